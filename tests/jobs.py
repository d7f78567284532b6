"""Runs in this process: configured, and trained in one way."""

import jax

from elastic_ckpt.core import events
from elastic_ckpt.elastic.world import World
from elastic_ckpt.training import load, step_log, trainer
from tests import runs


def configured(directory, corpus, **settings):
    """The configuration of the run `tiny` in a directory."""
    directory.mkdir(exist_ok=True)
    return load.load(runs.write_config(directory, corpus, **settings))


def assembled(config, *, slices=2, devices=4, emit=events.nobody, **options):
    """The trainer of a run on so many devices of this process."""
    world = World(
        number=1,
        slices=tuple(range(slices)),
        slice_name="0",
        devices=tuple(jax.devices()[-devices:]),
        emit=emit,
        **options,
    )
    return trainer.assembled(config, world)


def trained(job):
    """How the loop of a trainer ended, with the trainer closed."""
    with job.run:
        ended = job.train(job.restore())
        job.close()
    return ended


def begun(job):
    """The state that a trainer begins with."""
    with job.run:
        try:
            return job.restore()
        finally:
            job.close()


def losses(directory):
    """The losses of the only attempt of the run `tiny`, by step."""
    (attempt,) = step_log.read(directory / "tiny")
    return {record.step: record.loss for record in attempt.records}
