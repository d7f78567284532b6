"""A state that fits into a host once is saved and restored there."""

import subprocess
import sys

import pytest

from tests import shared_memory


def run(*arguments):
    command = [sys.executable, "-m", "tests.checkpoint.limited_memory"]
    return subprocess.run(
        [*command, *map(str, arguments)], check=False, capture_output=True, text=True
    )


@pytest.fixture
def ram():
    with shared_memory.directory("limited_memory") as directory:
        yield directory


@pytest.mark.slow
@pytest.mark.parametrize("tiers", ["ram", "storage"])
def test_a_save_needs_512_mib_and_a_restore_1_gib_beside_a_state_of_4_gib(
    tmp_path, ram, tiers
):
    for what, extra_mib in (("save", 512), ("restore", 1024)):
        done = run(what, tiers, tmp_path / "steps", ram, 4, extra_mib)
        assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_the_limit_is_one(tmp_path, ram):
    # A state of 768 MiB does not come back into 256 MiB.
    assert run("save", "ram", tmp_path, ram, 0.75, 512).returncode == 0
    failed = run("restore", "ram", tmp_path, ram, 0.75, -512)
    assert failed.returncode != 0
