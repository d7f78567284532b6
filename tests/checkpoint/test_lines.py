"""Runs that go back to an older step, or look at one: which saves count.

`tests/model` goes back and overwrites in random histories, and crashes at each change.
"""

import functools
import itertools
import shutil

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt import frontend
from elastic_ckpt.checkpoint import follow
from elastic_ckpt.core import errors
from elastic_ckpt.steps.step import Line, StepId
from elastic_ckpt.tiers.choices import Local, Persistent
from elastic_ckpt.tiers.persistent import leases, persistent_root
from tests.checkpoint.test_component_io import Counter
from tests.recorded_events import RecordedEvents

policies = ocp.training.preservation_policies
ALL = policies.PreserveAll()
NotFound = ocp.training.errors.StepNotFoundError


class Run:
    """Processes of one run, one after the other; the state of a step is a number."""

    def __init__(self, path):
        self.path = path
        self.recorded = RecordedEvents()

    def open(self, keep=ALL):
        """Opens a world."""
        local, stored = Local(self.path / "ram", keep=keep), self.path / "steps"
        tiers = [local, Persistent(stored, every=1)]
        return frontend.Checkpointer(tiers, run="run", emit=self.recorded)

    def save(self, opened, *steps, line=1, **options):
        for step in steps:
            checkpointables = {"state": {"w": 100 * line + step}, "data": Counter()}
            assert opened.save_checkpointables(step, checkpointables, **options)
            opened.wait()

    def steps(self):
        """The steps that a new world finds, with their values."""
        with self.open() as opened:
            return values(opened)

    def stock(self):
        """The steps that stock Orbax finds, with their values."""
        with ocp.training.Checkpointer(self.path / "steps") as stock:
            return values(stock)


def values(opened):
    return [(each.step, value(opened.load(each.step))) for each in opened.checkpoints]


def value(state):
    return int(np.ravel(state["w"])[0])


def old(*steps):
    return [(step, 100 + step) for step in steps]


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


@pytest.mark.usefixtures("kind")
def test_abandoned_steps_come_back_by_name(run):
    newest = policies.LatestN(1)
    with run.open(newest) as opened:
        run.save(opened, 1, 2, 3, 4)
        opened.load(2, roll_back=True)
        run.save(opened, 3, line=2)
    with run.open(newest) as opened:
        for step, expected in ((4, 104), (3, 203), (4, 104)):
            assert value(opened.load(step)) == expected
        run.save(opened, 5)
    # What the other line had passed is gone.
    root = persistent_root.PersistentRoot.from_path(run.path / "steps")
    assert list(root.set_aside_steps()) == []
    shutil.rmtree(run.path / "ram")
    assert run.steps() == old(1, 2, 4, 5)


def test_what_a_line_abandons():
    current = Line(save="5", parents=((3, "1"), (6, "3")))
    for number, save in [(3, "1"), (6, "3"), (3, "0"), (7, "5"), (7, "6")]:
        assert not current.abandons(StepId(number, save))
    # Those of saves that the line did not go on from, too.
    for number, save in [(4, "1"), (7, "3"), (2, "2"), (2, "4"), (4, "0")]:
        assert current.abandons(StepId(number, save))
    assert not Line(save="5", parents=()).abandons(StepId(9, "1"))


def test_a_run_that_begins_anew_or_looks_at_an_older_step_abandons_nothing(run):
    with run.open() as opened:
        run.save(opened, 1, 2, 3)
        assert value(opened.load(1)) == 101
        assert opened.latest.step == 3
        assert not opened.should_save(1)
        run.save(opened, 4)
    with run.open() as opened:
        # A process that goes on from nothing else may not save after newer steps.
        assert value(opened.load(2)) == 102
        behind = (
            "step 5 cannot be saved: .* step 4, .* than the loaded step 2.*roll_back"
        )
        for refused in (opened.should_save, functools.partial(run.save, opened)):
            with pytest.raises(errors.CheckpointError, match=behind):
                refused(5)
    with run.open() as opened:
        behind = (
            "step 0 cannot be saved: .*/steps has step 4, .*later.*different directory"
        )
        for refused in (opened.should_save, functools.partial(run.save, opened)):
            with pytest.raises(errors.CheckpointError, match=behind):
                refused(0)
    assert run.recorded.named("went_back") == []
    assert run.steps() == old(1, 2, 3, 4)


