"""bench/first_minutes.py types what the page says, and sees where a loss falls and where a command fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import first_minutes

PAGE = """## The first loss
Text.
```sh
echo REPOSITORY
printf 'step 1  loss 5.0\\nstep 2  loss 4.6\\nstep 3  loss 4.4\\n'
```
```sh
echo never
```

## The first Hugging Face model
```sh
printf 'epoch 1: loss 0.7\\nepoch 2: loss 0.6\\n'
```

## Conversations, and texts with labels
```sh
true
```
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "start.md").write_text(PAGE)
    monkeypatch.setattr(first_minutes, "ROOT", tmp_path)
    return tmp_path


def test_the_page_is_typed_and_falling_losses_are_seen(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first_minutes.time_first_minutes(checkout)
    lines = capsys.readouterr().out.splitlines()
    assert f"$ echo {checkout}" in lines[0] and "never" not in "".join(lines)
    assert [line.split("s    ")[1] for line in lines if "falls" in line] == [
        "step 3  loss 4.4  <- falls",
        "epoch 2: loss 0.6  <- falls",
    ]


def test_a_command_that_fails_is_named(checkout: Path) -> None:
    (checkout / "docs" / "start.md").write_text(PAGE.replace("echo REPOSITORY", "false"))
    with pytest.raises(SystemExit, match="'false' ended with code 1"):
        first_minutes.time_first_minutes(checkout)


def test_the_real_page_has_the_commands() -> None:
    page = (first_minutes.ROOT / "docs" / "start.md").read_text()
    commands = [line for title in first_minutes.SECTIONS for line in first_minutes.read_commands(page, title)]
    assert commands[0] == "git clone REPOSITORY stretto" and {"make demo", "python examples/finetune_bert.py"} < set(
        commands
    )
