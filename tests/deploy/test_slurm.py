"""The batch script for Slurm, run with an `srun` of ours."""

import dataclasses
import os
import pathlib
import re
import signal
import time

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.training import configured, launch, load, step_log
from tests import runs, shared_memory
from tests.deploy import fake_slurm, job_script, overlays


@pytest.fixture
def ram():
    """The RAM disk of all nodes."""
    with shared_memory.directory("slurm") as directory:
        yield pathlib.Path(directory)


@pytest.fixture
def start(tmp_path, ram):
    """Starts the script: two hosts on two nodes, each with a device."""

    def started(shell=None, *, starts=0, is_elastic=False, **chosen):
        program = None if shell is None else ["sh", "-c", shell]
        values = {"devices": 1, "max_restarts": 1, "setup": "", **chosen}
        text = job_script.text(
            ram=ram, program=program, is_elastic=is_elastic, **values
        )
        return fake_slurm.start(text, tmp_path, starts=starts)

    return started


def ended(job):
    output, _ = job.communicate()
    return job.returncode, output


def test_each_task_finds_its_place_its_devices_and_its_failure_domain(
    start, tmp_path, ram
):
    report = (
        'echo "$SLURM_PROCID $JAX_LOCAL_DEVICE_IDS $ELASTIC_CKPT_DOMAINS $A'
        ' $(dirname "$ELASTIC_CKPT_LOCAL")" >> report'
        ' && test -d "$(dirname "$ELASTIC_CKPT_LOCAL")"'
    )
    setup = f"cd {tmp_path}; export A='b  c'"
    assert ended(start(report, tasks=2, devices=2, setup=setup)) == (0, "")
    directory = ram / f"first-{fake_slurm.JOB_ID}"
    lines = sorted((tmp_path / "report").read_text().splitlines())
    assert lines == [
        f"{n} {'0,1' if n % 2 == 0 else '2,3'} switch=top.leaf{n // 2} b  c {directory}"
        for n in range(4)
    ]
    # A run that has ended leaves nothing in RAM.
    assert not [*ram.iterdir()]


def test_each_task_of_a_node_serves_its_metrics_at_a_port_of_its_own(start, tmp_path):
    script = (overlays.DEPLOY / "slurm/job.sh").read_text()
    (setup,) = re.findall(r"add '(set -- .*)' to setup", script)
    # What follows the command of `sh -c` is its name.
    program = f"echo $0 >> {tmp_path}/ports"
    assert ended(start(program, tasks=2, setup=setup))[0] == 0
    ports = sorted((tmp_path / "ports").read_text().splitlines())
    assert ports == [f"prometheus_port={port}" for port in (9400, 9400, 9401, 9401)]


@pytest.mark.parametrize(
    ("code", "times"), [(errors.CONFIG_EXIT_CODE, 0), (143, 3), (1, 1)]
)
def test_a_job_is_requeued_if_another_start_can_help(start, tmp_path, ram, code, times):
    for number in range(3):
        requeued = fake_slurm.requeued(tmp_path)
        assert ended(start(f"exit {code}", starts=number))[0] == code
        if fake_slurm.requeued(tmp_path) == requeued:
            break
    # Failures are counted (max_restarts=1), ends at the time limit are not.
    assert fake_slurm.requeued(tmp_path) == times
    # The next start finds the memory of the one before.
    has_next = fake_slurm.requeued(tmp_path) > requeued
    assert len([*ram.iterdir()]) == has_next


def test_steps_in_ram_outlive_the_last_failure(start, tmp_path, ram):
    """The error of a run that fails says to start it again while RAM has the step."""
    file = '"$ELASTIC_CKPT_LOCAL/hosts/0/1-0/manifest-0.json"'
    write = f'mkdir -p "$(dirname {file})" && touch {file}; exit 1'
    for number in range(2):
        code, output = ended(start(write, starts=number))
        assert code == 1
    assert fake_slurm.requeued(tmp_path) == 1
    directory = ram / f"first-{fake_slurm.JOB_ID}"
    assert f"{directory}, the steps in RAM" in output
    assert f"scontrol requeue {fake_slurm.JOB_ID}" in output
    # Such a start has as many tries as the first one, and finds the steps.
    assert ended(start(write, starts=2))[0] == 1
    assert fake_slurm.requeued(tmp_path) == 2
    assert ended(start(f"test -e {file}", starts=3)) == (0, "")
    assert not [*ram.iterdir()]


def test_a_ram_directory_of_another_user_is_refused(start, tmp_path, ram):
    place = ram / f"first-{fake_slurm.JOB_ID}"
    # Nobody, or what a link of anybody leads to.
    if os.geteuid() == 0:
        place.mkdir()
        os.chown(place, 65534, 65534)
    else:
        place.symlink_to("/usr")
    before = set(place.iterdir())
    code, output = ended(start("exit 0"))
    assert code == 1
    assert f"{place} on " in output
    assert "set ram_disk to another RAM disk" in output
    assert set(place.iterdir()) == before
    assert not fake_slurm.requeued(tmp_path)


