"""The values of a recipe: read from text, checked for a range that all has a place for, and shown in errors.

A recipe may come from a stranger. What no recipe ever has, but would keep a parser busy for hours or make it fail in
ways of its own, is refused here, so that a configuration is either right or a `ConfigError`.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

from stretto.errors import ConfigError

MOST_BYTES = 1 << 18  # of a recipe
MOST_DOTS = 100  # in a line of it; the parser's time grows with the square of the parts of a key
MOST_TOKENS = 1 << 24  # of a vocabulary: the largest have a tenth of it, and the libraries abort where memory ends
SHOWN = 200  # characters of a value in a message
# The numbers in data.aa: magnitude, operations on each image, standard deviation of the magnitude, and whether all
# operations change more with it. Each with its default and the largest that there is.
POLICY = {"m": (10.0, 10.0), "n": (2.0, 15.0), "mstd": (0.0, 100.0), "inc": (0.0, 1.0)}
_POLICY_PART = re.compile(r"(?=m|\w+$)(m|mstd|n|inc)(\d+(?:\.\d+)?)")  # n and inc are whole


def parse(text: str) -> dict[str, Any]:
    """Reads TOML; a `ValueError` where it is none."""
    if any(line.count(".") > MOST_DOTS for line in text.split("\n")):
        raise ValueError(f"a line has more than {MOST_DOTS} dots")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def check_range(key: str, value: Any) -> Any:
    """Returns a value that files, libraries and devices have a place for; a `ConfigError` names the key of others."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ConfigError(f"{key} = {show(value)} must be between -2**63 and 2**63 - 1")
    if isinstance(value, float) and not abs(value) < float("inf"):
        raise ConfigError(f"{key} = {value!r} must be finite")
    if isinstance(value, str) and ("\0" in value or is_broken(value)):
        raise ConfigError(f"{key} = {show(value)} must be UTF-8 text without NUL")
    return value


def is_broken(text: str) -> bool:
    """Says whether it has bytes of a command line that are no UTF-8: Python keeps these as surrogates."""
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def show(value: Any) -> str:
    """Returns the value for a message: short, and without surrogates. Python refuses to write out very long numbers."""
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return f"a number of {value.bit_length():,} bits"
    try:
        text = ascii(value) if isinstance(value, str) and is_broken(value) else repr(value)
    except (ValueError, RecursionError):
        return f"a very large {type(value).__name__}"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def read_policy(aa: str) -> dict[str, float]:
    """Reads the numbers in data.aa, by their names; there are none if it is empty."""
    if not aa:
        return {}
    name, *parts = aa.split("-")
    found = {match[1]: float(match[2]) for part in parts if (match := _POLICY_PART.fullmatch(part))}
    if name != "rand" or len(found) != len(parts) or any(value > POLICY[key][1] for key, value in found.items()):
        raise ConfigError(
            f"data.aa = {show(aa)} must be a RandAugment of timm's, such as 'rand-m9-mstd0.5-inc1': each of "
            + ", ".join(f"{key} (at most {most:g})" for key, (_, most) in POLICY.items())
            + " at most once; n and inc are whole"
        )
    return {key: default for key, (default, _) in POLICY.items()} | found
