"""A run whose data ends before its steps: its last step is in every tier."""

import pytest

from elastic_ckpt.tiers.ram import ram_disk
from tests import runs, shared_memory


@pytest.fixture
def ram():
    with shared_memory.directory("end") as directory:
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
