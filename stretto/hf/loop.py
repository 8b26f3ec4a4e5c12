"""What a training loop of one's own needs: batches of few shapes, and whole updates that are launched as one.

`TokenBudgetSampler` groups samples of about equal length: a batch is rows of one bucket of lengths, as many as the
budget of tokens allows. `DataCollator` fills rows up to the bucket's length, or lays documents one after the other. So
compiled code and CUDA graphs meet one shape for each bucket, whatever the data.

    lengths 1 to 8, 9 to 16, ... 64, then 72, 80, ... 128, then 144, ...: eight buckets between two powers of two, so
    at most an eighth of a row is padding

A bucket's last samples, too few for a batch, go to the next longer bucket; only the longest bucket's last batch has
fewer rows.

`Step` is a whole update, launched as one where that is possible (update.py):

    step = stretto.hf.Step(model, optimizer, clip=1.0)
    for batch in loader:
        loss = step(batch)

In several processes each calls it with batches of its own; the gradients become one sum between two graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.data import Sampler

from stretto.batch import IGNORE
from stretto.buckets import round_to_bucket
from stretto.hf.acceleration import is_accelerated, set_step
from stretto.hf.update import Update, find_obstacle
from stretto.optim import FlatAdamW
from stretto.replicas import hash_weights

LENGTHS = 8  # number of buckets of lengths between two powers of two


def bucket_length(length: int) -> int:
    return round_to_bucket(length, LENGTHS)


class TokenBudgetSampler(Sampler[list[int]]):
    """Yields batches of indices, for a DataLoader's `batch_sampler`. Every epoch (`set_epoch`) draws other batches from
    the same buckets; all processes yield equally many, of which a few may be repeated. Where somebody else shares them
    out, as Accelerate's `prepare` does, `rank` is 0 and `world` 1."""

    def __init__(
        self,
        lengths: Sequence[int],
        max_tokens: int,
        seed: int = 0,
        rank: int | None = None,
        world: int | None = None,
    ) -> None:
        self.lengths = np.array([bucket_length(int(length)) for length in lengths], np.int64)
        if not len(self.lengths):
            raise ValueError("TokenBudgetSampler has no lengths: the data set is empty")
        longest = int(self.lengths.max())
        if longest > max_tokens:
            raise ValueError(
                f"max_tokens = {max_tokens} is too small: a sample has {max(lengths)} tokens, {longest} with padding"
            )
        started = dist.is_available() and dist.is_initialized()
        self.rank = rank if rank is not None else dist.get_rank() if started else 0
        self.world = world if world is not None else dist.get_world_size() if started else 1
        self.max_tokens, self.seed, self.epoch = max_tokens, seed, 0
        self.num_batches = -(-len(self._cut(np.arange(len(self.lengths)))) // self.world)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        random = np.random.default_rng([self.seed, self.epoch])
        batches = self._cut(random.permutation(len(self.lengths)))
        order = random.permutation(len(batches))
        for place in range(self.rank, self.num_batches * self.world, self.world):
            yield batches[order[place % len(batches)]]

    def _cut(self, order: np.ndarray[Any, Any]) -> list[list[int]]:
        """Batches of the samples in this order; the number of batches depends on the lengths alone."""
        batches: list[list[int]] = []
        waiting: list[int] = []
        for length in np.unique(self.lengths):
            waiting += order[self.lengths[order] == length].tolist()
            rows = self.max_tokens // int(length)
            whole = len(waiting) // rows * rows
            batches += [waiting[i : i + rows] for i in range(0, whole, rows)]
            waiting = waiting[whole:]
        return batches + ([waiting] if waiting else [])


class DataCollator:
    """Rows filled up to a bucket's length, with their attention_mask; or, `packed`, all documents in one row, with
    position_ids that begin anew in each of them, for decoders.

    Fields of a sample that have as many elements as its input_ids (labels, token_type_ids, ...) are treated alike;
    labels may have a length of their own, as in translation; numbers (classes) become one tensor."""

    def __init__(self, pad_token_id: int | None, packed: bool = False) -> None:
        if pad_token_id is None:
            raise ValueError("the tokenizer has no pad token: pass any id, for instance tokenizer.eos_token_id")
        self.fill = {"input_ids": pad_token_id, "labels": IGNORE}
        self.packed = packed

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        samples = [{name: torch.as_tensor(value) for name, value in sample.items()} for sample in samples]
        lengths = [len(sample["input_ids"]) for sample in samples]
        if self.packed:
            return self._pack(samples, lengths)
        width = bucket_length(max(lengths))
        masks = [torch.ones(length, dtype=torch.int64) for length in lengths]
        batch = {"attention_mask": _pad(masks, width, 0)}
        for name in samples[0]:
            values = [sample[name] for sample in samples]
            if values[0].ndim == 0:
                batch[name] = torch.stack(values)
                continue
            same = [len(value) for value in values] == lengths
            room = width if same else bucket_length(max(len(value) for value in values))
            batch[name] = _pad(values, room, self.fill.get(name, 0))
        return batch

    def _pack(self, samples: Sequence[Mapping[str, Tensor]], lengths: list[int]) -> dict[str, Tensor]:
        """All documents in one row; filler at the end is a document of its own."""
        total = sum(lengths)
        filler = round_to_bucket(total) - total
        fields = {"labels": samples[0]["input_ids"]} | dict(samples[0])
        for name, value in fields.items():
            if value.ndim != 1 or (name in samples[0] and [len(sample[name]) for sample in samples] != lengths):
                raise ValueError(f"{name} has not one element for each of the input_ids: such samples cannot be packed")
        batch = {}
        for name in fields:
            parts = [sample.get(name, sample["input_ids"]) for sample in samples]
            if name == "labels":  # nothing is predicted across the beginning of a document
                parts = [torch.cat([part.new_full((1,), IGNORE), part[1:]]) for part in parts]
            parts.append(parts[0].new_full((filler,), self.fill.get(name, 0)))
            batch[name] = torch.cat(parts)[None]
        positions = [torch.arange(length) for length in (*lengths, filler)]
        return batch | {"position_ids": torch.cat(positions)[None]}


def _pad(values: Sequence[Tensor], width: int, fill: int) -> Tensor:
    padded = values[0].new_full((len(values), width), fill)
    for row, value in zip(padded, values, strict=True):
        row[: len(value)] = value
    return padded


class Step:
    def __init__(self, model: nn.Module, optimizer: FlatAdamW, clip: float = 0.0, accumulate: int = 1) -> None:
        """`clip` is the largest norm of the gradients; with 0 there is none. An update is by the mean of the losses of
        `accumulate` batches, and of all processes. An error in one of them drops the update: the next batch is the
        first of a new one."""
        if isinstance(model, DataParallel | DistributedDataParallel):
            raise ValueError(f"Step takes the model inside {type(model).__name__}: it exchanges gradients itself")
        if accumulate < 1:
            raise ValueError(f"accumulate = {accumulate} is the number of batches of an update: at least 1")
        if not is_accelerated(model):
            raise ValueError(f"Step takes an accelerated model, not {type(model).__name__}: stretto.accelerate(model)")
        if not isinstance(optimizer, FlatAdamW):
            raise ValueError(f"Step takes stretto.optim.FlatAdamW, not {type(optimizer).__name__}")
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world > 1:
            _check_alike(model, optimizer, world)
        self.model, self.accumulate, self.share = model, accumulate, 1.0 / (accumulate * world)
        self.updates = 0  # number of updates so far, for schedules; a run that is resumed sets it
        self.added = 0  # batches of the update that was under way last
        several = self.share < 1.0
        obstacle = find_obstacle(model, optimizer, several)
        self.update = Update(model, optimizer, clip, self._backpropagate, obstacle, several)

    def __call__(self, batch: Mapping[str, Any]) -> Tensor:
        """The loss of this batch, still on the device. Tensors of the batch may be on the CPU."""
        added = self.added + 1 if self.update.begun else 1
        if added == 1:
            set_step(self.model, self.updates, self.share)
        last = added == self.accumulate
        loss = self.update.run(self.update.plan(batch), self.updates, last)
        self.added, self.updates = added, self.updates + last
        return loss

    def _backpropagate(self, inputs: dict[str, Any]) -> Tensor:
        loss: Tensor | None = self.model(**inputs).loss
        if loss is None:
            raise ValueError(f"{type(self.model).__name__} gave no loss: the batch needs labels")
        part = loss if self.share == 1.0 else self.share * loss
        part.backward()  # type: ignore[no-untyped-call]
        return loss


def _check_alike(model: nn.Module, optimizer: FlatAdamW, world: int) -> None:
    _, hashes = hash_weights(model, optimizer)
    found = [torch.empty_like(hashes) for _ in range(world)]
    dist.all_gather(found, hashes)
    if any(not torch.equal(other, hashes) for other in found):
        raise ValueError("the processes begin with different weights: load the same ones, or seed torch before")
