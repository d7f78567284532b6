"""Hosts that fail, sleep, stop after a step or train; this imports little."""

import functools
import multiprocessing
import os
import signal
import sys
import time

# But for plug-ins of platforms, which JAX imports when it starts a backend.
PACKAGES = ("jax", "jaxlib", "orbax", "grain", "tensorstore", "elastic_ckpt")
PLUGINS = ("jax_plugins", "jax._src.cudacheck")
# It takes most of a second, and only agents serve HTTP.
UNWANTED = "aiohttp"


def stay(place, emit, *, acts=None):
    """Does what this host has to do; else reports, and stays."""
    emit.begin("step")
    print(f"host {place.host} was here", flush=True)
    if acts and place.host in acts:
        acts[place.host]()
    emit("save_started", step=place.host)
    # As a host would in a collective whose other members are gone.
    time.sleep(3600)


def raise_(error):
    raise error


def end_the_supervisor(place, _):
    if place.host == 0:
        os.kill(multiprocessing.parent_process().pid, signal.SIGTERM)
    time.sleep(600)


def take_the_signal(place, emit, *, is_own=False):
    """Stops after a step, though the signal arrives before it has joined."""
    from elastic_ckpt.core import allgather
    from elastic_ckpt.elastic import host, termination
    from elastic_ckpt.training import schema

    emit("save_started", step=place.host)
    if is_own:
        os.kill(os.getpid(), signal.SIGTERM)
    while signal.SIGTERM not in signal.sigpending():
        time.sleep(0.01)
    host.configure(schema.WorldSection())
    phases, step = [], 7
    with host.joined(place, phases.append):
        termination.call_beside(lambda: emit.send({"sigterm": True}))
        with termination.agreed() as is_stopping:
            while not is_stopping(step):
                step += 1
                time.sleep(0.05)
            order = emit.agree(allgather.new()).decode()
        told = f"{order} after {phases}"
        emit("step_interrupted", step=step, path=told, resume_step=0)


def train_warm(place, emit, *, config):
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
            place,
            emit,
        )
    wrong = [UNWANTED] * (UNWANTED in at_fork)
    wrong += [
        name
        for name in set(sys.modules) - at_fork
        if name.partition(".")[0].startswith(PACKAGES) and not name.startswith(PLUGINS)
    ]
    emit("step_interrupted", step=threads, path=str(wrong), resume_step=0)


def fork_and_be_killed(pipe):
    """The task of a process that leaves one that it has forked behind."""
    if os.fork():
        os.kill(os.getpid(), signal.SIGKILL)
    pipe.poll(None)
    os._exit(0)
