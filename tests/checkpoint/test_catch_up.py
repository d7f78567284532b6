"""Backups that a world could not finish are made by the next one, from RAM."""

import functools
import json
import threading

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import run_world
from elastic_ckpt.checkpoint.host import backup
from elastic_ckpt.core import errors, events
from elastic_ckpt.tiers.persistent import persistent_root, upload
from tests.tiers import tiered_steps

# Orbax warns about loads without a sharding.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

KEEP_ALL = ocp.training.preservation_policies.PreserveAll()


class Worlds:
    """Worlds of one run, one after the other; a backup hangs as long as it is held."""

    def __init__(self, path, monkeypatch):
        self.path = path
        self.events = []
        self._number = 0
        self._is_left = False
        self.is_held = False
        self._released = threading.Event()
        back_up = backup.HostBackup.back_up

        @functools.wraps(back_up)
        def held_back_up(host, **arguments):
            if self.is_held:
                assert self._released.wait(600)
                raise errors.CheckpointError("its process has ended")
            return back_up(host, **arguments)

        monkeypatch.setattr(backup.HostBackup, "back_up", held_back_up)

    def world(self, **options):
        self._number += 1
        self._is_left = False
        return tiered_steps.checkpointer(
            self.path / "ram",
            self.path / "steps",
            world=run_world.RunWorld(
                number=self._number, is_left=lambda: self._is_left
            ),
            emit=self._emit,
            **{"every": 10, **options},
        )

    def _emit(self, name, **fields):
        events.check(name, fields)
        self.events.append((name, fields))

    def save(self, opened, *steps, **options):
        for step in steps:
            parts = {"state": tiered_steps.state(step), "data": tiered_steps.Cursors()}
            assert opened.save_checkpointables(step, parts, **options)

    def leave(self, opened, *steps):
        """The last saves of a world that is left."""
        self._is_left = True
        self.save(opened, *steps, force=True)
        opened.close()

    def release(self):
        self.is_held = False
        self._released.set()

    def backed_up(self):
        return [
            (fields["step"], fields["world"])
            for name, fields in self.events
            if name == "backed_up"
        ]

    def stored(self):
        root = persistent_root.PersistentRoot.from_path(self.path / "steps")
        return root.steps()

    def in_ram(self):
        names = (each.name for each in (self.path / "ram" / "hosts" / "0").iterdir())
        return sorted(int(name.partition("-")[0]) for name in names if name != "lock")

    def files(self, step, name):
        return json.loads((self.path / "steps" / str(step) / name).read_text())


@pytest.fixture
def worlds(tmp_path, monkeypatch):
    worlds = Worlds(tmp_path, monkeypatch)
    yield worlds
    worlds.release()


def load(opened):
    opened.load_checkpointables(None, {"data": tiered_steps.Cursors()})
    return opened.latest.step


def test_a_world_that_is_left_does_not_wait_and_the_next_one_backs_up(worlds):
    opened = worlds.world()
    worlds.is_held = True
    worlds.save(opened, 9, 10)
    # The last step of a world is not due in storage.
    worlds.leave(opened, 11)
    assert worlds.stored() == []
    # Step 10 stays until it is in storage; the world did not wait until 9 was removed.
    assert {10, 11} <= set(worlds.in_ram())
    worlds.is_held = False
    with worlds.world() as opened:
        assert load(opened) == 11
        opened.wait()
        assert worlds.stored() == [10]
        assert worlds.backed_up() == [(10, 2)]
        worlds.save(opened, 12)
    assert worlds.in_ram() == [12]
    assert worlds.backed_up() == [(10, 2)]


def test_a_step_that_waits_for_its_backup_survives_any_number_of_worlds(worlds):
    opened = worlds.world()
    worlds.is_held = True
    worlds.save(opened, 10)
    worlds.leave(opened, 11)
    for step in (12, 14):
        opened = worlds.world()
        assert load(opened) == step - 1
        worlds.save(opened, step)
        worlds.leave(opened, step + 1)
    assert {10, 15} <= set(worlds.in_ram())
    worlds.is_held = False
    with worlds.world() as opened:
        assert load(opened) == 15
    assert worlds.backed_up() == [(10, 4)]


