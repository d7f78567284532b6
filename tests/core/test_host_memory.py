import pathlib
import resource

import numpy as np
import pytest

from elastic_ckpt.core import host_memory


def test_memory_is_writable_aligned_and_as_large_as_asked_for():
    for num_bytes in (0, 1, 63, 4097, 2**21 - 1, 2**21, 2**21 + 1):
        memory = host_memory.allocate(num_bytes)
        assert (memory.dtype, memory.shape) == (np.uint8, (num_bytes,))
        memory[:] = 7
        assert not num_bytes or memory.ctypes.data % 64 == 0


def test_memory_that_was_given_back_is_used_again_for_the_same_size_alone():
    pool = host_memory.Pool()
    memory = pool.take(3 * 2**20)
    first = memory.ctypes.data
    pool.release(memory)
    other = pool.take(2**20)
    assert other.ctypes.data != first
    assert pool.take(3 * 2**20).ctypes.data == first


@pytest.mark.parametrize("limit", [resource.RLIMIT_DATA, resource.RLIMIT_AS])
def test_what_is_available_is_bounded_by_the_limits_of_the_process(limit):
    before, hard = resource.getrlimit(limit)
    free = host_memory.available_bytes()
    assert 0 < free < 2**60
    used = {resource.RLIMIT_DATA: "VmData", resource.RLIMIT_AS: "VmSize"}[limit]
    status = dict(
        line.split(":", 1)
        for line in pathlib.Path("/proc/self/status").read_text().splitlines()
    )
    most = int(status[used].split()[0]) * 2**10 + 2**28
    resource.setrlimit(limit, (most, hard))
    try:
        assert host_memory.available_bytes() <= 2**28
    finally:
        resource.setrlimit(limit, (before, hard))
