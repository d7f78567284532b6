"""Runs that go back to an older step, or look at one: which saves count.

`tests/model` goes back and overwrites in random histories, and crashes at each change.
"""

import contextlib
import functools
import itertools
import os
import shutil

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt import frontend
from elastic_ckpt.checkpoint import run_world
from elastic_ckpt.core import errors, storage
from elastic_ckpt.steps.step import Line, StepId
from elastic_ckpt.tiers.choices import Local, Persistent
from elastic_ckpt.tiers.persistent import claims, leases, persistent_root
from tests.checkpoint.test_component_io import Counter
from tests.recorded_events import RecordedEvents

policies = ocp.training.preservation_policies
NotFound = ocp.training.errors.StepNotFoundError


class Run:
    """Processes of one run, one after the other; the state of a step is a number."""

    def __init__(self, path, *, ram="ram"):
        self.path, self.ram = path, ram
        self.recorded = RecordedEvents()

    def open(self, *, ram=None, start=None, every=1, keep=None, ram_keep=None, **local):
        """Opens a world; a `start` of the run claims it."""
        local["keep"] = ram_keep or policies.PreserveAll()
        tiers = [Persistent(self.path / "steps", every=every, keep=keep)]
        if ram or self.ram:
            tiers.append(Local(self.path / (ram or self.ram), every=1, **local))
        world = run_world.ALONE
        if start:
            world = run_world.RunWorld(claimant=claims.Claimant(name=start))
        return frontend.Checkpointer(tiers, run="run", emit=self.recorded, world=world)

    def save(self, opened, *steps, line=1, **options):
        for step in steps:
            parts = {"state": {"w": 100 * line + step}, "data": Counter()}
            assert opened.save_checkpointables(step, parts, **options)
            opened.wait()

    def load(self, opened, step=None):
        """Loads a step with its data; returns the number in its state."""
        parts = {"state": None, "data": Counter()}
        go_back = step is not None
        loaded = opened.load_checkpointables(step, parts, go_back=go_back)
        return value(loaded["state"])

    def steps(self, **options):
        """The steps that a new world finds, with their values."""
        with self.open(**options) as opened:
            return [
                (each.step, value(opened.load(each))) for each in opened.checkpoints
            ]

    def stock(self):
        """The steps that stock Orbax finds, with their values."""
        with ocp.training.Checkpointer(self.path / "steps") as stock:
            return [
                (each.step, value(stock.load(each.step))) for each in stock.checkpoints
            ]

    def set_aside(self):
        root = persistent_root.PersistentRoot.from_path(self.path / "steps")
        return [step for step, _ in root.set_aside_steps()]

    def lose_ram(self):
        shutil.rmtree(self.path / "ram")

    def went_back(self):
        """From which step to which, since it was asked last."""
        found = self.recorded.named("went_back")
        self.recorded.events.clear()
        return [(each["step"], each["to_step"]) for each in found]


def value(state):
    return int(np.ravel(state["w"])[0])


def old(*steps):
    return [(step, 100 + step) for step in steps]


@pytest.fixture(params=["ram"])
def run(request, tmp_path):
    return Run(tmp_path, ram=request.param)


with_and_without_ram = pytest.mark.parametrize("run", ["ram", None], indirect=True)


@pytest.mark.parametrize("steps", [[], [1, 2, 3]])
def test_saves_of_a_replaced_start_do_not_count(run, steps):
    ended = contextlib.suppress(errors.ReplacedError)
    with ended, run.open(ram="of-a", start="a") as replaced:
        run.save(replaced, *steps)
        assert replaced.claim_world() == 1
        with run.open(ram="of-b", start="b") as new:
            assert new.claim_world() == 2
            # The old start saves on, until it is to commit a step to storage.
            for step in (4, 5):
                with pytest.raises(errors.ReplacedError, match=r"b \(.*has continued"):
                    run.save(replaced, step)
            assert [each.step for each in new.checkpoints] == steps
            run.save(new, 4, line=2)
        assert replaced.latest.step == 4
        replaced.wait()
    # Also where the memory of the old start is.
    assert run.steps(ram="of-a") == run.stock() == [*old(*steps), (4, 204)]


