"""Flips bits in what a run has in storage, one at a time, and restores with each.

python -m tests.faults.flipped_runs FLIPS CONFIG key=value...
"""

import collections
import pathlib
import random
import sys

import jax
import numpy as np

import elastic_ckpt as ec
from elastic_ckpt.checkpoint import run_saver
from elastic_ckpt.core import errors
from elastic_ckpt.data.lm import pipeline
from elastic_ckpt.training import load, run_directory, training_files
from tests.faults import spoilt_files


def restore(config, step):
    """The bits of all leaves of a step and of the batch after it, on one host."""
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    batches = ec.batches(
        pipeline.from_config(config.data),
        mesh=mesh,
        global_batch_size=config.data.global_batch_size,
        colocated=False,
    )
    try:
        with ec.Checkpointer([ec.Persistent(directory(config), every=1)]) as stored:
            parts = {"state": None, "data": batches}
            state = stored.load_checkpointables(step, parts)["state"]
        restored = (state, next(batches))
    finally:
        batches.close()
    return jax.tree.map(lambda leaf: np.asarray(leaf).tobytes(), restored)


def directory(config):
    return pathlib.Path(run_directory.path_of(config), run_saver.DIRECTORY)


def flip(count, config):
    """How many flips left a step as it was, and how many made it unreadable."""
    steps = [int(each.name) for each in directory(config).glob("[0-9]*")]
    saved = {step: restore(config, step) for step in sorted(steps)}
    files = [
        (step, file)
        for step in saved
        for file in sorted(directory(config).glob(f"{step}/**/*"))
        if file.is_file() and file.stat().st_size
    ]
    # Large files are hit more often in one half, and small ones in the other.
    chance = random.Random(0)
    sizes = [file.stat().st_size for _, file in files]
    hit = chance.choices(files, sizes, k=count // 2)
    hit += chance.choices(files, k=count - len(hit))
    outcomes = collections.Counter()
    for step, file in hit:
        content = file.read_bytes()
        spoilt_files.spoil(file, "flipped", chance, other=b"")
        try:
            assert restore(config, step) == saved[step], file
            outcomes["unharmed"] += 1
        except errors.ElasticCkptError:
            outcomes["refused"] += 1
        file.write_bytes(content)
    assert {step: restore(config, step) for step in saved} == saved
    return outcomes


if __name__ == "__main__":
    configured = load.load(sys.argv[2], sys.argv[3:])
    counted = flip(int(sys.argv[1]), training_files.prepare(configured))
    print(counted["refused"], "refused,", counted["unharmed"], "as they were saved")
