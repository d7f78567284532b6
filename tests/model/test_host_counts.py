"""A step that some hosts saved is restored on any other number of hosts, bit by bit."""

import itertools

import pytest

from tests import shared_memory
from tests.model.checked_run import CheckedRun

MOST_HOSTS = 8


@pytest.mark.parametrize("source", ["ram", "peers", "storage"])
@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param([(1, 8), (8, 1), (3, 5)], id="some"),
        pytest.param(
            list(itertools.product(range(1, MOST_HOSTS + 1), repeat=2)),
            id="all",
            marks=pytest.mark.night,
        ),
    ],
)
def test_hosts_restore_what_any_other_number_of_hosts_has_saved(pairs, source):
    for before, after in pairs:
        with (
            shared_memory.directory("model") as directory,
            CheckedRun(directory, num_machines=MOST_HOSTS, store_every=1) as run,
        ):
            run.open(range(before))
            run.save(1)
            run.save(2)
            run.wait()
            saved = run.head
            run.close()
            if source == "peers" and before > 1:
                run.evict(0)
            if source == "storage":
                for machine in range(before):
                    run.evict(machine)
            # It compares each byte with the model's.
            run.open(range(after))
            assert run.head is saved, (before, after)
            run.save(3)
            run.close()
