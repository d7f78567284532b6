"""Worker processes: what they import, how they end, and what they say then."""

import functools
import gc
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


def data(function, num_workers=1):
    """Shards of the numbers, each made a row by `function`."""
    return sharded_data.sharded(
        functools.partial(shard_of, function),
        num_shards=4,
        pipeline="numbers",
        num_workers=num_workers,
    )


def shard_of(function, shard):
    numbers = grain.MapDataset.range(shard, 10**6, 4).map(function)
    return numbers.to_iter_dataset(pipelines.IN_CALLER)


def batches(function, num_workers=1):
    return local_batches.LocalBatches(
        data(function, num_workers), global_batch_size=8, read_ahead=0
    )


def row(number):
    # A batch of these is larger than a pipe.
    return {"x": np.full(LENGTH, number)}


class Unpicklable(Exception):
    """An error that holds what only its own process has."""

    def __init__(self, number):
        super().__init__(f"row {number} is bad")
        self.lock = threading.Lock()


def fails(number):
    raise Unpicklable(number)


def locked(number):
    return {"x": np.array(number), "lock": threading.Lock()}


def forks(number):
    """A row, whose process leaves another behind."""
    if number == 8 and not os.fork():
        time.sleep(600)
        os._exit(0)
    return row(number)


def children():
    """The processes that this one has started."""
    return set(process_tree.of(os.getpid()))


SCRIPT = """
import grain, numpy as np
import elastic_ckpt as ec

class Odd(Exception):
    pass

def row(number):
    if number > 11:
        raise Odd(f"{number} is too much")
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


def printed(script, content):
    """What a program prints."""
    script.write_text(content)
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ['PYTHONPATH']}"},
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_script_needs_no_guard(tmp_path):
    *lines, last = printed(tmp_path / "script.py", SCRIPT)
    assert lines == ["[0, 1, 2, 3]", "[4, 5, 6, 7]", "[8, 9, 10, 11]"]
    assert last.startswith("Odd: 1")


@pytest.mark.slow
def test_a_worker_that_is_killed_is_named_with_its_signal():
    before = children()
    one = batches(row, num_workers=2)
    next(one)
    # Each is in the middle of a batch, of which a part is in its pipe.
    workers = sorted(children() - before)
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    with pytest.raises(errors.DataError) as caught:
        list(one)
    assert f"(process {workers[1]}) was ended by SIGKILL" in str(caught.value)
    assert "memory is short" in str(caught.value)
    one.close()
    assert not any(map(process_tree.is_alive, workers))


@pytest.mark.slow
def test_signals_to_all_processes_of_a_host_do_not_end_its_workers():
    before = children()
    one, plain = batches(row), batches(row, num_workers=0)
    for _ in range(3):
        assert next(one)["x"].tolist() == next(plain)["x"].tolist()
        process_tree.send(children() - before, signal.SIGINT)
        process_tree.send(children() - before, signal.SIGTERM)
    one.close()
    assert children() == before


@pytest.mark.slow
def test_an_iterator_that_is_forgotten_ends_its_workers():
    before = children()
    one = batches(row)
    next(one)
    assert len(children() - before) == 1
    del one
    gc.collect()
    assert children() == before


@pytest.mark.slow
def test_an_error_that_cannot_be_pickled_is_shown():
    one = batches(fails)
    with pytest.raises(errors.DataError, match=r"Unpicklable\('row \d is bad'\)"):
        next(one)
    one.close()


@pytest.mark.slow
def test_rows_that_cannot_be_pickled_are_one_error():
    one = batches(locked)
    with pytest.raises(errors.DataError, match=r"cannot be pickled: TypeError.*lock"):
        next(one)
    one.close()


@pytest.mark.slow
def test_a_killed_worker_is_noticed_whoever_it_has_forked():
    before = children()
    one = batches(forks)
    for _ in range(2):
        next(one)
    worker = min(children() - before)
    left = children() - before - {worker}
    assert len(left) == 1
    os.kill(worker, signal.SIGKILL)
    try:
        with pytest.raises(errors.DataError, match="was ended by SIGKILL"):
            list(one)
    finally:
        for each in left:
            os.kill(each, signal.SIGKILL)
    one.close()


def test_a_pipeline_that_cannot_be_sent_is_refused_before_a_process_starts():
    before = children()
    lock = threading.Lock()

    def locked(number):
        with lock:
            return {"x": np.array(number)}

    with pytest.raises(errors.ConfigError, match=r"cannot be sent.*num_workers=0"):
        next(batches(locked))
    assert children() == before


@pytest.mark.slow
def test_the_workers_of_a_host_that_is_killed_end_by_themselves(tmp_path):
    files = set(os.listdir("/dev/shm"))
    host = subprocess.Popen(
        [sys.executable, "-m", "tests.data.reading_host", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    workers = [int(pid) for pid in host.stdout.readline().split()]
    assert len(workers) == 2
    assert all(map(process_tree.is_alive, workers))
    host.send_signal(signal.SIGKILL)
    host.wait()
    host.stdout.close()
    process_tree.wait_for_end(workers)
    assert not shared_memory.left_behind()
    assert not [name for name in set(os.listdir("/dev/shm")) - files if "mp-" in name]
