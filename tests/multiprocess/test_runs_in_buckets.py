"""Training runs whose directory is in a bucket: saved there, and continued."""

import os
import shutil

import pytest

from elastic_ckpt.core import storage
from tests import runs, shared_memory


@pytest.mark.slow(minutes=1.2)
def test_a_run_goes_on_from_its_bucket_on_other_hosts(bucket, tmp_path, corpus):
    with shared_memory.directory("buckets") as ram:
        config = runs.write_config(
            tmp_path,
            corpus,
            base_output_directory=bucket,
            grain_use_elastic_iterator=True,
            enable_multi_tier_checkpointing=True,
            local_checkpoint_directory=ram,
            local_checkpoint_period=2,
            multi_tier_checkpointing_backup_interval_steps=4,
        )
        train(config, "hosts=2", "steps=8")
        run = f"{bucket}/tiny"
        names = {each.name for each in storage.absolute(run).iterdir()}
        assert {"checkpoints", "config.json", "events.jsonl", "step_log"} <= names
        assert "PASSED" in runs.verb("verify", run)
        shutil.rmtree(os.path.join(ram, "tiny"))
        output = train(config, "hosts=1", "steps=12")
        assert "from persistent storage" in output
        assert "from step 8 to step 12 on 1 host" in output
        assert "PASSED" in runs.verb("verify", run)
        assert "PASSED" in runs.verb("audit", run)


def train(config, *settings):
    ended = runs.cli("train", config, *settings)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
