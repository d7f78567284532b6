"""A live run diverges and goes back, while slices are lost and come back."""

import json
import re

import pytest

from elastic_ckpt.training import step_log
from tests import runs
from tests.multiprocess import callbacks, test_divergence, test_elastic_run
from tests.multiprocess.test_divergence import spoilt  # noqa: F401
from tests.multiprocess.test_elastic_run import ram  # noqa: F401

# The noise comes while the learning rate is high; then it falls, so that rounding by
# other numbers of devices, in another order, does not grow over hundreds of steps.
SCHEDULE = {"learning_rate_schedule_steps": 24}
LOSS_RTOL = 1e-4


def configured(directory, corpus, ram, **settings):  # noqa: F811
    config = test_elastic_run.configured(directory, corpus, ram)
    values = {
        **json.loads(config.read_text()),
        **test_divergence.SETTINGS,
        **SCHEDULE,
        "multi_tier_checkpointing_backup_interval_steps": 4,
        "local_checkpoint_period": 2,
        **settings,
    }
    return runs.write_config(directory, corpus, **values)


def one_host(directory, corpus, *, steps, to):
    """The same on one host that goes back to the same step, and is never stopped."""
    # The newest saved step that is so much older than the first bad one.
    older = {"checkpoint_period": to, "divergence_rollback_steps": 11 - to}
    config = test_divergence.configured(
        directory, corpus, steps=steps, **older, **SCHEDULE
    )
    test_divergence.trained(config)
    return config.parent / "tiny"


@pytest.mark.night
def test_a_run_that_loses_slices_goes_back_as_one_host_does(
    tmp_path,
    spoilt,  # noqa: F811
    ram,  # noqa: F811
):
    faults = [
        {"kill_slice": 1, "at_step": 14},
        {"kill_slice": 0, "at_step": 22, "in_world": 2},
        {"return_slice": 0, "at_step": 26, "in_world": 3},
        {"return_slice": 1, "at_step": 26, "in_world": 3},
    ]
    settings = {
        "faults": faults,
        "training_callbacks": callbacks.named(callbacks.held),
    }
    config = configured(tmp_path / "hosts", spoilt, ram, **settings)
    run = test_elastic_run.trained_until(config, "starts on slices 0, 1, 2, 3")
    worlds = test_elastic_run.worlds(run)
    assert worlds[:3] == [[0, 1, 2, 3], [0, 2, 3], [2, 3]]
    # Slices come back in one change, or each when its check has ended.
    assert worlds.index(worlds[0], 1) == len(worlds) - 1 <= 4
    # Which steps are backed up in time depends on the machine.
    (event,) = runs.events(run, "rolled_back")
    test_divergence.check_went_back(run, event["to_step"])
    rolled_back = next(each for each in step_log.read(run) if each.left_out)
    assert rolled_back.hosts == 3
    steps = len(runs.steps(run))
    other = one_host(tmp_path / "one", spoilt, steps=steps, to=event["to_step"])
    test_divergence.check_went_back(other, event["to_step"])
    test_divergence.check_same(run, other, rtol=LOSS_RTOL)


@pytest.mark.slow
def test_a_run_that_loses_a_host_while_it_goes_back_does_so_again(
    tmp_path,
    spoilt,  # noqa: F811
    ram,  # noqa: F811
):
    faults = [{"kill_host": 1, "in_phase": "restore", "at_step": 14}]
    settings = {
        **{"hosts": 2, "slices": 2, "steps": 24, "faults": faults},
        "training_callbacks": callbacks.named(callbacks.held_in_restore),
    }
    config = configured(tmp_path, spoilt, ram, **settings)
    run = test_elastic_run.trained(config)
    assert test_elastic_run.worlds(run) == [[0, 1], [0, 1]]
    names = test_elastic_run.names(run)
    assert names.index("divergence_found") < names.index("slice_lost")
    (_, event) = runs.events(run, "restored_from")[-2:]
    test_divergence.check_rows(run, to=event["step"])


@pytest.mark.slow
def test_a_live_run_that_diverges_after_a_loss_ends_without_its_last_step(
    tmp_path,
    spoilt,  # noqa: F811
    ram,  # noqa: F811
):
    faults = [{"kill_slice": 1, "at_step": 13}]
    settings = {
        **{"hosts": 3, "slices": 3, "faults": faults, "divergence_action": "stop"},
        "training_callbacks": callbacks.named(callbacks.held),
    }
    config = configured(tmp_path, spoilt, ram, steps=24, **settings)
    output = test_divergence.trained(config, code=1)
    run = config.parent / "tiny"
    # It is not begun again, as after the loss.
    assert test_elastic_run.worlds(run) == [[0, 1, 2], [0, 2]]
    assert "the run was ended after step 16, which is not saved: loss_above" in output
    # The steps since the data went bad are abandoned by a run that stops.
    (newest,) = re.findall(r"; the newest step is (\d+)", output)
    assert int(newest) < 13
    assert 16 not in runs.saved_steps(run)


@pytest.mark.slow
def test_under_one_controller_a_run_goes_back_between_changes_of_slices(
    tmp_path,
    spoilt,  # noqa: F811
    ram,  # noqa: F811
):
    faults = [
        {"kill_slice": 1, "at_step": 10},
        {"return_slice": 1, "at_step": 15},
        {"kill_slice": 0, "at_step": 20},
        {"return_slice": 0, "at_step": 23},
    ]
    settings = {"hosts": 1, "devices_per_host": 4, "steps": 26, "faults": faults}
    config = configured(tmp_path / "slices", spoilt, ram, **settings)
    run = test_elastic_run.trained(config)
    every, left = [0, 1, 2, 3], [[0, 2, 3], [1, 2, 3]]
    assert test_elastic_run.worlds(run) == [every, left[0], every, left[1], every]
    (event,) = runs.events(run, "rolled_back")
    test_divergence.check_went_back(run, event["to_step"])
    other = one_host(tmp_path / "one", spoilt, steps=26, to=event["to_step"])
    test_divergence.check_same(run, other, rtol=LOSS_RTOL)
