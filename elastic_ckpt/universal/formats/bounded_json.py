"""Parses JSON that other programs wrote: bounded in memory, without doubled names."""

from __future__ import annotations

import json
import re
from typing import Any

from etils import epath

from elastic_ckpt.universal.formats import bounded_file
from elastic_ckpt.universal.formats.format_error import FormatError

MOST_BYTES = 100 << 20
# Values of 64 bytes take less than 1 GiB; a tensor of a header has 13.
MOST_VALUES = 12_000_000
# In memory every character of a text takes as much as its widest.
_MOST_WIDE_BYTES = 32 << 20
_WIDE = re.compile(rb"[\xc4-\xff]")


def read(path: epath.PathLike) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
      FormatError: if the file is missing or too large, or as `parse`.
    """
    return parse(bounded_file.read(path, most_bytes=MOST_BYTES), str(path))


def parse(content: bytes, place: str) -> dict[str, Any]:
    """The JSON object that `content` is.

    Args:
      content: UTF-8.
      place: the file, and the place in it, for messages.

    Raises:
      FormatError: if it is no JSON object, has a name twice, or too many values.
    """
    # A dict takes as much as four numbers, and a list as two. It has room for a few
    # names; others take as much as three.
    dicts = content.count(b"{")
    names = max(0, content.count(b":") - 4 * dicts)
    lists = content.count(b"[")
    values = content.count(b",") + 4 * dicts + 2 * lists + 3 * names
    if values > MOST_VALUES:
        raise FormatError(
            f"{place} has about {values} values, and at most {MOST_VALUES} are read"
        )
    if len(content) > _MOST_WIDE_BYTES and _WIDE.search(content):
        raise FormatError(
            f"{place} has {len(content)} bytes with characters that make it four times"
            f" as large, and at most {_MOST_WIDE_BYTES} of such are read"
        )
    try:
        fields = json.loads(content, object_pairs_hook=_without_doubles)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{place} is no valid JSON ({error})") from None
    if not isinstance(fields, dict):
        raise FormatError(f"{place} is no JSON object")
    return fields


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("it has a name twice")
    return fields
