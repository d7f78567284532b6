"""Hosts under Orbax v0's `CheckpointManager`, resized."""

import pytest

from tests import worlds
from tests.processes import orbax_v0_worlds


@pytest.mark.slow
def test_worlds_of_any_size_continue_with_the_batches_of_one_host(tmp_path):
    log = tmp_path / "batches"
    for num_hosts, last in [(4, 2), (2, 4), (3, 6)]:
        orbax_v0_worlds.run(
            num_hosts=num_hosts,
            logs=tmp_path / "logs",
            path=str(tmp_path / "steps"),
            last=last,
            log=str(log),
        )
    one = worlds.World(orbax_v0_worlds.data(), 1, orbax_v0_worlds.SIZE)
    expected = [orbax_v0_worlds.digest(n, one.next()) for n in range(1, 7)]
    one.close()
    assert log.read_text().splitlines() == expected
