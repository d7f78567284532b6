"""`ec.elastic.Processes` with plain values, from a script as users write it."""

import dataclasses
import functools
import os
import subprocess
import sys

import pytest

import elastic_ckpt as ec
from elastic_ckpt.core import errors
from tests import pages, shared_memory
from tests.elastic import tiny_hosts


def script(directory, program, **environment):
    """Runs a program that is a file; returns how it ended."""
    path = directory / "program.py"
    path.write_text(program)
    return subprocess.run(
        [sys.executable, path],
        cwd=directory,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


GUARD = 'if __name__ == "__main__":\n    main()\n'
PROGRAM = """
import elastic_ckpt as ec

def train(world):
    assert world.ram_directory is None
    for step in range(1, 21):
        if world.should_stop(step):
            return

def main():
    with ec.elastic.Processes(slices=2, run="x") as cluster:
        ec.elastic.run(train, cluster=cluster)
    print("done")

"""


@pytest.mark.slow
def test_a_script_with_plain_values_trains_and_prints_what_happens(tmp_path):
    ended = script(tmp_path, PROGRAM + GUARD)
    assert ended.returncode == 0, ended.stderr
    *_, before, last = ended.stdout.splitlines()
    assert (before.partition(" |")[0], last) == ("step 20", "done")
    assert sorted(path.name for path in (tmp_path / "logs" / "x").glob("*/*")) == [
        "host-0.log",
        "host-1.log",
    ]


def last_line(ended):
    assert ended.returncode != 0
    return ended.stderr.strip().splitlines()[-1]


def test_a_script_that_each_host_would_run_again_is_refused_in_one_line(tmp_path):
    ended = script(tmp_path, f"{PROGRAM}\nmain()\n")
    assert ended.stderr.count("Traceback") == 1
    line = PROGRAM.count("\n") + 2
    assert f"program.py, line {line}: ec.elastic.Processes starts" in last_line(ended)
    assert 'under `if __name__ == "__main__":`' in last_line(ended)
    assert not (tmp_path / "logs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "why"),
    [
        ("lambda world: None", "<lambda>"),
        ("functools.partial(train, open('program.py'))", "cannot pickle"),
    ],
)
def test_a_training_function_that_hosts_cannot_get_is_refused_in_one_line(
    tmp_path, train, why
):
    program = PROGRAM.replace("run(train,", f"run({train},") + GUARD
    ended = script(tmp_path, f"import functools\n{program}")
    assert ended.stderr.count("Traceback") == 1
    assert "the training function cannot be sent to host processes" in last_line(ended)
    assert why in last_line(ended)
    assert "define it with `def` at the top of a module" in last_line(ended)


@pytest.mark.slow
def test_a_training_function_of_a_program_without_a_file_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="a program without a file") as raised:
        pages.run(PROGRAM + GUARD, tmp_path)
    assert "put it into a file" in str(raised.value)


@pytest.mark.slow
def test_a_script_that_no_host_can_import_ends_the_run(tmp_path):
    program = PROGRAM + GUARD + "else:\n    raise OSError('no such device')\n"
    ended = script(tmp_path, program)
    assert "no host process could begin" in last_line(ended)
    assert "no such device" in ended.stderr


