import concurrent.futures
import contextlib
import errno
import os
import pathlib
import stat
import subprocess
import sys
import threading

import fsspec
import pytest

from elastic_ckpt.core import errors, storage, storage_cause
from tests import faulty_buckets

ERRNOS = errno.errorcode


def test_a_write_replaces_the_file_as_a_whole_or_not(tmp_path):
    path = tmp_path / "a" / "b" / "file"
    for content in (b"one", b"two"):
        storage.write_atomic(path, content, mode=0o600)
        assert path.read_bytes() == content
        assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def half_write():
        with storage.atomic_path(path) as temporary:
            pathlib.Path(temporary).write_bytes(b"half of the n")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half_write()
    assert path.read_bytes() == b"two"
    assert os.listdir(path.parent) == ["file"]


def test_a_lock_is_refused_while_its_process_lives_and_free_once_it_is_killed(tmp_path):
    path = tmp_path / "run" / "run.lock"
    with storage.exclusive_lock(path):
        pass
    program = (
        "import sys; from elastic_ckpt.core import storage\n"
        "with storage.exclusive_lock(sys.argv[1]):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    holder = subprocess.Popen([sys.executable, "-c", program, path], text=True, **pipes)
    with holder:
        assert holder.stdout.readline() == "held\n"
        refused = pytest.raises(errors.RunError, match=rf"\(process {holder.pid} on")
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
    assert not storage.is_locked(tmp_path / "writers.lock")
    both[1].close()


@pytest.mark.parametrize("place", ["local", "gs", "s3"])
def test_of_many_that_create_a_file_or_object_one_does(steps_in, place):
    file = storage.absolute(steps_in(place)) / "new" / "file"

    def create(number):
        wrote = storage.create(file, b"%d" % number, mode=0o600)
        return wrote, storage.read_bytes(file)

    with concurrent.futures.ThreadPoolExecutor(8) as executor:
        actual = list(executor.map(create, range(32)))
    assert sum(wrote for wrote, _ in actual) == 1
    # All find what it wrote.
    number = actual.index((True, actual[0][1]))
    assert {content for _, content in actual} == {b"%d" % number}
    assert storage.names(file.parent) == ["file"]


# Bytes that a server may take for the end of a part of a request.
@pytest.mark.parametrize("end", [b"\r", b"\n", b"\r\n", b"--", b"\0"])
def test_object_is_read_as_it_was_written_whatever_its_last_bytes_are(bucket, end):
    for content in (end, b"one\r\n\r\ntwo" + end, memoryview(b"three" + end)):
        storage.write_atomic(f"{bucket}/file", content)
        assert storage.read_bytes(f"{bucket}/file") == content
        with storage.atomic_path(f"{bucket}/moved") as temporary:
            pathlib.Path(temporary).write_bytes(content)
        assert storage.read_bytes(f"{bucket}/moved") == content


class LostAnswers(faulty_buckets.Faults):
    """The answer to the first request that writes is lost."""

    def next(self, command):
        if command not in ("PUT", "POST"):
            return None
        kind = "answered" if self.happened else faulty_buckets.LOST_ANSWER
        self.count(kind)
        return kind


class Requests(faulty_buckets.Faults):
    """Counts requests."""

    def next(self, command):
        self.count(command)


@pytest.fixture
def through(bucket, object_stores, monkeypatch):
    """Gives a block in which requests go through a proxy with faults."""
    clients = fsspec.get_filesystem_class(bucket.partition("://")[0])

    @contextlib.contextmanager
    def through(faults):
        with (
            faulty_buckets.before(object_stores, faults) as environment,
            monkeypatch.context() as patched,
        ):
            for name, value in environment.items():
                patched.setenv(name, value)
            clients.clear_instance_cache()
            try:
                yield faults
            finally:
                clients.clear_instance_cache()

    return through


def test_object_whose_answer_is_lost_is_written_again(bucket, through):
    storage.write_atomic(f"{bucket}/file", b"before")
    with through(LostAnswers()) as faults:
        storage.write_atomic(f"{bucket}/file", b"after")
    assert faults.happened == {faulty_buckets.LOST_ANSWER: 1, "answered": 1}
    assert storage.read_bytes(f"{bucket}/file") == b"after"


def test_one_request_reads_an_object_or_finds_that_there_is_none(bucket, through):
    storage.write_atomic(f"{bucket}/file", b"content")
    for count, name in enumerate(("file", "file/none", "none"), 1):
        with through(Requests()) as requests:
            assert storage.has_file(f"{bucket}/{name}") == (count == 1)
        assert requests.happened == {"GET": 1}


def test_others_may_do_with_files_what_the_process_allows(tmp_path):
    (tmp_path / "run").mkdir(mode=0o777)
    storage.make_private_directory(tmp_path / "run")
    before = os.umask(0o027)
    try:
        storage.write_atomic(tmp_path / "a", b"")
        storage.create(tmp_path / "b", b"")
        storage.create(tmp_path / "secret", b"", mode=0o600)
    finally:
        os.umask(before)
    modes = {"run": 0o700, "a": 0o640, "b": 0o640, "secret": 0o600}
    for name, mode in modes.items():
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode


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
        "step 3 needs 9 bytes in /ram, but only 3 are free; raise the limit": "full",
        "PERMISSION_DENIED: Error writing local file": "refused",
        "UNAUTHENTICATED: HTTP response code: 401": "refused",
        "gcsfs: Forbidden, 403": "refused",
        "An error occurred (AccessDenied) when calling PutObject": "refused",
        "the backup of an earlier step is not done; this step is backed up": "slow",
        "http://a does not take the secret in /ram/secret": "refused",
        "the backup of step 3 is not done: Connection reset": "unreachable",
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
