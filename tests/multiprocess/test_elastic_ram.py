"""What hosts hold in RAM is restored on any number of hosts, without storage."""

import functools

import pytest

from tests.multiprocess import machines, tier_worlds


@pytest.fixture
def ram():
    with machines.Machines() as found:
        yield found


def on(ram, numbers, work, tmp_path, **options):
    """Runs `work` on a host on each of some machines, whose agents are started."""
    ram.start_agents(numbers)
    return tier_worlds.run(
        work,
        num_hosts=len(numbers),
        directories=[ram.directory(number) for number in numbers],
        logs=tmp_path / "logs",
        **options,
    )


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "replicated"])
def test_four_hosts_save_and_any_number_restores(ram, tmp_path, sharded):
    save = functools.partial(tier_worlds.save, steps=[3, 4], sharded=sharded)
    on(ram, range(4), save, tmp_path)
    restore = functools.partial(tier_worlds.restore, step=4, sharded=sharded)
    for num_hosts in (1, 2, 3, 6, 8):
        events = on(ram, range(num_hosts), restore, tmp_path)
        print(events)
