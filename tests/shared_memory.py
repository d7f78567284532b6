"""The files of a test session in /dev/shm; their names contain the session."""

import contextlib
import os
import shutil
import tempfile

SESSION = "ELASTIC_CKPT_TEST_SESSION"


def prefix():
    """The prefix of all names; tests/site/sitecustomize.py has it too."""
    return f"elastic_ckpt_tests_{os.environ[SESSION]}_"


@contextlib.contextmanager
def directory(kind):
    """A directory in /dev/shm, which is gone at the end of the block."""
    made = tempfile.mkdtemp(prefix=f"{prefix()}{kind}_", dir="/dev/shm")
    try:
        yield made
    finally:
        shutil.rmtree(made)


def left_behind():
    """The names that the session has in /dev/shm now."""
    names = (prefix(), f"sem.{prefix()}")
    return sorted(name for name in os.listdir("/dev/shm") if name.startswith(names))
