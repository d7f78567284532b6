import concurrent.futures
import errno
import os
import pathlib
import stat
import subprocess
import sys
import threading

import pytest

from elastic_ckpt.core import errors, storage, storage_cause

ERRNOS = errno.errorcode


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "file"
    storage.write_atomic(path, b"old")

    def half_write():
        with storage.atomic_path(path) as temporary:
            pathlib.Path(temporary).write_bytes(b"half of the n")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half_write()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_write_creates_the_directory_and_replaces_the_file(tmp_path):
    path = tmp_path / "a" / "b" / "file"
    for content in (b"one", b"two"):
        storage.write_atomic(path, content, mode=0o600)
        assert path.read_bytes() == content
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["file"]


def test_a_lock_is_refused_while_its_process_lives_and_free_once_it_is_killed(tmp_path):
    path = tmp_path / "run" / "run.lock"
    program = (
        "import sys, time; from elastic_ckpt.core import storage\n"
        "with storage.exclusive_lock(sys.argv[1]):\n"
        "    print('held', flush=True); time.sleep(3600)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, path], stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout.readline() == "held\n"
        refused = pytest.raises(errors.RunError, match=rf"process {holder.pid} on")
        with refused, storage.exclusive_lock(path):
            pass
        holder.kill()
        holder.wait()
    with storage.exclusive_lock(path):
        pass


def test_who_asks_for_a_lock_keeps_nobody_from_taking_it(tmp_path):
    path, is_over = tmp_path / "run.lock", threading.Event()

    def ask():
        while not is_over.is_set():
            storage.is_locked(path)

    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        asking = executor.submit(ask)
        try:
            for _ in range(2000):
                with storage.exclusive_lock(path):
                    assert storage.is_locked(path)
        finally:
            is_over.set()
        asking.result()


def test_of_two_that_are_there_none_is_told_that_it_is_alone(tmp_path):
    def told(presence):
        answers = set()
        for _ in range(2000):
            with presence.alone() as is_alone:
                answers.add(is_alone)
        return answers

    both = [storage.Presence(tmp_path / "writers.lock") for _ in range(2)]
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        assert list(executor.map(told, both)) == [{False}] * 2
    both[0].close()
    assert told(both[1]) == {True}
    both[1].close()


def test_of_many_that_create_a_file_one_does_and_all_find_what_it_wrote(tmp_path):
    file = tmp_path / "new" / "file"

    def create(number):
        return storage.create(file, b"%d" % number, mode=0o600), file.read_bytes()

    with concurrent.futures.ThreadPoolExecutor(8) as executor:
        actual = list(executor.map(create, range(64)))
    assert sum(wrote for wrote, _ in actual) == 1
    assert len({content for _, content in actual}) == 1
    assert file.stat().st_mode & 0o777 == 0o600
    assert os.listdir(file.parent) == ["file"]


def test_of_many_that_create_an_object_one_does(bucket):
    path = f"{bucket}/worlds/1.json"

    def create(number):
        return storage.create(path, b"%d" % number)

    with concurrent.futures.ThreadPoolExecutor(4) as executor:
        actual = list(executor.map(create, range(16)))
    assert sum(actual) == 1
    assert storage.absolute(path).read_bytes() == b"%d" % actual.index(True)


@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_nobody_else_can_enter_a_private_directory(tmp_path, mode):
    (tmp_path / "run").mkdir(mode=mode)
    storage.make_private_directory(tmp_path / "run")
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


def test_new_files_have_the_mode_that_the_process_gives(tmp_path):
    before = os.umask(0o027)
    try:
        storage.write_atomic(tmp_path / "a", b"")
        storage.create(tmp_path / "b", b"")
    finally:
        os.umask(before)
    for name in "ab":
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640


def test_a_failure_has_a_cause_by_what_systems_and_clients_write():
    for message, cause in {
        errno.ENOSPC: "full",
        errno.EDQUOT: "full",
        errno.EROFS: "read_only",
        errno.EACCES: "refused",
        errno.ETIMEDOUT: "slow",
        errno.ECONNREFUSED: "unreachable",
        errno.ESTALE: "unreachable",
        errno.EIO: "unreachable",
        errno.ENOTDIR: "missing",
        "step 3 needs 9 bytes in /ram, and 3 are free; raise the limit": "full",
        "PERMISSION_DENIED: Error writing local file": "refused",
        "UNAUTHENTICATED: HTTP response code: 401": "refused",
        "gcsfs: Forbidden, 403": "refused",
        "An error occurred (AccessDenied) when calling PutObject": "refused",
        "the backup of an earlier step is not done; it comes next": "slow",
        "UNAVAILABLE: HTTP response code: 503": "unreachable",
        "HTTP status 429": "unreachable",
        "is not what was saved: its digest differs": "damaged",
        "host 1: components were not written: Connection refused": "component",
        "host 1: components were not written: No space left on device": "full",
        "step 401 has 503 boxes at 403 hosts": "other",
    }.items():
        error = OSError(message, os.strerror(message)) if message in ERRNOS else message
        assert storage_cause.of_message(str(error)) == cause, message
        assert bool(storage_cause.advice(str(error))) == (cause != "other")
        if message in ERRNOS:
            assert storage_cause.of_error(OSError(message, "in other words")) == cause
    assert storage_cause.of_error(PermissionError("no")) == "refused"
    # The name of a file says nothing, nor does the number of a step.
    unreachable = OSError(errno.EIO, "Input/output error", "/mnt/HTTP 403/d/x")
    assert storage_cause.of_error(unreachable) == "unreachable"
    assert storage_cause.of_message("OSError at step 4031: no") == "other"
