"""The file of a state: an npz archive that holds its arrays and their description.

The entry `state` is a `checked_json` file as bytes; the entries `0`, `1`, .. are the
arrays. Types that NumPy's format lacks, such as bfloat16, are stored as unsigned
integers of their size. The comment at the end of the archive is the digest of all bytes
before it. Nothing is pickled. FORMAT.md is the page of the format.
"""

from __future__ import annotations

import contextlib
import io
import os
import zipfile
from typing import IO

import numpy as np
from etils import epath

from elastic_ckpt.checkpoint.components.encoding import Encoded
from elastic_ckpt.core import checked_json, digest, errors, storage

VERSION = 1
_WHAT = "state of a component"
_STATE = "state"
_DIGEST_LENGTH = 32
_PIECE_BYTES = 2**20
_MOST_ATTEMPTS = 10


def to_bytes(encoded: Encoded) -> bytes:
    """The content of the file of a state; the same bytes for the same state."""
    archived = io.BytesIO()
    _archive(encoded, archived)
    content = archived.getvalue()[:-_DIGEST_LENGTH]
    return content + _digest(content)


def write(path: epath.Path, encoded: Encoded) -> None:
    """Writes the file of a state, whole or not at all, without a copy of its values."""
    with storage.atomic_path(path) as temporary, open(temporary, "w+b") as file:
        _archive(encoded, file)
        value = _file_digest(file)
        file.seek(-_DIGEST_LENGTH, os.SEEK_END)
        file.write(value)


def _archive(encoded: Encoded, file: IO[bytes]) -> None:
    # The content of the file, with zeros in the place of the digest.
    dtypes = [each.dtype.name if _is_foreign(each) else "" for each in encoded.arrays]
    fields = {"tree": encoded.tree, "dtypes": dtypes}
    text = checked_json.to_bytes(fields, version=VERSION)
    with zipfile.ZipFile(file, "w") as archive:
        _put(archive, _STATE, np.frombuffer(text, np.uint8))
        for number, values in enumerate(encoded.arrays):
            _put(archive, str(number), _stored(values))
        archive.comment = bytes(_DIGEST_LENGTH)


def _file_digest(file: IO[bytes]) -> bytes:
    # Of all bytes before the digest.
    left = file.seek(0, os.SEEK_END) - _DIGEST_LENGTH
    file.seek(0)
    hashed = digest.values_hash()
    while left > 0 and (piece := file.read(min(left, _PIECE_BYTES))):
        hashed.update(piece)
        left -= len(piece)
    return hashed.hexdigest().encode()


def from_bytes(content: bytes) -> Encoded:
    """The state in the content of a file.

    Raises:
      CheckpointError: if it is cut short, altered, or of another version.
    """
    return _from_file(io.BytesIO(content))


def _from_file(file: IO[bytes]) -> Encoded:
    value = _file_digest(file)
    if value != file.read(_DIGEST_LENGTH + 1):
        raise errors.CheckpointError("is cut short or altered (its digest differs)")
    with zipfile.ZipFile(file) as archive:
        text = _get(archive, _STATE).tobytes()
        try:
            fields = checked_json.parse(text, what=_WHAT, version=VERSION)
        except checked_json.UnreadableError as error:
            raise errors.CheckpointError(str(error)) from None
        arrays = [
            values.view(np.dtype(name)) if name else values
            for number, name in enumerate(fields["dtypes"])
            for values in [_get(archive, str(number))]
        ]
    return Encoded(fields["tree"], arrays)


def read(path: epath.Path) -> Encoded:
    """The state in a file.

    Raises:
      CheckpointError: if the file is missing or `from_bytes` rejects it; it names the
        file.
    """
    try:
        if not storage.is_local(path):
            return from_bytes(path.read_bytes())
        with open(path, "rb") as file:
            return _from_file(file)
    except FileNotFoundError:
        problem = "is missing"
    except errors.CheckpointError as error:
        problem = str(error)
    raise unreadable(path, problem)


def unreadable(path: epath.Path, problem: str) -> errors.CheckpointError:
    """The error of a file of a component that cannot be read."""
    return errors.CheckpointError(
        f"{_WHAT} {path} {problem}; restore the file from a copy, load another step, or"
        " load without the component (strict=False)"
    )


def _is_foreign(array: np.ndarray) -> bool:
    # Types that other packages have registered, which NumPy would store without a name.
    return array.dtype.isbuiltin == 2


def _stored(array: np.ndarray) -> np.ndarray:
    if not _is_foreign(array):
        return array
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def _digest(content: bytes) -> bytes:
    return digest.values_digest(np.frombuffer(content, np.uint8)).hex().encode()


def _put(archive: zipfile.ZipFile, name: str, values: np.ndarray) -> None:
    # Without the time of the day: equal states have equal bytes.
    with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as file:
        np.lib.format.write_array(file, values, allow_pickle=False)


def _get(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    # NumPy has Python parse the shape and the dtype, which CPython 3.11 now and then
    # fails to do while another thread does it (python/cpython#106905).
    for _ in range(_MOST_ATTEMPTS):
        with contextlib.suppress(SystemError), archive.open(f"{name}.npy") as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    with archive.open(f"{name}.npy") as file:
        return np.lib.format.read_array(file, allow_pickle=False)
