"""The examples run as their page says, and continue when they are run again."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import elastic_ckpt as ec
from tests import shared_memory

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def run(program, *arguments, devices=4, cwd=None):
    ended = subprocess.run(
        [sys.executable, EXAMPLES / program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)},
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def losses(printed):
    return [float(loss) for loss in re.findall(r"loss ([0-9.]+)", printed)]


@pytest.mark.slow(minutes=0.5)
def test_a_model_of_nnx_continues_on_other_devices_and_is_evaluated(tmp_path):
    first = run("flax_nnx.py", tmp_path, "--steps", 20)
    second = run("flax_nnx.py", tmp_path, "--steps", 40, devices=2)
    assert "continues from step 20" in second
    trained = losses(first) + losses(second)
    assert len(trained) == 4
    assert sorted(trained, reverse=True) == trained
    evaluated = run("evaluator.py", tmp_path, "--once", devices=1)
    assert re.findall(r"^([0-9]+): ", evaluated, re.MULTILINE) == [
        "10",
        "20",
        "30",
        "40",
    ]
    assert "best step: 40" in evaluated


@pytest.mark.slow(minutes=0.3)
def test_plain_jax_continues_on_a_mesh_of_another_shape(tmp_path):
    first = run("plain_jax.py", tmp_path, "--mesh", 4, 2, devices=8)
    second = run("plain_jax.py", tmp_path, "--mesh", 2, 2, "--steps", 40)
    assert "continues from step 20 on a mesh of 2 x 2" in second
    trained = losses(first) + losses(second)
    assert len(trained) == 4
    assert sorted(trained, reverse=True) == trained


@pytest.mark.slow(minutes=0.5)
def test_an_elastic_run_loses_a_slice_with_its_memory_and_continues(tmp_path):
    with shared_memory.directory("example") as ram:
        printed = run(
            "elastic_run.py",
            *(tmp_path / "run", "--slices", 3, "--steps", 40, "--ram", ram),
            devices=1,
            cwd=tmp_path,
        )
    assert "slice 1 is lost: host 1 failed: killed by SIGKILL" in printed
    assert "world 2 starts on slices 0, 2" in printed
    assert "restored step 10" in printed
    assert "step 40 |" in printed or "step 40/" in printed
    tiers = [ec.Persistent(tmp_path / "run/checkpoints")]
    with ec.Checkpointer(tiers, read_only=True) as stored:
        assert stored.latest.step == 40


def test_the_page_lists_every_example():
    listed = re.findall(r"\]\((\w+\.py)\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.glob("*.py"))
