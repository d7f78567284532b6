"""Hosts that fail, sleep, or stop after a step; they import little."""

import multiprocessing
import os
import signal
import time
import types

from elastic_ckpt.core import errors, topology


def sum_over_hosts(place, emit):
    """Sums over all hosts, and reports the sum and the number of devices."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    from elastic_ckpt.elastic import host
    from elastic_ckpt.training import schema

    host.configure(schema.WorldSection(devices_per_host=2))
    with host.joined(place):
        mine = np.array([10 ** topology.this_host()])
        total = int(multihost_utils.process_allgather(mine).sum())
        emit("save_started", step=total * 100 + len(jax.devices()))


def fail(place, _, *, host, how):
    print(f"host {place.host} was here", flush=True)
    if place.host == host:
        how()
    # As a host would in a collective whose other members are gone.
    time.sleep(3600)


def raise_ours():
    raise errors.DataError("texts.array_record is cut short; restore it")


def raise_replaced():
    raise errors.ReplacedError("another start has continued it")


def raise_foreign():
    raise ZeroDivisionError("by zero")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def exit_3():
    os._exit(3)


def sleep(place, emit):
    emit("save_started", step=place.host)
    time.sleep(3600)


def report_for_ever(place, emit):
    """Host 0 reports without end, and host 1 dies."""
    if place.host == 1:
        kill()
    while True:
        emit("step_done", step=1)


def wait_and_end(*_):
    time.sleep(1)


def end_the_supervisor(place, _):
    if place.host == 0:
        os.kill(multiprocessing.parent_process().pid, signal.SIGTERM)
    time.sleep(600)


def take_the_signal(place, emit):
    """Emits the step it stops after, though the signal arrives before it has joined."""
    from elastic_ckpt.elastic import host, termination
    from elastic_ckpt.training import schema

    emit("save_started", step=place.host)
    while signal.SIGTERM not in signal.sigpending():
        time.sleep(0.01)
    host.configure(schema.WorldSection())
    step = 7
    with (
        host.joined(place),
        termination.agreed() as is_stopping,
    ):
        while not is_stopping(step):
            step += 1
            time.sleep(0.05)
        emit("saved", step=step, secs=0.0)


def fail_in_turn(place, _):
    if place.host == 2:
        raise errors.DataError("the cause")
    time.sleep(0.05 * place.host)
    raise RuntimeError(f"an echo in host {place.host}")


def get_sigterm_from_others(place, emit):
    """Waits for an order, as a host does that leaves, and ends."""
    emit("save_started", step=place.host)
    emit.send({"sigterm": True})
    emit.agree(types.SimpleNamespace(gather=lambda _, own, **__: [own]))


def fork_and_be_killed(pipe):
    """The task of a process that leaves one that it has forked behind."""
    if os.fork():
        os.kill(os.getpid(), signal.SIGKILL)
    pipe.poll(None)
    os._exit(0)
