"""`ec.elastic.Processes` with plain values, from a script as users write it."""

import functools
import os
import subprocess
import sys

import pytest

import elastic_ckpt as ec
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
        if world.leaving(step):
            return

def main():
    with ec.elastic.Processes(slices=2, run="x") as cluster:
        ec.elastic.run(train, cluster=cluster)
    print("done")

"""


def last_line(ended):
    assert ended.returncode != 0
    return ended.stderr.strip().splitlines()[-1]


def test_a_script_that_each_host_would_run_again_ends_and_says_why(tmp_path):
    ended = script(tmp_path, f"{PROGRAM}\nmain()\n")
    assert "the program cannot be imported" in last_line(ended)
    assert "ec.elastic.Processes starts processes" in ended.stderr
    assert 'under `if __name__ == "__main__":`' in ended.stderr


@pytest.mark.slow
def test_a_training_function_that_hosts_cannot_get_is_refused_in_one_line(tmp_path):
    program = PROGRAM.replace("run(train,", "run(lambda world: None,") + GUARD
    ended = script(tmp_path, program)
    assert ended.stderr.count("Traceback") == 1
    assert "the training function cannot be sent to host processes" in last_line(ended)
    assert "<lambda>" in last_line(ended)
    assert "define it with `def` at the top level of a module" in last_line(ended)


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
