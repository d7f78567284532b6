"""A training run whose hosts come and go, and die, with checkpoints in their RAM."""

import json
import os
import shutil
import signal
import time

import pytest

from tests import runs, shared_memory


@pytest.fixture
def ram():
    with shared_memory.directory("train") as directory:
        yield directory


@pytest.fixture
def config(tmp_path, corpus, ram):
    return runs.write_config(
        tmp_path,
        corpus,
        slices=2,
        grain_use_elastic_iterator=True,
        enable_multi_tier_checkpointing=True,
        local_checkpoint_directory=ram,
        local_checkpoint_period=2,
        multi_tier_checkpointing_backup_interval_steps=10,
    )


def events(run, name):
    lines = (run / "events.jsonl").read_text().splitlines()
    return [each for each in map(json.loads, lines) if each["event"] == name]


def train(config, *settings):
    ended = runs.cli("train", config, *settings)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_a_run_whose_ram_is_too_small_is_stored_all_the_same(config, tmp_path):
    train(config, "hosts=2", "steps=12", "local_checkpoint_size_limit=1K")
    run = tmp_path / "tiny"
    assert [each["step"] for each in events(run, "backed_up")] == [10, 12]
    assert "PASSED" in runs.verb("audit", run)
    shutil.rmtree(run / "checkpoints")
    assert "checkpoint 12 was due in storage" in runs.verb("audit", run, code=1)


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_from_what_its_processes_left_in_ram(
    config, tmp_path
):
    run = tmp_path / "tiny"
    for hosts in (4, 2, 4):
        started = runs.Started(
            *("train", config, f"hosts={hosts}", "steps=1000000"),
            output=tmp_path / "output.txt",
            leads_group=True,
        )
        before = 0
        if (run / "events.jsonl").exists():
            before = len(events(run, "saved"))
        deadline = time.monotonic() + 1800
        while not run.exists() or not (run / "events.jsonl").exists():
            time.sleep(0.05)
        while len(events(run, "saved")) < before + 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        newest = max(each["step"] for each in events(run, "saved"))
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
        saved = max(each["step"] for each in events(run, "saved"))
        assert saved >= newest
    train(config, "hosts=2", f"steps={saved + 4}")
    assert events(run, "restored_from")[-1]["step"] >= saved
    assert "PASSED" in runs.verb("audit", run)
