"""The component files of a controller that does not share the hosts' memory.

A plain Python component lives in the controller, and so do its files. These files are
small, so they are passed as arguments and results of calls to host 0. (Components on
the hosts write their files there, without the controller.)
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from etils import epath

from elastic_ckpt.core import storage


def read(directory: epath.PathLike) -> dict[str, bytes]:
    """Returns the content of all files in a directory, keyed by path."""
    top = pathlib.Path(directory)
    files = [path for path in top.rglob("*") if path.is_file()]
    return {str(path.relative_to(top)): path.read_bytes() for path in files}


def write(directory: epath.PathLike, files: Mapping[str, bytes]) -> None:
    """Writes files to a directory, which is created if it is missing."""
    made = storage.make_directory(directory)
    for path, content in files.items():
        storage.write_atomic(made / path, content)
