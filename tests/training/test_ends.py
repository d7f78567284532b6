"""How runs end: with their data, an error, a taken name, a directory that is gone."""

import shutil

import pytest

from elastic_ckpt.core import errors, metrics
from elastic_ckpt.inspect import run_files
from elastic_ckpt.tiers.ram import ram_disk
from tests import jobs, runs, shared_memory
from tests.processes.callbacks import Stateless
from tests.recorded_events import RecordedEvents


@pytest.fixture
def ram():
    with shared_memory.directory("ends") as directory:
        yield directory


def in_tiers(ram, period):
    return {
        "enable_multi_tier_checkpointing": True,
        "local_checkpoint_directory": ram,
        "local_checkpoint_period": period,
        "multi_tier_checkpointing_backup_interval_steps": 2 * period,
    }


@pytest.mark.slow
def test_last_step_before_the_end_of_the_data_is_in_every_tier(tmp_path, corpus, ram):
    config = jobs.configured(
        tmp_path,
        corpus,
        num_logical_shards=8,
        num_epoch=1,
        steps=1000,
        # RAM lacks the step after which the data ends.
        **in_tiers(ram, 1000),
    )
    recorded = RecordedEvents()
    ended = jobs.trained(jobs.assembled(config, emit=recorded))
    (end,) = recorded.named("data_ended")
    assert end["step"] == ended.step
    assert 1 < ended.step < 1000
    assert runs.saved_steps(tmp_path / "tiny") == [ended.step]
    disk = ram_disk.RamDisk(f"{ram}/tiny", run="tiny")
    assert {step for step, _ in disk.known_saves()} == {ended.step}
    assert "PASSED" in runs.verb("audit", tmp_path / "tiny")


class Failing(Stateless):
    """A callback that fails right after a save was begun, at the step after it."""

    def after_step(self, step, report):
        del report
        if step == 5:
            raise ZeroDivisionError("of the callback")


def callbacks(config):
    del config
    return {"failing": Failing()}


@pytest.mark.slow
def test_run_of_one_process_that_fails_has_its_last_due_step(tmp_path, corpus):
    config = runs.write_config(tmp_path, corpus, steps=8, checkpoint_period=4)
    ended = runs.cli("train", config, f"training_callbacks={__name__}:callbacks")
    assert ended.returncode == 1, ended.stdout
    assert "ZeroDivisionError: of the callback" in ended.stderr
    assert runs.saved_steps(tmp_path / "tiny") == [4]
    (lines,) = run_files.read_metrics(tmp_path / "tiny" / "metrics").values()
    assert metrics.FAILURES.name in [line["metric"] for line in lines]
    ended = runs.cli("train", config)
    assert ended.returncode == 0, ended.stderr
    assert "from step 4 to step 8" in ended.stdout
    assert "PASSED" in runs.verb("audit", tmp_path / "tiny")


@pytest.mark.slow
def test_run_does_not_begin_with_the_steps_of_another_one(tmp_path, corpus, ram):
    def job(directory, **settings):
        settings = {**in_tiers(ram, 2), "steps": 4, **settings}
        return jobs.assembled(jobs.configured(tmp_path / directory, corpus, **settings))

    jobs.trained(job("one"))
    (tmp_path / "one" / "tiny").rename(tmp_path / "one" / "moved")
    named = "moved/checkpoints contains the steps of another run, 'tiny'"
    with pytest.raises(errors.ElasticCkptError, match=named):
        job("one", run_name="moved", local_checkpoint_directory=f"{ram}/2")
    (tmp_path / "one" / "moved").rename(tmp_path / "one" / "tiny")
    with pytest.raises(errors.ElasticCkptError) as refused:
        job("other")
    for says in (
        f"{ram}/tiny has steps of a run that had persistent storage",
        "choose a different run_name",
        f"rm -r {ram}/tiny",
    ):
        assert says in str(refused.value)
    # The remedy.
    shutil.rmtree(f"{ram}/tiny")
    for directory, start_step in (("other", 0), ("one", 4)):
        begun = job(directory, local_checkpoint_directory=f"{ram}/{directory}")
        assert begun.start_step == start_step
        jobs.begun(begun)
