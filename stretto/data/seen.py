"""What is known of files that were read before: it holds as long as they have the same names, sizes and dates.

Large corpora would take minutes to be read again whenever a run begins. A note in the store says what was found in
them, next to a stamp of the files. What others have just written gets no note, since some file systems count time in
seconds, and it could change again without a new date.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stretto.data.tokenizer import Store
from stretto.files import read_text, write_text

_MOST_BYTES = 1 << 24  # of a note
_RECENT_S = 2.0


def stamp(paths: Sequence[Path]) -> tuple[str, float]:
    """Returns what changes with the names, sizes and dates of files, and the newest date."""
    found = [(str(path.absolute()), path.stat()) for path in paths]
    facts = [(name, about.st_size, about.st_mtime_ns) for name, about in found]
    newest = max((about.st_mtime for _, about in found), default=0.0)
    return hashlib.sha256(repr(facts).encode()).hexdigest(), newest


def recall(store: Store, name: str, paths: Sequence[Path]) -> Any:
    """Returns what is noted under a name, if the files are as they were; else nothing."""
    try:
        note = json.loads(read_text(store.find(_name(name)), _MOST_BYTES))
        return note["facts"] if note["stamp"] == stamp(paths)[0] else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # it was never noted, or what is there is no note: the files themselves are there


def note(store: Store, name: str, before: tuple[str, float], facts: Any, *, own: bool = False) -> None:
    """Notes what was found in files that had this stamp before they were read, or of `own` ones, after they were
    written."""
    if own or time.time() - before[1] > _RECENT_S:
        write_text(store.folder / _name(name), json.dumps({"stamp": before[0], "facts": facts}))


def _name(name: str) -> str:
    return f"{hashlib.sha256(name.encode()).hexdigest()[:16]}.seen"
