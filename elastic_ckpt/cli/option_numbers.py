"""Types of numeric options, for `type=` in argparse's `add_argument`.

argparse puts the option before the message and exits with 2: "argument --days: '-1' is
not a number above 0".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta


def _number(kind: Any, what: str) -> Callable[[str], Any]:
    # Reads a number of an annotated type. Messages call it `what`.
    def read(text: str) -> Any:
        try:
            return msgspec.convert(text, kind, strict=False)
        except msgspec.ValidationError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None

    return read


def _named(number: Callable[[str], Any]) -> Callable[[str], tuple[str, Any]]:
    # Reads NAME=NUMBER.
    def read(text: str) -> tuple[str, Any]:
        name, equals, value = text.partition("=")
        if not (name.isidentifier() and equals):
            raise argparse.ArgumentTypeError(f"{text!r}: use NAME=NUMBER")
        return name, number(value)

    return read


count = _number(Annotated[int, Meta(ge=0)], "a non-negative integer")
positive_count = _number(Annotated[int, Meta(ge=1)], "a positive integer")
port = _number(Annotated[int, Meta(ge=0, lt=2**16)], "a port, 0 to 65535")
positive_number = _number(
    Annotated[float, Meta(gt=0, le=sys.float_info.max)], "a number above 0"
)
named_positive_count = _named(positive_count)
named_number = _named(
    _number(
        Annotated[float, Meta(ge=0, le=sys.float_info.max)], "a non-negative number"
    )
)


def positive_counts(text: str) -> list[int]:
    """Parses comma-separated positive integers."""
    return [positive_count(part) for part in text.split(",")]
