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

    def test_whole_files_and_ranges_are_read(self, file_source):
        for file, content in FILES.items():
            assert file_source.size(file) == len(content)
            assert self.read(file_source, file, 0, len(content)) == content
        (file, content), *_ = FILES.items()
        for offset, num_bytes in (
            *((0, 1), (5, 2**20), (2**20 - 1, 2), (2**21, 2**20 + 17)),
            (len(RANDOM) - 1, 1),
        ):
            read = self.read(file_source, file, offset, num_bytes)
            assert read == content[offset : offset + num_bytes]

    @pytest.mark.parametrize(
        ("file", "offset", "num_bytes"),
        [
            ("data/none", 0, 0),
            ("data/none", 0, 1),
            ("state", 0, 1),
            *[("data/shards-00000-00063.json", *at) for at in ((0, 3), (2, 1), (9, 1))],
        ],
    )
    def test_what_is_not_there_is_an_error_and_others_can_be_read_after_it(
        self, file_source, file, offset, num_bytes
    ):
        with pytest.raises(source.ReadError):
            self.read(file_source, file, offset, num_bytes)
        if file == "data/none":
            with pytest.raises(source.ReadError):
                file_source.size(file)
        assert self.read(file_source, "data/shards-00000-00063.json", 0, 2) == b"{}"

    def test_many_threads_read_at_once(self, file_source):
        (file, content), *_ = FILES.items()
        size = len(content) // 40
        with concurrent.futures.ThreadPoolExecutor(16) as executor:
            parts = executor.map(
                lambda n: self.read(file_source, file, n * size, size), range(40)
            )
        assert b"".join(parts) == content[: 40 * size]
