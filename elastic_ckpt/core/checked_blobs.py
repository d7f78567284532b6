"""A JSON header and binary blobs, with a version and a digest.

8 bytes    the length of the header, little-endian
header     JSON: the version, the fields, and the sizes of the blobs
blobs      one after the other
16 bytes   XXH3-128 of everything before
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from elastic_ckpt.core import checked_json, digest, storage

_LENGTH_BYTES = 8
_DIGEST_BYTES = 16


def to_bytes(
    fields: dict[str, storage.Json], blobs: Sequence[bytes], *, version: int
) -> bytes:
    """Encodes fields and blobs for `parse`."""
    sizes: list[storage.Json] = [len(blob) for blob in blobs]
    header = storage.canonical_json({"version": version, **fields, "sizes": sizes})
    content = b"".join([len(header).to_bytes(_LENGTH_BYTES, "little"), header, *blobs])
    return content + digest.values_digest(np.frombuffer(content, np.uint8))


def parse(
    content: bytes, *, what: str, version: int
) -> tuple[dict[str, Any], list[bytes]]:
    """Checks `content` and returns its fields and blobs.

    Args:
      content: the result of `to_bytes`.
      what: the kind of content, used in error messages.
      version: the format version that the caller can read.

    Raises:
      UnreadableError: if the content is truncated, altered, of a different kind, or has
        a different version.
    """
    body = np.frombuffer(content, np.uint8)[: max(0, len(content) - _DIGEST_BYTES)]
    if digest.values_digest(body) != content[len(body) :]:
        raise checked_json.UnreadableError("was truncated or altered")
    end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    try:
        fields = json.loads(content[_LENGTH_BYTES:end])
        checked_json.check_version(fields, what=what, version=version)
        ends = itertools.accumulate(map(int, fields["sizes"]), initial=end)
        blobs = [content[a:b] for a, b in itertools.pairwise(ends)]
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        if isinstance(error, checked_json.UnreadableError):
            raise
        raise checked_json.UnreadableError(f"is not a {what} ({error!r})") from None
    return fields, blobs
