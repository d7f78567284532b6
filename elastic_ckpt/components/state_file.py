"""The file of a state: an npz archive that holds its arrays and their description.

The entry `state` is a `checked_json` file as bytes; the entries `0`, `1`, .. are the
arrays. Types that NumPy's format lacks, such as bfloat16, are stored as unsigned
integers of their size. Nothing is pickled. FORMAT.md is the page of the format.
"""

from __future__ import annotations

import io
import zipfile
from typing import Any

import numpy as np
from etils import epath

from elastic_ckpt.components.encoding import Encoded
from elastic_ckpt.core import checked_json, digest, errors

VERSION = 1
_WHAT = "state of a component"
_STATE = "state"


def to_bytes(encoded: Encoded) -> bytes:
    """The content of the file of a state; the same bytes for the same state."""
    stored = [_stored(each) for each in encoded.arrays]
    metadata = [
        {
            "dtype": array.dtype.name if _is_foreign(array) else "",
            "digest": digest.values_digest(values).hex(),
        }
        for array, values in zip(encoded.arrays, stored, strict=True)
    ]
    fields = {"tree": encoded.tree, "arrays": metadata}
    text = checked_json.to_bytes(fields, version=VERSION)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        _put(archive, _STATE, np.frombuffer(text, np.uint8))
        for number, values in enumerate(stored):
            _put(archive, str(number), values)
    return content.getvalue()


def from_bytes(content: bytes) -> Encoded:
    """The state in the content of a file.

    Raises:
      CheckpointError: if it is cut short, altered, or of another version.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            text = _get(archive, _STATE).tobytes()
            fields = checked_json.parse(text, what=_WHAT, version=VERSION)
            arrays = [
                _checked(_get(archive, str(number)), metadata)
                for number, metadata in enumerate(fields["arrays"])
            ]
    except checked_json.UnreadableError as error:
        raise errors.CheckpointError(str(error)) from None
    except (zipfile.BadZipFile, KeyError, ValueError, EOFError) as error:
        raise errors.CheckpointError(
            f"is cut short or altered ({type(error).__name__}: {error})"
        ) from None
    return Encoded(fields["tree"], arrays)


def read(path: epath.Path) -> Encoded:
    """The state in a file.

    Raises:
      CheckpointError: if the file is missing or `from_bytes` rejects it; it names the
        file.
    """
    try:
        return from_bytes(path.read_bytes())
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


def _checked(values: np.ndarray, metadata: dict[str, Any]) -> np.ndarray:
    if digest.values_digest(values).hex() != metadata["digest"]:
        raise ValueError("the digest of an array differs")
    if metadata["dtype"]:
        return values.view(np.dtype(metadata["dtype"]))
    return values


def _put(archive: zipfile.ZipFile, name: str, values: np.ndarray) -> None:
    # Without the time of the day: equal states have equal bytes.
    with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as file:
        np.lib.format.write_array(file, values, allow_pickle=False)


def _get(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    with archive.open(f"{name}.npy") as file:
        values = np.lib.format.read_array(file, allow_pickle=False)
        # Reads on to the checksum at the end.
        if file.read(1):
            raise ValueError(f"{name} goes on after its end")
    return values
