import contextlib
import subprocess
import sys
import threading

import pytest

from elastic_ckpt.core import append_log, segmented_log, storage


def numbers(log):
    return [record["n"] for record in segmented_log.read(log)]


def names(log):
    return sorted(each.name for each in storage.absolute(log).iterdir())


def test_each_sync_uploads_the_lines_since_the_last_one(bucket, monkeypatch):
    uploads = []
    write = storage.write_atomic

    def counted(path, content):
        uploads.append((path.name, len(content)))
        write(path, content)

    monkeypatch.setattr(storage, "write_atomic", counted)
    path = f"{bucket}/log"
    assert segmented_log.read(path) == []
    with contextlib.closing(segmented_log.SegmentedLog(path)) as log:
        for number in range(100, 130):
            log.append({"n": number})
            if number % 10 == 9:
                log.sync()
        log.sync()
        assert numbers(path) == list(range(100, 130))
    log.close()
    assert uploads == [(f"0000000{number}.jsonl", 100) for number in (1, 2, 3)]
    assert numbers(path) == list(range(100, 130))
    assert names(path) == [name for name, _ in uploads]


def test_a_writer_holds_no_more_than_a_segment(tmp_path):
    log = segmented_log.SegmentedLog(tmp_path / "log", max_bytes=64)
    most = 0
    for number in range(10, 99):
        log.append({"n": number})
        most = max(most, log.pending_bytes)
    log.append({"n": "x" * 100})
    log.append({"n": 99})
    log.close()
    assert most == 63  # of 9 bytes each
    assert log.pending_bytes == 0
    assert numbers(tmp_path / "log") == [*range(10, 99), "x" * 100, 99]
    sizes = [each.stat().st_size for each in (tmp_path / "log").iterdir()]
    assert sorted(sizes)[-2:] == [63, 109]


def test_a_segment_whose_upload_failed_is_uploaded_with_the_lines_after_it(
    tmp_path, monkeypatch
):
    log = segmented_log.SegmentedLog(tmp_path / "log")
    log.append({"n": 1})

    def refused(*_):
        raise OSError("503")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_atomic", refused)
        for _ in range(2):
            with pytest.raises(OSError, match="503"):
                log.sync()
            log.append({"n": 2})
    log.close()
    assert numbers(tmp_path / "log") == [1, 2, 2]
    assert names(tmp_path / "log") == ["00000001.jsonl"]


def test_an_upload_that_hangs_is_reported_and_its_lines_are_uploaded_once(
    tmp_path, monkeypatch
):
    write, is_answering = storage.write_atomic, threading.Event()

    def late(path, content):
        is_answering.wait()
        write(path, content)

    monkeypatch.setattr(storage, "write_atomic", late)
    log = segmented_log.SegmentedLog(tmp_path / "log", max_bytes=18, wait_secs=0.0)
    for number in range(10, 15):
        log.append({"n": number})
        with pytest.raises(TimeoutError, match="timed out"):
            log.sync()
    assert log.pending_bytes == 5 * 9
    is_answering.set()
    log.close()
    assert numbers(tmp_path / "log") == list(range(10, 15))
    assert names(tmp_path / "log") == ["00000001.jsonl", "00000002.jsonl"]


def test_lines_that_no_store_takes_are_bounded(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError("403")

    monkeypatch.setattr(storage, "write_atomic", refused)
    monkeypatch.setattr(append_log, "MOST_LATE_BYTES", 90)
    log = segmented_log.SegmentedLog(tmp_path / "log", max_bytes=18)

    def append():
        for number in range(10, 30):
            log.append({"n": number})

    with pytest.raises(OSError, match=r"403|timed out"):
        append()
    assert log.pending_bytes == 90


# Uploads segments of two lines, and dies before or after an upload.
KILLED = """if True:
    import os, signal, sys
    from elastic_ckpt.core import append_log, segmented_log, storage
    path, number, when = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    write = storage.write_atomic
    uploads = 0

    def killed(path, content):
        global uploads
        uploads += 1
        if uploads == number and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, content)
        if uploads == number:
            os.kill(os.getpid(), signal.SIGKILL)

    storage.write_atomic = killed
    log = segmented_log.SegmentedLog(path)
    for n in range(9):
        log.append({"n": n})
        if n % 2:
            log.sync()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "when", "lines"), [(2, "before", 2), (2, "after", 4), (4, "after", 8)]
)
def test_killed_between_uploads_a_log_has_all_lines_that_were_synced(
    bucket, number, when, lines
):
    path = f"{bucket}/log"
    command = [sys.executable, "-c", KILLED, path, str(number), when]
    assert subprocess.run(command, check=False).returncode == -9
    assert numbers(path) == list(range(lines))
