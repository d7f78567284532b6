"""Reports the state of a forked host; imports nothing that it looks for."""

import functools
import os
import sys

WANTED = (
    "jax",
    "grain",
    "orbax.checkpoint",
    "optax",
    "tensorstore",
    "elastic_ckpt_sidecar.worker",
)
# It takes most of a second, and only agents serve HTTP.
UNWANTED = ("aiohttp",)


def look_around(place, emit):
    missing = sorted(set(WANTED) - set(sys.modules))
    unwanted = sorted(set(UNWANTED) & set(sys.modules))
    threads = len(os.listdir(f"/proc/{os.getppid()}/task"))
    emit(
        "step_interrupted",
        step=threads,
        path=str(missing + unwanted),
        resume_step=float(place.host),
    )


# Packages that hosts have to find imported, but for plug-ins of platforms, which JAX
# imports when it starts a backend.
PACKAGES = ("jax", "jaxlib", "orbax", "grain", "tensorstore", "elastic_ckpt")
PLUGINS = ("jax_plugins", "jax._src.cudacheck")


def train(config, place, channel):
    """Trains, and reports the modules that were imported after the fork."""
    from elastic_ckpt.elastic import cluster, decision, world_host
    from elastic_ckpt.training import elastic_run

    at_fork = set(sys.modules)
    work = decision.Train(slices=(0,), spares=(), rows=8, accumulated=1)
    world_host.run_host(
        functools.partial(elastic_run.train, config),
        config.world,
        cluster.Assignment(number=1, work=work),
        world_host.Owned(memory=None, kept=None, grace_secs=600),
        place,
        channel,
    )
    later = sorted(
        name
        for name in set(sys.modules) - at_fork
        if name.partition(".")[0].startswith(PACKAGES) and not name.startswith(PLUGINS)
    )
    channel("step_interrupted", step=0, path=str(later), resume_step=0)
