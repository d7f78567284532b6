"""Whether a run lives is asked of its lock."""

import os
import socket

from elastic_ckpt.core import storage
from elastic_ckpt.inspect import run_files


def test_run_lives_while_its_lock_is_held_whoever_has_its_process_number(tmp_path):
    lock = tmp_path / run_files.LOCK
    assert run_files.is_alive(tmp_path) is run_files.is_alive("gs://bucket/run") is None
    with storage.exclusive_lock(lock):
        assert run_files.is_alive(tmp_path) is True
    # The run was killed, and another program has its number.
    lock.write_text(f"process {os.getppid()} on {socket.gethostname()}\n")
    assert run_files.is_alive(tmp_path) is False
    lock.write_text("process 1 on another-machine\n")
    assert run_files.is_alive(tmp_path) is None
