"""Parses JSON that other programs wrote: bounded in memory, without doubled names."""

from __future__ import annotations

import json
import re
from typing import Any

from etils import epath

from elastic_ckpt.universal.formats import source_files
from elastic_ckpt.universal.formats.format_error import FormatError

MOST_BYTES = 100 << 20
# Values of 64 bytes take less than 1 GiB; a tensor of a header has 13, one of Orbax 57.
MOST_VALUES = 12_000_000
# A list of many tensors may be larger: the tensors have more bytes than it has, and so
# many for each value of it.
_BYTES_PER_BYTE, _BYTES_PER_VALUE = 2, 16
# Lists of tensors that are no larger are within the limits.
_SMALL_BYTES = 12 << 20
# In memory every character of a text takes as much as its widest.
_MOST_WIDE_BYTES = 32 << 20
_WIDE = re.compile(rb"[\xc4-\xff]")


def read(path: epath.PathLike, *, tensors: epath.Path | None = None) -> dict[str, Any]:
    """The JSON object that a file holds.

    Args:
      path: local, or in a bucket.
      tensors: the directory of those that it lists, if it is large where they are.

    Raises:
      FormatError: if the file is missing or too large, or as `parse`.
    """
    most_bytes, most_values = MOST_BYTES, MOST_VALUES
    num_bytes = epath.Path(path).stat().length if tensors is not None else 0
    if tensors is not None and num_bytes > _SMALL_BYTES:
        stored_bytes = source_files.num_stored_bytes_in(tensors) - num_bytes
        most_bytes = max(most_bytes, stored_bytes // _BYTES_PER_BYTE)
        most_values = max(most_values, stored_bytes // _BYTES_PER_VALUE)
    content = source_files.read(path, most_bytes=most_bytes)
    return parse(content, str(path), most_values=most_values)


def parse(
    content: bytes, place: str, *, most_values: int = MOST_VALUES
) -> dict[str, Any]:
    """The JSON object that `content` is.

    Args:
      content: UTF-8.
      place: the file, and the place in it, for messages.
      most_values: about as many values, names and parts of containers may it have.

    Raises:
      FormatError: if it is no JSON object, has a name twice, or too many values.
    """
    # A dict takes as much as four numbers, and a list as two. It has room for a few
    # names; others take as much as three.
    dicts = content.count(b"{")
    names = max(0, content.count(b":") - 4 * dicts)
    lists = content.count(b"[")
    values = content.count(b",") + 4 * dicts + 2 * lists + 3 * names
    if values > most_values:
        raise FormatError(
            f"{place} has about {values} values, and at most {most_values} are read"
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
