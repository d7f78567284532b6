"""The examples run as their page says, and continue when they are run again."""

import pathlib
import re
import sys

import pytest
import yaml

import elastic_ckpt as ec
from tests import pages, shared_memory
from tests.deploy import fake_slurm, job_script

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


def run(program, *arguments, devices=4, cwd=EXAMPLES):
    path = EXAMPLES / program
    return pages.run_file(path, *arguments, directory=cwd, devices=devices)


def losses(printed):
    return [float(loss) for loss in re.findall(r"loss ([0-9.]+)", printed)]


@pytest.mark.slow
def test_a_model_of_nnx_continues_on_other_devices_and_is_evaluated(tmp_path):
    first = run("flax_nnx.py", tmp_path, "--steps", 20)
    second = run("flax_nnx.py", tmp_path, "--steps", 40, devices=2)
    assert "continues from step 20" in second
    trained = losses(first) + losses(second)
    assert len(trained) == 4
    assert sorted(trained, reverse=True) == trained
    evaluated = run("evaluator.py", tmp_path, "--once", devices=1)
    steps = re.findall(r"^([0-9]+): ", evaluated, re.MULTILINE)
    assert steps == ["10", "20", "30", "40"]
    assert "best step: 40" in evaluated


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("equinox_model.py", marks=pytest.mark.night),
        pytest.param("linen_optax.py", marks=pytest.mark.slow),
    ],
)
def test_a_model_that_continues_elsewhere_trains_as_one_that_never_stopped(
    tmp_path, program
):
    first = run(program, tmp_path / "stopped", "--steps", 20)
    second = run(program, tmp_path / "stopped", "--steps", 40, devices=2)
    assert "continues from step 20" in second
    at_once = losses(run(program, tmp_path / "at_once", "--steps", 40))
    assert len(at_once) == 4
    # They are printed with three decimals.
    assert losses(first) + losses(second) == pytest.approx(at_once, abs=2e-3)
    assert at_once[-1] < at_once[0]


@pytest.mark.night
def test_a_loop_of_two_nodes_that_slurm_ends_continues_from_their_ram(tmp_path, corpus):
    """The script asks for GPUs; here its tasks have a CPU each."""
    program = [sys.executable, str(EXAMPLES / "cluster.py"), corpus, f"{tmp_path}/c"]
    chosen = {"is_elastic": False, "devices": 1, "setup": "export JAX_PLATFORMS=cpu"}
    with shared_memory.directory("slurm") as ram:
        text = job_script.text(ram=ram, program=program, **chosen)
        with fake_slurm.start(text, tmp_path) as job:
            lines = iter(job.stdout.readline, "")
            printed = list(until(lines, "step 10: loss"))
            fake_slurm.stop_steps(job)
            printed += list(lines)
        assert job.returncode == 143, printed
        assert fake_slurm.requeued(tmp_path) == 1
        last = int(re.findall(r"^step ([0-9]+):", "".join(printed), re.MULTILINE)[-1])
        program += ["--steps", str(last + 5)]
        text = job_script.text(ram=ram, program=program, **chosen)
        job = fake_slurm.start(text, tmp_path, starts=1)
        again, _ = job.communicate()
        assert job.returncode == 0, again
        # Two tasks may write into one line.
        told = r"host (\d) continues from step (\d+?)(?=host|\n)"
        continued = set(re.findall(told, again))
        assert continued == {("0", str(last)), ("1", str(last))}, (printed, again)
        assert f"step {last + 5}: loss" in again


def until(lines, wanted):
    """The lines up to the first with `wanted`; an error if there is none."""
    seen = []
    for line in lines:
        seen.append(line)
        if wanted in line:
            return seen
    raise AssertionError("".join(seen))


def test_the_run_of_maxtext_is_that_of_its_guide():
    """The tests of the guide run it."""
    guide = EXAMPLES.parent / "docs/pages/guides/maxtext.md"
    shown = yaml.safe_load(pages.blocks(guide.read_text(), "yaml")[0])
    assert yaml.safe_load((EXAMPLES / "maxtext.yml").read_text()) == shown


@pytest.mark.slow
def test_plain_jax_continues_on_a_mesh_of_another_shape(tmp_path):
    first = run("plain_jax.py", tmp_path, "--mesh", 4, 2, devices=8)
    second = run("plain_jax.py", tmp_path, "--mesh", 2, 2, "--steps", 40)
    assert "continues from step 20 on a mesh of 2 x 2" in second
    trained = losses(first) + losses(second)
    assert len(trained) == 4
    assert sorted(trained, reverse=True) == trained


@pytest.mark.slow
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
    assert re.search("restored step (5|10):", printed)
    assert "step 40 |" in printed or "step 40/" in printed
    tiers = [ec.Persistent(tmp_path / "run/checkpoints")]
    with ec.Checkpointer(tiers, read_only=True) as stored:
        assert stored.latest.step == 40


def test_the_page_lists_every_example():
    listed = re.findall(r"\]\((\w+\.\w+)\)", (EXAMPLES / "README.md").read_text())
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()}
    assert sorted(listed) == sorted(files - {"README.md"})
