"""Types of numeric options, as `type=` of argparse's `add_argument`.

argparse puts the option before the message and exits with 2: "argument --days: '-1' is
not a number above 0".
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

_N = TypeVar("_N", int, float)


def count(text: str) -> int:
    """A whole number, 0 or more."""
    return _number(
        text, int, lambda number: number >= 0, "a whole number of at least 0"
    )


def positive_count(text: str) -> int:
    """A whole number, 1 or more."""
    return _number(text, int, lambda number: number > 0, "a whole number of at least 1")


def positive_counts(text: str) -> list[int]:
    """Whole numbers, each 1 or more, separated by commas."""
    return [positive_count(part) for part in text.split(",")]


def port(text: str) -> int:
    """A port; 0 has the system choose one."""
    return _number(text, int, lambda number: 0 <= number < 2**16, "a port, 0 to 65535")


def positive_number(text: str) -> float:
    """A finite number above 0."""
    return _number(text, float, lambda number: number > 0, "a number above 0")


def named_number(text: str) -> tuple[str, float]:
    """NAME=NUMBER, with a finite number of at least 0."""
    name, number = _named(text)
    return name, _number(number, float, lambda n: n >= 0, "a number of at least 0")


def named_positive_count(text: str) -> tuple[str, int]:
    """NAME=NUMBER, with a whole number, 1 or more."""
    name, number = _named(text)
    return name, positive_count(number)


def _number(
    text: str, parse: Callable[[str], _N], is_valid: Callable[[_N], bool], what: str
) -> _N:
    try:
        number = parse(text)
    except ValueError:
        number = parse("-1")
    if not (math.isfinite(number) and is_valid(number)):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return number


def _named(text: str) -> tuple[str, str]:
    name, equals, number = text.partition("=")
    if not (name.isidentifier() and equals):
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=NUMBER")
    return name, number
