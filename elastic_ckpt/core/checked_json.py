"""Files of one JSON object, with a version and a digest.

The object has `version`, the fields of its format, and `digest`, the BLAKE2b-128 of the
canonical JSON of all other fields.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from typing import Any

from etils import epath

from elastic_ckpt.core import digest, errors, storage

_text = json.JSONEncoder(separators=(",", ":")).encode


class UnreadableError(ValueError):
    """A file's content is invalid; the message continues `<file> ...`."""


class LaterVersionError(UnreadableError, errors.CheckpointError):
    """The content was written by a later version of elastic_ckpt."""


def to_bytes(fields: dict[str, storage.Json], *, version: int) -> bytes:
    """The content of a file that holds `fields`."""
    return _laid_out(sealed(fields, version=version))


def sealed(fields: dict[str, storage.Json], *, version: int) -> dict[str, storage.Json]:
    """The JSON object `fields` with its version and digest."""
    content: dict[str, storage.Json] = {"version": version, **fields}
    content["digest"] = digest.json_digest(content)
    return content


def parse(text: bytes, *, what: str, version: int) -> dict[str, Any]:
    """Checks the content of a file and returns its fields, including `version`.

    Args:
      text: the content of the file.
      what: the kind of file, used in error messages.
      version: the format version that the caller can read.

    Raises:
      UnreadableError: if the content is truncated, is not JSON, was altered, or has a
        different version.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(
            f"is truncated or is not JSON ({error}; it has {len(text)} bytes)"
        ) from None
    return unsealed(content, what=what, version=version)


def unsealed(content: Any, *, what: str, version: int) -> dict[str, Any]:
    """Checks an object from `sealed` and returns its fields, including `version`.

    For `what` and `version`, see `parse`.

    Raises:
      UnreadableError: if the object is of a different kind, was altered, or has a
        different version.
    """
    check_version(content, what=what, version=version)
    fields = {name: value for name, value in content.items() if name != "digest"}
    try:
        actual = digest.json_digest(fields)
    except (TypeError, ValueError) as error:
        raise UnreadableError(f"is not JSON ({error})") from None
    if actual != content.get("digest"):
        raise UnreadableError("was altered after it was saved (its digest differs)")
    return fields


def check_version(content: Any, *, what: str, version: int) -> None:
    """Checks only the version of an object, as `unsealed` does."""
    if not isinstance(content, Mapping) or "version" not in content:
        raise UnreadableError(f"is not a {what}")
    found = content["version"]
    if type(found) is not int or found != version:
        reads = f"format version {found!r}, but this release reads version {version}"
        if isinstance(found, int) and found > version:
            raise LaterVersionError(
                f"was written by a later version of elastic_ckpt (it has {reads});"
                " upgrade elastic_ckpt"
            )
        raise UnreadableError(f"has {reads}")


def read(path: epath.Path, *, what: str, version: int) -> dict[str, Any]:
    """Reads and checks a data state file and returns its fields; see `parse`.

    The path is `<step>/<part>/<file>`. A file that ends in `.gz` is compressed.

    Raises:
      DataError: if the file is missing or `parse` rejects it; the message names the
        file and the remedy.
    """
    try:
        text = path.read_bytes()
        return parse(
            _decompressed(text) if path.suffix == ".gz" else text,
            what=what,
            version=version,
        )
    except LaterVersionError as problem:
        raise errors.DataError(f"{what} {path} {problem}") from None
    except (FileNotFoundError, UnreadableError) as problem:
        missing = isinstance(problem, FileNotFoundError)
        raise errors.DataError(
            f"{what} {path} {'is missing' if missing else problem}; restore the file"
            " from a good copy or, to continue from the previous step, move"
            f" {path.parent.parent} out of its directory"
        ) from None


def _decompressed(content: bytes) -> bytes:
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise UnreadableError(
            f"is truncated or is not gzip ({error}; it has {len(content)} bytes)"
        ) from None


def _laid_out(content: dict[str, Any]) -> bytes:
    # One line for each field.
    lines = [f"{_text(name)}: {_text(value)}" for name, value in content.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()
