"""Jobs of runs in this process: configured, assembled and trained in one way."""

import jax

from elastic_ckpt.application.job import assemble
from elastic_ckpt.config import load
from elastic_ckpt.core import topology
from elastic_ckpt.training import step_log
from tests import runs


def configured(directory, corpus, **settings):
    """The configuration of the run `tiny` in a directory."""
    directory.mkdir(exist_ok=True)
    return load.load(runs.write_config(directory, corpus, **settings))


def assembled(config, *, slices=2, devices=4, **options):
    """The job of a run on so many devices of this process."""
    world = topology.Topology(hosts=1, slices=slices, devices=devices)
    return assemble(config, world, devices=jax.devices()[-devices:], **options)


def trained(job):
    """How the loop of a job ended, with the job closed."""
    ended = job.run(job.restore_or_init())
    job.close()
    return ended


def begun(job):
    """The state that a job begins with."""
    try:
        return job.restore_or_init()
    finally:
        job.close()


def losses(directory):
    """The losses of the only attempt of the run `tiny`, by step."""
    (attempt,) = step_log.read(directory / "tiny")
    return {record.step: record.loss for record in attempt.records}