def test_abandoned_steps_come_back_by_name_and_their_line_goes_on(run):
    newest = {"ram_keep": policies.LatestN(1)}
    with run.open(**newest) as opened:
        run.save(opened, *range(1, 7))
        opened.load(4, go_back=True)
        run.save(opened, 5, line=2)
    with run.open(**newest) as opened:
        for step, expected in ((6, 106), (5, 205), (6, 106)):
            assert value(opened.load(step)) == expected
        run.save(opened, 7)
    # What the other line had passed is gone.
    assert run.steps() == run.stock() == old(1, 2, 3, 4, 6, 7)
    assert run.set_aside() == []


def test_a_fallback_names_its_parent_and_the_incomplete_step_does_not_count(run):
    with run.open() as opened:
        run.save(opened, 1, 2, 3)
        # Stored values of step 3 are lost in RAM and in storage.
        for step in (*run.path.glob("ram/hosts/*/3-*"), run.path / "steps" / "3"):
            shutil.rmtree(step / "state")
    with run.open() as opened:
        assert value(opened.load(None)) == 102
        parent = (opened.latest.step, opened.latest.save)
        run.save(opened, 3, line=2)
        assert opened.latest.line[-2:] == (parent, (3, opened.latest.save))
    assert run.steps() == run.stock() == [*old(1, 2), (3, 203)]


def test_retention_prefers_what_it_promised_to_abandoned_steps(run):
    latest = policies.LatestN
    with run.open(keep=latest(3)) as opened:
        run.save(opened, *range(1, 7))
    with run.open(keep=latest(3), ram_keep=latest(2)) as opened:
        opened.load(4, go_back=True)
        run.save(opened, 5, line=2)
        assert [step for step, _ in run.stock()] == [4, 5]
        assert run.set_aside() == [6]
        run.save(opened, 6, 7, line=2)
    assert run.stock() == [(5, 205), (6, 206), (7, 207)]
    assert run.set_aside() == []
    names = os.listdir(run.path / "ram" / "hosts" / "0")
    assert sorted(n.partition("-")[0] for n in names if n[0].isdigit()) == ["6", "7"]


def test_steps_of_plain_orbax_are_abandoned_too(run):
    with ocp.training.Checkpointer(run.path / "steps") as stock:
        for step in (1, 2, 3):
            stock.save(step, {"w": 100 + step})
    with run.open() as opened:
        assert opened.latest.step == 3
        opened.load(1, {"w": 0}, go_back=True)
        run.save(opened, 2, line=2)
    assert run.steps() == run.stock() == [(1, 101), (2, 202)]


def test_only_the_newest_step_is_overwritten_whether_it_fits_into_ram_or_not(run):
    with run.open(limit_bytes=300_000) as opened:
        run.save(opened, 1, 2)
        with pytest.raises(
            errors.CheckpointError, match="only the newest step can, which is 2"
        ):
            run.save(opened, 1, line=2, overwrite=True)
        large = {"w": np.full(10**6, 202, np.int32)}
        assert opened.save(2, large, overwrite=True)
    assert run.stock() == run.steps() == [(1, 101), (2, 202)]


def test_where_steps_are_written_in_place_they_are_copied_aside(run, monkeypatch):
    def in_place(path):
        path = storage.absolute(path)
        return persistent_root.PersistentRoot(path=path, in_place=True)

    monkeypatch.setattr(persistent_root.PersistentRoot, "from_path", in_place)
    with run.open() as opened:
        run.save(opened, *range(1, 5))
        opened.load(2, go_back=True)
        run.save(opened, 3, line=2)
    # What the new line has passed is gone.
    assert run.set_aside() == [4]
    run.lose_ram()
    assert run.steps() == [*old(1, 2), (3, 203)]
    with run.open() as opened:
        assert value(opened.load(4)) == 104
        run.save(opened, 5)
    assert run.set_aside() == []
    run.lose_ram()
    assert run.steps() == old(1, 2, 4, 5)


def test_what_a_line_abandons():
    current = Line(save="5", parents=((3, "1"), (6, "3")))
    kept = [(3, "1"), (6, "3"), (3, "0"), (7, "5"), (7, "6")]
    # Those of saves that the line did not go on from, too.
    gone = [(4, "1"), (7, "3"), (2, "2"), (2, "4"), (4, "0")]
    for number, save in kept:
        assert not current.abandons(StepId(number, save))
    for number, save in gone:
        assert current.abandons(StepId(number, save))
    assert not Line(save="5", parents=()).abandons(StepId(9, "1"))


