"""A live run loses slices with their memory, and takes them in again, by itself."""

import json
import os
import re
import signal

import numpy as np
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.training import configured as configured_values
from elastic_ckpt.training import load, step_log
from tests import runs, shared_memory
from tests.multiprocess import test_stopped_run

# Float32 sums over another number of devices, in another order.
LOSS_RTOL = 1e-5


@pytest.fixture
def ram():
    with shared_memory.directory("elastic") as directory:
        yield directory


def configured(directory, corpus, ram, **settings):
    directory.mkdir(exist_ok=True)
    values = {
        "hosts": 4,
        "slices": 4,
        # Many more than hosts train until they have agreed on a step to leave after.
        "steps": 300,
        "global_batch_size": 24,
        "elastic_enabled": True,
        "elastic_min_slice_count": 2,
        "elastic_settle_seconds": 0,
        "enable_multi_tier_checkpointing": True,
        "local_checkpoint_directory": ram,
        "local_checkpoint_period": 5,
        "multi_tier_checkpointing_backup_interval_steps": 100,
        **settings,
    }
    return runs.write_config(directory, corpus, **values)


def anew(directory):
    """Settings of a run whose executables are counted: only compiled ones are kept."""
    return {"jax_cache_dir": str(directory / "jax_cache")}


def trained(config, *settings):
    ended = runs.cli("train", config, *settings)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return config.parent / "tiny"


def trained_until(config, shown, *settings):
    """Trains until a step after a line that contains `shown`; then SIGTERM."""
    output, is_shown = "", False
    with test_stopped_run.start(config, *settings) as started:
        for line in started.stdout:
            output += line
            if is_shown and line.startswith("step "):
                started.terminate()
                is_shown = False
            is_shown |= shown in line
    assert started.returncode == 128 + signal.SIGTERM, output
    return config.parent / "tiny"


def worlds(run):
    return [each["slices"] for each in runs.events(run, "world_started")]


def names(run):
    lines = (run / "events.jsonl").read_text().splitlines()
    return [json.loads(line)["event"] for line in lines]


def losses(run):
    return np.array([record.loss for record in runs.steps(run)])


@pytest.mark.slow
def test_a_run_loses_slices_with_their_memory_and_gets_them_back(tmp_path, corpus, ram):
    # That of process 0, too.
    lost = [0, 2]
    faults = [
        {kind: number, "at_step": step}
        for kind, step in (("kill_slice", 12), ("return_slice", 20))
        for number in lost
    ]
    config = configured(
        *(tmp_path / "faults", corpus, ram),
        faults=faults,
        learning_rate=1e-4,
        elastic_compile_ahead_seconds=0,
        **anew(tmp_path),
    )
    run = trained_until(config, "starts on slices 0, 1, 2, 3")
    every, others = [0, 1, 2, 3], sorted({0, 1, 2, 3} - set(lost))
    # Slices come back in one change, or each when its check has ended.
    changes = worlds(run)
    assert changes[:2] == [every, others]
    assert changes.index(every, 1) == len(changes) - 1 <= 1 + len(lost)
    assert [each["slice"] for each in runs.events(run, "slice_lost")] == lost
    assert names(run)[-1] == "run_stopped"
    # A planned change loses no step.
    starts = [attempt.start_step for attempt in step_log.read(run)]
    # One that is left before it trains has no steps, and is where the one before was.
    left = [each["step"] for each in runs.events(run, "world_left")]
    assert starts[2:] == sorted({*left})
    assert "PASSED" in runs.verb("audit", run)
    # The second world of four slices loads what the first one has compiled.
    *compiled, last = [
        name for name in names(run) if name in ("compiled", "executable_loaded")
    ]
    assert last == "executable_loaded"
    # A world between them that is left before its first step compiles nothing.
    assert compiled in [["compiled"] * count for count in range(2, len(changes))]
    other = os.path.join(ram, "other")
    undisturbed = trained(
        configured(
            *(tmp_path / "calm", corpus, other),
            learning_rate=1e-4,
            steps=len(losses(run)),
        )
    )
    np.testing.assert_allclose(losses(run), losses(undisturbed), rtol=LOSS_RTOL)


