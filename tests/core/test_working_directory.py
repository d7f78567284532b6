"""Directories for files of components: none is left by an end of a process."""

import os
import subprocess
import sys
import tempfile

import pytest

from elastic_ckpt.core import storage, working_directory

USE = """
import sys
from elastic_ckpt.core import working_directory
used = working_directory.WorkingDirectory(working_directory.new_path())
print(flush=True)
sys.stdin.readline()
raise ValueError
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def started():
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", USE], text=True, **pipes)
    assert process.stdout.readline() == "\n"
    return process


def directories(temporary):
    return {path for path in temporary.iterdir() if path.name.startswith("elastic")}


def test_a_killed_process_leaves_its_directory_to_the_next_and_one_that_fails_none(
    temporary,
):
    with started() as living, started() as killed:
        both = directories(temporary)
        assert len(both) == 2
        killed.kill()
        killed.wait()
        own = working_directory.WorkingDirectory(working_directory.new_path())
        left = directories(temporary)
        assert len(left) == 2
        assert len(left & both) == 1
        own.close()
        living.communicate("\n")
        assert living.returncode == 1
    assert not directories(temporary)


def test_the_last_user_removes_it_and_others_stay(temporary):
    # The lock of the second is there, and not taken yet.
    others = [working_directory.new_path(), working_directory.new_path()]
    others.append(str(temporary / "elastic_ckpt-run-0"))
    for path in others:
        storage.make_private_directory(path)
    (temporary / others[1] / "in-use.lock").touch()
    path = str(temporary / os.path.basename(working_directory.new_path()))
    first = working_directory.WorkingDirectory(path)
    second = working_directory.WorkingDirectory(path)
    first.close()
    assert os.path.exists(path)
    second.close()
    assert {str(path) for path in directories(temporary)} == set(others)
