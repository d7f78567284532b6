"""Logs of JSON lines, in a file and in segments of a bucket: no line is lost."""

import contextlib
import errno
import subprocess
import sys
import threading
from concurrent import futures
from unittest import mock

import pytest

from elastic_ckpt.core import clock, errors, jsonlog, storage


def segments(path, *, max_bytes=99, wait_secs=5.0, close_secs=60.0):
    """Writes segments into a directory, in the place of a store."""
    return jsonlog._Segments(path, max_bytes, wait_secs, close_secs)


def numbers(records):
    return [record["n"] for record in records]


def append(log, *numbers):
    for number in numbers:
        log.append({"n": number})


def names(log):
    return sorted(each.name for each in storage.absolute(log).iterdir())


def test_it_keeps_every_appended_line_when_its_process_is_killed(tmp_path):
    path = tmp_path / "log"
    program = (
        "import os, signal, sys; from elastic_ckpt.core import jsonlog\n"
        "log = jsonlog.writer(sys.argv[1])\n"
        "for n in range(3): log.append({'n': n})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, path], check=False)
    assert killed.returncode == -9
    assert numbers(jsonlog.read(path)) == [0, 1, 2]
    last = [jsonlog.read(path, last_bytes=most) for most in (9, 18, 99)]
    assert [numbers(each) for each in last] == [[2], [1, 2], [0, 1, 2]]
    (tmp_path / "spoilt").write_bytes(b'{"n":0}\n{"n":\n{"n":2}\n')
    with pytest.raises(errors.DataError, match="spoilt, line 2: not a JSON object"):
        jsonlog.read(tmp_path / "spoilt")


@pytest.mark.parametrize("num_torn_bytes", [1, 2**16 - 1, 2**16, 2**16 + 1, 2**18])
def test_a_torn_last_line_is_dropped_and_it_goes_on(tmp_path, num_torn_bytes):
    path = tmp_path / "log"
    for whole in (b"", b'{"n":0}\n'):
        path.write_bytes(whole + b"x" * num_torn_bytes)
        assert len(jsonlog.read(path)) == bool(whole)
        with contextlib.closing(jsonlog.writer(path)) as log:
            assert path.read_bytes() == whole
            append(log, 1)
        assert path.read_bytes() == whole + b'{"n":1}\n'


@contextlib.contextmanager
def full_disk(log):
    """It takes a line and a half more."""
    file, room = log._file, [5, 9]

    def write(content):
        if not room:
            raise OSError(errno.ENOSPC, "no room")
        return file.write(content[: room.pop()])

    log._file = mock.Mock(wraps=file)
    log._file.write.side_effect = write
    yield
    log._file = file


@contextlib.contextmanager
def store_without_answers(log):
    """It takes what is uploaded at once, and does not say so."""
    del log

    def unanswered(upload, *, name):
        del name
        upload()
        done = futures.Future()
        done.set_exception(OSError("no room"))
        return done

    with mock.patch.object(jsonlog.background, "in_thread", unanswered):
        yield


@pytest.mark.parametrize(
    ("opened", "failing", "late_bytes", "kept"),
    [(jsonlog.writer, full_disk, 4, 22), (segments, store_without_answers, 18, 25)],
)
def test_lines_that_are_not_taken_wait_in_memory_up_to_a_limit(
    tmp_path, monkeypatch, opened, failing, late_bytes, kept
):
    path = tmp_path / "log"
    log = opened(path)
    append(log, *range(10, 21))
    assert log.late_bytes == 0
    with failing(log), monkeypatch.context() as patch:
        append(log, 21, 22)
        assert log.late_bytes == late_bytes
        with pytest.raises(OSError, match="no room"):
            log.sync()
        patch.setattr(jsonlog, "MOST_LATE_BYTES", late_bytes + 9)
        append(log, 23)
        with pytest.raises(OSError, match="no room"):
            append(log, 24)
        assert log.late_bytes == late_bytes + 18
        assert numbers(jsonlog.read(path)) == [*range(10, kept)]
    append(log, 25)
    if path.is_file():
        assert log.late_bytes == 0
    log.close()
    # A failed upload keeps its name: no line is there twice.
    assert numbers(jsonlog.read(path)) == [*range(10, 26)]
    assert path.is_file() or len(names(path)) == 2


def test_it_is_closed_on_a_full_disk_all_the_same():
    log = jsonlog.writer("/dev/full")
    append(log, 0)
    with pytest.raises(OSError, match="No space left"):
        log.close()
    assert log._file.closed


def test_each_sync_uploads_the_lines_since_the_last_one(bucket, monkeypatch):
    uploads = mock.Mock(wraps=storage.write_atomic)
    monkeypatch.setattr(storage, "write_atomic", uploads)
    path = f"{bucket}/log"
    with pytest.raises(FileNotFoundError, match="no log segments"):
        jsonlog.read(path)
    with contextlib.closing(jsonlog.writer(path)) as log:
        for first in (100, 110, 120):
            append(log, *range(first, first + 10))
            log.sync()
            # A reader after a kill sees no more than this.
            assert numbers(jsonlog.read(path)) == [*range(100, first + 10)]
        log.sync()
    log.close()
    written = [call.args for call in uploads.call_args_list]
    assert [len(content) for _, content in written] == [100] * 3
    assert names(path) == [path.name for path, _ in written]


def test_an_upload_that_hangs_is_reported_and_its_lines_are_uploaded_once(
    tmp_path, monkeypatch
):
    write, is_answering = storage.write_atomic, threading.Event()

    def late(path, content):
        is_answering.wait()
        write(path, content)

    monkeypatch.setattr(storage, "write_atomic", late)
    path = tmp_path / "log"
    log = segments(path, max_bytes=18, wait_secs=0.0)
    for number in range(10, 15):
        append(log, number)
        with pytest.raises(TimeoutError, match="timed out"):
            log.sync()
    assert log.late_bytes == 5 * 9
    ending = segments(tmp_path / "other", close_secs=0.0)
    append(ending, 1)
    with pytest.raises(TimeoutError, match="timed out"):
        ending.close()
    is_answering.set()
    log.close()
    assert numbers(jsonlog.read(path)) == [*range(10, 15)]
    assert len(names(path)) == 2


def test_lines_added_while_an_upload_begins_or_two_threads_wait_for_it_are_kept(
    tmp_path, monkeypatch
):
    write, wait = storage.write_atomic, jsonlog.futures.wait
    start = jsonlog.background.in_thread
    is_answering, waiting = threading.Event(), threading.Semaphore(0)

    def late(path, content):
        is_answering.wait()
        write(path, content)

    def appending(*arguments, **more):
        monkeypatch.setattr(jsonlog.background, "in_thread", start)
        append(log, 11)
        return start(*arguments, **more)

    def counted(*arguments):
        waiting.release()
        return wait(*arguments)

    log = segments(tmp_path / "log")
    append(log, 10)
    monkeypatch.setattr(storage, "write_atomic", late)
    monkeypatch.setattr(jsonlog.background, "in_thread", appending)
    monkeypatch.setattr(jsonlog.futures, "wait", counted)
    threads = [threading.Thread(target=log.sync) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in threads:
        waiting.acquire()
    append(log, 12)
    is_answering.set()
    for thread in threads:
        thread.join()
    log.close()
    assert numbers(jsonlog.read(tmp_path / "log")) == [10, 11, 12]


def test_starts_continue_it_and_do_not_undo_the_lines_of_others(bucket, monkeypatch):
    path = f"{bucket}/log"
    # They upload at the same time.
    monkeypatch.setattr(clock, "time_ns", lambda: 10**18)
    assert jsonlog.create(path, {"n": 0})
    assert not jsonlog.create(path, {"n": 9})
    former, newer = jsonlog.writer(path), jsonlog.writer(path)
    for log, number in ((former, 1), (newer, 1), (former, 2)):
        append(log, number)
        log.close()
    with contextlib.closing(jsonlog.writer(path)) as log:
        append(log, 3)
    storage.write_atomic(f"{path}/notes.jsonl", b"of somebody else")
    assert numbers(jsonlog.read(path)) == [0, 1, 1, 2, 3]
    assert numbers(jsonlog.read(path, last_bytes=8)) == [0, 1, 1, 2, 3]


def test_starts_have_an_order_though_lists_lag_and_clocks_differ(tmp_path, monkeypatch):
    path, lists = tmp_path / "log", jsonlog._segments
    for number in range(20):
        with monkeypatch.context() as patch:
            if number % 2:
                patch.setattr(jsonlog, "_segments", lambda _: [])
            else:
                now = clock.time_ns() - 10**12
                patch.setattr(clock, "time_ns", lambda now=now: now)
            with contextlib.closing(segments(path)) as log:
                append(log, number)
        assert lists(path)
    assert numbers(jsonlog.read(path)) == [*range(20)]
