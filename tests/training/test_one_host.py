"""An elastic run of one host and one slice: its supervisor starts the host again."""

import pytest
from jax._src import xla_bridge

from elastic_ckpt.cli import main
from elastic_ckpt.core import errors
from elastic_ckpt.elastic import decision
from elastic_ckpt.training import configured, step_log
from tests import runs, shared_memory
from tests.refusals import training as refusals


def supervised(arguments):
    """Runs the program, and fails if its process has taken a device."""
    code = main.main(arguments)
    assert not xla_bridge.backends_are_initialized()
    return code


@pytest.mark.slow
def test_host_that_is_killed_continues_from_ram(tmp_path, corpus):
    with shared_memory.directory("one-host") as ram:
        config = runs.write_config(
            tmp_path,
            corpus,
            devices_per_host=2,
            steps=24,
            elastic_enabled=True,
            enable_multi_tier_checkpointing=True,
            local_checkpoint_directory=ram,
            local_checkpoint_period=3,
            multi_tier_checkpointing_backup_interval_steps=1000,
            faults=[{"kill_host": 0, "at_step": 10}],
        )
        ended = runs.forked(supervised, ["train", str(config)])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = tmp_path / "tiny"
    assert [each["slices"] for each in runs.events(run, "world_started")] == [[0], [0]]
    (restored,) = runs.events(run, "restored_from")
    assert restored["local_bytes"] > 0
    first, second = step_log.read(run)
    # Step 9 may not have been committed when the host died.
    assert (first.start_step, second.start_step) in ((0, 6), (0, 9))
    assert len(runs.events(run, "run_finished")) == 1
    assert "PASSED" in runs.verb("audit", run)


ALONE = {"elastic_enabled": True, "per_device_batch_size": 0.5}


@pytest.mark.parametrize("hardware", ["gpu", "tpu"])
def test_supervisor_of_an_accelerator_leaves_the_devices_to_its_host(hardware):
    config = refusals.read(ALONE | {"hardware": hardware})
    configured.check_local(config)
    # It does not know their number, which the rows of a batch depend on.
    groups = configured.groups(config)
    decided = decision.decide(
        decision.Slices(alive_secs={0: 99.0}),
        configured.policy(config, groups),
        configured.work(config, groups),
    )
    assert isinstance(decided, decision.Train)
    assert (decided.slices, decided.accumulated) == ((0,), 1)
    assert config.world.gpus(0) is None


def test_accelerators_of_one_host_are_no_slices_that_can_be_lost_alone():
    config = refusals.read(ALONE | {"hardware": "gpu", "slices": 4})
    with pytest.raises(errors.ConfigError, match=r"slices=4 and hosts=1.*whole hosts"):
        configured.check_local(config)
