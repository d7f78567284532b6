"""The temporary directory of simulated worlds, which crash without removing files."""

import tempfile
from multiprocessing import util

import pytest


@pytest.fixture(autouse=True, scope="package")
def temporary_directory():
    """Goes with the tests, and with it what components wrote before a crash."""
    # The process keeps its own for as long as it lives, wherever it is made.
    util.get_temp_dir()
    with tempfile.TemporaryDirectory() as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", made)
        yield
