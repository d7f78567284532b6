"""An elastic run in one process, over CPU devices that stand for slices of Pathways."""

import pytest

from elastic_ckpt.training import step_log
from tests import runs, shared_memory


def configured(directory, corpus, **settings):
    values = {
        "hosts": 1,
        "slices": 4,
        "devices_per_host": 8,
        "steps": 24,
        "global_batch_size": 24,
        "elastic_enabled": True,
        "elastic_min_slice_count": 2,
        "elastic_settle_seconds": 0,
        **settings,
    }
    return runs.write_config(directory, corpus, **values)


@pytest.mark.slow
def test_run_loses_a_slice_and_gets_it_back(tmp_path, corpus):
    faults = [{"kill_slice": 0, "at_step": 7}, {"return_slice": 0, "at_step": 15}]
    with shared_memory.directory("controlled") as ram:
        in_ram = {
            "enable_multi_tier_checkpointing": True,
            "local_checkpoint_directory": ram,
            "local_checkpoint_period": 3,
            "multi_tier_checkpointing_backup_interval_steps": 9,
        }
        config = configured(tmp_path, corpus, faults=faults, **in_ram)
        ended = runs.cli("train", config)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    run = config.parent / "tiny"
    worlds = [each["slices"] for each in runs.events(run, "world_started")]
    assert worlds == [[0, 1, 2, 3], [1, 2, 3], [0, 1, 2, 3]]
    (lost,) = runs.events(run, "slice_lost")
    assert (lost["slice"], "DATA_LOSS" in lost["why"]) == (0, True)
    starts = [each.start_step for each in step_log.read(run)]
    # Step 6 may not have been saved when the slice was lost; a planned change is exact.
    assert starts in ([0, 6, 15], [0, 3, 15])
    # After the loss all of it comes from RAM; after the planned change the data alone.
    lost, planned = runs.events(run, "restored_from")
    assert lost["local_bytes"] > planned["local_bytes"] == 0
    (kept,) = runs.events(run, "state_kept")
    assert (kept["step"], kept["device_bytes"] > 10_000) == (15, True)
    assert len(runs.events(run, "run_finished")) == 1
    assert not runs.events(run, "run_stopped")
    assert "PASSED" in runs.verb("audit", run)
