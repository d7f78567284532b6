"""A step log whose writer is killed with SIGKILL while it writes, or after it."""

import os
import signal
import threading

import numpy as np

from elastic_ckpt.core import jsonlog, storage, topology
from elastic_ckpt.training import step_log

WORLD = topology.Topology(hosts=2, slices=1, devices=4)
STEPS = 40
# Steps between two checkpoints.
PERIOD = 4


def ids(step):
    return range(2**40 + 3 * step, 2**40 + 3 * step + 3)


def rows(ids):
    """The example ids and the row digests of a batch."""
    halves = np.array([[i >> 32, i & 0xFFFFFFFF] for i in ids], np.uint32)
    return halves, np.array([i % 97 for i in ids], np.uint32)


def write(run, start_step, steps=STEPS):
    """Logs steps, and prints their number whenever they are durable."""
    log = step_log.StepLog(run, start_step, world=WORLD, data={"packing": True})
    for step in range(start_step, steps):
        log.write(step, *rows(ids(step)), step)
        if step % PERIOD == PERIOD - 1:
            log.sync()
            print(step + 1, flush=True)
    log.close()


def write_until_killed(run, point, moment):
    """Is killed at the `point`-th write: while it runs, or after it.

    A write is a line on a disk, and a segment in an object store.
    """
    done = 0

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    def dying(written):
        def act(*args):
            nonlocal done
            done += 1
            if done == point and moment == "within":
                threading.Thread(target=written, args=args).start()
                die()
            written(*args)
            if done == point and moment == "after":
                die()

        return act

    storage.write_atomic = dying(storage.write_atomic)
    jsonlog._File.append = dying(jsonlog._File.append)
    write(run, 0)
