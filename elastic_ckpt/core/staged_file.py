"""A file that is written on this machine and appears in its place whole, anywhere."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

from etils import epath

from elastic_ckpt.core import bucket_clients, storage


@contextlib.contextmanager
def staged_path(path: epath.PathLike) -> Iterator[str]:
    """Yields a temporary local path; on success its file becomes `path`, durably.

    Args:
      path: local, or in an object store, to which the file is uploaded then; an
        existing object is replaced.

    Raises:
      OSError: if storage fails, or another of `bucket_clients.failures`.
    """
    if storage.is_local(path):
        with storage.atomic_path(path) as temporary:
            yield temporary
        return
    import fsspec

    bucket_clients.prepare(os.fspath(path))
    filesystem, name = fsspec.url_to_fs(os.fspath(path))
    with tempfile.NamedTemporaryFile() as file:
        yield file.name
        filesystem.put_file(file.name, name)
