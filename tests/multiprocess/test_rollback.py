"""Worlds of several hosts that go back to an older step, and are killed meanwhile."""

import functools
import os
import signal

import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.core import errors, storage
from elastic_ckpt.tiers.persistent import persistent_root
from tests.multiprocess import machines, tier_worlds


def save(checkpointer, mesh, *, steps, seed=0):
    """Saves some steps, with the values of other steps."""
    for step in steps:
        parts = {
            "state": tier_worlds.state(mesh, step + seed, True),
            "data": tier_worlds.Counter(step + seed),
        }
        assert checkpointer.save_checkpointables(step, parts)
        checkpointer.wait()


def load(checkpointer, mesh, *, step, expected, seed=0):
    """Restores a step, which has to be that of `found` and `seed`."""
    counter = tier_worlds.Counter()
    restored = checkpointer.load_checkpointables(
        step, {"state": tier_worlds.abstract(mesh, True), "data": counter}
    )
    assert checkpointer.latest.step == expected
    tier_worlds.check(restored["state"], expected + seed)
    assert counter.step == expected + seed


def go_back(checkpointer, mesh, *, to, steps, killed):
    """Goes back to a step, and on from there with other values."""
    load(checkpointer, mesh, step=to, expected=to)
    if killed:
        _die_instead_of_committing(steps[0])
    save(checkpointer, mesh, steps=steps, seed=100)


def go_on(checkpointer, mesh, *, expected, steps):
    """Goes on from the newest step."""
    load(checkpointer, mesh, step=None, expected=expected, seed=100)
    save(checkpointer, mesh, steps=steps, seed=100)


def _die_instead_of_committing(step):
    rename = storage.rename

    def rename_or_die(source, target):
        if os.path.basename(os.fspath(target)) == str(step):
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    storage.rename = rename_or_die


@pytest.fixture
def ram():
    with machines.Machines() as expected:
        yield expected


@pytest.mark.parametrize("killed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_rollback_holds_on_other_host_counts(ram, tmp_path, killed):
    root = persistent_root.PersistentRoot.from_path(tmp_path / "steps")

    def on(numbers, work):
        ram.start_agents(numbers)
        return tier_worlds.run(
            work,
            num_hosts=len(numbers),
            directories=[ram.directory(number) for number in numbers],
            logs=tmp_path / "logs",
            persistent=str(root.path),
        )

    on(range(3), functools.partial(save, steps=range(1, 5)))
    back = functools.partial(go_back, to=2, steps=[3], killed=killed)
    if killed:
        with pytest.raises(errors.RunError):
            on(range(2), back)
        assert root.steps() == [1, 2]
    else:
        on(range(2), back)
        assert root.steps() == [1, 2, 3]
    assert [step for step, _ in root.set_aside_steps()] == [3, 4]
    on([1, 0, 2], functools.partial(go_on, expected=3, steps=[4]))
    with ocp.training.Checkpointer(root.path) as stock:
        assert stock.latest.step == 4
    # The last world makes the backup that was cut short.
    assert root.steps() == [1, 2, 3, 4]
    for number in range(3):
        ram.lose(number)
    on([3], functools.partial(load, step=None, expected=4, seed=100))
