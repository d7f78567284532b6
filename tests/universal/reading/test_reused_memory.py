"""Memory that is given back is taken again, within a limit."""

import numpy as np

from elastic_ckpt.universal.reading.reused_memory import ReusedMemory

SIZE = 2**18


def address(memory):
    return memory.__array_interface__["data"][0]


def test_memory_of_the_same_size_is_taken_again():
    memory = ReusedMemory(10 * SIZE)
    first = memory.take(SIZE)
    values = first.view(np.float32).reshape(4, -1)
    memory.give_back(values)
    assert address(memory.take(2 * SIZE)) != address(first)
    again = memory.take(SIZE)
    assert (address(again), again.dtype, again.shape) == (
        *(address(first), np.uint8),
        (SIZE,),
    )
    assert address(memory.take(SIZE)) != address(first)


def test_the_oldest_memory_over_the_limit_is_freed():
    memory = ReusedMemory(2 * SIZE)
    taken = [memory.take(SIZE) for _ in range(3)]
    for each in taken:
        memory.give_back(each)
    again = {address(memory.take(SIZE)) for _ in range(3)}
    assert {address(each) for each in taken[1:]} < again
    assert address(taken[0]) not in again
