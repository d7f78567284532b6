"""The contract of every `source.Source`; subclasses make one from some files."""

import concurrent.futures

import numpy as np
import pytest

from elastic_ckpt.core import boxes
from elastic_ckpt.tiers import source
from tests.tiers import served

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
    def read(file_source, file, num_bytes):
        leaf, content = served.leaf_of(file), FILES.get(file, b"")
        into = bytearray(num_bytes)
        recorded = bytearray()
        box = boxes.whole(leaf.shape)
        size = file_source.read_into(leaf, box, memoryview(into), recorded.extend)
        assert (recorded, size) == (into, len(content))
        return bytes(into)

    def test_whole_files_and_their_first_bytes_are_read(self, file_source):
        for file, content in FILES.items():
            assert self.read(file_source, file, len(content)) == content
        (file, content), *_ = FILES.items()
        for num_bytes in (1, 2**20, 2**21 + 17):
            assert self.read(file_source, file, num_bytes) == content[:num_bytes]

    @pytest.mark.parametrize(
        ("file", "num_bytes"),
        [
            *(("data/none", 0), ("data/none", 1), ("state", 1)),
            ("data/shards-00000-00063.json", 3),
        ],
    )
    def test_what_is_not_there_is_an_error_and_others_can_be_read_after_it(
        self, file_source, file, num_bytes
    ):
        with pytest.raises(source.ReadError):
            self.read(file_source, file, num_bytes)
        assert self.read(file_source, "data/shards-00000-00063.json", 2) == b"{}"

    def test_many_threads_read_at_once(self, file_source):
        (file, content), *_ = FILES.items()
        with concurrent.futures.ThreadPoolExecutor(16) as executor:
            reads = executor.map(
                lambda n: self.read(file_source, file, len(content) // n), range(1, 41)
            )
            for n, read in enumerate(reads, 1):
                assert read == content[: len(content) // n]