@with_and_without_ram
def test_looking_at_an_older_step_abandons_nothing(run):
    with run.open() as opened:
        run.save(opened, 1, 2, 3)
        for step in (2, 1):
            assert value(opened.load(step)) == 100 + step
        assert opened.latest.step == 3
        assert not opened.should_save(1)
        assert opened.should_save(4)
        run.save(opened, 4)
    with run.open() as opened:
        assert value(opened.load()) == 104
        assert value(opened.load(2)) == 102
        run.save(opened, 5)
    with run.open() as opened:
        # A process that goes on from nothing else may not save after newer steps.
        assert value(opened.load(2)) == 102
        assert opened.latest.step == 5
        behind = (
            "step 6 cannot be saved: .* step 5, which is later than step 2.*go_back"
        )
        for refused in (opened.should_save, functools.partial(run.save, opened)):
            with pytest.raises(errors.CheckpointError, match=behind):
                refused(6)
        run.load(opened)
        run.save(opened, 6)
    assert run.went_back() == []
    assert run.steps() == old(1, 2, 3, 4, 5, 6)


# The step, the newest being 3, and whether components are loaded, and to go back.
LOADS = list(itertools.product((2, 3), (False, True), (False, True)))
# All pairs in CI, and a fifth of them each time.
PAIRS = [
    pytest.param(pair, marks=[pytest.mark.slow] if number % 5 else [])
    for number, pair in enumerate(itertools.product(LOADS, repeat=2))
]


@pytest.mark.parametrize("loads", PAIRS)
def test_which_of_two_loads_decides(run, loads):
    with run.open() as opened:
        run.save(opened, 1, 2, 3)
    with run.open() as opened:
        at = newest = 3
        is_placed = False
        for step, has_data, go_back in loads:
            parts = {"state": None} | ({"data": Counter()} if has_data else {})
            opened.load_checkpointables(step, parts, go_back=go_back)
            # An abandoned step is gone on from as if it was the newest.
            if go_back or has_data or not is_placed or step >= newest:
                at, is_placed = step, True
            if go_back or step > newest:
                newest = step
        if at < newest:
            with pytest.raises(errors.CheckpointError, match="go_back=True"):
                run.save(opened, 4, line=2)
        else:
            run.save(opened, 4, line=2)
    saved = [] if at < newest else [(4, 204)]
    assert run.steps() == [*old(*range(1, newest + 1)), *saved]


@with_and_without_ram
def test_going_back_abandons_newer_steps_at_once(run):
    with run.open() as opened:
        run.save(opened, 1, 2, 3, 4)
        opened.load(2, go_back=True)
        assert opened.latest.step == 2
        assert run.went_back() == [(4, 2)]
    # Also if it is killed before it saves.
    assert run.steps() == old(1, 2)
    with run.open() as opened:
        run.load(opened)
        run.save(opened, 6, line=2)
    assert run.steps() == [*old(1, 2), (6, 206)]


def test_a_step_is_saved_again_or_overwritten_after_a_run_went_back(run):
    with run.open() as opened:
        run.save(opened, 1, 2, 3)
        opened.load(2, go_back=True)
        assert opened.should_save(3)
        run.save(opened, 3, line=2)
        opened.load(1)
        run.save(opened, 3, line=2, overwrite=True)
        opened.load(1, go_back=True)
        with pytest.raises(errors.CheckpointError, match="already exists"):
            run.save(opened, 1)
        run.save(opened, 1, line=3, overwrite=True)
        assert run.went_back() == [(3, 2), (3, 1)]
    assert run.steps() == [(1, 301)]


