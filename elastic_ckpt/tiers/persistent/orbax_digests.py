"""The digests of Orbax's own files in a step: lists of arrays, shardings and times.

    <step>/orbax-digests.json    `files`: by path in the step, XXH3-128 of the content

The file has the layout of `core.checked_json`, in version 1, and is written before the
commit. Orbax ignores it. Only a verification reads it; values have their digests in
manifests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from etils import epath

from elastic_ckpt.core import bucket_clients, checked_json, digest, errors, storage

FILE = "orbax-digests.json"
_VERSION = 1


def to_bytes(files: Mapping[str, bytes]) -> bytes:
    """The content of the file for Orbax's `files`, by path."""
    return _content({path: _digest(content) for path, content in files.items()})


def add(directory: epath.Path, files: Mapping[str, bytes]) -> None:
    """Adds Orbax's `files`, by path, to those that the file in a step lists, if any."""
    path = directory / FILE
    listed = _listed(path) if path.exists() else {}
    digests = {path: _digest(content) for path, content in files.items()}
    storage.write_atomic(path, _content(listed | digests))


def read(directory: epath.Path) -> dict[str, bytes]:
    """Orbax's files of a step by path, as they were saved.

    Raises:
      CheckpointError: if one of them is not what was saved, or they were not listed.
    """
    wrong = [f"{path} {why}" for path, why in problems(directory)]
    if wrong:
        raise errors.CheckpointError(
            f"{directory}: {'; '.join(wrong)}; restore it from a copy, or save the step"
            " once more"
        )
    listed = _listed(directory / FILE)
    return {path: (directory / path).read_bytes() for path in listed}


def problems(directory: epath.Path) -> Iterator[tuple[str, str]]:
    """The problems of Orbax's files of a step.

    Yields:
      The path of a file in the step's directory, and what is wrong with it.
    """
    try:
        listed = _listed(directory / FILE)
    except FileNotFoundError:
        yield FILE, "is missing, so Orbax's own files cannot be compared"
        return
    except (*bucket_clients.failures(), checked_json.UnreadableError) as error:
        yield FILE, str(error)
        return
    for path, expected in listed.items():
        try:
            content = (directory / path).read_bytes()
        except FileNotFoundError:
            yield path, "is missing"
        except bucket_clients.failures() as error:
            yield path, f"cannot be read ({error})"
        else:
            if _digest(content) != expected:
                yield path, "is not what was saved: its digest differs"


def _listed(path: epath.Path) -> dict[str, str]:
    content = path.read_bytes()
    return checked_json.parse(content, what="list of files", version=_VERSION)["files"]


def _content(listed: Mapping[str, str]) -> bytes:
    return checked_json.to_bytes(
        {"files": dict(sorted(listed.items()))}, version=_VERSION
    )


def _digest(content: bytes) -> str:
    return digest.values_digest(np.frombuffer(content, np.uint8)).hex()
