"""The temporary directory of simulated worlds, which crash without removing files."""

import tempfile

import pytest


@pytest.fixture(autouse=True, scope="package")
def temporary_directory():
    """Goes with the tests, and with it what components wrote before a crash."""
    with (
        tempfile.TemporaryDirectory() as directory,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(tempfile, "tempdir", directory)
        yield