@pytest.mark.slow
def test_a_host_is_lost_in_each_phase_of_a_recovery(tmp_path, corpus, ram):
    phases = ["start", "prepare", "restore", "compile", "step", "save"]
    # The hosts of world n+2 die in the n-th of these phases, in turn.
    faults = [{"kill_host": 1, "at_step": 12}] + [
        {"kill_host": number % 2, "in_phase": phase, "in_world": number + 2}
        for number, phase in enumerate(phases)
    ]
    faults.append({"hang_host": 1, "in_phase": "restore", "in_world": 8})
    config = configured(
        *(tmp_path, corpus, ram),
        hosts=2,
        slices=2,
        elastic_min_slice_count=2,
        elastic_heartbeat_timeout_seconds=20,
        elastic_quarantine_failures=0,
        faults=faults,
    )
    run = trained_until(config, "world 9 starts")
    assert worlds(run) == [[0, 1]] * 9
    lost = [each["slice"] for each in runs.events(run, "slice_lost")]
    assert lost == [1, 0, 1, 0, 1, 0, 1, 1]
    # It may have begun the next phase before the signal arrived.
    why = runs.events(run, "slice_lost")[-1]["why"]
    assert re.search(r"no heartbeat for \d+ s, in \['(restore|compile|step)'\]", why)
    # All of it was in RAM, whichever process was killed.
    restored = runs.events(run, "restored_from")
    assert {each["persistent_bytes"] for each in restored} == {0}
    assert names(run)[-1] == "run_stopped"
    (stopped,) = runs.events(run, "run_stopped")
    audit = runs.verb("audit", run)
    assert f"{stopped['step']} steps took" in audit
    assert "PASSED" in audit
    assert "PASSED" in runs.verb("verify", run)
    # The memory of all slices is there after the end.
    assert re.search(r"(?m)^in RAM +step \d+", runs.verb("status", run))


@pytest.mark.slow
def test_a_host_that_is_stopped_is_found_and_its_slice_left_out(tmp_path, corpus, ram):
    faults = [{"hang_host": 2, "at_step": 12}]
    settings = {"slices": 4, "faults": faults, "elastic_settle_seconds": 3600}
    config = configured(
        tmp_path,
        corpus,
        ram,
        elastic_heartbeat_timeout_seconds=20,
        **settings,
    )
    run = trained_until(config, "world 2 starts")
    assert worlds(run) == [[0, 1, 2, 3], [0, 1, 3]]
    (lost,) = runs.events(run, "slice_lost")
    assert lost["slice"] == 2
    assert "no heartbeat for" in lost["why"]
    assert "PASSED" in runs.verb("audit", run)
    # The log of each host has the stacks of its threads.
    logs = sorted((run / "logs").iterdir())[0]
    for host in range(4):
        assert "Thread 0x" in (logs / f"host-{host}.log").read_text()


@pytest.mark.slow
def test_a_slice_that_is_cut_off_is_left_out_until_it_is_back(tmp_path, corpus, ram):
    faults = [{"cut_off": 1, "at_step": 12}, {"return_slice": 1, "at_step": 60}]
    config = configured(tmp_path, corpus, ram, hosts=3, slices=3, faults=faults)
    run = trained_until(config, "world 3 starts")
    assert worlds(run) == [[0, 1, 2], [0, 2], [0, 1, 2]]
    assert [each["slice"] for each in runs.events(run, "slice_lost")] == [1]
    restored = runs.events(run, "restored_from")
    assert {each["persistent_bytes"] for each in restored} == {0}
    assert "PASSED" in runs.verb("audit", run)


@pytest.mark.slow
def test_a_run_that_is_not_elastic_ends_with_its_first_host(tmp_path, corpus, ram):
    faults = [{"kill_host": 1, "at_step": 3}]
    settings = {"hosts": 2, "slices": 2, "faults": faults, "elastic_enabled": False}
    config = configured(tmp_path, corpus, ram, steps=1_000_000, **settings)
    ended = runs.cli("train", config)
    assert ended.returncode == 1
    assert "host 1 failed: killed by SIGKILL" in ended.stderr
    assert names(tmp_path / "tiny")[-1] == "run_failed"


def test_settings_that_cannot_work_are_refused_before_the_start(tmp_path, corpus):
    for settings, message in (
        ({"slices": 4, "hosts": 2}, "a slice must consist of whole hosts"),
        ({"elastic_min_slice_count": 5}, "is more than slices=4; lower it"),
        ({"faults": [{"burn": 1}]}, "is not a fault; give one of"),
    ):
        config = configured(tmp_path, corpus, "/nowhere", **settings)
        with pytest.raises(errors.ConfigError, match=re.escape(message)):
            configured_values.check_local(load.load(config))