def test_the_newest_step_that_was_due_is_backed_up_first(worlds):
    opened = worlds.world(keep_in_ram=KEEP_ALL)
    worlds.is_held = True
    worlds.save(opened, 10, 15, 20)
    worlds.leave(opened, 21)
    worlds.is_held = False
    with worlds.world(keep_in_ram=KEEP_ALL) as opened:
        assert load(opened) == 21
    assert worlds.backed_up() == [(20, 2), (10, 2)]
    assert worlds.stored() == [10, 20]


def test_steps_that_were_never_due_or_are_abandoned_are_not_backed_up(worlds):
    opened = worlds.world(keep_in_ram=KEEP_ALL)
    worlds.is_held = True
    worlds.save(opened, 8, 9, 10)
    worlds.leave(opened, 11)
    worlds.is_held = False
    # Another schedule changes nothing for what was saved before.
    with worlds.world(keep_in_ram=KEEP_ALL, every=1) as opened:
        opened.load_checkpointables(9, {"data": tiered_steps.Cursors()})
        opened.wait()
    assert worlds.stored() == []


def test_a_backup_that_fails_again_is_made_with_the_next_step_or_at_the_end(
    worlds, monkeypatch
):
    opened = worlds.world()
    worlds.is_held = True
    worlds.save(opened, 10)
    worlds.leave(opened, 11)
    worlds.is_held = False
    failing = threading.Event()
    begin = upload.Upload.begin

    def fail_once(*arguments):
        if not failing.is_set():
            failing.set()
            raise errors.CheckpointError("storage is full")
        return begin(*arguments)

    monkeypatch.setattr(upload.Upload, "begin", fail_once)
    with worlds.world() as opened:
        load(opened)
    assert worlds.backed_up() == [(10, 2)]
    reasons = [fields["why"] for name, fields in worlds.events if name == "degraded"]
    assert reasons == ["it was not backed up: host 0: storage is full"]


def test_a_late_backup_is_the_checkpoint_that_orbax_would_have_had_in_time(worlds):
    opened = worlds.world()
    worlds.save(opened, 10)
    opened.wait()
    worlds.is_held = True
    worlds.save(opened, 20)
    worlds.leave(opened, 21)
    worlds.is_held = False
    with worlds.world() as opened:
        load(opened)
    for name in ("_METADATA", "array_metadatas/process_0"):
        assert worlds.files(20, f"state/{name}") == worlds.files(10, f"state/{name}")
    late, in_time = (
        {
            leaf: json.loads(text)
            for leaf, text in worlds.files(n, "state/_sharding").items()
        }
        for n in (20, 10)
    )
    assert late == in_time
    in_time, late = (worlds.files(n, "_CHECKPOINT_METADATA") for n in (10, 20))
    assert late["item_handlers"] == in_time["item_handlers"]
    with ocp.training.Checkpointer(worlds.path / "steps") as stock:
        restored = stock.load(20)
    expected = tiered_steps.state(20)
    assert restored["step"] == 20
    for name in ("w", "b"):
        actual = restored["params"][name]
        wanted = expected["params"][name]
        assert actual.sharding == wanted.sharding
        assert np.asarray(actual).tobytes() == np.asarray(wanted).tobytes()


def test_without_ram_a_world_that_is_left_waits_for_storage(tmp_path):
    from elastic_ckpt import frontend
    from elastic_ckpt.tiers import choices

    left = run_world.RunWorld(number=1, is_left=lambda: True)
    tiers = [choices.Persistent(tmp_path / "steps", every=10)]
    with frontend.Checkpointer(tiers, run="run", slice_name="s0", world=left) as opened:
        tiered_steps.save(opened, 3, force=True)
        assert not opened.is_left
    assert persistent_root.PersistentRoot.from_path(tmp_path / "steps").steps() == [3]
