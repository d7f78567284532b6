"""Whether a run lives is asked of its lock, and its record moves with it."""

import os
import socket

from elastic_ckpt.core import storage
from elastic_ckpt.inspect import run_files
from tests import own_formats


def test_run_lives_while_its_lock_is_held_whoever_has_its_process_number(tmp_path):
    lock = tmp_path / run_files.LOCK
    assert run_files.is_alive(tmp_path) is None
    with storage.exclusive_lock(lock):
        assert run_files.is_alive(tmp_path) is True
    # The run was killed, and another program has its number.
    lock.write_text(f"process {os.getppid()} on {socket.gethostname()}\n")
    assert run_files.is_alive(tmp_path) is False
    lock.write_text("process 1 on another-machine\n")
    assert run_files.is_alive(tmp_path) is None
    assert run_files.is_alive("gs://bucket/run") is None


def test_steps_in_the_directory_of_a_run_are_found_where_it_is_now(tmp_path):
    for steps, found in (
        (tmp_path / "run", tmp_path / "moved"),
        (tmp_path / "run/checkpoints", tmp_path / "moved/checkpoints"),
        (tmp_path / "runs", tmp_path / "runs"),
        ("gs://bucket/run", "gs://bucket/run"),
    ):
        changed = {**vars(own_formats.RECORD), "steps_directory": os.fspath(steps)}
        run_files.write(tmp_path / "run", run_files.RunRecord(**changed))
        moved = (tmp_path / "run").rename(tmp_path / "moved")
        read = run_files.read(moved)
        assert os.path.normpath(read.steps_directory) == os.path.normpath(found)
        moved.rename(tmp_path / "run")
