"""The limits that hold for every reader in these tests do hold."""

import itertools
import subprocess
import sys

import numpy as np
import pytest

from elastic_ckpt.universal.formats import safetensors_file
from tests.universal.formats import process_limits
from tests.universal.formats.process_limits import TooLongError


def test_memory_is_limited():
    with pytest.raises(MemoryError), process_limits.limited():
        np.empty(2 * process_limits.MOST_BYTES, np.uint8)
    assert np.empty(2 * process_limits.MOST_BYTES, np.uint8).nbytes


@pytest.mark.slow
def test_time_is_limited(monkeypatch):
    monkeypatch.setattr(process_limits, "MOST_SECS", 0)
    with pytest.raises(TooLongError), process_limits.limited():
        any(number < 0 for number in itertools.count())


ENDLESS = """
import itertools
from tests.universal.formats import process_limits

process_limits.MOST_WALL_SECS = 0.1

def test_of_a_reader():
    with process_limits.limited():
        sum(itertools.repeat(0))

test_of_a_reader()
"""


def test_a_function_of_c_that_does_not_return_ends_the_process_and_is_named():
    ended = subprocess.run(
        [sys.executable, "-c", ENDLESS], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr
    assert "in test_of_a_reader" in ended.stderr


def test_readers_are_limited(monkeypatch, tmp_path):
    monkeypatch.setattr(process_limits, "MOST_BYTES", 1 << 20)
    # A large value is no part of the memory that this process has.
    path, size = tmp_path / "x.safetensors", 64 << 20
    header = f'{{"w":{{"dtype":"U8","shape":[{size}],"data_offsets":[0,{size}]}}}}'
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + size)
    with pytest.raises(MemoryError):
        safetensors_file.read(path)
