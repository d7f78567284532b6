"""A run and another of its name: neither takes what the other one has in RAM."""

import os
import shutil

import pytest

from tests import runs, shared_memory


@pytest.fixture
def ram():
    with shared_memory.directory("name") as directory:
        yield directory


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
