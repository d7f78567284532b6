"""Hosts whose RAM disks are too small back up from the memory of their captures."""

import functools

import numpy as np
import pytest

from tests.multiprocess import machines, tier_worlds


@pytest.fixture
def ram():
    with machines.Machines() as started:
        yield started


@pytest.mark.slow
def test_each_value_is_uploaded_once_and_comes_back_elsewhere(ram, tmp_path):
    def on(numbers, work, **options):
        ram.start_agents(numbers)
        return tier_worlds.run(
            work,
            num_hosts=len(numbers),
            directories=[ram.directory(number) for number in numbers],
            logs=tmp_path / "logs",
            persistent=str(tmp_path / "steps"),
            **options,
        )

    saving = functools.partial(tier_worlds.save, steps=[1, 2], sharded=False)
    events = on(range(2), saving, limit_bytes=100)
    stored = [each for each in events if each["event"] == "backed_up"]
    assert [each["step"] for each in stored] == [1, 2]
    of_values = 4 * sum(int(np.prod(shape)) for shape in tier_worlds.SHAPES.values())
    of_shards = sum(len(f"2/{n}") for n in range(tier_worlds.Counter.SHARDS))
    assert stored[-1]["bytes"] == of_values + of_shards
    why = {each["why"] for each in events if each["event"] == "degraded"}
    assert all("it goes to storage without RAM" in each for each in why)
    restoring = functools.partial(tier_worlds.restore, step=2, sharded=False)
    on([2, 1, 3], restoring)
