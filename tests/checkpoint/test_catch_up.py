"""Backups that a world could not finish are made by the next one, from RAM."""

import contextlib
import functools
import json

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt import frontend
from elastic_ckpt.checkpoint import run_world
from elastic_ckpt.checkpoint.host import backup
from elastic_ckpt.core import errors
from elastic_ckpt.tiers import choices
from elastic_ckpt.tiers.persistent import persistent_root
from tests.checkpoint.test_save_stages import (  # noqa: F401
    begin,
    in_ram,
    restore,
    sim,
    steps,
    told,
)
from tests.model import simulated_world
from tests.tiers import tiered_steps

ALL = ocp.training.preservation_policies.PreserveAll()


@pytest.fixture
def no_backups(monkeypatch):
    """In a `with` block, backups fail, as they do where a process has ended."""

    @functools.wraps(backup.HostBackup.back_up)
    def fail(*_, **__):
        raise errors.CheckpointError("its process has ended")

    @contextlib.contextmanager
    def failing():
        with monkeypatch.context() as patch:
            patch.setattr(backup.HostBackup, "back_up", fail)
            yield

    return failing


def stored(path):
    return persistent_root.PersistentRoot.from_path(path).steps()


def leave(sim, *numbers):  # noqa: F811
    """Saves steps in a world that is left before their backups are made."""
    sim.threads.late = frozenset({"back-up"})
    *before, last = numbers
    begin(sim, *before)
    sim.is_left = True
    parts = {"state": simulated_world.state_of(last)}
    assert sim.world.save_checkpointables(last, parts, force=True)
    sim.world.close()
    # Its processes end.
    sim.end()
    sim.threads.late = frozenset()


def test_a_step_that_waits_for_its_backup_survives_any_number_of_worlds(
    sim,  # noqa: F811
    no_backups,
):
    sim.open((0, 1), store_every=10)
    # The last step of a world is not due in storage.
    leave(sim, 9, 10, 11)
    with no_backups():
        for number in (12, 14):
            sim.open((0, 1), store_every=10)
            assert restore(sim) == number - 1
            leave(sim, number, number + 1)
    assert stored(sim.storage) == []
    assert {10, 15} <= {*in_ram(sim)}
    sim.open((0, 1), store_every=10)
    assert restore(sim) == 15
    sim.world.wait()
    assert steps(sim, "backed_up") == stored(sim.storage) == [10]
    begin(sim, 16)
    sim.world.wait()
    assert in_ram(sim) == [16]
    assert steps(sim, "backed_up") == [10]


def test_the_newest_step_that_was_due_is_backed_up_first(sim):  # noqa: F811
    options = {"store_every": 10, "keep_local": ALL}
    sim.open((0, 1), **options)
    leave(sim, 10, 15, 20, 21)
    sim.open((0, 1), **options)
    assert restore(sim) == 21
    sim.world.close()
    assert steps(sim, "backed_up") == [20, 10]


def test_steps_that_were_never_due_or_are_abandoned_are_not_backed_up(sim):  # noqa: F811
    sim.open((0, 1), store_every=10, keep_local=ALL)
    leave(sim, 8, 9, 10, 11)
    # Another schedule changes nothing for what was saved before.
    sim.open((0, 1), store_every=1, keep_local=ALL)
    wanted = {"state": simulated_world.abstract()}
    sim.world.load_checkpointables(9, wanted, go_back=True)
    sim.world.wait()
    assert stored(sim.storage) == []


def test_a_backup_that_fails_again_is_made_with_the_next_step_or_at_the_end(
    sim,  # noqa: F811
    no_backups,
):
    sim.open((0, 1), store_every=10)
    leave(sim, 10, 11)
    sim.open((0, 1), store_every=10)
    with no_backups():
        assert restore(sim) == 11
    ((step, why),) = told(sim, "persistent")
    assert step == 10
    assert why.startswith("it was not backed up: host 0: its process has ended")
    sim.world.close()
    assert steps(sim, "backed_up") == [10]


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_a_late_backup_is_the_checkpoint_that_orbax_would_have_had_in_time(
    tmp_path, no_backups
):
    def opened(number, *, is_left):
        world = run_world.RunWorld(number=number, is_left=is_left)
        ram, storage = tmp_path / "ram", tmp_path / "steps"
        return tiered_steps.checkpointer(ram, storage, world=world, every=10)

    def files(step, name):
        return json.loads((tmp_path / "steps" / str(step) / name).read_text())

    left = []
    with opened(1, is_left=lambda: bool(left)) as world:
        tiered_steps.save(world, 10)
        world.wait()
        left.append(True)
        with no_backups():
            tiered_steps.save(world, 20)
            world.close()
    assert stored(tmp_path / "steps") == [10]
    with opened(2, is_left=lambda: False) as world:
        world.load_checkpointables(None, {"data": tiered_steps.Cursors()})
    for name in ("_METADATA", "array_metadatas/process_0"):
        assert files(20, f"state/{name}") == files(10, f"state/{name}")
    late, in_time = (
        {leaf: json.loads(text) for leaf, text in files(n, "state/_sharding").items()}
        for n in (20, 10)
    )
    assert late == in_time
    late, in_time = (files(n, "_CHECKPOINT_METADATA") for n in (20, 10))
    assert late["item_handlers"] == in_time["item_handlers"]
    with ocp.training.Checkpointer(tmp_path / "steps") as stock:
        restored = stock.load(20)
    expected = tiered_steps.state(20)
    assert restored["step"] == 20
    for name in ("w", "b"):
        actual, wanted = restored["params"][name], expected["params"][name]
        assert actual.sharding == wanted.sharding
        assert np.asarray(actual).tobytes() == np.asarray(wanted).tobytes()


def test_without_ram_a_world_that_is_left_waits_for_storage(tmp_path):
    left = run_world.RunWorld(number=1, is_left=lambda: True)
    tiers = [choices.Persistent(tmp_path / "steps", every=10)]
    with frontend.Checkpointer(tiers, run="run", slice_name="s0", world=left) as opened:
        tiered_steps.save(opened, 3, force=True)
        assert not opened.is_left
    assert stored(tmp_path / "steps") == [3]
