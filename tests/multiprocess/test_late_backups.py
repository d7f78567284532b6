"""Worlds change faster than a backup is made, and it is made all the same."""

import dataclasses
import functools
import itertools
import os
import pathlib
import signal
import threading
import time

import pytest

from elastic_ckpt.application import local_world
from elastic_ckpt.checkpoint.host import upload_share
from elastic_ckpt.config import load
from elastic_ckpt.core import events
from elastic_ckpt.tiers.persistent import upload
from tests import runs, shared_memory

# The worlds that do not finish a backup, and how much of it each of their hosts makes.
CUT_SHORT = 3
MOST_ITEMS = 6
# While a slice is away, the other one is slow from this step on, by so much a step.
ALONE_STEP, ALONE_SECS = 320, 1.0


def train(config, world, *, counts):
    """Trains; a host of an early world uploads a few items, and then hangs in that."""
    upload_share._BATCH_ITEMS = 1
    upload._PROGRESS_SECS, upload._PROGRESS_SHARE = 0.0, 0
    lock, done = threading.Lock(), [0]

    def counted(write):
        def act(*arguments):
            with lock:
                done[0] += 1
                is_over = done[0] > MOST_ITEMS and world.number <= CUT_SHORT
            if is_over:
                threading.Event().wait()
            write(*arguments)
            with lock:
                path = pathlib.Path(counts, f"{world.number}-{world.slice_name}")
                path.write_text(str(done[0]))

        return act

    for name in ("write_chunks", "write_file"):
        setattr(upload.Upload, name, counted(getattr(upload.Upload, name)))
    steps = itertools.count()

    def should_stop(step):
        if world.number <= 2 and step > ALONE_STEP:
            # Slowly, until the other slice is lost, or is back and has been checked.
            time.sleep(ALONE_SECS)
        if world.number == 3 and world.slice_name == "0" and next(steps) == 20:
            while not any(pathlib.Path(counts).glob("3-*")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        return world.should_stop(step)

    local_world.train(config, dataclasses.replace(world, should_stop=should_stop))


@pytest.mark.thorough
@pytest.mark.slow(minutes=1)
def test_a_backup_is_made_by_several_worlds_together(tmp_path, corpus):
    counts = tmp_path / "counts"
    counts.mkdir()
    emitted = []

    def emit(name, **fields):
        events.check(name, fields)
        if name != "step":
            emitted.append((name, fields))

    def named(name):
        return [fields for each, fields in emitted if each == name]

    with shared_memory.directory("late") as ram:
        path = runs.write_config(
            tmp_path,
            corpus,
            hosts=2,
            slices=2,
            steps=500,
            global_batch_size=24,
            elastic_enabled=True,
            elastic_min_slice_count=1,
            elastic_settle_seconds=0,
            enable_multi_tier_checkpointing=True,
            local_checkpoint_directory=ram,
            local_checkpoint_period=5,
            multi_tier_checkpointing_backup_interval_steps=300,
            faults=[
                {"kill_slice": 1, "at_step": 305},
                {"return_slice": 1, "at_step": 310},
            ],
        )
        local_world.run(
            load.load(path, []), emit, train=functools.partial(train, counts=counts)
        )
    # A crash, a planned change, and another crash.
    assert [each["slices"] for each in named("world_started")][:3] == [
        [0, 1],
        [0],
        [0, 1],
    ]
    assert len(named("world_left")) >= 1, emitted
    assert named("run_finished")
    backups = {each["step"]: each["world"] for each in named("backed_up")}
    assert backups[300] > CUT_SHORT
    assert 500 in backups
    # Several worlds have written parts of it; the first may have been killed too soon.
    by_world = {int(each.name[0]) for each in counts.iterdir()}
    assert by_world >= {2, 3}
    assert {"300", "500"} <= {
        each.name for each in (tmp_path / "tiny/checkpoints").iterdir()
    }
