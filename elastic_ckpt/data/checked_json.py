"""JSON objects in files that know their version and notice any change.

A file holds `version`, the fields of its format, and `digest`, the BLAKE2b-128 of the
canonical JSON of all of the others.
"""

from __future__ import annotations

import json
from typing import Any

from etils import epath

from elastic_ckpt.core import digest, errors, storage

# How `to_bytes` ends a file, and no field.
_END = b"\n}\n"


def to_bytes(fields: dict[str, storage.Json], *, version: int) -> bytes:
    """The content of a file with `fields`."""
    content: dict[str, storage.Json] = {"version": version, **fields}
    content["digest"] = digest.json_digest(content)
    # A field a line.
    lines = [
        f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}"
        for name, value in content.items()
    ]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def read(path: epath.Path, *, what: str, version: int) -> dict[str, Any]:
    """The fields that `to_bytes` put into the file at `path`, checked.

    Args:
      path: a file below a step's directory.
      what: what the file is, in messages.
      version: the only version that the caller reads.

    Raises:
      DataError: if the file is missing, cut short, not JSON, altered, or of another
        version; the message names the file and the way out.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise _unreadable(path, what, "is missing") from None
    try:
        content = json.loads(text)
    except ValueError as error:
        began_well = text.startswith(b"{") or not text
        if began_well and not text.endswith(_END):
            problem = f"is cut short (after {len(text)} bytes)"
        else:
            problem = f"is not JSON ({error})"
        raise _unreadable(path, what, problem) from None
    if not isinstance(content, dict) or "version" not in content:
        raise _unreadable(path, what, f"is not a {what}")
    if content["version"] != version:
        raise errors.DataError(
            f"{what} {path} has version {content['version']!r}, and this program reads"
            f" version {version}; continue the run with the program that wrote it"
        )
    said = content.pop("digest", None)
    if digest.json_digest(content) != said:
        raise _unreadable(
            path, what, "was altered after it was saved (its digest differs)"
        )
    return content


def _unreadable(path: epath.Path, what: str, problem: str) -> errors.DataError:
    step = path.parent.parent
    return errors.DataError(
        f"{what} {path} {problem}; restore the file from a copy, or move {step} out of"
        " its directory to continue from the step before"
    )
