import pathlib
import resource
import weakref

import numpy as np
import pytest

from elastic_ckpt.core import host_memory


def address(memory):
    return memory.ctypes.data


def test_memory_is_writable_aligned_and_as_large_as_asked_for():
    for num_bytes in (0, 1, 63, 4097, 2**21 - 1, 2**21, 2**21 + 1):
        memory = host_memory.allocate(num_bytes)
        assert (memory.dtype, memory.shape) == (np.uint8, (num_bytes,))
        memory[:] = 7
        assert not num_bytes or address(memory) % 64 == 0


def test_memory_that_was_given_back_is_used_again_until_another_size_is_taken():
    pool = host_memory.Pool()
    both = [pool.take(3 * 2**20) for _ in range(2)]
    used = set(map(address, both))
    while both:
        pool.give_back(both.pop())
    again = [pool.take(3 * 2**20) for _ in range(2)]
    assert set(map(address, again)) == used
    pool.give_back(again[0])
    assert pool.has(3 * 2**20)
    freed = [weakref.ref(each) for each in again]
    del again
    assert pool.take(2**20).nbytes == 2**20
    assert not pool.has(3 * 2**20)
    assert [each() for each in freed] == [None] * 2


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