def test_the_run_that_ships_is_one_for_the_nodes_of_the_script():
    config = load.load(overlays.DEPLOY / "slurm/run.yml")
    script = (overlays.DEPLOY / "slurm/job.sh").read_text()
    nodes = int(fake_slurm.options(script)["nodes"])
    configured.check_keys(config)
    configured.check_slices(config)
    for number in range(nodes):
        given = dataclasses.replace(config.elastic, elastic_machines=nodes)
        of_node = dataclasses.replace(config, elastic=given)
        place = launch.place(of_node, {"SLURM_NODEID": str(number)})
        assert place.slices == range(number, number + 1)
    grace_secs = config.run.termination_grace_period_seconds
    assert fake_slurm.options(script)["signal"] == f"TERM@{grace_secs}"


def write_run(directory, corpus, **settings):
    """Writes `run.yml` beside the script."""
    path = runs.write_config(
        directory,
        corpus,
        hosts=2,
        slices=2,
        termination_grace_period_seconds=600,
        **settings,
    )
    path.rename(directory / "run.yml")


@pytest.mark.slow
def test_a_job_at_its_time_limit_saves_and_continues_when_it_is_requeued(
    start, tmp_path, corpus, ram
):
    """Two hosts, on two nodes: the second start reads what the first left in RAM."""
    settings = {
        "enable_multi_tier_checkpointing": True,
        "local_checkpoint_period": 2,
        "multi_tier_checkpointing_backup_interval_steps": 1_000,
    }
    write_run(tmp_path, corpus, steps=1_000_000, **settings)
    job = start()
    run = tmp_path / "tiny"
    _await(job, lambda: "run_started" in _events(run))
    fake_slurm.stop_steps(job)
    code, output = ended(job)
    assert code == 128 + signal.SIGTERM, output
    assert fake_slurm.requeued(tmp_path) == 1
    (stopped,) = runs.events(run, "run_stopped")
    write_run(tmp_path, corpus, steps=stopped["step"] + 2, **settings)
    code, output = ended(start(starts=1))
    assert code == 0, output
    (restored,) = runs.events(run, "restored_from")
    assert restored["step"] == stopped["step"]
    assert restored["local_bytes"] > 0
    assert restored["persistent_bytes"] == 0
    runs.verb("audit", run)
    assert not [*ram.iterdir()]


@pytest.mark.night
def test_an_elastic_job_goes_on_without_a_node_that_is_lost(start, tmp_path, corpus):
    write_run(
        tmp_path,
        corpus,
        steps=1_000_000,
        elastic_enabled=True,
        elastic_min_slice_count=1,
        elastic_machine_timeout_seconds=120,
    )
    job = start(is_elastic=True)
    run = tmp_path / "tiny"
    _await(job, lambda: _worlds(run) and _steps(run))
    fake_slurm.lose_node(tmp_path, 1)
    _await(job, lambda: len(_worlds(run)) > 1 and _steps(run))
    assert _worlds(run)[:2] == [[0, 1], [0]]
    fake_slurm.stop_steps(job)
    code, output = ended(job)
    # The highest of the statuses of all tasks counts; that of the lost one is lower.
    assert code == 128 + signal.SIGTERM, output
    assert fake_slurm.requeued(tmp_path) == 1
    runs.verb("audit", run)


@pytest.mark.slow
def test_an_elastic_job_at_its_time_limit_stores_its_last_step(
    start, tmp_path, corpus, ram
):
    settings = {
        "enable_multi_tier_checkpointing": True,
        "local_checkpoint_period": 2,
        "peer_copies": 1,
        "multi_tier_checkpointing_backup_interval_steps": 1_000,
        "elastic_enabled": True,
    }
    write_run(tmp_path, corpus, steps=1_000_000, **settings)
    job = start(is_elastic=True)
    run = tmp_path / "tiny"
    _await(job, lambda: _worlds(run) and _steps(run))
    fake_slurm.stop_steps(job)
    code, output = ended(job)
    assert code == 128 + signal.SIGTERM, output
    (stopped,) = runs.events(run, "run_stopped")
    assert stopped["saved"], output
    # The nodes may be those of the next start, too.
    held = ram.glob("*/steps/slice-*/*/hosts/*/*/manifest-*")
    assert {path.relative_to(ram).parts[2] for path in held} == {"slice-0", "slice-1"}


def test_a_job_that_is_cancelled_says_what_is_left_in_ram(start, tmp_path, ram):
    job = start(f"trap 'exit 143' TERM; touch {tmp_path}/begun; sleep 600 & wait")
    _await(job, (tmp_path / "begun").exists)
    fake_slurm.cancel(job, tmp_path)
    code, output = ended(job)
    assert code == 143
    assert f"rm -rf {ram}/first-{fake_slurm.JOB_ID}" in output
    assert not fake_slurm.requeued(tmp_path)
    assert not [*ram.iterdir()]


def test_a_job_that_has_lost_a_node_cleans_the_others(start, tmp_path, ram):
    lose = f"touch {tmp_path}/lost-1; exit 0"
    code, output = ended(start(lose, is_elastic=True))
    assert code == 0, output
    assert not [*ram.iterdir()]


def _await(job, is_so):
    while not is_so():
        assert job.poll() is None, ended(job)
        time.sleep(0.2)


def _worlds(run):
    if not _events(run):
        return []
    return [event["slices"] for event in runs.events(run, "world_started")]


def _steps(run):
    """The steps that the newest world has logged."""
    logs = list((run / step_log.DIRECTORY).glob("*.jsonl"))
    newest = step_log.read(run)[-1] if logs else None
    is_newest = newest is not None and newest.hosts == len(_worlds(run)[-1])
    return newest.records if is_newest else []


def _events(run):
    path = run / "events.jsonl"
    return path.read_text() if path.exists() else ""
