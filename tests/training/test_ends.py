"""How runs end: with their data, or with an error."""

import pytest

from elastic_ckpt.core import errors, metrics
from elastic_ckpt.inspect import run_files
from elastic_ckpt.tiers.ram import ram_disk
from tests import jobs, runs
from tests.processes.callbacks import Stateless
from tests.recorded_events import RecordedEvents


@pytest.mark.slow
def test_last_step_before_the_end_of_the_data_is_in_every_tier(tmp_path, corpus):
    ram = tmp_path / "ram"
    config = jobs.configured(
        tmp_path,
        corpus,
        num_logical_shards=8,
        num_epoch=1,
        steps=1000,
        enable_multi_tier_checkpointing=True,
        local_checkpoint_directory=str(ram),
        # RAM lacks the step after which the data ends.
        local_checkpoint_period=1000,
        multi_tier_checkpointing_backup_interval_steps=1000,
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
    # Another run does not begin with its steps.
    (tmp_path / "tiny").rename(tmp_path / "moved")
    with pytest.raises(errors.RunError, match="the steps of another run, 'tiny'"):
        jobs.assembled(jobs.configured(tmp_path, corpus, run_name="moved"))


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
