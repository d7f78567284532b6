"""Files in stores are read in ranges, ahead of the reader, by parallel requests."""

import concurrent.futures
import errno
import pathlib
import time

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.core import errors, working_directory
from elastic_ckpt.data import order
from elastic_ckpt.data.sources import files, remote_file, source, tfrecord
from tests import corpora, source_contract, tfrecord_files

# Small, as the bytes of a range change nothing but the time of the tests.
RANGE = 2**14
SIZE = 40 * RANGE + 123
CONTENT = np.random.default_rng(0).bytes(SIZE)


class System:
    """A store that counts requests, and fails where it is asked to."""

    def __init__(self):
        self.ranges = []
        self.failures = []
        self.missing = 0

    def cat_file(self, path, start, end):
        assert path == "name"
        self.ranges.append((start, end))
        if self.failures:
            raise self.failures.pop()
        return CONTENT[start : end - self.missing]


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch):
    monkeypatch.setattr(remote_file, "RANGE_BYTES", RANGE)
    monkeypatch.setattr(remote_file, "_BUFFER_BYTES", RANGE // 4)
    monkeypatch.setattr(remote_file, "_MOST_BYTES", 16 * RANGE)
    monkeypatch.setattr(remote_file, "_BUDGET_BYTES", 32 * RANGE)
    remote_file.forget()


def remote(system, version=1):
    return remote_file.Object(
        url="store://name",
        version=str(version),
        system=system,
        path="name",
        num_bytes=SIZE,
    )


def opened(system, version=1):
    return remote_file.opened(remote(system, version))


@given(st.lists(st.tuples(st.integers(0, SIZE + 5), st.integers(0, 3 * RANGE))))
def test_any_reads_return_the_bytes_of_the_file(reads):
    remote_file.forget()
    reader = opened(System())
    for at, num_bytes in reads:
        assert reader.seek(at) == reader.tell() == at
        assert reader.read(num_bytes) == CONTENT[at : at + num_bytes]


@pytest.mark.parametrize("num_readers", [1, 6, 12])
def test_readers_that_take_turns_leave_room_for_each_other(num_readers):
    systems = [System() for _ in range(num_readers)]
    readers = [opened(system, number) for number, system in enumerate(systems)]
    content = [b""] * num_readers
    for _ in range(2 * SIZE // RANGE + 1):
        for number, reader in enumerate(readers):
            content[number] += reader.read(RANGE // 2)
    assert content == [CONTENT] * num_readers
    assert remote_file._RANGES.num_bytes <= 32 * RANGE
    # No range was displaced before it was read.
    ends = [*range(RANGE, SIZE, RANGE), SIZE]
    ranges = list(zip(range(0, SIZE, RANGE), ends, strict=True))
    assert all(sorted(system.ranges) == ranges for system in systems)


def test_a_range_that_failed_or_is_short_is_requested_again():
    system = System()
    system.failures = [PermissionError(errno.EACCES, "no"), OSError("reset")]
    reader = opened(system)
    with pytest.raises(OSError, match="OSError: reset") as raised:
        reader.readinto(bytearray(10))
    assert raised.value.errno == errno.EIO
    with pytest.raises(PermissionError):
        reader.readinto(bytearray(10))
    system.missing = 1
    with pytest.raises(OSError, match=f"instead of {RANGE} at byte 0"):
        reader.readinto(bytearray(10))
    system.missing = 0
    assert reader.read(10) == CONTENT[:10]


def test_ranges_are_read_while_a_program_ends(monkeypatch):
    pool = concurrent.futures.ThreadPoolExecutor(1)
    pool.shutdown()
    monkeypatch.setattr(remote_file, "_pool", lambda: pool)
    for _ in range(2):
        assert opened(System()).read(10) == CONTENT[:10]


def test_many_threads_share_the_ranges():
    system = System()

    def read(_):
        reader = opened(system)
        return reader.read(3 * RANGE) + reader.read(2 * RANGE)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read, range(8))) == [CONTENT[: 5 * RANGE]] * 8
    # Those that follow are on their way.
    assert remote(system).key(7) in remote_file._RANGES
    assert len(system.ranges) == len(set(system.ranges))


def test_ranges_of_an_object_that_was_overwritten_are_not_used(monkeypatch):
    monkeypatch.setattr(files, "_LOOK_SECS", 1e-9)
    store, url = fsspec.filesystem("memory"), "memory://store/file"

    def first_bytes():
        with files.opened(url) as stream:
            return stream.read(5)

    store.pipe_file("/store/file", b"first")
    version = files.version(url)
    assert first_bytes() == b"first"
    assert files.version(url) == version
    store.pipe_file("/store/file", b"other")
    with pytest.raises(errors.DataError, match="was overwritten during the run"):
        first_bytes()
    assert files.version(url) != version
    files._READ.clear()
    assert first_bytes() == b"other"
    assert pathlib.Path(files.local_copy(url)).read_bytes() == b"other"


def test_files_that_are_copied_at_the_same_time_are_all_there(monkeypatch):
    new_path = working_directory.new_path

    def slow():
        time.sleep(0.05)
        return new_path()

    monkeypatch.setattr(working_directory, "new_path", slow)
    remote_file._directory.cache_clear()
    urls = [f"memory://copies/{number}.arrow" for number in range(16)]
    for url in urls:
        fsspec.filesystem("memory").pipe_file(url, b"content")
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        copies = list(pool.map(files.local_copy, urls))
    assert [pathlib.Path(copy).read_bytes() for copy in copies] == [b"content"] * 16


@pytest.mark.parametrize("seed", [None, 7])
def test_shards_that_take_turns_request_a_file_about_once(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(order, "_SMALL_RECORDS", 0)
    monkeypatch.setattr(source, "BLOCK_BYTES", RANGE // 4)
    monkeypatch.setattr(remote_file, "_BUDGET_BYTES", 24 * RANGE)
    tfrecord_files.write(tmp_path / "a", [bytes(1000)] * 2000)
    url = corpora.upload(str(tmp_path / "a"), tmp_path.name)
    dataset = tfrecord.TFRecord(files=(url,), record_format="bytes")
    source.indexes(dataset)
    remote_file.forget()
    requested, read = [], remote_file.Object._read

    def counted(self, number):
        requested.append(number)
        return read(self, number)

    monkeypatch.setattr(remote_file.Object, "_read", counted)
    found = source_contract.read_all(dataset, 3, num_epochs=1, shuffle_seed=seed)
    assert len(found) == 2000
    assert len(requested) * RANGE < 1.7 * 2000 * 1016