def test_a_missing_step_and_an_empty_directory_are_told(run):
    with run.open() as opened:
        calls = [
            opened.load,
            opened.load_checkpointables,
            opened.metadata,
            lambda step: opened.load_async(step).result(),
        ]
        for call in calls:
            with pytest.raises(NotFound, match=r"steps.* has no checkpoints yet"):
                call(None)
            with pytest.raises(NotFound, match=r"no step 7: .* has no checkpoints yet"):
                call(7)
        run.save(opened, 1, 2)
        for call in [*calls, opened.delete]:
            with pytest.raises(NotFound, match=r"^step 7 is not in any tier") as caught:
                call(7)
            assert isinstance(caught.value, errors.CheckpointError)
        gone = opened.checkpoints[0]
        opened.delete(1)
        with pytest.raises(NotFound, match="step is 2: restore it with step=2"):
            opened.load(gone)
        with ocp.training.Checkpointer(opened.directory) as stock:
            stock.save(3, {"w": 1})
        opened.reload()
        with pytest.raises(NotFound, match="newest complete step is 3"):
            opened.load(7)
    for call in (lambda: run.save(opened, 8), opened.load):
        with pytest.raises(errors.CheckpointError, match="was closed; save and load"):
            call()


@with_and_without_ram
def test_a_component_that_was_not_loaded_is_reported_once_when_it_is_saved(run, caplog):
    with run.open() as opened:
        run.save(opened, 1)
        # This process has the data of the step.
        opened.load(1)
        run.save(opened, 2)
    with run.open() as opened:
        opened.load_checkpointables(2, {"state": {"w": 0}})
        assert not run.recorded.named("component_not_loaded")
        run.save(opened, 3, 4)
    (event,) = run.recorded.named("component_not_loaded")
    assert (event["step"], event["component"]) == (2, "data")
    assert "step 2 has 'data', which was not loaded" in caplog.text


@pytest.mark.parametrize("is_memory_lost", [False, True])
def test_a_run_goes_back_to_a_step_in_storage_before_anything_is_saved(
    run, is_memory_lost
):
    with run.open(every=2) as opened:
        run.save(opened, 1, 2, 3, 4, 5)
        stored = [each.step for each in opened.checkpoints if each.path]
        assert stored == [2, 4]
        assert run.load(opened, stored[-1]) == 104
    if is_memory_lost:
        run.lose_ram()
    with run.open(every=2) as opened:
        assert run.load(opened) == 104
        run.save(opened, 5, line=2)
        assert run.load(opened) == 205


def test_a_step_of_orbax_alone_is_in_storage(run):
    with run.open(every=2) as opened:
        run.save(opened, 2)
    with ocp.training.Checkpointer(run.path / "steps") as stock:
        stock.save_checkpointables(3, {"state": {"w": 3}})
    with run.open(every=2) as opened:
        assert [each.step for each in opened.checkpoints if each.path] == [2, 3]


def test_a_step_that_is_leased_is_neither_set_aside_nor_replaced(run):
    with run.open() as opened:
        run.save(opened, 1, 2, 3)
        opened.load(1, go_back=True)
        with leases.lease(run.path / "steps" / "3"):
            run.save(opened, 2, line=2)
            assert [step for step, _ in run.stock()] == [1, 2, 3]
        run.save(opened, 4, line=2)
        assert run.stock() == [(1, 101), (2, 202), (4, 204)]
        with leases.lease(run.path / "steps" / "4"):
            run.save(opened, 4, line=3, overwrite=True)
            assert run.stock()[-1] == (4, 204)
        told = run.recorded.named("degraded")
        assert all("step 4 in" in each["why"] for each in told)
        assert "is leased: a program is reading it" in told[0]["why"]
        opened.wait()
        assert run.stock()[-1] == (4, 304)


def test_a_removal_that_was_cut_short_is_finished_though_all_steps_are_kept(run):
    with run.open() as opened:
        run.save(opened, 1)
    announced = run.path / "steps" / leases.DIRECTORY / "1-0.removing"
    storage.write_atomic(announced, b"")
    with run.open() as opened:
        run.load(opened)
        run.save(opened, 2)
    assert not announced.exists()
    with leases.lease(run.path / "steps" / "1"):
        pass


def test_an_abandoned_step_that_was_leased_is_not_gone_on_from(run):
    with run.open() as opened:
        run.save(opened, 1, 2, 3)
        with leases.lease(run.path / "steps" / "3"):
            opened.load(1, go_back=True)
            run.save(opened, 1, line=2, overwrite=True)
    run.lose_ram()
    # It is where it was, and the newest by its number.
    assert [step for step, _ in run.stock()] == [1, 3]
    assert run.steps() == [(1, 201)]
