"""The program of the guide to elastic runs works with real processes, as a file."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import elastic_ckpt as ec
from tests import pages, shared_memory

ROOT = pathlib.Path(__file__).parents[2]
GUIDE = (ROOT / "docs/pages/guides/elastic-run.md").read_text()
ALL, LEFT = "0, 1, 2, 3", "0, 2, 3"
# Enough for the slice to come back while it trains.
STEPS = 300


@pytest.fixture
def program(tmp_path):
    """The directory of the program, which has a RAM disk of its own."""
    train = pages.blocks(GUIDE)[0].replace("STEPS = 30\n", f"STEPS = {STEPS}\n")
    (main,) = pages.blocks(GUIDE, "py")
    with shared_memory.directory("page") as ram:
        text = train + main.replace("/dev/shm", ram)
        (tmp_path / "train.py").write_text(text)
        assert str(STEPS) in text
        assert ram in text
        yield tmp_path


def start(directory, *arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "train.py", *arguments],
        cwd=directory,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(process):
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    return output


def check(directory):
    """The worlds of the run, by what host 0 printed, and its last step in storage."""
    logs = sorted((directory / "logs" / "my_run").glob("*/host-0.log"))
    worlds = re.findall(
        r"world (\d+) on slices \((.*)\), from step (\d+)",
        "".join(log.read_text() for log in logs),
    )
    assert worlds[0] == ("1", ALL, "0")
    number, slices, step = worlds[1]
    assert (number, slices) == ("2", LEFT)
    # The loss is found at some step from 12 on; a step in RAM may be five steps old.
    assert int(step) >= 5
    assert {on for _, on, _ in worlds[2:]} <= {ALL, LEFT}
    steps = [int(step) for *_, step in worlds]
    assert steps == sorted(steps)
    storage = [ec.Persistent(directory / "storage", every=20)]
    with ec.Checkpointer(storage, read_only=True) as checkpointer:
        assert checkpointer.latest.step == STEPS


@pytest.mark.night
def test_it_loses_a_slice_and_gets_it_back(program):
    printed = ended(start(program))
    check(program)
    for line in (
        "slice 1 is lost: host 1 failed: killed by SIGKILL",
        "world 2 starts on slices 0, 2, 3",
        "slice 1 is back",
    ):
        assert line in printed.splitlines()
    # Its steps are done.
    assert "went on" not in ended(start(program))


@pytest.mark.night
def test_it_runs_on_several_machines(program):
    texts = str(program / "texts.array_record")
    ec.data.lm.write_arrayrecord("python-stdlib/email", texts)
    machines = [start(program, "2", NODE_RANK=str(number)) for number in range(2)]
    printed = [ended(machine) for machine in machines]
    check(program)
    (leader,) = [n for n in range(2) if f"machine {n} leads the run" in printed[n]]
    follower = 1 - leader
    assert "slice 1 is lost: host 1 failed: killed by SIGKILL" in printed[leader]
    last = printed[follower].splitlines()[-1]
    assert last == f"machine {follower} follows machine {leader}"
