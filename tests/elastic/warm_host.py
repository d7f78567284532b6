"""Trains on one host that is forked from a warm server, and prints what it imported.

A separate program: `warm_host.py DIRECTORY CONFIG`.
"""

import functools
import os
import sys

# But for plug-ins of platforms, which JAX imports when it starts a backend.
PACKAGES = ("jax", "jaxlib", "orbax", "grain", "tensorstore", "elastic_ckpt")
PLUGINS = ("jax_plugins", "jax._src.cudacheck")
# It takes most of a second, and only agents serve HTTP.
UNWANTED = "aiohttp"


def train(config, member, channel):
    """Trains; tells of modules that are not as they should be, and of threads."""
    from elastic_ckpt.elastic import cluster, decision, executables, host
    from elastic_ckpt.training import launch

    at_fork = set(sys.modules)
    threads = len(os.listdir(f"/proc/{os.getppid()}/task"))
    work = decision.Train(slices=(0,), spares=(), rows=8, accumulated=1)
    with executables.kept() as kept:
        host.run_host(
            functools.partial(launch.on_host, None, config),
            config.world,
            cluster.Assignment(number=1, work=work),
            host.Owned(memory=None, kept=kept),
            member,
            channel,
        )
    wrong = [UNWANTED] * (UNWANTED in at_fork)
    wrong += [
        name
        for name in set(sys.modules) - at_fork
        if name.partition(".")[0].startswith(PACKAGES) and not name.startswith(PLUGINS)
    ]
    channel("step_interrupted", step=threads, path=str(wrong), resume_step=0)


def main(directory, config):
    """Trains on a host whose supervisor prints what it tells."""
    from elastic_ckpt.training import launch, load
    from tests import host_worlds
    from tests.elastic import warm_host

    def emit(name, **fields):
        if name == "step_interrupted":
            print(fields["path"], fields["step"], flush=True)

    launch.warm_up()
    program = functools.partial(warm_host.train, load.load(config))
    host_worlds.run(program, num_hosts=1, log_directory=directory, emit=emit)


if __name__ == "__main__":
    main(*sys.argv[1:])
