"""A key of the configuration: its type, default, meaning and allowed values."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

Value: TypeAlias = bool | int | float | str


def key(
    default: Value,
    doc: str,
    *,
    choices: tuple[Value, ...] = (),
    at_least: float | None = None,
    off: int | None = None,
    listed: bool = False,
) -> Any:
    """A field of a section: a key with its default.

    Args:
      default: its value where it is not set.
      doc: its meaning, for `configs/base.yml` and the command line.
      choices: the allowed values; empty allows all.
      at_least: the smallest allowed number.
      off: another number, MaxText's, that stands for the default.
      listed: whether a list of one text, as MaxText writes it, is read too.
    """
    metadata = {
        "doc": doc,
        "choices": choices,
        "at_least": at_least,
        "off": off,
        "listed": listed,
    }
    return dataclasses.field(default=default, metadata=metadata)
