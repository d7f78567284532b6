"""Older steps that are loaded: to look at, or to go on from. And steps that are not.

`tests/model` goes back in random histories.
"""

import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt import frontend
from elastic_ckpt.core import errors
from elastic_ckpt.tiers.choices import Local, Persistent
from tests.checkpoint.test_component_io import Counter

NotFound = ocp.training.errors.StepNotFoundError


class Run:
    """Processes of one run, one after the other; the state of a step is a number."""

    def __init__(self, path, kind):
        self._tiers = [Persistent(path / "steps", every=1)]
        if kind != "storage":
            keep = ocp.training.preservation_policies.PreserveAll()
            self._tiers.append(Local(path / "ram", keep=keep))
        self.events = []
        self.unloaded = []

    def open(self):
        return frontend.Checkpointer(self._tiers, run="run", emit=self._emit)

    def _emit(self, name, **fields):
        if name == "went_back":
            self.events.append((fields["step"], fields["to_step"]))
        if name == "component_not_loaded":
            self.unloaded.append((fields["step"], fields["component"]))

    def steps(self):
        with self.open() as checkpointer:
            return [
                (each.step, checkpointer.load(each, {"w": 0})["w"])
                for each in checkpointer.checkpoints
            ]


def save(checkpointer, *steps, line=1, **options):
    for step in steps:
        parts = {"state": {"w": 100 * line + step}, "data": Counter()}
        assert checkpointer.save_checkpointables(step, parts, **options)
        checkpointer.wait()


def old(*steps):
    return [(step, 100 + step) for step in steps]


@pytest.fixture(params=["ram and storage"])
def run(request, tmp_path):
    return Run(tmp_path, request.param)


in_both = pytest.mark.parametrize("run", ["storage", "ram and storage"], indirect=True)


@in_both
def test_looking_at_an_older_step_abandons_nothing(run):
    with run.open() as checkpointer:
        save(checkpointer, 1, 2, 3)
        for step in (2, 1):
            assert checkpointer.load(step)["w"] == 100 + step
        assert checkpointer.latest.step == 3
        assert not checkpointer.should_save(1)
        assert checkpointer.should_save(4)
        save(checkpointer, 4)
    with run.open() as checkpointer:
        assert checkpointer.load()["w"] == 104
        assert checkpointer.load(2)["w"] == 102
        save(checkpointer, 5)
    with run.open() as checkpointer:
        # A process that has nothing else to go on from.
        assert checkpointer.load(2, go_back=False)["w"] == 102
        save(checkpointer, 6)
    assert run.events == []
    assert run.steps() == old(1, 2, 3, 4, 5, 6)


@in_both
@pytest.mark.parametrize("way", ["said", "with components", "first load"])
def test_going_back_abandons_newer_steps_at_the_next_save(run, way):
    with run.open() as checkpointer:
        save(checkpointer, 1, 2, 3, 4)
        if way == "said":
            checkpointer.load_async(2, go_back=True).result()
        elif way == "with components":
            parts = {"state": None, "data": Counter()}
            checkpointer.load_checkpointables(2, parts)
        else:
            checkpointer.close()
            checkpointer = run.open()
            checkpointer.load(2)
        assert checkpointer.latest.step == 2
        assert run.events == []
        save(checkpointer, 6, line=2)
        assert run.events == [(4, 2)]
        checkpointer.close()
    assert run.steps() == [*old(1, 2), (6, 206)]


def test_a_step_is_saved_again_or_overwritten_after_a_look_at_an_older_one(run):
    with run.open() as checkpointer:
        save(checkpointer, 1, 2, 3)
        checkpointer.load(1)
        checkpointer.load(2)
        assert checkpointer.should_save(3)
        # A step that is there is saved again: the run goes back to the one loaded.
        save(checkpointer, 3, line=2)
        assert run.events == [(3, 2)]
        run.events.clear()
        checkpointer.load(1)
        save(checkpointer, 3, line=2, overwrite=True)
        checkpointer.load(1)
        with pytest.raises(errors.CheckpointError, match="already exists"):
            save(checkpointer, 1)
        assert run.events == []
        save(checkpointer, 1, line=3, overwrite=True)
        assert run.events == [(3, 1)]
    assert run.steps() == [(1, 301)]


def test_a_deleted_or_reloaded_run_has_forgotten_the_look(run):
    with run.open() as checkpointer:
        save(checkpointer, 1, 2, 3, 4)
        checkpointer.load(2)
        checkpointer.delete(2)
        with pytest.raises(errors.CheckpointError, match="already exists"):
            save(checkpointer, 4)
        save(checkpointer, 5)
    assert run.events == []
    assert run.steps() == old(1, 3, 4, 5)


def test_a_missing_step_and_an_empty_directory_are_told(run):
    with run.open() as checkpointer:
        calls = [
            checkpointer.load,
            checkpointer.load_checkpointables,
            checkpointer.metadata,
            lambda step: checkpointer.load_async(step).result(),
        ]
        for call in calls:
            with pytest.raises(NotFound, match=r"steps.* has no checkpoints yet"):
                call(None)
            with pytest.raises(NotFound, match=r"no step 7: .* has no checkpoints yet"):
                call(7)
        save(checkpointer, 1, 2)
        for call in [*calls, checkpointer.delete]:
            with pytest.raises(NotFound, match=r"^step 7 is not in any tier") as caught:
                call(7)
            assert isinstance(caught.value, errors.CheckpointError)
        gone = checkpointer.checkpoints[0]
        checkpointer.delete(1)
        with pytest.raises(NotFound, match="step is 2: restore it with step=2"):
            checkpointer.load(gone)
        with ocp.training.Checkpointer(checkpointer.directory) as stock:
            stock.save(3, {"w": 1})
        checkpointer.reload()
        with pytest.raises(NotFound, match="newest complete step is 3"):
            checkpointer.load(7)
    for call in (lambda: save(checkpointer, 8), checkpointer.load):
        with pytest.raises(errors.CheckpointError, match="was closed; save and load"):
            call()


@in_both
def test_a_component_that_was_not_loaded_is_reported_once_when_it_is_saved(run, caplog):
    with run.open() as checkpointer:
        save(checkpointer, 1)
    with run.open() as checkpointer:
        checkpointer.load_checkpointables(1, {"state": {"w": 0}})
        assert not run.unloaded
        save(checkpointer, 2, 3)
    assert run.unloaded == [(1, "data")]
    assert "step 1 has 'data', which was not loaded" in caplog.text
