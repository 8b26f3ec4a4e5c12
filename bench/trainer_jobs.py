"""Five jobs as people write them, by transformers' Trainer and by Stretto's: the import is the only difference.

    python -m bench.trainer_jobs                        # everything, about a minute for each job and Trainer
    python -m bench.trainer_jobs --jobs gpt2 --steps 120
    python -m bench.trainer_jobs --profile              # and where the GPU's time goes, in ten more steps
    python -m bench.trainer_jobs --tiny                 # on a CPU, in seconds

Models are initialised at random from their configurations and kept in fp32, with bf16=True; of the one with LoRA (by
peft, on all linear layers), what is frozen is in bf16. Samples are random, their lengths log-normal; transformers' own
collators pad each batch to its longest row; four workers load. Each Trainer runs in a process of its own. "all" is the
speed from the second step to the last one, "end" that of the last third, when kernels are compiled and graphs are
recorded. Tokens are real ones; of pairs, those of both sides.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import transformers as hf
from torch.utils.data import Dataset

from stretto.bench.measure import list_kernels, summarise

PAD, CLS, SEP, MASK, FIRST = 0, 1, 2, 3, 4  # ids; those of words follow
PROFILED, LISTED = 10, 20  # steps, and the kernels that are named
CHOICES = {"transformers": "transformers", "stretto": "stretto", "liger": "transformers"}  # and whose Trainer it is


@dataclass(frozen=True)
class Size:
    vocab: int
    steps: int


FULL, TINY = Size(30522, 120), Size(97, 6)
TINY_TEXT: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
                             "intermediate_size": 64}  # fmt: skip


@dataclass(frozen=True)
class Job:
    rows: int
    longest: int
    typical: int  # median length
    build: Callable[[bool], Any]  # the model; whether it is tiny
    collate: Callable[[Any], Any]  # the collator of a tokenizer
    classes: int = 0  # of a sample
    pairs: bool = False
    packed: bool = False  # whether all rows are of the greatest length


def _bert(kind: Any, tiny: bool) -> Any:
    options = TINY_TEXT if tiny else {}
    return kind(hf.BertConfig(vocab_size=_vocab(tiny), pad_token_id=PAD, **options))


def _gpt2(tiny: bool) -> Any:
    options: dict[str, Any] = {"vocab_size": TINY.vocab, "n_embd": 32, "n_layer": 2, "n_head": 2} if tiny else {}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**options))


def _t5(tiny: bool) -> Any:
    options: dict[str, Any] = {"vocab_size": 32128, "pad_token_id": PAD, "decoder_start_token_id": PAD}
    if tiny:
        options |= {"vocab_size": TINY.vocab, "d_model": 32, "d_kv": 16, "num_heads": 2, "d_ff": 64, "num_layers": 2}
    return hf.T5ForConditionalGeneration(hf.T5Config(**options))


def _llama_lora(tiny: bool) -> Any:
    from peft import LoraConfig, get_peft_model

    full = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "intermediate_size": 8192}
    heads, vocab = (2, TINY.vocab) if tiny else (8, 128256)
    options = TINY_TEXT if tiny else full
    config = hf.LlamaConfig(**options, num_key_value_heads=heads, vocab_size=vocab, tie_word_embeddings=True)
    model = hf.LlamaForCausalLM(config).bfloat16()
    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear"))


def _vocab(tiny: bool) -> int:
    return (TINY if tiny else FULL).vocab


def _mask_words(tokenizer: Any) -> Any:
    return hf.DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability=0.15)


def _predict_words(tokenizer: Any) -> Any:
    return hf.DataCollatorForLanguageModeling(tokenizer, mlm=False)


JOBS = {
    "bert-classify": Job(32, 128, 40, lambda tiny: _bert(hf.BertForSequenceClassification, tiny),
                         hf.DataCollatorWithPadding, classes=2),
    "bert-mlm": Job(32, 512, 150, lambda tiny: _bert(hf.BertForMaskedLM, tiny), _mask_words),
    "gpt2": Job(8, 1024, 1024, _gpt2, lambda tokenizer: hf.default_data_collator, packed=True),
    "llama-lora": Job(8, 2048, 600, _llama_lora, _predict_words),
    "t5": Job(32, 128, 40, _t5, hf.DataCollatorForSeq2Seq, pairs=True),
}  # fmt: skip


class Samples(Dataset[dict[str, Any]]):
    """Random samples, of the same numbers for the same index."""

    def __init__(self, job: Job, number: int, vocab: int, shrink: int) -> None:
        self.job, self.number, self.vocab, self.shrink = job, number, vocab, shrink

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        ids, job = self._draw(generator), self.job
        if job.packed:
            return {"input_ids": ids, "labels": ids}
        sample: dict[str, Any] = {"input_ids": ids, "attention_mask": [1] * len(ids)}
        if job.classes:
            sample["labels"] = ids[1] % job.classes
        if job.pairs:
            sample["labels"] = self._draw(generator)
        return sample

    def _draw(self, generator: torch.Generator) -> list[int]:
        job, spread = self.job, 0.0 if self.job.packed else 0.6
        length = int(job.typical * float(torch.exp(spread * torch.randn((), generator=generator))))
        length = max(min(length, job.longest) // self.shrink, 4)
        words = torch.randint(FIRST, self.vocab, (length - 2,), generator=generator)
        return [CLS, *words.tolist(), SEP]


def make_tokenizer(vocab: int) -> Any:
    """A tokenizer of made-up words, for its special tokens and its padding."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {"[PAD]": PAD, "[CLS]": CLS, "[SEP]": SEP, "[MASK]": MASK}
    words |= {f"w{i}": i for i in range(FIRST, vocab)}
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    model = WordLevel(words, unk_token="[MASK]")
    return hf.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), unk_token="[MASK]", **special)