# The step, the newest being 3, and whether components are loaded, and to go back.
LOADS = list(itertools.product((2, 3), (False, True), (False, True)))
# All pairs in CI, and some of them each time.
PAIRS = [
    pytest.param(pair, marks=[pytest.mark.slow] if number % 13 else [])
    for number, pair in enumerate(itertools.product(LOADS, reversed(LOADS)))
]


@pytest.mark.parametrize("loads", PAIRS)
def test_which_of_two_loads_decides(run, loads):
    with run.open() as opened:
        run.save(opened, 1, 2, 3)
    with run.open() as opened:
        at = newest = 3
        is_placed = False
        for step, has_data, roll_back in loads:
            checkpointables = {"state": None} | (
                {"data": Counter()} if has_data else {}
            )
            opened.load_checkpointables(step, checkpointables, roll_back=roll_back)
            # An abandoned step is gone on from as if it was the newest.
            if roll_back or has_data or not is_placed or step >= newest:
                at, is_placed = step, True
            if roll_back or step > newest:
                newest = step
        if at < newest:
            with pytest.raises(errors.CheckpointError, match="roll_back=True"):
                run.save(opened, 4, line=2)
        else:
            run.save(opened, 4, line=2)
    saved = [] if at < newest else [(4, 204)]
    assert run.steps() == [*old(*range(1, newest + 1)), *saved]


def test_going_back_abandons_newer_steps_at_once_and_they_are_saved_again(run):
    with run.open() as opened:
        run.save(opened, 1, 2, 3, 4)
        opened.load(2, roll_back=True)
        with pytest.raises(errors.CheckpointError, match="only the newest step, "):
            run.save(opened, 1, overwrite=True)
    # Also if it is killed before it saves.
    assert run.steps() == old(1, 2)
    with run.open() as opened:
        opened.load_checkpointables(None, {"state": None, "data": Counter()})
        run.save(opened, 3, line=2)
        opened.load(1)
        run.save(opened, 3, line=2, overwrite=True)
        opened.load(1, roll_back=True)
        for force in (True, False):
            with pytest.raises(ocp.training.errors.StepAlreadyExistsError):
                run.save(opened, 1, force=force)
        run.save(opened, 1, line=3, overwrite=True)
    went_back = run.recorded.named("went_back")
    assert [(each["step"], each["to_step"]) for each in went_back] == [(4, 2), (3, 1)]
    assert run.steps() == [(1, 301)]


def test_a_missing_step_and_an_empty_directory_are_told(run):
    with run.open() as opened:
        calls = [
            opened.load,
            opened.load_checkpointables,
            opened.metadata,
            lambda step: opened.load_async(step).result(),
        ]
        for call, step in itertools.product(calls, (None, 7)):
            with pytest.raises(NotFound, match=r"steps.* has no checkpoints yet"):
                call(step)
        run.save(opened, 1, 2)
        for call in [*calls, opened.delete]:
            with pytest.raises(NotFound, match=r"^step 7 is not in any tier") as caught:
                call(7)
            assert isinstance(caught.value, errors.CheckpointError)
        gone = opened.checkpoints[0]
        opened.delete(1)
        with pytest.raises(NotFound, match="step is 2; restore it with step=2"):
            opened.load(gone)
    for call in (lambda: run.save(opened, 8), opened.load):
        with pytest.raises(errors.CheckpointError, match="was closed; save and load"):
            call()


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
    assert "step 2 contains 'data', which was not loaded" in caplog.text


def test_a_step_that_is_leased_is_neither_set_aside_nor_replaced(run):
    with run.open() as opened:
        run.save(opened, 1, 2, 3)
        opened.load(1, roll_back=True)
        with leases.lease(run.path / "steps" / "3"):
            run.save(opened, 2, line=2)
            assert [step for step, _ in run.stock()] == [1, 2, 3]
            followed = follow.watch_steps(run.path / "steps", timeout_secs=0)
            assert [each.step for each in followed] == [1, 2]
        run.save(opened, 4, line=2)
        assert run.stock() == [(1, 101), (2, 202), (4, 204)]
        with leases.lease(run.path / "steps" / "4"):
            with pytest.raises(errors.CheckpointError, match=r"step 4 .* is leased"):
                opened.delete(4)
            run.save(opened, 4, line=3, overwrite=True)
        assert run.stock()[-1] == (4, 204)
        told = run.recorded.named("degraded")
        assert "is leased: a program is reading it" in told[0]["why"]