SHARED = {"slices": 2, "machines": 2, "shared": "shared"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"slices": 0}, r"Processes\(slices=0\): give a whole number of at least 1"),
        ({"slices": 2.0}, r"slices=2\.0"),
        ({"slices": 2, "hosts_per_slice": -1}, "hosts_per_slice=-1"),
        ({"slices": 2, "devices_per_host": True}, "devices_per_host=True"),
        ({"slices": 2, "hardware": "tpu"}, r"use ec\.elastic\.Pathways"),
        ({"slices": 2, "ram": "/dev/shm"}, "needs the name of the run"),
        ({"slices": 2, "ram": "/proc/x", "run": "x"}, r"ram='/proc/x'\): .*name a dir"),
        (
            {"slices": 2, "run": "a", "ram": "gs://b/c"},
            "ram='gs://b/c' is not a direct",
        ),
        ({"slices": 2, "logs": "s3://b/c"}, "logs='s3://b/c' is not a directory of"),
        ({"slices": 2, "run": "a/b"}, "give a name that a directory can have"),
        ({"slices": 2, "machines": ["a:1"]}, r"machines=\['a:1'\]\): give a whole"),
        ({"slices": 2, "machines": 2}, "needs a directory that all of them share"),
        ({**SHARED, "slices": 3}, "evenly among machines=2"),
        (SHARED, "machine is not set"),
        ({**SHARED, "machine": 2}, "from 0 to 1"),
    ],
)
def test_values_that_cannot_work_are_refused(values, message):
    with pytest.raises(errors.ConfigError, match=message):
        ec.elastic.Processes(**values)


def test_limits_are_there_by_default():
    limits = ec.elastic.Limits()
    assert (limits.most_secs, limits.heartbeat_secs) == (600.0, 30.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        limits.most_secs = 1.0


@pytest.mark.slow
def test_a_host_that_is_stopped_is_noticed_in_its_time(tmp_path):
    lost = []

    def emit(name, **fields):
        if name == "slice_lost":
            lost.append((fields["slice"], fields["why"]))

    limits = ec.elastic.Limits(heartbeat_secs=10.0)
    with ec.elastic.Processes(slices=2, logs=tmp_path, limits=limits) as cluster:
        ec.elastic.run(
            functools.partial(tiny_hosts.stops_at_a_step, steps=20),
            cluster=cluster,
            policy=ec.elastic.Policy(settle_secs=0),
            emit=emit,
        )
    assert lost[0][0] == 1
    assert "no heartbeat for" in lost[0][1]


class Worlds:
    """The slices of each world of a run, and its events."""

    def __init__(self):
        self.slices = []
        self.events = []

    def __call__(self, name, **fields):
        self.events.append(name)
        if name == "world_started":
            self.slices.append(fields["slices"])


@pytest.mark.slow
def test_a_host_that_dies_on_a_sound_machine_costs_one_change(tmp_path):
    worlds = Worlds()
    with ec.elastic.Processes(slices=2, logs=tmp_path) as cluster:
        ec.elastic.run(
            functools.partial(tiny_hosts.dies_once, steps=20),
            cluster=cluster,
            policy=ec.elastic.Policy(settle_secs=3600, check_secs=600),
            emit=worlds,
        )
    assert worlds.slices == [[0, 1], [0, 1]]
    assert "slice_lost" in worlds.events


@pytest.mark.slow
def test_a_change_that_is_decided_does_not_wait_for_a_compile(tmp_path):
    worlds = Worlds()
    every, one = ec.elastic.Policy(), ec.elastic.Policy(max_slices=1)
    with ec.elastic.Processes(slices=2, logs=tmp_path) as cluster:
        ec.elastic.run(
            functools.partial(tiny_hosts.compiles_for_ever, steps=20),
            cluster=cluster,
            policy=lambda: one if "compile_started" in worlds.events else every,
            emit=worlds,
        )
    assert worlds.slices == [[0, 1], [0]]
    assert "slice_lost" not in worlds.events
    assert worlds.events.count("world_leaving") == 1
    assert worlds.events.count("world_left") == 1


def test_a_checkpointer_is_where_the_agent_of_the_slice_serves(tmp_path):
    with shared_memory.directory("served") as ram:
        served = f"{ram}/slice-0/x"
        world = ec.elastic.World(
            number=1, slices=(0,), slice_name="0", ram_directory=served
        )
        tiers = [
            ec.Local(f"{served}/x"),
            ec.Peers(),
            ec.Persistent(tmp_path / "storage", every=1),
        ]
        with pytest.raises(
            errors.ConfigError, match="is not where the agent of slice 0"
        ):
            world.checkpointer(tiers)
        tiers[0] = ec.Local(served)
        with world.checkpointer(tiers) as checkpointer:
            assert checkpointer.latest is None
