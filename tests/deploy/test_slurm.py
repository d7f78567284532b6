"""The batch script for Slurm, run with an `srun` of ours."""

import json
import os
import pathlib
import signal
import time

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.deploy import slurm
from elastic_ckpt.training import load, step_log
from tests import runs, shared_memory
from tests.deploy import fake_slurm


def script(path, *overrides, **settings):
    overrides = [*overrides, *(f"{key}={value}" for key, value in settings.items())]
    return slurm.script(load.load(path, overrides))


@pytest.fixture
def ram():
    """The RAM disk of all nodes."""
    with shared_memory.directory("slurm") as directory:
        yield pathlib.Path(directory)


@pytest.fixture
def settings(tmp_path, ram):
    """Those of two hosts on two nodes."""
    return {
        "run_name": "tiny",
        "base_output_directory": str(tmp_path),
        "hosts": 2,
        "slices": 2,
        "slurm_ram_directory": str(ram),
        "max_restarts": 1,
    }


@pytest.fixture
def config(tmp_path, settings):
    path = tmp_path / "config.yml"
    path.write_text(json.dumps(settings | {"grain_train_files": "texts"}))
    return path


def ended(job):
    output, _ = job.communicate()
    return job.returncode, output


def shell(text):
    return "command=" + json.dumps(["sh", "-c", text])


def test_each_task_finds_its_files_its_devices_and_its_failure_domain(
    config, tmp_path, ram
):
    report = (
        'echo "$SLURM_PROCID $JAX_LOCAL_DEVICE_IDS $ELASTIC_CKPT_DOMAINS $A'
        ' $(grep run_name "$ELASTIC_CKPT_CONFIG") $(dirname "$ELASTIC_CKPT_LOCAL")"'
        f' >> {tmp_path}/report; test -d "$(dirname "$ELASTIC_CKPT_LOCAL")"'
    )
    settings = ["hosts=4", "slurm_tasks_per_node=2", "devices_per_host=2"]
    text = script(
        config, shell(report), *settings, "pod_env={A: 'b  c'}", "slurm_setup=cd /"
    )
    assert ended(fake_slurm.start(text, tmp_path)) == (0, "")
    directory = ram / f"tiny-{fake_slurm.JOB_ID}"
    lines = sorted((tmp_path / "report").read_text().splitlines())
    assert lines == [
        f"{n} {'0,1' if n % 2 == 0 else '2,3'} switch=top.leaf{n // 2} b  c"
        f" run_name: tiny {directory}"
        for n in range(4)
    ]
    # A run that has ended leaves nothing in RAM.
    assert not [*ram.iterdir()]


def test_each_task_of_a_node_serves_its_metrics_at_a_port_of_its_own(config, tmp_path):
    program = tmp_path / "bin" / "elastic-ckpt"
    program.parent.mkdir()
    program.write_text(
        f"#!/bin/sh\nfor last; do :; done; echo $last >> {tmp_path}/ports"
    )
    program.chmod(0o755)
    settings = ["hosts=4", "slurm_tasks_per_node=2", "prometheus_port=9400"]
    setup = f"slurm_setup=PATH={program.parent}:$PATH"
    assert ended(fake_slurm.start(script(config, *settings, setup), tmp_path))[0] == 0
    ports = sorted((tmp_path / "ports").read_text().splitlines())
    assert ports == [f"prometheus_port={port}" for port in (9400, 9400, 9401, 9401)]


@pytest.mark.parametrize(
    ("code", "times"), [(errors.CONFIG_EXIT_CODE, 0), (143, 3), (1, 1)]
)
def test_a_job_is_requeued_if_another_start_can_help(
    config, tmp_path, ram, code, times
):
    text = script(config, shell(f"exit {code}"))
    for start in range(3):
        requeued = fake_slurm.requeued(tmp_path)
        assert ended(fake_slurm.start(text, tmp_path, starts=start))[0] == code
        if fake_slurm.requeued(tmp_path) == requeued:
            break
    # Failures are counted (max_restarts=1), ends at the time limit are not.
    assert fake_slurm.requeued(tmp_path) == times
    # The next start finds the memory of the one before.
    has_next = fake_slurm.requeued(tmp_path) > requeued
    assert len([*ram.iterdir()]) == has_next


