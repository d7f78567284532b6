"""Directories in /dev/shm, named by the process that has them: others may test too."""

import contextlib
import os
import re
import shutil
import tempfile

_NAME = re.compile(r"elastic_ckpt_(?:tests|benchmark)_(\d+)_.*")


@contextlib.contextmanager
def directory(kind):
    """A directory in /dev/shm, which is gone at the end of the block."""
    prefix = f"elastic_ckpt_tests_{os.getpid()}_{kind}_"
    made = tempfile.mkdtemp(prefix=prefix, dir="/dev/shm")
    try:
        yield made
    finally:
        shutil.rmtree(made)


def is_anothers(name):
    """Whether a name in /dev/shm is that of tests of another process, which lives."""
    found = _NAME.fullmatch(name)
    return (
        found is not None
        and int(found[1]) != os.getpid()
        and os.path.exists(f"/proc/{found[1]}")
    )
