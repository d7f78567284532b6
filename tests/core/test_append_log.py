import contextlib
import errno
import subprocess
import sys

import pytest

from elastic_ckpt.core import append_log, errors, storage


def test_a_log_keeps_every_appended_line_when_its_process_is_killed(tmp_path):
    path = tmp_path / "log"
    program = (
        "import os, signal, sys; from elastic_ckpt.core import append_log\n"
        "log = append_log.AppendLog(sys.argv[1])\n"
        "for n in range(3): log.append({'n': n})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", program, path], check=False)
    assert killed.returncode == -9
    assert append_log.read(path) == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_a_torn_last_line_is_dropped_and_the_log_goes_on_after_it(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b'{"n":0}\n{"n":')
    assert append_log.read(path) == [{"n": 0}]
    with contextlib.closing(append_log.AppendLog(path)) as log:
        log.append({"n": 1})
    assert append_log.read(path) == [{"n": 0}, {"n": 1}]


@pytest.mark.parametrize("num_torn_bytes", [1, 2**16 - 1, 2**16, 2**16 + 1, 2**18])
@pytest.mark.parametrize("whole", [b"", b'{"n":0}\n'])
def test_a_torn_line_of_any_length_is_dropped(tmp_path, whole, num_torn_bytes):
    path = tmp_path / "log"
    path.write_bytes(whole + b"x" * num_torn_bytes)
    append_log.AppendLog(path).close()
    assert path.read_bytes() == whole


def test_a_spoilt_line_in_the_middle_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b'{"n":0}\n{"n":\n{"n":2}\n')
    with pytest.raises(errors.DataError, match=r"log, line 2: not a JSON object"):
        append_log.read(path)


def test_a_log_is_readable_after_sync_on_an_object_store(tmp_path, monkeypatch):
    # The branch for object stores, with a directory in the store's place.
    monkeypatch.setattr(storage, "is_local", lambda _: False)
    log = append_log.AppendLog(tmp_path / "log")
    log.append({"n": 0})
    log.sync()
    log.append({"n": 1})
    assert append_log.read(tmp_path / "log") == [{"n": 0}]
    log.close()
    assert append_log.read(tmp_path / "log") == [{"n": 0}, {"n": 1}]
    with contextlib.closing(append_log.AppendLog(tmp_path / "log")) as log:
        log.append({"n": 2})
    assert append_log.read(tmp_path / "log") == [{"n": 0}, {"n": 1}, {"n": 2}]


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


def test_lines_that_a_full_disk_does_not_take_wait_in_memory(tmp_path):
    log = append_log.AppendLog(tmp_path / "log")
    log.append({"n": 0})
    log._file = disk = Filling(log._file, room=12)
    for number in (1, 2):
        log.append({"n": number})
    # A line and a part of the next one.
    assert log.late_bytes == 4
    assert append_log.read(tmp_path / "log") == [{"n": 0}, {"n": 1}]
    with pytest.raises(OSError, match="No space left"):
        log.sync()
    disk.room = 10**6
    log.append({"n": 3})
    assert log.late_bytes == 0
    assert append_log.read(tmp_path / "log") == [{"n": n} for n in range(4)]
    log.sync()
    log.close()


def test_the_memory_of_lines_is_bounded_and_none_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(append_log, "MOST_LATE_BYTES", 20)
    log = append_log.AppendLog(tmp_path / "log")
    log._file = disk = Filling(log._file, room=0)
    for number in (0, 1):
        log.append({"n": number})
    with pytest.raises(OSError, match="No space left"):
        log.append({"n": 2})
    disk.room = 10**6
    log.close()
    assert append_log.read(tmp_path / "log") == [{"n": n} for n in range(3)]


def test_a_log_on_a_full_disk_is_closed_all_the_same():
    log = append_log.AppendLog("/dev/full")
    log.append({"n": 0})
    with pytest.raises(OSError, match="No space left"):
        log.close()
    assert log._file.closed


def test_a_log_in_a_bucket_goes_on_where_it_was_synced(bucket):
    for number in range(2):
        log = append_log.AppendLog(f"{bucket}/log.jsonl")
        log.append({"number": number})
        log.close()
    actual = append_log.read(f"{bucket}/log.jsonl")
    assert actual == [{"number": 0}, {"number": 1}]


@pytest.mark.parametrize(("last_bytes", "read"), [(9, [2]), (18, [1, 2]), (99, 3)])
def test_the_end_of_a_log_is_read_in_whole_lines(tmp_path, last_bytes, read):
    log = append_log.AppendLog(tmp_path / "log")
    for number in range(3):
        log.append({"n": number})
    log.close()
    read = list(range(read)) if isinstance(read, int) else read
    records = append_log.read(tmp_path / "log", last_bytes=last_bytes)
    assert [record["n"] for record in records] == read
