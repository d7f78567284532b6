"""A pipeline that tests hold up, count and break, and that workers import from here.

A worker gets its data by cloudpickle, so objects that a test changes while a worker
runs are looked up by the name of this module.
"""

import threading
import time

import grain
import numpy as np

from elastic_ckpt.data import sharded_data
from tests import pipelines
from tests.tiers import served

NUM_SHARDS = 8
SOON_SECS = 600


class Valve:
    """Lets the examples before a number pass, and the others when it is opened."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.read = 0
        self._open = threading.Event()
        self._open.set()
        self._limit = 0

    def close(self, *, at=0):
        """Holds up the examples of every shard from number `at` on."""
        self._limit = at
        self._open.clear()

    def open(self):
        self._open.set()

    def example(self, shard, number):
        if number >= self._limit:
            assert self._open.wait(SOON_SECS), "the valve was not opened"
        self.read += 1
        return {"x": np.array([shard, number], np.int32)}

    def num_batches(self):
        """Batches of a row of each shard that were read."""
        return self.read // NUM_SHARDS


VALVE = Valve()


def make_shard(shard):
    numbers = grain.MapDataset.range(10**6)
    return numbers.map(lambda n: VALVE.example(shard, n)).to_iter_dataset(
        pipelines.IN_CALLER
    )


def data():
    """A row of each of 8 shards makes a batch."""
    return sharded_data.sharded(make_shard, num_shards=NUM_SHARDS, pipeline="held")


def number(batch):
    """The number of a batch, which all of its rows contain."""
    (number,) = set(np.asarray(batch["x"])[:, 1].tolist())
    return number


def settled(is_so, *, secs=0.05):
    """Whether it comes to be so, and stays so for a while."""
    served.until(is_so)
    until = time.monotonic() + secs
    while is_so() and time.monotonic() < until:
        time.sleep(0.01)
    return is_so()
