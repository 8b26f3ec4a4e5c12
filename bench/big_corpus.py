"""Tokenises a corpus of any size, as `stretto data` does: peak memory, rate, a kill in the midst of it, and restarts.

    python -m bench.big_corpus --gb 10 --tokenizer bytes --folder /tmp/big

The corpus is JSON lines of made-up words, about 2,000 characters each. Three processes open it, one after another:
one that is killed when some shards are whole, one that goes on to the end, and one that begins again when all is there.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROW = 2000  # characters
GROUP = 1000  # rows written at a time
POOL = 1 << 24  # characters of which rows are cut
LOOK_S = 0.05


def write_corpus(path: Path, size: int) -> int:
    """Writes rows until the file has `size` bytes; returns how many these are."""
    random = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlu"))
    words = ["".join(random.choice(letters, size=length)) for length in random.integers(2, 9, 20_000)]
    text, rows = " ".join(words[i] for i in random.zipf(1.3, POOL // 6) % len(words)), 0
    with path.open("w") as file:
        while file.tell() < size:
            starts = random.integers(0, len(text) - ROW, GROUP).tolist()
            file.writelines(json.dumps({"text": text[at : at + ROW]}) + "\n" for at in starts)
            rows += GROUP
    return rows


def open_it(path: Path, cache: Path, tokenizer: str, shard: int) -> None:
    """What each process does: opens the data, takes a batch, and prints what that took."""
    from stretto.config import DataConfig
    from stretto.data import open_data, tokens

    tokens._SHARD = shard
    begin, cfg = time.perf_counter(), DataConfig(train=str(path), cache=str(cache), tokenizer=tokenizer, seq_len=1024)
    data = open_data(cfg, seed=0, folder=cache / "run")
    opened = time.perf_counter()
    first = data.train_batch(0)
    numbers = {
        "open_s": opened - begin,
        "batch_s": time.perf_counter() - opened,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "sum": int(first.labels.sum()),
        "says": data.describe(),
    }
    print(json.dumps(numbers))


def start(arguments: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.big_corpus", "--open", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"opening the corpus ended with code {process.returncode}")
    numbers: dict[str, Any] = json.loads(out.splitlines()[-1])
    return numbers


def kill_after(process: subprocess.Popen[str], cache: Path, shards: int) -> dict[Path, int]:
    """Kills the process when so many shards are whole; returns these with their dates."""
    while len(whole := sorted(cache.glob("*.tokens"))) < shards:
        if process.poll() is not None:
            raise SystemExit(f"it ended before {shards} shards were there")
        time.sleep(LOOK_S)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return {path: path.stat().st_mtime_ns for path in whole}


def measure(folder: Path, size: int, tokenizer: str, shard: int) -> dict[str, Any]:
    path, cache = folder / "corpus.jsonl", folder / "cache"
    begin = time.perf_counter()
    rows, wrote = write_corpus(path, size), time.perf_counter() - begin
    size = path.stat().st_size
    past = time.time() - 60  # as if it had not just been written
    os.utime(path, (past, past))
    arguments = [str(path), str(cache), tokenizer, str(shard)]
    begin = time.perf_counter()
    kept = kill_after(start(arguments), cache, max(size // shard // 2, 1))
    killed_s = time.perf_counter() - begin
    rest = finish(start(arguments))
    again = finish(start(arguments))
    assert all(path.stat().st_mtime_ns == date for path, date in kept.items()), "whole shards were written again"
    assert again["sum"] == rest["sum"] and again["says"] == rest["says"]
    made = list(cache.glob("*.tokens"))
    return {
        "corpus_gb": size / 1e9, "rows": rows, "write_s": wrote, "until_kill_s": killed_s, "shards_then": len(kept),
        "shards": len(made), "token_gb": sum(one.stat().st_size for one in made) / 1e9,
        "rest_s": rest["open_s"], "rest_peak_rss_mib": rest["peak_rss_mib"],
        "mb_per_s": size / 1e6 / (killed_s + rest["open_s"]), "restart_s": again["open_s"],
        "restart_peak_rss_mib": again["peak_rss_mib"], "batch_s": again["batch_s"], "says": again["says"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=0.3)
    parser.add_argument("--tokenizer", choices=["bytes", "bpe"], default="bytes")
    parser.add_argument("--folder", type=Path, default=Path("big_corpus"), help="made, and deleted afterwards")
    parser.add_argument("--shard-mb", type=int, default=268, help="of text in a shard")
    parser.add_argument("--open", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.open:
        path, cache, tokenizer, shard = given.open
        open_it(Path(path), Path(cache), tokenizer, int(shard))
        return
    given.folder.mkdir(parents=True)
    try:
        for name, value in measure(
            given.folder, int(given.gb * 1e9), given.tokenizer, int(given.shard_mb * 1e6)
        ).items():
            print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")
    finally:
        shutil.rmtree(given.folder)


if __name__ == "__main__":
    main()
