"""Hosts that fail, sleep, or stop after a step; this imports little."""

import multiprocessing
import os
import signal
import time


def stay(place, emit, *, acts=None):
    """Does or raises what this host has to; else reports, and stays."""
    emit.begin("step")
    print(f"host {place.host} was here", flush=True)
    act = (acts or {}).get(place.host)
    if isinstance(act, Exception):
        raise act
    if act is not None:
        act()
    emit("save_started", step=place.host)
    # As a host would in a collective whose other members are gone.
    time.sleep(3600)


def end_the_supervisor(place, _, *, by=signal.SIGTERM):
    if place.host == 0:
        os.kill(multiprocessing.parent_process().pid, by)
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


def fork_and_be_killed(pipe):
    """The task of a process that leaves one that it has forked behind."""
    if os.fork():
        os.kill(os.getpid(), signal.SIGKILL)
    pipe.poll(None)
    os._exit(0)
