"""How long it takes from a clone to a loss that falls, to a Hugging Face model that is accelerated and learns, and to
models that learned to answer and to sort texts.

    python -m bench.first_minutes [--folder FOLDER]

types what docs/start.md says in its first sections (SECTIONS) into one shell, in a new folder, with this checkout as
the repository, and a clock. Nothing is prepared: the virtual environment is made, and packages are fetched from
wherever pip is told to fetch them, without pip's cache. A loss falls when a line shows one that is a tenth below the
first of its command.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

ROOT = Path(__file__).parents[1]
SECTIONS = ("The first loss", "The first Hugging Face model", "Conversations, and texts with labels")
MARK = "first-minutes-command:"
LOSS = re.compile(r"\bloss (\d+\.\d+)")
FALLS = 0.9


def read_commands(page: str, title: str) -> list[str]:
    """The lines of the first block of commands in a section."""
    section = page[page.index(f"## {title}\n") :]
    found = re.search(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert found, f"docs/start.md has no commands under {title!r}"
    return found[1].splitlines()


def follow(commands: list[str], folder: Path) -> Iterator[tuple[float, str, str]]:
    """Runs them in one shell; seconds since the start, the command, and what it prints, line by line."""
    script = "\n".join(["set -e", *(f"echo {quote(MARK + command)}\n{command}" for command in commands)])
    outside = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    outside |= {"PIP_NO_CACHE_DIR": "1", "PYTHONUNBUFFERED": "1"}
    start, command = time.monotonic(), ""
    with subprocess.Popen(
        ["bash", "-c", script], cwd=folder, env=outside, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as shell:
        for line in shell.stdout or ():
            if line.startswith(MARK):
                command = line.removeprefix(MARK).strip()
            yield time.monotonic() - start, command, line.rstrip()
    if shell.returncode:
        raise SystemExit(f"{command!r} ended with code {shell.returncode}")


def time_first_minutes(folder: Path) -> None:
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf-8")
    commands = [line.replace("REPOSITORY", str(ROOT)) for title in SECTIONS for line in read_commands(page, title)]
    first, fallen = dict[str, float](), set[str]()
    for seconds, command, line in follow(commands, folder):
        if line.startswith(MARK):
            print(f"{seconds:7.1f} s  $ {command}", flush=True)
        elif found := LOSS.search(line):
            loss = float(found[1])
            if command not in first:
                first[command] = loss
                print(f"{seconds:7.1f} s    {line.strip()}", flush=True)
            elif command not in fallen and loss < FALLS * first[command]:
                fallen.add(command)
                print(f"{seconds:7.1f} s    {line.strip()}  <- falls", flush=True)
    print(f"{seconds:7.1f} s  done, on {os.cpu_count()} cores with a load of {os.getloadavg()[1]:.1f} in these minutes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="for the clone: a new one; without it, one that is deleted")
    folder = parser.parse_args().folder
    if folder is not None:
        folder.mkdir(parents=True)
        time_first_minutes(folder)
        return
    with tempfile.TemporaryDirectory() as made:
        time_first_minutes(Path(made))


if __name__ == "__main__":
    main()
