"""The place of a machine among those of a run."""

import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.training import load, machine_run
from tests import runs


def place(directory, environment=None, **settings):
    values = {
        "hosts": 4,
        "slices": 4,
        "elastic_enabled": True,
        "elastic_machines": 2,
        **settings,
    }
    path = runs.write_config(directory, str(directory / "corpus"), **values)
    return machine_run.place(load.load(path), environment or {})


def test_slices_are_dealt_to_the_machines_in_order(tmp_path):
    own = place(tmp_path, elastic_machine=1, peer_interface="10.0.0.2")
    assert (own.interface, own.slices) == ("10.0.0.2", range(2, 4))


def test_the_number_of_a_machine_is_that_of_its_launcher_unless_it_is_set(tmp_path):
    environment = {"NODE_RANK": "1", "SLURM_NODEID": "0"}
    assert place(tmp_path, environment).number == 1
    assert place(tmp_path, {"JOB_COMPLETION_INDEX": "1"}).number == 1
    assert place(tmp_path, environment, elastic_machine=0).number == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"elastic_machine": -1}, "the environment has none of NODE_RANK"),
        ({"elastic_machine": 2}, "elastic_machine=2 is not the number of one of the 2"),
        ({"elastic_machines": 3}, "cannot be divided evenly among elastic_machines=3"),
        ({"enable_single_controller": True}, "only runs with a process per host"),
        ({"enable_checkpointing": False}, "with enable_checkpointing=false"),
        ({"elastic_enabled": False}, "needs elastic_enabled=true"),
        ({"slices": 2, "hosts": 3}, "cannot be divided evenly among 2 machines"),
    ],
)
def test_places_that_cannot_work_are_refused(tmp_path, settings, message):
    with pytest.raises(errors.ConfigError, match=message):
        place(tmp_path, **{"elastic_machine": 0, **settings})
