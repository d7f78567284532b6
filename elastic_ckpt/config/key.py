"""A configuration key: its default, description and allowed values."""

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
    below: float | None = None,
    multiple_of: int | None = None,
    off: int | None = None,
    lists: str = "",
) -> Any:
    """A dataclass field of a section that defines one key.

    Args:
      default: the value if the key is not set.
      doc: the description, for `configs/base.yml` and the command line.
      choices: the allowed values; empty allows all.
      at_least: the smallest allowed number.
      below: a number that is greater than all allowed ones.
      multiple_of: of which the number is a multiple.
      off: another number, as in MaxText, that means the default.
      lists: whether a list is accepted in place of a text, too: `names` to keep its
        texts, separated by commas, `any` to keep its JSON, and `yaml` to keep the JSON
        of a list or a mapping.
    """
    metadata = {
        "doc": doc,
        "choices": choices,
        "at_least": at_least,
        "below": below,
        "multiple_of": multiple_of,
        "off": off,
        "lists": lists,
    }
    return dataclasses.field(default=default, metadata=metadata)
