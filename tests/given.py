"""What a Python program may give to a run: data and a model as small as can be, and a recipe for them."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.batch import IGNORE, Batch
from stretto.data import Data
from stretto.data.packing import count, pack, to_tensor
from stretto.data.stream import batch_positions

TINY = {
    "run": {"device": "cpu"}, "data": {"seq_len": 16, "batch_size": 4}, "optim": {"lr": 1e-2, "warmup": 2},
    "model": {"layers": 1, "width": 32, "heads": 4, "max_len": 32}, "train": {"steps": 4, "log_every": 1},
}  # fmt: skip


class Steps(Data):
    """As in docs/python.md."""

    num_train, num_eval_batches, fingerprint = 100, 2, "steps"

    def train_batch(self, index: int, part: int = 0, parts: int = 1) -> Batch:
        return self.make(batch_positions(index, 8, part, parts))

    def eval_batch(self, index: int) -> Batch:
        return self.make(range(1000 + 8 * index, 1008 + 8 * index))

    def describe(self) -> str:
        return "sequences that count in steps"

    def make(self, samples: range) -> Batch:
        rows = [np.arange(17) * (number % 7 + 1) % 50 for number in samples]
        lengths = np.full(len(rows), 16)
        inputs = pack(np.concatenate([row[:-1] for row in rows]), lengths, max_len=16)
        labels = to_tensor(np.concatenate([row[1:] for row in rows]))
        return Batch(labels, count(lengths, len(labels), len(labels)), tuple(samples), inputs)


class Bigrams(nn.Module):
    def __init__(self, vocab: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(vocab, vocab)

    def forward(self, batch: Batch) -> Tensor:
        assert batch.inputs is not None
        hidden = F.dropout(self.table(batch.inputs.ids), 0.1, self.training)
        return F.cross_entropy(hidden.float(), batch.labels, ignore_index=IGNORE, reduction="sum")
