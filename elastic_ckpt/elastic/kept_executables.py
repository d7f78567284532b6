"""The directory and the key of a supervisor's executables; imports no JAX."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import tempfile
import time
from collections.abc import Iterator

from elastic_ckpt.core import working_directory

_RAM_DISK = "/dev/shm"


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptExecutables:
    """The place of executables that outlive their world.

    Attributes:
      directory: private, on this machine's RAM disk.
      key: of the MAC of each file; in the memory of the supervisor and its hosts alone.
      began_ns: when the directory was made, since 1970.
    """

    directory: str
    key: bytes = dataclasses.field(repr=False)
    began_ns: int


@contextlib.contextmanager
def kept() -> Iterator[KeptExecutables]:
    """A new directory and key, which end with the block."""
    parent = _RAM_DISK if os.access(_RAM_DISK, os.W_OK) else tempfile.gettempdir()
    directory = working_directory.new_path(parent)
    with contextlib.closing(working_directory.WorkingDirectory(directory)):
        yield KeptExecutables(
            directory=directory, key=secrets.token_bytes(32), began_ns=time.time_ns()
        )
