"""The contract of every `source.Source`; subclasses make one from some files."""

import concurrent.futures

import numpy as np
import pytest

from elastic_ckpt.tiers import source

RANDOM = np.random.default_rng(7).integers(0, 256, 3 * 2**20 + 17, np.uint8).tobytes()
FILES = {
    "state/params/w/c/0/1": RANDOM,
    "state/a%2Fb [0]/c/0": b"quoted once already",
    "data/shards-00000-00063.json": b"{}",
    "data/empty": b"",
}


class ReadContract:
    @pytest.fixture
    def file_source(self, tmp_path):
        """A source of `FILES`."""
        raise NotImplementedError

    @staticmethod
    def read(file_source, file, offset, num_bytes):
        into = bytearray(num_bytes)
        recorded = bytearray()
        file_source.read_into(file, offset, memoryview(into), recorded.extend)
        assert recorded == into
        return bytes(into)

    @pytest.mark.parametrize("file", FILES)
    def test_a_whole_file_is_read(self, file_source, file):
        assert self.read(file_source, file, 0, len(FILES[file])) == FILES[file]

    @pytest.mark.parametrize(
        ("offset", "num_bytes"),
        [(0, 1), (5, 2**20), (2**20 - 1, 2), (2**21, 2**20 + 17), (len(RANDOM) - 1, 1)],
    )
    def test_a_range_is_read(self, file_source, offset, num_bytes):
        (file, content), *_ = FILES.items()
        actual = self.read(file_source, file, offset, num_bytes)
        assert actual == content[offset : offset + num_bytes]

    @pytest.mark.parametrize("file", FILES)
    def test_the_size_is_that_of_the_whole_file(self, file_source, file):
        assert file_source.size(file) == len(FILES[file])

    def test_a_missing_file_has_no_size(self, file_source):
        with pytest.raises(source.ReadError):
            file_source.size("data/none")

    @pytest.mark.parametrize("num_bytes", [0, 1])
    def test_a_missing_file_is_an_error(self, file_source, num_bytes):
        with pytest.raises(source.ReadError):
            self.read(file_source, "data/none", 0, num_bytes)

    @pytest.mark.parametrize(("offset", "num_bytes"), [(0, 3), (1, 2), (2, 1), (9, 1)])
    def test_a_file_that_is_too_short_is_an_error(self, file_source, offset, num_bytes):
        with pytest.raises(source.ReadError):
            self.read(file_source, "data/shards-00000-00063.json", offset, num_bytes)

    def test_a_directory_is_an_error(self, file_source):
        with pytest.raises(source.ReadError):
            self.read(file_source, "state", 0, 1)

    def test_it_can_be_read_after_an_error(self, file_source):
        with pytest.raises(source.ReadError):
            self.read(file_source, "data/none", 0, 1)
        assert self.read(file_source, "data/shards-00000-00063.json", 0, 2) == b"{}"

    def test_many_threads_read_at_once(self, file_source):
        (file, content), *_ = FILES.items()
        size = len(content) // 40
        with concurrent.futures.ThreadPoolExecutor(16) as executor:
            parts = executor.map(
                lambda n: self.read(file_source, file, n * size, size), range(40)
            )
        assert b"".join(parts) == content[: 40 * size]
