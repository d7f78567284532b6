"""Worker processes: what they import, how they end, and what they say then."""

import functools
import gc
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import grain
import numpy as np
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data import local_batches, sharded_data
from tests import pipelines, process_tree, shared_memory

ROOT = pathlib.Path(__file__).parents[2]
LENGTH = 1 << 16


def batches(function, num_workers=1):
    numbers = grain.MapDataset.range(10**6).map(function)
    data = sharded_data.sharded(
        lambda shard: numbers[shard::4].to_iter_dataset(pipelines.IN_CALLER),
        num_shards=4,
        pipeline="numbers",
        num_workers=num_workers,
    )
    return local_batches.LocalBatches(data, global_batch_size=8)


def row(number):
    # A batch of these is larger than a pipe.
    return {"x": np.full(LENGTH, number)}


class Unpicklable(Exception):
    def __init__(self, number):
        super().__init__(number)
        self.lock = threading.Lock()


class Unrepeatable(Exception):
    """Cannot be made from what a pickle has of it."""

    def __init__(self, number):
        super().__init__(number, number)


def fails(error, number):
    raise error(number)


def locked(number):
    return {"x": np.array(number), "lock": threading.Lock()}


def starts(number):
    multiprocessing.get_context("fork").Process(target=print).start()
    return row(number)


def forks(number):
    """A row, whose process leaves another behind."""
    if number == 8 and not os.fork():
        time.sleep(600)
        os._exit(0)
    return row(number)


def children():
    return set(process_tree.of(os.getpid()))


def python(*arguments):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *arguments], cwd=ROOT, **pipes)


SCRIPT = """
import grain, numpy as np, sys
import elastic_ckpt as ec

class Odd(Exception):
    pass

def row(number):
    if number > 11:
        raise Odd(f"{number} is too much")
    print(f"row {number} {sys.stdin.read()!r}\\n", end="")
    return {"x": np.array(number)}

def make_shard(shard):
    return grain.MapDataset.range(shard, 100, 4).map(row).to_iter_dataset()

data = ec.data.sharded(make_shard, num_shards=4, pipeline="odd, 1", num_workers=2)
batches = ec.data.LocalBatches(data, global_batch_size=4)
try:
    while True:
        print(next(batches)["x"].tolist())
except Odd as error:
    print("Odd:", error)
"""


@pytest.mark.slow
def test_a_script_needs_no_guard_and_its_rows_may_print(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    printed, told = python(tmp_path / "script.py").communicate()
    *lines, last = printed.splitlines()
    assert lines == ["[0, 1, 2, 3]", "[4, 5, 6, 7]", "[8, 9, 10, 11]"]
    assert last.startswith("Odd: 1")
    assert sorted(told.splitlines()) == sorted(f"row {n} ''" for n in range(12))


@pytest.mark.slow
@pytest.mark.parametrize("function", [row, forks])
def test_a_worker_that_is_killed_is_named_with_its_signal(function):
    before = children()
    one = batches(function, num_workers=2)
    for _ in range(2):
        next(one)
    # Each is in the middle of a batch, of which a part is in its pipe.
    workers = sorted(children() - before)[:2]
    left = children() - before - {*workers}
    assert len(left) == (function is forks)
    os.kill(workers[0], signal.SIGKILL)
    said = rf"\(process {workers[0]}\) stopped with SIGKILL.* memory runs out"
    try:
        with pytest.raises(errors.DataError, match=said):
            list(one)
    finally:
        process_tree.send(left, signal.SIGKILL)
    one.close()
    assert not any(map(process_tree.is_alive, workers))


@pytest.mark.slow
def test_signals_to_all_processes_of_a_host_do_not_end_its_workers():
    before = children()
    one, plain = batches(row, num_workers=2), batches(row, num_workers=0)
    for _ in range(3):
        rows, expected = next(one)["x"], next(plain)["x"]
        assert np.array_equal(rows, expected)
        assert one.get_state() == plain.get_state()
        process_tree.send(children() - before, signal.SIGINT)
        process_tree.send(children() - before, signal.SIGTERM)
    assert len(children() - before) == 2
    # An iterator that is forgotten ends its workers, even those that hang.
    process_tree.send(children() - before, signal.SIGSTOP)
    del one
    gc.collect()
    assert children() == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "error", "shown"),
    [
        (functools.partial(fails, Unpicklable), errors.DataError, r"Unpicklable\(\d"),
        (functools.partial(fails, Unrepeatable), errors.DataError, r"table\(\d, \d"),
        (locked, errors.DataError, r"cannot be pickled: TypeError.*lock"),
        (starts, AssertionError, "daemonic processes are not allowed to have chil"),
    ],
)
def test_what_a_pipeline_cannot_do_there_is_one_error(function, error, shown):
    one = batches(function)
    with pytest.raises(error, match=shown) as caught:
        next(one)
    assert "in worker process 0 of 1" in caught.value.__notes__
    one.close()


def test_a_pipeline_that_cannot_be_sent_is_refused_before_a_process_starts():
    before = children()
    lock = threading.Lock()
    with pytest.raises(errors.ConfigError, match=r"cannot be sent.*num_workers=0"):
        next(batches(lambda number: {"x": np.array(number), "lock": lock}))
    assert children() == before


HOST = """
from tests.data import test_worker
one = test_worker.batches(test_worker.row, num_workers=2)
next(one)
print(*test_worker.children(), flush=True)
list(one)
"""


@pytest.mark.slow
def test_the_workers_of_a_host_that_is_killed_end_by_themselves():
    files = set(os.listdir("/dev/shm"))
    with python("-c", HOST) as host:
        numbers = set(map(int, host.stdout.readline().split()))
        workers = numbers - {host.pid}
        assert len(workers) == 2
        assert all(map(process_tree.is_alive, workers))
        host.kill()
    process_tree.wait_for_end(workers)
    assert not shared_memory.left_behind()
    assert not [name for name in set(os.listdir("/dev/shm")) - files if "mp-" in name]
