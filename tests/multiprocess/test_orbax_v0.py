"""Worlds of hosts under Orbax v0's `CheckpointManager`: resized, killed, failing."""

import functools

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from elastic_ckpt.core import errors
from tests import runs
from tests.multiprocess import orbax_v0_worlds

CASES = [("before its manifest is written", 3), ("before the commit", 0)]


def expected(num_batches):
    """The batches of one host that is never interrupted."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    batches = orbax_v0_worlds.batches_on(mesh)
    return [
        f"{n} {orbax_v0_worlds.digest(next(batches))}"
        for n in range(1, num_batches + 1)
    ]


@pytest.mark.slow
def test_four_hosts_save_and_two_and_four_continue_with_the_batches_of_one_host(
    tmp_path,
):
    log, path = tmp_path / "batches", tmp_path / "steps"
    for num_hosts, last in [(4, 4), (2, 6), (4, 8)]:
        work = functools.partial(orbax_v0_worlds.train, last=last, log=str(log))
        orbax_v0_worlds.run(
            work, num_hosts=num_hosts, path=str(path), logs=tmp_path / "logs"
        )
    assert log.read_text().splitlines() == expected(8)
    report = runs.verb("verify", path)
    assert "PASSED" in report, report


@pytest.mark.slow
@pytest.mark.parametrize(("point", "victim"), CASES)
def test_a_host_that_is_killed_in_a_save_leaves_the_step_before(
    point, victim, tmp_path
):
    log, path = tmp_path / "batches", tmp_path / "steps"
    work = functools.partial(orbax_v0_worlds.killed, point=point, victim=victim)
    with pytest.raises(errors.RunError):
        orbax_v0_worlds.run(work, num_hosts=4, path=str(path), logs=tmp_path / "logs")
    with ocp.CheckpointManager(path) as manager:
        assert manager.all_steps() == [2]
    work = functools.partial(orbax_v0_worlds.train, last=4, log=str(log))
    orbax_v0_worlds.run(work, num_hosts=2, path=str(path), logs=tmp_path / "logs")
    with ocp.CheckpointManager(path) as manager:
        assert manager.all_steps() == [2, 4]


@pytest.mark.night
def test_a_save_that_fails_on_one_host_fails_on_all_at_once(tmp_path):
    work = functools.partial(orbax_v0_worlds.failing, victim=1)
    orbax_v0_worlds.run(
        work, num_hosts=3, path=str(tmp_path / "steps"), logs=tmp_path / "logs"
    )