def test_steps_in_ram_outlive_the_last_failure(config, tmp_path, ram):
    """The error of a run that fails says to start it again while RAM has the step."""
    file = '"$ELASTIC_CKPT_LOCAL/hosts/0/1-0/manifest-0.json"'
    write = f'mkdir -p "$(dirname {file})" && touch {file}; exit 1'
    text = script(config, shell(write))
    for start in range(2):
        code, output = ended(fake_slurm.start(text, tmp_path, starts=start))
        assert code == 1
    assert fake_slurm.requeued(tmp_path) == 1
    directory = ram / f"tiny-{fake_slurm.JOB_ID}"
    assert f"{directory}, the steps in RAM" in output
    assert f"scontrol requeue {fake_slurm.JOB_ID}" in output
    # Such a start has as many tries as the first one, and finds the steps.
    assert ended(fake_slurm.start(text, tmp_path, starts=2))[0] == 1
    assert fake_slurm.requeued(tmp_path) == 2
    found = script(config, shell(f"test -e {file}"))
    assert ended(fake_slurm.start(found, tmp_path, starts=3)) == (0, "")
    assert not [*ram.iterdir()]


def test_a_time_needs_no_quotes(config):
    settings = json.loads(config.read_text())
    given = "".join(f"{key}: {value}\n" for key, value in settings.items())
    for chosen_time in ("12:00:00", "12:30", "1-12:00:00", "'12:00:00'"):
        options = f"slurm_time: {chosen_time}\nslurm_options: {{begin: 16:00:00}}\n"
        config.write_text(given + options)
        chosen = fake_slurm.options(script(config))
        assert chosen["time"] == chosen_time.strip("'")
        assert chosen["begin"] == "16:00:00"
        overridden = fake_slurm.options(script(config, slurm_time=chosen_time))
        assert overridden["time"] == chosen["time"]


def test_a_ram_directory_of_another_user_is_refused(config, tmp_path, ram):
    place = ram / f"tiny-{fake_slurm.JOB_ID}"
    # Nobody, or what a link of anybody leads to.
    if os.geteuid() == 0:
        place.mkdir()
        os.chown(place, 65534, 65534)
    else:
        place.symlink_to("/usr")
    before = set(place.iterdir())
    code, output = ended(fake_slurm.start(script(config, shell("exit 0")), tmp_path))
    assert code == 1
    assert f"{place} on " in output
    assert "set slurm_ram_directory to another RAM disk" in output
    assert set(place.iterdir()) == before
    assert not fake_slurm.requeued(tmp_path)


@pytest.mark.slow
def test_a_job_at_its_time_limit_saves_and_continues_when_it_is_requeued(
    tmp_path, corpus, settings, ram
):
    """Two hosts, on two nodes: the second start reads what the first left in RAM."""
    config = runs.write_config(
        tmp_path,
        corpus,
        **settings,
        steps=1_000_000,
        enable_multi_tier_checkpointing=True,
        local_checkpoint_period=2,
        multi_tier_checkpointing_backup_interval_steps=1_000,
        termination_grace_period_seconds=600,
    )
    job = fake_slurm.start(script(config), tmp_path)
    run = tmp_path / "tiny"
    _await(job, lambda: "run_started" in _events(run))
    fake_slurm.signal_steps(job)
    code, output = ended(job)
    assert code == 128 + signal.SIGTERM, output
    assert fake_slurm.requeued(tmp_path) == 1
    (stopped,) = runs.events(run, "run_stopped")
    text = script(config, steps=stopped["step"] + 2)
    code, output = ended(fake_slurm.start(text, tmp_path, starts=1))
    assert code == 0, output
    (restored,) = runs.events(run, "restored_from")
    assert restored["step"] == stopped["step"]
    assert restored["local_bytes"] > 0
    assert restored["persistent_bytes"] == 0
    runs.verb("audit", run)
    assert not [*ram.iterdir()]


@pytest.mark.night
def test_an_elastic_job_goes_on_without_a_node_that_is_lost(tmp_path, corpus, settings):
    config = runs.write_config(
        tmp_path,
        corpus,
        **settings,
        elastic_enabled=True,
        elastic_min_slice_count=1,
        elastic_compile_ahead_seconds=0,
        elastic_machine_timeout_seconds=120,
        termination_grace_period_seconds=600,
    )
    job = fake_slurm.start(script(config, steps=1_000_000), tmp_path)
    run = tmp_path / "tiny"
    _await(job, lambda: _worlds(run) and _steps(run))
    fake_slurm.lose_node(tmp_path, 1)
    _await(job, lambda: len(_worlds(run)) > 1 and _steps(run))
    assert _worlds(run)[:2] == [[0, 1], [0]]
    fake_slurm.signal_steps(job)
    code, output = ended(job)
    # The highest of the statuses of all tasks counts; that of the lost one is lower.
    assert code == 128 + signal.SIGTERM, output
    assert fake_slurm.requeued(tmp_path) == 1
    runs.verb("audit", run)


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
