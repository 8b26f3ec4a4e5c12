"""Whether two versions of the code compute the same numbers: every shipped recipe and every legal combination of
techniques at tiny size, the losses, the norms of gradients and the trained weights of each, bit for bit.

    PYTHONPATH=OLD python bench/same_numbers.py record old.json      the version whose numbers count
    PYTHONPATH=NEW python bench/same_numbers.py record new.json
    python bench/same_numbers.py compare old.json new.json           exits with 1 if anything differs

It uses what users use and nothing else: recipes, `train`, the run folder, `stretto.accelerate` and `stretto.hf.Step`.
So it runs with versions that share no internal name. On a GPU kernels are the deterministic ones, and combinations run
with CUDA graphs and without; on a CPU, graphs do not exist. Runs of several processes use gloo, on the CPU.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

STEPS = 6
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wise", "owls", "read")
TINY = {"run.deterministic": True, "train.log_every": 1, "train.eval_every": 3, "train.eval_batches": 2,
        "train.steps": STEPS, "checkpoint.every": 0, "optim.warmup": 2, "train.compile": False}  # fmt: skip
TEXT = {"data.tokenizer": "bytes", "data.seq_len": 32, "data.batch_size": 4, "data.held_out": 0.2}
RECIPES: dict[str, dict[str, Any]] = {
    "demo": TEXT | {"data.train": "text", "model.layers": 3, "model.width": 32, "model.dropout": 0.1},
    "causal-lm": TEXT | {"data.train": "text", "model.preset": "gpt2-tiny", "model.vocab": 0},
    "masked-lm": TEXT | {"data.train": "text", "model.preset": "bert-tiny", "model.attention_dropout": 0.0},
    "translation": {"data.train": "pairs", "data.eval": "pairs", "data.test": "", "data.vocab": 300,
                    "data.seq_len": 24, "data.max_tokens": 128, "model.preset": "transformer-tiny"},
    "images": {"data.train": "images.npz", "data.batch_size": 6, "model.preset": "vit-tiny", "data.held_out": 0.25},
}  # fmt: skip
PRE = {"model.norm_order": "pre"}
FUSED: dict[str, dict[str, Any]] = {"": {}, "fused": {"techniques.fused.weights": "fp32"}}
DROPS: dict[str, dict[str, Any]] = {
    "": {},
    "drop": PRE | {"techniques.layer_drop": True},
    "drop by sample": PRE | {"techniques.layer_drop.gate": "sample"},
}
STANDARDS: dict[str, dict[str, Any]] = {"": {}, "standardize": {"techniques.standardize.warmup": 2}}
COMBINED = (FUSED, DROPS, STANDARDS)
MORE: dict[str, dict[str, Any]] = {
    "bf16": {"train.precision": "bf16"},
    "bf16 split": {"train.precision": "bf16", "techniques.fused.weights": "split"},
    "bf16 all": {"train.precision": "bf16", "techniques.fused.weights": "bf16", "techniques.fused.moments": "bf16"},
    "recompute": {"techniques.fused.weights": "fp32", "techniques.lean.norms": "input"},
    "micro": {"train.micro_batches": 2},
    "micro fused drop": PRE
    | {"train.micro_batches": 2, "techniques.fused.weights": "fp32", "techniques.layer_drop": True},
    "bernoulli update": PRE | {"techniques.layer_drop.sampling": "bernoulli", "techniques.layer_drop.scale": "update"},
    "raptr text": PRE | {"techniques.layer_drop.schedule": "raptr", "techniques.layer_drop.index": "text"},
    "channel": {"techniques.standardize.axis": "channel", "techniques.standardize.warmup": 2},
    "layer plain": {"techniques.standardize.axis": "layer", "techniques.standardize.affine": False},
}
DISTRIBUTED: dict[str, dict[str, Any]] = {
    "replicate": {},
    "replicate fused drop": PRE | {"techniques.fused.weights": "fp32", "techniques.layer_drop": True},
    "replicate standardize": {"techniques.standardize.warmup": 2},
    "shard": {"parallel.data": "shard"},
    "shard fused drop standardize": PRE
    | {"parallel.data": "shard", "techniques.fused.weights": "fp32", "techniques.layer_drop": True,
       "techniques.standardize.warmup": 2},
    "gather": {"parallel.sequence": 2, "parallel.sequence_method": "gather"},
    "ring fused": {"parallel.sequence": 2, "parallel.sequence_method": "ring", "techniques.fused.weights": "fp32"},
    "ulysses fused": {"parallel.sequence": 2, "parallel.sequence_method": "ulysses",
                      "techniques.fused.weights": "fp32"},
    "auto hybrid": {"parallel.sequence": 2, "parallel.data": "hybrid"},
}  # fmt: skip


def list_cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """A name, a recipe and what is set in it."""
    for recipe in RECIPES:
        for (fused, of_fused), (drop, of_drop), (standard, of_standard) in product(*map(dict.items, COMBINED)):
            name = " + ".join(filter(None, [fused, drop, standard])) or "plain"
            yield f"{recipe}: {name}", recipe, of_fused | of_drop | of_standard
        for name, options in MORE.items():
            yield f"{recipe}: {name}", recipe, options


def list_variants(device: str, options: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """With CUDA graphs and without, where there is a GPU."""
    if device == "cpu":
        yield "", {}
        return
    yield ", graphs off", {"train.graphs": "off"}
    if any(key.startswith("techniques.fused") for key in options):
        yield ", graphs on", {"train.graphs": "on", "train.steps": 10}


def write_data(folder: Path) -> None:
    import numpy as np

    draw = random.Random(0)

    def sentence() -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(3, 12)))

    folder.joinpath("text").mkdir()
    for number in range(120):
        folder.joinpath("text", f"{number:03}.txt").write_text(" ".join(sentence() for _ in range(1 + number % 4)))
    for language in ("en", "de"):
        folder.joinpath(f"pairs.{language}").write_text("\n".join(sentence() for _ in range(80)) + "\n")
    generator = np.random.default_rng(0)
    images = generator.integers(0, 255, (48, 32, 32, 3), dtype=np.uint8)
    np.savez(folder / "images.npz", images=images, labels=np.arange(48) % 4)


def write_overrides(folder: Path, run: Path, recipe: str, options: dict[str, Any], device: str) -> list[str]:
    off = {} if any(key.startswith("techniques.fused") for key in options) else {"techniques.fused": False}
    values = TINY | off | RECIPES[recipe] | {"run.dir": str(run), "run.device": device} | options
    for key in ("data.train", "data.eval", "data.test"):
        if values.get(key):
            values[key] = str(folder / values[key])
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def read_numbers(run: Path) -> dict[str, Any]:
    """Of a run folder: floats as they were printed, which is exact, and a hash of each file of tensors."""
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    keys = ("loss", "grad_norm", "eval_loss")
    numbers = {key: [line[key] for line in lines if key in line] for key in keys}
    newest = max((run / "checkpoints").glob("step-*"))
    return numbers | {name: hash_tensors(newest, name) for name in ("model", "optimizer")}


def hash_tensors(checkpoint: Path, kind: str) -> str:
    """Hashes whole tensors. Processes may have saved parts: other tensors, or rows of them in the order of ranks."""
    import torch
    from safetensors.torch import load_file

    rows: dict[str, list[Any]] = defaultdict(list)
    for path in sorted(checkpoint.glob(f"{kind}*.safetensors")):
        for name, value in load_file(path).items():
            rows[name].append(value)
    return hash_all({name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in rows.items()})


def hash_all(tensors: dict[str, Any]) -> str:
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def record_runs(folder: Path, device: str, wanted: str) -> Iterator[tuple[str, dict[str, Any]]]:
    from stretto.config import load_config
    from stretto.errors import StrettoError
    from stretto.recipes import find_recipe
    from stretto.train import train

    for number, (case, recipe, options) in enumerate(list_cases()):
        for suffix, more in list_variants(device, options):
            if wanted not in case + suffix:
                continue
            run = folder / f"run-{number}-{len(suffix)}"
            overrides = write_overrides(folder, run, recipe, options | more, device)
            try:
                train(load_config(find_recipe(recipe), overrides))
                yield case + suffix, read_numbers(run)
            except StrettoError as error:
                yield case + suffix, {"refused": str(error).replace(str(folder), "")}


def record_processes(folder: Path, wanted: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, (case, options) in enumerate(DISTRIBUTED.items()):
        for recipe in ("causal-lm", "translation"):
            name = f"{recipe}, 2 processes: {case}"
            if wanted not in name:
                continue
            run = folder / f"processes-{number}-{recipe}"
            overrides = write_overrides(folder, run, recipe, options, "cpu")
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            command += ["-m", "stretto", "train", recipe, *(part for text in overrides for part in ("--set", text))]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            lines = done.stderr.strip().splitlines() or [""]
            yield name, read_numbers(run) if done.returncode == 0 else {"refused": lines[0].replace(str(folder), "")}


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", {"intermediate_size": 64}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "llama": ("LlamaForCausalLM", {"intermediate_size": 64, "num_key_value_heads": 2}),
    "bart": ("BartForConditionalGeneration", {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_layers": 3,
                                              "encoder_layers": 3, "encoder_attention_heads": 4,
                                              "decoder_attention_heads": 4}),
    "t5": ("T5ForConditionalGeneration", {"d_ff": 64, "d_kv": 8, "num_layers": 3, "decoder_start_token_id": 0}),
}  # fmt: skip
HALF = {"theta": 0.5, "schedule": "constant", "scale": "update"}
ACCELERATED: dict[str, dict[str, Any]] = {
    "plain": {},
    "drop": {"layer_drop": HALF},
    "standardize": {"standardize": True},
    "both": {"layer_drop": HALF, "standardize": True},
}


def record_accelerated(device: str, wanted: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import torch

    for family in FAMILIES:
        for case, options in ACCELERATED.items():
            for dtype in (torch.float32, torch.bfloat16):
                name = f"accelerate {family}: {case}, {str(dtype).removeprefix('torch.')}"
                if wanted in name:
                    yield name, train_accelerated(family, options, dtype, device)


def train_accelerated(family: str, options: dict[str, Any], dtype: Any, device: str) -> dict[str, Any]:
    import torch
    import transformers

    import stretto
    from stretto.hf import Step
    from stretto.optim import FlatAdamW

    name, more = FAMILIES[family]
    kind = getattr(transformers, name)
    sizes = {"vocab_size": 96, "hidden_size": 32, "d_model": 32, "n_embd": 32, "num_hidden_layers": 3, "n_layer": 3,
             "num_attention_heads": 4, "num_heads": 4, "n_head": 4, "max_position_embeddings": 64,
             "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
    torch.manual_seed(0)
    model = kind(kind.config_class(**sizes | more)).to(device, dtype).train()
    try:
        model = stretto.accelerate(model, steps=20, seed=3, **options)
    except ValueError as error:
        return {"refused": str(error)}
    halves = dtype == torch.bfloat16
    step = Step(model, FlatAdamW(model.parameters(), lr=1e-3, weights="split" if halves else "fp32"), clip=1.0)
    losses = []
    for i in range(10):
        torch.manual_seed(i)
        lengths = [(9, 4, 7), (9, 9, 9)][i % 2]
        generator = torch.Generator().manual_seed(i % 4)
        ids = torch.randint(3, 96, (3, 9), generator=generator)
        mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).long()
        batch = {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.where(mask > 0, ids, -100)}
        losses.append(float(step(batch)))
    return {"loss": losses, "model": hash_all(model.state_dict())}


def record(path: Path, device: str, wanted: str) -> None:
    import torch

    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, begin = Path(name), time.time()
        write_data(folder)
        several = record_processes(folder, wanted) if device == "cpu" else ()
        for cases in (record_accelerated(device, wanted), record_runs(folder, device, wanted), several):
            for case, numbers in cases:
                found[case] = numbers
                print(f"{time.time() - begin:6.1f} s  {case}: {numbers.get('refused') or numbers['loss'][-1]}",
                      file=sys.stderr, flush=True)  # fmt: skip
                path.write_text(json.dumps({"device": device, "torch": torch.__version__, "cases": found}, indent=1))


def compare(old: Path, new: Path) -> int:
    before, after = (json.loads(path.read_text()) for path in (old, new))
    cases = before["cases"]
    different = [name for name in cases if after["cases"].get(name) != cases[name]]
    for name in different:
        now = after["cases"].get(name, {})
        keys = [key for key in cases[name].keys() | now.keys() if cases[name].get(key) != now.get(key)]
        print(f"{name}: {', '.join(f'{key}: {cases[name].get(key)} -> {now.get(key)}' for key in sorted(keys))}")
    refused = sum("refused" in numbers for numbers in cases.values())
    equal = len(cases) - len(different)
    print(f"{equal} of {len(cases)} cases are equal bit for bit ({refused} of them are refused, with a reason)")
    return int(bool(different))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("out", type=Path)
    recorder.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    recorder.add_argument("--only", default="", help="cases whose name has this in it")
    comparer = commands.add_parser("compare")
    comparer.add_argument("old", type=Path)
    comparer.add_argument("new", type=Path)
    args = parser.parse_args()
    if args.command == "compare":
        return compare(args.old, args.new)
    record(args.out, args.device, args.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
