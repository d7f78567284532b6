"""Directories for files of components: none is left by an end of a process."""

import concurrent.futures
import os
import subprocess
import sys
import tempfile

import pytest

from elastic_ckpt.core.working_directory import WorkingDirectory

USE = """
import sys
from elastic_ckpt.core import working_directory
used = working_directory.WorkingDirectory()
print(used.path, flush=True)
sys.stdin.readline()
raise ValueError
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def started(temporary):
    process = subprocess.Popen(
        [sys.executable, "-c", USE],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, process.stdout.readline().strip()


def directories(temporary):
    return {str(path) for path in temporary.iterdir()}


def test_a_killed_process_leaves_its_directory_to_the_next_and_one_that_fails_none(
    temporary,
):
    (living, used), (killed, left) = started(temporary), started(temporary)
    with living, killed:
        assert directories(temporary) == {used, left}
        assert os.stat(used).st_mode & 0o077 == 0
        killed.kill()
        killed.wait()
        own = WorkingDirectory()
        assert directories(temporary) == {used, own.path}
        own.close()
        living.communicate("\n")
        assert living.returncode == 1
    assert not directories(temporary)


def test_of_many_that_start_and_end_at_once_each_keeps_its_own(temporary):
    def use(_):
        used = WorkingDirectory()
        WorkingDirectory().close()
        was_there = os.listdir(used.path)
        used.close()
        return was_there

    with concurrent.futures.ThreadPoolExecutor(8) as executor:
        assert list(executor.map(use, range(200))) == [["in-use.lock"]] * 200
    assert not directories(temporary)


def test_directories_of_others_stay(temporary, tmp_path_factory):
    # One is about to be locked, and one is a link.
    (temporary / "elastic_ckpt-working-1").mkdir()
    (temporary / "elastic_ckpt-run-0").mkdir()
    (temporary / "elastic_ckpt-run-0" / "in-use.lock").touch()
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "in-use.lock").touch()
    (temporary / "elastic_ckpt-working-2").symlink_to(elsewhere)
    others = directories(temporary)
    WorkingDirectory().close()
    assert directories(temporary) == others
    assert os.listdir(elsewhere) == ["in-use.lock"]
