"""Logs of JSON lines, in a file and in segments of a bucket: no line is lost."""

import contextlib
import errno
import subprocess
import sys
import threading

import pytest

from elastic_ckpt.core import clock, errors, jsonlog, storage


class Filling:
    """A file on a disk that has room for a few bytes more."""

    def __init__(self, file, room):
        self._file = file
        self.room = room

    def __getattr__(self, name):
        return getattr(self._file, name)

    def write(self, content):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = content[: self.room]
        self.room -= len(taken)
        return self._file.write(taken)


class TestFile:
    def test_it_keeps_every_appended_line_when_its_process_is_killed(self, tmp_path):
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
        (path.parent / "spoilt").write_bytes(b'{"n":0}\n{"n":\n{"n":2}\n')
        with pytest.raises(errors.DataError, match="spoilt, line 2: not a JSON object"):
            jsonlog.read(path.parent / "spoilt")
        last = [jsonlog.read(path, last_bytes=most) for most in (9, 18, 99)]
        assert [numbers(each) for each in last] == [[2], [1, 2], [0, 1, 2]]

    @pytest.mark.parametrize("num_torn_bytes", [1, 2**16 - 1, 2**16, 2**16 + 1, 2**18])
    def test_a_torn_last_line_is_dropped_and_it_goes_on(self, tmp_path, num_torn_bytes):
        path = tmp_path / "log"
        for whole in (b"", b'{"n":0}\n'):
            path.write_bytes(whole + b"x" * num_torn_bytes)
            assert len(jsonlog.read(path)) == bool(whole)
            with contextlib.closing(jsonlog.writer(path)) as log:
                assert path.read_bytes() == whole
                log.append({"n": 1})
            assert path.read_bytes() == whole + b'{"n":1}\n'

    def test_lines_that_a_full_disk_does_not_take_wait_in_memory_up_to_a_limit(
        self, tmp_path, monkeypatch
    ):
        log = jsonlog.writer(tmp_path / "log")
        log.append({"n": 0})
        log._file = disk = Filling(log._file, room=12)
        for number in (1, 2):
            log.append({"n": number})
        # A line and a part of the next one.
        assert log.late_bytes == 4
        assert numbers(jsonlog.read(tmp_path / "log")) == [0, 1]
        with pytest.raises(OSError, match="No space left"):
            log.sync()
        monkeypatch.setattr(jsonlog, "MOST_LATE_BYTES", 12)
        log.append({"n": 3})
        with pytest.raises(OSError, match="No space left"):
            log.append({"n": 4})
        disk.room = 10**6
        log.append({"n": 5})
        assert log.late_bytes == 0
        log.sync()
        log.close()
        assert numbers(jsonlog.read(tmp_path / "log")) == [*range(6)]
        # It is closed on a full disk all the same.
        log = jsonlog.writer("/dev/full")
        log.append({"n": 0})
        with pytest.raises(OSError, match="No space left"):
            log.close()
        assert log._file.closed


