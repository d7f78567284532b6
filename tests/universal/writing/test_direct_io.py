"""Files that are written and read past the page cache have their bytes."""

import os
import pathlib
import random

import numpy as np
import pytest

from elastic_ckpt.universal.writing import direct_io


@pytest.fixture(params=["disk", "/dev/shm"])
def path(request, tmp_path):
    """On a disk, and on a file system that has no direct access, or may have none."""
    if request.param == "disk":
        yield tmp_path / "file"
        return
    file = pathlib.Path(f"/dev/shm/{os.getpid()}-direct-io")
    yield file
    file.unlink()


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097, 3 * 2**20 + 5])
def test_every_range_of_a_file_reads_back(path, num_bytes):
    generator = random.Random(num_bytes)
    content = generator.randbytes(num_bytes)
    memory = direct_io.allocate(num_bytes)
    memory.data[:num_bytes] = content
    direct_io.write(str(path), memory, num_bytes)
    assert path.read_bytes() == content
    reader = direct_io.Reader()
    for _ in range(20):
        start, size = generator.randrange(num_bytes + 10), generator.randrange(10**4)
        read = reader.read(str(path), start, size)
        assert read.tobytes() == content[start : start + size]
    assert reader.read(str(path), 0, num_bytes + 1).tobytes() == content


@pytest.mark.parametrize("start", [0, 1, 4095, 4096, 5000])
@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 20000])
def test_bytes_are_put_into_a_file_and_others_stay(path, start, num_bytes):
    generator = random.Random(num_bytes)
    before, content = generator.randbytes(30000), generator.randbytes(num_bytes)
    path.write_bytes(before)
    given, memory = np.frombuffer(content, np.uint8), direct_io.allocate(num_bytes)
    direct_io.put(str(path), start, given, memory)
    assert path.read_bytes() == before[:start] + content + before[start + num_bytes :]
