"""Hosts under Orbax v0's `CheckpointManager`, resized."""

import functools

import pytest

from tests import runs, worlds
from tests.processes import orbax_v0_worlds


@pytest.mark.slow
def test_worlds_of_any_size_continue_with_the_batches_of_one_host(tmp_path):
    log, path = tmp_path / "batches", tmp_path / "steps"
    for num_hosts, last in [(4, 2), (2, 4), (3, 6)]:
        orbax_v0_worlds.run(
            functools.partial(orbax_v0_worlds.train, last=last, log=str(log)),
            num_hosts=num_hosts,
            path=str(path),
            logs=tmp_path / "logs",
        )
    one = worlds.World(orbax_v0_worlds.data(), 1, orbax_v0_worlds.SIZE)
    expected = [orbax_v0_worlds.digest(n, one.next()) for n in range(1, 7)]
    one.close()
    assert log.read_text().splitlines() == expected
    report = runs.verb("verify", path)
    assert "PASSED" in report, report
