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
if sys.argv[1] == "error":
    raise ValueError
"""

SAVE = """
import sys
import numpy as np
import elastic_ckpt as ec
saved = ec.Checkpointer([ec.Persistent(sys.argv[1], every=1)])
print(flush=True)
sys.stdin.readline()
saved.save_checkpointables(1, {"state": {"w": np.arange(4.0)}})
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def started(program, temporary, argument):
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(argument)],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "\n"
    return process


def directories(temporary):
    return {path for path in temporary.iterdir() if path.name.startswith("elastic")}


def test_the_directory_of_a_killed_process_is_removed_by_the_next_start(temporary):
    with started(USE, temporary, "") as living, started(USE, temporary, "") as killed:
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
    assert not directories(temporary)


@pytest.mark.slow
def test_the_directory_of_a_killed_checkpointer_is_removed_by_the_next(temporary):
    store = temporary / "steps"
    with started(SAVE, temporary, store) as killed:
        assert len(directories(temporary)) == 1
        killed.kill()
    with started(SAVE, temporary, store) as ended:
        assert len(directories(temporary)) == 1
        _, problems = ended.communicate("\n")
    assert ended.returncode == 0, problems
    assert not directories(temporary)


@pytest.mark.parametrize("end", ["return", "error"])
def test_a_process_that_ends_by_itself_leaves_no_directory(temporary, end):
    with started(USE, temporary, end) as process:
        process.communicate("\n")
    assert process.returncode == (end == "error")
    assert not directories(temporary)


def test_the_last_of_several_users_removes_the_directory(temporary):
    path = str(temporary / os.path.basename(working_directory.new_path()))
    first = working_directory.WorkingDirectory(path)
    second = working_directory.WorkingDirectory(path)
    first.close()
    assert os.path.exists(path)
    second.close()
    assert not os.path.exists(path)


def test_what_is_just_being_made_or_has_another_name_is_not_removed(temporary):
    # The lock of the second is there, and not taken yet.
    made = [working_directory.new_path(), working_directory.new_path()]
    made.append(str(temporary / "elastic_ckpt-run-0"))
    for path in made:
        storage.make_private_directory(path)
    (temporary / made[1] / "in-use.lock").touch()
    working_directory.WorkingDirectory(working_directory.new_path()).close()
    assert {str(path) for path in directories(temporary)} == set(made)
