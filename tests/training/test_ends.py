"""How runs end: with their data, an error, a taken name, a directory that is gone."""

import fcntl
import os
import shutil

import jax.numpy as jnp
import pytest

import elastic_ckpt as ec
from elastic_ckpt.core import errors
from elastic_ckpt.tiers.ram import ram_disk
from tests import runs, shared_memory


@pytest.fixture
def ram():
    with shared_memory.directory("ends") as directory:
        yield directory


# The data ends after a step that RAM has, and after one that it lacks.
@pytest.mark.parametrize("period", [1, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_last_step_before_the_end_of_the_data_is_in_every_tier(
    tmp_path, corpus, ram, period
):
    config = runs.write_config(
        tmp_path,
        corpus,
        num_logical_shards=8,
        num_epoch=1,
        steps=1000,
        enable_multi_tier_checkpointing=True,
        local_checkpoint_directory=ram,
        local_checkpoint_period=period,
        multi_tier_checkpointing_backup_interval_steps=1000,
    )
    ended = runs.cli("train", config)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (end,) = runs.events(tmp_path / "tiny", "data_ended")
    last = end["step"]
    assert 1 < last < 1000
    assert runs.saved_steps(tmp_path / "tiny") == [last]
    disk = ram_disk.RamDisk(f"{ram}/tiny", run="tiny")
    assert {step for step, _ in disk.known_saves()} == {last}
    said = f"the data ended after step {last} of 1000, the last of the run"
    assert said in ended.stdout
    assert f"step {last} is done" in ended.stdout
    assert "PASSED" in runs.verb("audit", tmp_path / "tiny")


def test_an_elastic_run_without_checkpoints_is_refused(tmp_path, corpus):
    config = runs.write_config(tmp_path, corpus, slices=2, hosts=2)
    settings = "elastic_enabled=true", "enable_checkpointing=false"
    ended = runs.cli("train", config, *settings)
    assert ended.returncode == 78, ended.stderr
    assert "elastic_enabled=true with enable_checkpointing=false" in ended.stderr
    # Nor is there a manifest of it.
    ended = runs.cli("manifest", "configs/deploy/elastic_h100.yml", settings[1])
    assert ended.returncode == 1
    assert "elastic_enabled=true with enable_checkpointing=false" in ended.stderr
    assert not (tmp_path / "tiny").exists()


class Failing:
    """A callback that fails right after a save was begun, at the step after it."""

    def after_step(self, step, report):
        del report
        if step == 5:
            raise ZeroDivisionError("of the callback")

    def after_evaluation(self, step, loss):
        del step, loss

    def get_state(self):
        return None

    def set_state(self, state):
        del state


def callbacks(config):
    """The function of `training_callbacks`."""
    del config
    return {"failing": Failing()}


@pytest.mark.slow
def test_a_run_of_one_process_that_fails_has_its_last_due_step(tmp_path, corpus):
    config = runs.write_config(tmp_path, corpus, steps=8, checkpoint_period=4)
    ended = runs.cli("train", config, f"training_callbacks={__name__}:callbacks")
    assert ended.returncode == 1, ended.stdout
    assert "ZeroDivisionError: of the callback" in ended.stderr
    assert runs.saved_steps(tmp_path / "tiny") == [4]
    ended = runs.cli("train", config)
    assert ended.returncode == 0, ended.stderr
    assert "from step 4 to step 8" in ended.stdout
    assert "PASSED" in runs.verb("audit", tmp_path / "tiny")


def config(directory, corpus, ram, **settings):
    directory.mkdir()
    return runs.write_config(
        directory,
        corpus,
        enable_multi_tier_checkpointing=True,
        local_checkpoint_directory=ram,
        local_checkpoint_period=2,
        multi_tier_checkpointing_backup_interval_steps=4,
        steps=4,
        **settings,
    )


def train(*arguments, code=0):
    ended = runs.cli("train", *arguments)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stderr


@pytest.mark.slow
def test_a_directory_that_was_renamed_is_refused_and_under_its_old_name_continued(
    tmp_path, corpus
):
    written = runs.write_config(tmp_path, corpus, steps=4)
    train(written)
    (tmp_path / "tiny").rename(tmp_path / "moved")
    refused = train(written, "run_name=moved", "steps=8", code=1)
    assert "moved/checkpoints contains the steps of another run, 'tiny'" in refused
    (tmp_path / "moved").rename(tmp_path / "tiny")
    train(written, "steps=8")
    assert "PASSED" in runs.verb("audit", tmp_path / "tiny")


@pytest.mark.slow
def test_a_run_does_not_begin_with_the_weights_of_another_of_its_name(
    tmp_path, corpus, ram
):
    one = config(tmp_path / "one", corpus, ram)
    other = config(tmp_path / "other", corpus, ram)
    train(one)
    refused = train(other, code=1)
    assert f"{ram}/tiny holds step 4 of a run that was stored" in refused
    assert "choose another run_name" in refused
    assert f"rm -r {ram}/tiny" in refused
    # The remedies, in turn.
    train(other, "run_name=third")
    assert len(runs.steps(tmp_path / "other" / "third")) == 4
    shutil.rmtree(os.path.join(ram, "tiny"))
    train(other)
    assert len(runs.steps(tmp_path / "other" / "tiny")) == 4
    assert "PASSED" in runs.verb("audit", tmp_path / "other" / "tiny")


@pytest.mark.slow
@pytest.mark.parametrize("has_checkpoints", [True, False])
def test_a_run_whose_output_is_removed_ends_with_an_error(
    tmp_path, corpus, has_checkpoints
):
    config = runs.write_config(
        tmp_path,
        corpus,
        steps=10000 if has_checkpoints else 400,
        checkpoint_period=4,
        log_period=1,
        enable_checkpointing=has_checkpoints,
    )
    with runs.Started("train", config) as started:
        # It waits until its lines are read, long before its last step.
        fcntl.fcntl(started.stdout, fcntl.F_SETPIPE_SZ, 4096)
        said = []
        for line in started.stdout:
            said.append(line)
            if line.startswith("step 6"):
                shutil.rmtree(tmp_path / "tiny")
                break
        said += started.stdout
    output = "".join(said)
    assert started.returncode == 1, output
    assert f"{tmp_path}/tiny/" in output
    assert "was removed" in output
    # Nothing was written that looks like a run.
    assert not (tmp_path / "tiny" / "config.json").exists()
    assert not list((tmp_path / "tiny").glob("checkpoints/[0-9]*"))


@pytest.mark.parametrize("in_ram", [False, True])
def test_storage_that_is_removed_is_an_error_of_the_next_save(tmp_path, in_ram):
    steps = tmp_path / "steps"
    with shared_memory.directory("removed") as ram:
        tiers = [ec.Persistent(steps, every=1), *([ec.Local(ram)] if in_ram else [])]
        checkpointer = ec.Checkpointer(tiers, run="tiny")
        assert checkpointer.save(1, {"w": jnp.ones(4)})
        checkpointer.wait()
        shutil.rmtree(steps)

        def save(step):
            response = checkpointer.save_async(step, {"w": jnp.ones(4)})
            assert response.durable()

        with pytest.raises(errors.RunError, match=f"{steps} was removed"):
            save(2)
        with pytest.raises(errors.RunError, match="was removed"):
            checkpointer.save(3, {"w": jnp.ones(4)})
        with pytest.raises(errors.RunError, match="was removed"):
            checkpointer.close()
        assert not list(steps.glob("[0-9]*"))
