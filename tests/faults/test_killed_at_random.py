"""Hosts that save every step are killed at random times, and lose what is promised.

A kill takes all hosts, whose machines keep their memory, or one machine with its
memory. Then the next world has to find the last step of which all copies were reported;
if no memory is lost, the last but the one in flight. All that it finds is compared bit
by bit.
"""

import functools
import os
import pathlib
import random
import shutil
import signal
import threading

import pytest

from elastic_ckpt import frontend
from elastic_ckpt.core import errors, topology
from elastic_ckpt.elastic import multicontroller, supervisor
from elastic_ckpt.training import schema
from tests.multiprocess import machines, tier_worlds

HOSTS = 3
MOST_SECS = 1.5


def live(place, emit, *, directories, pids, victims, secs):
    """A host that restores, saves each step, and kills `victims` after some time."""
    pathlib.Path(pids, str(place.host)).write_text(str(os.getpid()))
    multicontroller.configure(schema.WorldSection())
    with multicontroller.joined(place):
        mesh = topology.mesh_of(topology.present(HOSTS))
        checkpointer = frontend.Checkpointer(
            tier_worlds.tiers(directories[place.host], copies=1),
            run="run",
            slice_name=str(place.host),
            emit=emit if place.host == 0 else _nobody,
        )
        with checkpointer:
            step = _restore(checkpointer, mesh)
            if place.host == 0:
                emit("run_stopped", step=step, saved=True)
            begun = os.open(
                f"{pids}.begun-{place.host}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            )
            if place.host == 0:
                threading.Timer(secs, _kill, [pids, victims]).start()
            while True:
                step += 1
                parts = {
                    "state": tier_worlds.state(mesh, step, True),
                    "data": tier_worlds.Counter(step),
                }
                if checkpointer.save_checkpointables_async(step, parts) is not None:
                    os.pwrite(begun, f"{step:9}".encode(), 0)


def _restore(checkpointer, mesh):
    if checkpointer.latest is None:
        return 0
    counter = tier_worlds.Counter()
    restored = checkpointer.load_checkpointables(
        None, {"state": tier_worlds.abstract(mesh, True), "data": counter}
    )
    step = checkpointer.latest.step
    tier_worlds.check(restored["state"], step)
    assert counter.step == step
    return step


def _kill(pids, victims):
    # The own process last.
    for number in sorted(victims, reverse=True):
        os.kill(int(pathlib.Path(pids, str(number)).read_text()), signal.SIGKILL)


def _nobody(name, **fields):
    del name, fields


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(10, marks=pytest.mark.slow),
        pytest.param(100, marks=pytest.mark.night),
    ],
)
def test_hosts_that_save_each_step_are_killed_at_random(tmp_path, number):
    drawn = random.Random(number)
    pids = tmp_path / "pids"
    pids.mkdir()
    least = 0
    with machines.Machines() as ram:
        for life in range(number + 1):
            ram.start_agents(range(HOSTS))
            host = drawn.choice([None, *range(HOSTS)])
            events = []
            world = supervisor.HostProcesses(
                functools.partial(
                    live,
                    directories=[ram.directory(n) for n in range(HOSTS)],
                    pids=str(pids),
                    victims=range(HOSTS) if host is None else [host],
                    secs=drawn.uniform(0, MOST_SECS),
                ),
                num_hosts=HOSTS,
                log_directory=tmp_path / "logs",
                emit=lambda name, to=events, **fields: to.append((name, fields)),
            )
            with pytest.raises(errors.RunError, match="killed by SIGKILL"):
                world.run()
            restored = max(_steps(events, "run_stopped"))
            assert restored >= least, (life, restored, least)
            begun = [
                int(pathlib.Path(f"{pids}.begun-{n}").read_text() or restored)
                for n in range(HOSTS)
            ]
            if host is None:
                # All hosts have begun the last one of these.
                least = max([restored, *_steps(events, "saved"), min(begun) - 1])
            else:
                shutil.rmtree(ram.directory(host))
                least = max([0, *_steps(events, "replicated")])


def _steps(events, name):
    return [fields["step"] for event, fields in events if event == name]
