"""`kill -9` of a run that goes back, at each stage until the step saved after it."""

import os
import shutil
import signal

import pytest

from tests import runs
from tests.faults import killed_rollback
from tests.multiprocess import test_divergence
from tests.multiprocess.test_divergence import spoilt  # noqa: F401
from tests.multiprocess.test_elastic_run import ram  # noqa: F401

# Writes of a host to its RAM disk: step 8 is saved again, and step 12 after it.
RAM = [
    ("", "before", 0),
    ("write_atomic.*/restored/data/data_state.json", "after", 0),
    ("write_atomic.*/hosts/0/8-.*/data/data_state.json", "before", 0),
    ("write_atomic.*/hosts/0/8-.*/manifest", "before", 0),
    ("write_atomic.*/hosts/0/8-.*/manifest", "after", 0),
    ("write_atomic.*/hosts/1/8-.*/manifest", "before", 1),
    ("remove.*/hosts/0/12-.*/manifest", "before", 0),
    ("write_atomic.*/hosts/0/12-.*/manifest", "before", 0),
    ("write_atomic.*/hosts/1/12-.*/manifest", "after", 1),
]
# Writes to storage: later steps and the old step 8 are set aside.
STORED = [
    ("write_atomic.*/8.orbax[^/]*/data/data_state.json", "after", 0),
    ("rename.*/checkpoints/8 > .*/abandoned/8-", "before", 0),
    ("rename.*/checkpoints/8 > .*/abandoned/8-", "after", 0),
    ("rename.*/checkpoints/8$", "before", 0),
    ("rename.*/checkpoints/8$", "after", 0),
    ("rename.*/abandoned/8-", "after", 0),
    ("create.*/step_log/", "after", 0),
    ("create.*/worlds/", "after", 0),
]
# The step after it is saved.
NEXT = [
    ("rename.*/checkpoints/12$", "before", 0),
    ("rename.*/checkpoints/12$", "after", 0),
]
SET_ASIDE = ("rename.*/checkpoints/12 > .*/abandoned/12-", "after", 0)


def check(tmp_path, corpus, kill, *, is_memory_lost=False, **settings):
    config = test_divergence.configured(
        tmp_path / "killed", corpus, steps=20, hosts=2, **settings
    )
    killed = runs.forked(killed_rollback.train, *kill, [str(config)], leads_group=True)
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    if is_memory_lost:
        shutil.rmtree(os.path.join(settings["local_checkpoint_directory"], "tiny"))
    test_divergence.trained(config, "hosts=3")
    run = config.parent / "tiny"
    # It is decided again, or the run goes on after it. Soon after a restore from RAM
    # the restore is distrusted first, and the divergence is found once more.
    distrusted = runs.events(run, "restore_distrusted")
    again = sum(each["to_step"] is not None for each in distrusted)
    assert len(runs.events(run, "divergence_found")) - again in (1, 2)
    test_divergence.check_rows(run, to=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kill",
    [RAM[0], *STORED, *NEXT, SET_ASIDE],
)
def test_killed_while_it_goes_back_a_run_leaves_out_the_same_data(
    tmp_path,
    spoilt,  # noqa: F811
    kill,
):
    check(tmp_path, spoilt, kill)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kill", "is_memory_lost"),
    [(kill, False) for kill in RAM[1::2]]
    # Storage has the old step 8, is between both, or has the new one.
    + [(kill, True) for kill in (RAM[4], RAM[8], *STORED[2:6], STORED[7])],
)
def test_killed_with_a_ram_disk_a_run_leaves_out_the_same_data(
    tmp_path,
    spoilt,  # noqa: F811
    ram,  # noqa: F811
    kill,
    is_memory_lost,
):
    check(
        tmp_path,
        spoilt,
        kill,
        is_memory_lost=is_memory_lost,
        enable_multi_tier_checkpointing=True,
        local_checkpoint_directory=ram,
        local_checkpoint_period=4,
        # A period in which no backup can be late.
        multi_tier_checkpointing_backup_interval_steps=8,
    )
