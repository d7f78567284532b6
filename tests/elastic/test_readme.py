"""The programs of the page about elastic runs work as they are written."""

import importlib.resources
import os
import re
import subprocess
import sys

import pytest

import elastic_ckpt as ec
from tests import pages, shared_memory
from tests.multiprocess import supervisors

ROOM = importlib.resources.files(ec) / "elastic"
PAGE = (ROOM / "README.md").read_text()
ALL, LEFT = "0, 1, 2, 3", "0, 2, 3"
STEPS = 200


@pytest.fixture
def programs(tmp_path):
    """Writes the programs of the page, with a RAM disk of their own."""
    train, simulated = pages.blocks(PAGE)
    with shared_memory.directory("page") as ram:
        (tmp_path / "train.py").write_text(train.replace("/dev/shm", ram))
        (tmp_path / "simulated.py").write_text(simulated)
        yield tmp_path


def write_texts(directory):
    texts = str(directory / "texts.array_record")
    ec.data.lm.write_arrayrecord("python-stdlib/email", texts)


def start(directory, *command, **environment):
    return subprocess.Popen(
        [sys.executable, *command],
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


def trained(text):
    """By step, the slices that it was trained on last, and its loss."""
    lines = re.findall(r"step (\d+): loss (\S+) on slices \((.*)\)", text)
    return {int(step): (on, float(loss)) for step, loss, on in lines}


def check(directory):
    logs = sorted((directory / "logs" / "nnx").glob("*/host-0.log"))
    steps = trained("".join(log.read_text() for log in logs))
    assert list(steps) == list(range(1, STEPS + 1))
    assert {on for on, _ in steps.values()} <= {ALL, LEFT}
    assert steps[1][0] == ALL
    assert LEFT in {steps[step][0] for step in range(9, STEPS)}
    assert steps[STEPS][1] < 0.6 * steps[1][1]


@pytest.mark.thorough
@pytest.mark.slow(minutes=0.8)
def test_a_loop_in_flax_nnx_loses_a_slice_and_gets_it_back(programs):
    printed = ended(start(programs, "train.py"))
    check(programs)
    for line in (
        "slice 1 is lost: host 1 failed: killed by SIGKILL",
        "world 2 starts on slices 0, 2, 3",
        "slice 1 is back",
    ):
        assert line in printed.splitlines()
    # Its steps are done.
    assert "went on" not in ended(start(programs, "train.py"))


@pytest.mark.thorough
@pytest.mark.slow(minutes=0.6)
def test_the_same_program_runs_on_several_machines(programs):
    addresses = [supervisors.free_address(f"127.0.0.{n + 1}") for n in range(2)]
    write_texts(programs)
    machines = [
        start(programs, "train.py", *addresses, NODE_RANK=str(number))
        for number in range(2)
    ]
    first, second = map(ended, machines)
    check(programs)
    assert "machine 0 leads the run" in first
    assert "slice 1 is lost: host 1 failed: killed by SIGKILL" in first
    assert second.splitlines()[-1] == "machine 1 follows machine 0"


@pytest.mark.thorough
@pytest.mark.slow(minutes=0.4)
def test_the_same_function_trains_on_simulated_slices(programs):
    write_texts(programs)
    steps = trained(ended(start(programs, "simulated.py")))
    assert list(steps) == list(range(1, STEPS + 1))
    assert {on for on, _ in steps.values()} == {ALL}
