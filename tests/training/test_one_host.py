"""Elastic runs of one host: its supervisor starts it again, or it loses slices."""

import functools

import pytest
from jax._src import xla_bridge

from elastic_ckpt.cli import main
from elastic_ckpt.training import step_log
from tests import runs, shared_memory


def supervised(arguments):
    """Runs the program, and fails if its process has taken a device."""
    code = main.main(arguments)
    assert not xla_bridge.backends_are_initialized()
    return code


@pytest.fixture
def run(tmp_path, corpus):
    """Trains 24 steps with copies in RAM, and passes the audit; the directory."""

    def trained(program, **settings):
        with shared_memory.directory("one-host") as ram:
            config = runs.write_config(
                tmp_path,
                corpus,
                steps=24,
                elastic_enabled=True,
                enable_multi_tier_checkpointing=True,
                local_checkpoint_directory=ram,
                local_checkpoint_period=3,
                **settings,
            )
            ended = runs.forked(program, ["train", str(config)])
        assert ended.returncode == 0, ended.stdout + ended.stderr
        directory = tmp_path / "tiny"
        assert len(runs.events(directory, "run_finished")) == 1
        assert not runs.events(directory, "run_stopped")
        assert "PASSED" in runs.verb("audit", directory)
        starts = [each.start_step for each in step_log.read(directory)]
        worlds = [each["slices"] for each in runs.events(directory, "world_started")]
        return functools.partial(runs.events, directory), worlds, starts

    return trained


@pytest.mark.slow
def test_host_that_is_killed_continues_from_ram(run):
    events, worlds, starts = run(
        supervised,
        devices_per_host=2,
        multi_tier_checkpointing_backup_interval_steps=1000,
        faults=[{"kill_host": 0, "at_step": 10}],
    )
    assert worlds == [[0], [0]]
    (restored,) = events("restored_from")
    assert restored["local_bytes"] > 0
    # Step 9 may not have been committed when the host died.
    assert starts in ([0, 6], [0, 9])


@pytest.mark.slow
def test_run_on_slices_of_one_process_loses_one_and_gets_it_back(run):
    """CPU devices stand for slices of Pathways."""
    events, worlds, starts = run(
        main.main,
        slices=4,
        devices_per_host=8,
        global_batch_size=24,
        elastic_min_slice_count=2,
        elastic_settle_seconds=0,
        multi_tier_checkpointing_backup_interval_steps=9,
        faults=[{"kill_slice": 0, "at_step": 7}, {"return_slice": 0, "at_step": 15}],
    )
    assert worlds == [[0, 1, 2, 3], [1, 2, 3], [0, 1, 2, 3]]
    (lost,) = events("slice_lost")
    assert (lost["slice"], "DATA_LOSS" in lost["why"]) == (0, True)
    # Step 6 may not have been saved when the slice was lost; a planned change is exact.
    assert starts in ([0, 6, 15], [0, 3, 15])
    # After the loss all of it comes from RAM; after the planned change the data alone.
    lost, planned = events("restored_from")
    assert lost["local_bytes"] > planned["local_bytes"] == 0
    (kept,) = events("state_kept")
    assert (kept["step"], kept["device_bytes"] > 10_000) == (15, True)