class TestSegments:
    def test_each_sync_uploads_the_lines_since_the_last_one(self, bucket, monkeypatch):
        uploads = []
        write = storage.write_atomic

        def counted(path, content):
            uploads.append((path.name, len(content)))
            write(path, content)

        monkeypatch.setattr(storage, "write_atomic", counted)
        path = f"{bucket}/log"
        with pytest.raises(FileNotFoundError, match="no log segments"):
            jsonlog.read(path)
        with contextlib.closing(jsonlog.writer(path)) as log:
            for number in range(100, 130):
                log.append({"n": number})
                if number % 10 == 9:
                    log.sync()
                    # A reader after a kill sees no more than this.
                    read = numbers(jsonlog.read(path))
                    assert read == list(range(100, number + 1))
            log.sync()
        log.close()
        assert [size for _, size in uploads] == [100] * 3
        assert numbers(jsonlog.read(path)) == list(range(100, 130))
        assert names(path) == [name for name, _ in uploads]

    def test_lines_that_no_store_takes_wait_in_memory_up_to_a_limit(
        self, tmp_path, monkeypatch
    ):
        log, failures = segments(tmp_path / "log", max_bytes=18), []
        with monkeypatch.context() as patch:
            patch.setattr(storage, "write_atomic", refused)
            patch.setattr(jsonlog, "MOST_LATE_BYTES", 90)
            for number in range(10, 21):
                try:
                    log.append({"n": number})
                except OSError as error:
                    failures.append((number, str(error)))
                if number == 11:
                    with pytest.raises(OSError, match="503"):
                        log.sync()
        assert [number for number, _ in failures] == [20]
        assert log.late_bytes == 99
        log.close()
        assert numbers(jsonlog.read(tmp_path / "log")) == [*range(10, 21)]
        assert len(names(tmp_path / "log")) == 1

    def test_an_upload_that_hangs_is_reported_and_its_lines_are_uploaded_once(
        self, tmp_path, monkeypatch
    ):
        write, is_answering = storage.write_atomic, threading.Event()

        def late(path, content):
            is_answering.wait()
            write(path, content)

        monkeypatch.setattr(storage, "write_atomic", late)
        path = tmp_path / "log"
        log = segments(path, max_bytes=18, wait_secs=0.0)
        for number in range(10, 15):
            log.append({"n": number})
            with pytest.raises(TimeoutError, match="timed out"):
                log.sync()
        assert log.late_bytes == 5 * 9
        ending = segments(tmp_path / "other", close_secs=0.0)
        ending.append({"n": 1})
        with pytest.raises(TimeoutError, match="timed out"):
            ending.close()
        is_answering.set()
        log.close()
        assert numbers(jsonlog.read(path)) == list(range(10, 15))
        assert len(names(path)) == 2

    def test_lines_that_are_added_while_an_upload_begins_are_in_the_next(
        self, tmp_path, monkeypatch
    ):
        log, start = segments(tmp_path / "log"), jsonlog.background.in_thread

        def appending(*arguments, **more):
            monkeypatch.setattr(jsonlog.background, "in_thread", start)
            log.append({"n": 11})
            return start(*arguments, **more)

        monkeypatch.setattr(jsonlog.background, "in_thread", appending)
        log.append({"n": 10})
        log.sync()
        log.close()
        assert numbers(jsonlog.read(tmp_path / "log")) == [10, 11]

    def test_two_threads_that_wait_for_an_upload_settle_it_once(
        self, tmp_path, monkeypatch
    ):
        write, wait = storage.write_atomic, jsonlog.futures.wait
        is_answering, waiting = threading.Event(), threading.Semaphore(0)

        def late(path, content):
            is_answering.wait()
            write(path, content)

        def counted(*arguments):
            waiting.release()
            return wait(*arguments)

        log = segments(tmp_path / "log")
        log.append({"n": 10})
        monkeypatch.setattr(storage, "write_atomic", late)
        monkeypatch.setattr(jsonlog.futures, "wait", counted)
        threads = [threading.Thread(target=log.sync) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in threads:
            waiting.acquire()
        log.append({"n": 11})
        is_answering.set()
        for thread in threads:
            thread.join()
        log.close()
        assert numbers(jsonlog.read(tmp_path / "log")) == [10, 11]

    def test_starts_continue_it_and_do_not_undo_the_lines_of_others(self, bucket):
        path = f"{bucket}/log"
        assert jsonlog.create(path, {"n": 0})
        assert not jsonlog.create(path, {"n": 9})
        former, newer = jsonlog.writer(path), jsonlog.writer(path)
        for log, number in ((former, 1), (newer, 1), (former, 2)):
            log.append({"n": number})
            log.close()
        with contextlib.closing(jsonlog.writer(path)) as log:
            log.append({"n": 3})
        storage.write_atomic(f"{path}/notes.jsonl", b"of somebody else")
        assert numbers(jsonlog.read(path)) == [0, 1, 1, 2, 3]
        assert numbers(jsonlog.read(path, last_bytes=8)) == [0, 1, 1, 2, 3]

    def test_starts_have_an_order_though_lists_lag_and_clocks_differ(
        self, tmp_path, monkeypatch
    ):
        path, lists = tmp_path / "log", jsonlog._segments
        for number in range(20):
            with monkeypatch.context() as patch:
                if number % 2:
                    patch.setattr(jsonlog, "_segments", lambda _: [])
                else:
                    now = clock.time_ns() - 10**12
                    patch.setattr(clock, "time_ns", lambda now=now: now)
                with contextlib.closing(segments(path)) as log:
                    log.append({"n": number})
            assert lists(path)
        assert numbers(jsonlog.read(path)) == list(range(20))


def segments(
    path, *, max_bytes=jsonlog.MAX_SEGMENT_BYTES, wait_secs=5.0, close_secs=60.0
):
    """Writes segments into a directory, in the place of a store."""
    return jsonlog._Segments(path, max_bytes, wait_secs, close_secs)


def refused(*_):
    raise OSError("503")


def numbers(records):
    return [record["n"] for record in records]


def names(log):
    return sorted(each.name for each in storage.absolute(log).iterdir())