class Clock(hf.TrainerCallback):
    """When each step ended. The device is waited for where a measurement begins or ends, and nowhere else. The profiler
    has the steps after the last of these."""

    def __init__(self, steps: int) -> None:
        self.times: dict[int, float] = {}
        self.ends = {1, steps - steps // 3, steps}
        self.profiler: Any = torch.profiler.profile()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step in (*self.ends, state.max_steps):
            if torch.cuda.is_available() and not args.use_cpu:
                torch.cuda.synchronize()
            self.times[state.global_step] = time.perf_counter()
        if state.global_step == max(self.ends) < state.max_steps:
            self.profiler.start()
        elif max(self.ends) < state.global_step == state.max_steps:
            self.profiler.stop()


def run(name: str, which: str, steps: int, tiny: bool, profiled: int) -> dict[str, Any]:
    """One job by one Trainer; so many more steps are profiled."""
    if CHOICES[which] == "stretto":
        from stretto.hf import Trainer
    else:
        from transformers import Trainer  # type: ignore[assignment]
    job, vocab = JOBS[name], _vocab(tiny)
    torch.manual_seed(0)
    hf.set_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() and not tiny else "cpu"):
        model, clock = job.build(tiny), Clock(steps)
    samples = Samples(job, (steps + profiled) * job.rows, vocab, 16 if tiny else 1)
    with tempfile.TemporaryDirectory() as folder:
        args = hf.TrainingArguments(
            folder, per_device_train_batch_size=job.rows, max_steps=steps + profiled, learning_rate=5e-5,
            warmup_steps=steps // 10,
            bf16=True, dataloader_num_workers=0 if tiny else 4, logging_steps=max(steps // 6, 1), save_strategy="no",
            report_to=[], disable_tqdm=True, use_cpu=tiny, use_liger_kernel=which == "liger",
        )  # fmt: skip
        collator = job.collate(make_tokenizer(vocab))
        trainer = Trainer(model=model, args=args, train_dataset=samples, data_collator=collator, callbacks=[clock])
        trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    found = measure(clock, count_tokens(samples, job.rows, steps), steps) | {"first": losses[0], "last": losses[-1]}
    if profiled:
        third = steps // 3
        step_ms = 1e3 * (clock.times[steps] - clock.times[steps - third]) / third
        found["profile"] = summarise(list_kernels(clock.profiler), profiled, step_ms)
    return found


def count_tokens(samples: Samples, rows: int, steps: int) -> Callable[[int, int], int]:
    """The real tokens of the steps from one number to another one: on average, since their order is drawn."""
    some = [samples[i] for i in range(min(len(samples), 2000))]
    sides = ("input_ids", "labels") if samples.job.pairs else ("input_ids",)
    mean = sum(len(sample[side]) for sample in some for side in sides) / len(some)
    return lambda begin, end: round(mean * rows * (end - begin))


def measure(clock: Clock, tokens: Callable[[int, int], int], steps: int) -> dict[str, Any]:
    def speed(begin: int, end: int) -> float:
        return tokens(begin, end) / (clock.times[end] - clock.times[begin])

    peak = torch.cuda.max_memory_reserved() / 2**30 if torch.cuda.is_available() else 0.0
    return {"all": speed(1, steps), "end": speed(steps - steps // 3, steps), "peak_gib": peak}


def run_apart(name: str, which: str, steps: int, tiny: bool, profiled: int) -> dict[str, Any] | str:
    """In a process of its own, so that neither finds what the other has compiled, patched or allocated."""
    command = [sys.executable, "-m", "bench.trainer_jobs", "--only", name, which, "--steps", str(steps)]
    flags = [*(["--tiny"] if tiny else []), *(["--profile"] if profiled else [])]
    done = subprocess.run([*command, *flags], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
    for line in done.stderr.splitlines():
        if "CUDA graphs" in line:
            print(f"  {line}", flush=True)
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def describe(profile: dict[str, Any]) -> str:
    times = ", ".join(f"{kind} {ms:.2f}" for kind, ms in profile["breakdown_ms"].items())
    kernels = [f"    {one['ms']:.3f} ms, {one['calls']:.1f} times: {one['name'][:90]}" for one in profile["kernels"]]
    return "\n".join([f"  ms a step of the last third: {times}", *kernels[:LISTED]])


def find_trainers(name: str) -> list[str]:
    known = name != "t5"  # what Liger may patch; it refuses what it does not know
    return ["transformers", "stretto", *(["liger"] if known and find_spec("liger_kernel") else [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="where the GPU's time goes")
    parser.add_argument("--tiny", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--only", nargs=2, metavar=("JOB", "TRAINER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    steps, profiled = given.steps or (TINY if given.tiny else FULL).steps, PROFILED if given.profile else 0
    if given.only:
        import logging

        logging.basicConfig(level=logging.WARNING)
        logging.getLogger("stretto").setLevel(logging.INFO)
        print(json.dumps(run(given.only[0], given.only[1], steps, given.tiny, profiled)))
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}, torch {torch.__version__}, transformers {hf.__version__}, {steps} steps", flush=True)
    print(f"{'job':14} {'Trainer':13} {'all':>9} {'end':>9} {'GiB':>6} {'loss, first to last':>20}", flush=True)
    for name in given.jobs:
        for which in find_trainers(name):
            found = run_apart(name, which, steps, given.tiny, profiled)
            if isinstance(found, str):
                print(f"{name:14} {which:13} {found}", flush=True)
                continue
            losses = f"{found['first']:.4f} to {found['last']:.4f}"
            numbers = f"{found['all']:9.0f} {found['end']:9.0f} {found['peak_gib']:6.1f} {losses:>20}"
            print(f"{name:14} {which:13} {numbers}", flush=True)
            if "profile" in found:
                print(describe(found["profile"]), flush=True)


if __name__ == "__main__":
    main()
