"""A run whose copy in RAM was corrupt when it was saved goes back to storage."""

import json
import shutil

import jax
import numpy as np
import pytest

from elastic_ckpt.checkpoint import run_saver
from elastic_ckpt.training import step_log
from elastic_ckpt.training.callbacks import Action, Finding
from tests import jobs, runs
from tests.processes.callbacks import Stateless
from tests.recorded_events import RecordedEvents


def poisoned(state, factor=np.nan):
    """A state whose weights are corrupt."""
    return {**state, "params": jax.tree.map(lambda w: w * factor, state["params"])}


def poison(monkeypatch, *steps, factor=np.nan):
    """Has the state be corrupt when some steps are captured, and the training go on."""
    save = run_saver.RunSaver.save

    def save_poisoned(saver, step, state, *, last):
        state = poisoned(state, factor) if step in steps else state
        save(saver, step, state, last=last)

    monkeypatch.setattr(run_saver.RunSaver, "save", save_poisoned)


class Finds(Stateless):
    """Finds a divergence in one step, once."""

    def __init__(self, step, *, action=Action.WARN, is_divergence=True):
        self._step = step
        self._finding = Finding(
            action=action, why="it is odd", since=step, is_divergence=is_divergence
        )

    def after_step(self, step, report):
        del report
        if step != self._step:
            return None
        self._step = 0
        return self._finding


class DeadError(Exception):
    """In place of the death of the process."""


class Run:
    """Worlds of one run in this process."""

    def __init__(self, directory, corpus, **settings):
        self._directory = directory
        self._corpus = corpus
        self._settings = {
            "enable_multi_tier_checkpointing": True,
            "local_checkpoint_directory": str(directory / "ram"),
            "local_checkpoint_period": 2,
            "multi_tier_checkpointing_backup_interval_steps": 4,
            "save_checkpoint_on_completion": False,
            **settings,
        }
        self.path = directory / "tiny"
        self.phases = []
        self.events = []

    def train(self, steps, *, handed_over=lambda *_: None, callbacks=None):
        """Trains in a new world; returns how its loop ended."""
        values = {**self._settings, "steps": steps}
        config = jobs.configured(self._directory, self._corpus, **values)
        recorded = RecordedEvents()
        job = jobs.assembled(config, slices=1, callbacks=callbacks, emit=recorded)
        try:
            state = job.restore_or_init(handed_over=handed_over)
            ended = job.run(state, begin=self.phases.append)
        except DeadError:
            job.abandon()
            raise
        job.close()
        self.events = recorded.named("restore_distrusted")
        return ended

    def starts(self):
        """The first step of each attempt."""
        return [each.start_step for each in step_log.read(self.path)]

    def audit(self):
        outcome = json.loads(runs.verb("audit", self.path, "--json"))
        assert outcome["passed"], outcome
        return outcome


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, corpus):
    """The same run in one world, with the state at its end."""
    run = Run(tmp_path_factory.mktemp("undisturbed") / "run", corpus)
    return run, run.train(12).state


def check_same(run, state, undisturbed):
    """A run has the rows, losses and weights of the one that was not disturbed."""
    other, expected = undisturbed
    jax.tree.map(np.testing.assert_array_equal, state, expected)
    steps, others = runs.steps(run.path), runs.steps(other.path)
    assert [(s.digest, s.loss) for s in steps] == [(s.digest, s.loss) for s in others]


@pytest.mark.slow
def test_a_poisoned_copy_in_ram_is_left_for_storage_and_the_rows_come_again(
    tmp_path, corpus, undisturbed, monkeypatch
):
    run = Run(tmp_path / "run", corpus)
    poison(monkeypatch, 6)
    run.train(6)
    ended = run.train(12)
    assert run.events == [
        {"step": 7, "restored_step": 6, "to_step": 4, "why": "the loss is nan"}
    ]
    assert ended.finding is None
    # A watch does not take the wait for uploads for a step that hangs.
    assert run.phases.count("restore") == 1
    check_same(run, ended.state, undisturbed)
    assert run.starts() == [0, 6, 4]
    outcome = run.audit()
    # Steps 5 and 6, and those of the corrupt state until the loss was known.
    assert outcome["num_redone_steps"] >= 3
    assert outcome["num_left_out"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("action", ["warn", "rollback"])
def test_a_divergence_that_a_detector_finds_is_first_a_reason_to_distrust(
    tmp_path, corpus, undisturbed, monkeypatch, action
):
    settings = {
        "divergence_action": action,
        "divergence_loss_factor": 1.01,
        "divergence_loss_smoothing": 0.0,
        "divergence_patience_steps": 2,
        "divergence_warmup_steps": 0,
    }
    run = Run(tmp_path / "run", corpus, **settings)
    poison(monkeypatch, 6, factor=30)
    run.train(6)
    ended = run.train(12)
    (event,) = run.events
    assert (event["step"], event["to_step"]) == (8, 4)
    assert event["why"].startswith("loss_above_best: the smoothed loss is ")
    check_same(run, ended.state, undisturbed)
    assert run.audit()["num_left_out"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("step", "starts"), [(9, [0, 6, 4]), (10, [0, 6])])
def test_only_a_divergence_within_so_many_steps_of_the_restore_counts(
    tmp_path, corpus, undisturbed, step, starts
):
    run = Run(tmp_path / "run", corpus, distrust_steps=3)
    run.train(6)
    ended = run.train(12, callbacks={"finds": Finds(step)})
    assert run.starts() == starts
    check_same(run, ended.state, undisturbed)


@pytest.mark.night
def test_zero_steps_switch_it_off(tmp_path, corpus, monkeypatch):
    run = Run(tmp_path / "run", corpus, distrust_steps=0)
    poison(monkeypatch, 6)
    run.train(6)
    assert run.train(8).step == 8
    assert run.events == []
    assert run.starts() == [0, 6]


@pytest.mark.night
def test_each_restore_is_distrusted_once(tmp_path, corpus, monkeypatch):
    run = Run(tmp_path / "run", corpus, divergence_action="stop")
    poison(monkeypatch, 4, 6)
    run.train(6)
    ended = run.train(12)
    assert [each["to_step"] for each in run.events] == [4]
    # Then the configured reaction follows.
    assert (ended.finding.action, ended.finding.since) == (Action.STOP, 5)


@pytest.mark.slow
def test_without_an_earlier_step_in_storage_the_run_says_so_and_goes_on(
    tmp_path, corpus, monkeypatch
):
    run = Run(tmp_path / "run", corpus)
    poison(monkeypatch, 2)
    run.train(2)
    ended = run.train(5)
    assert (ended.step, ended.finding) == (5, None)
    assert run.events == [
        {"step": 3, "restored_step": 2, "to_step": None, "why": "the loss is nan"}
    ]
    assert run.starts() == [0, 2]


@pytest.mark.slow
def test_a_state_that_stayed_on_the_devices_is_distrusted(
    tmp_path, corpus, undisturbed
):
    run = Run(tmp_path / "run", corpus)
    kept = run.train(6).state
    ended = run.train(12, handed_over=lambda *_: poisoned(kept))
    assert [(each["restored_step"], each["to_step"]) for each in run.events] == [(6, 4)]
    check_same(run, ended.state, undisturbed)
    run.audit()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_recorded", "is_memory_lost", "starts"),
    [(False, False, [0, 6, 6, 4]), (True, False, [0, 6, 4]), (True, True, [0, 6, 4])],
)
def test_a_run_that_dies_while_it_goes_back_continues_from_storage(
    tmp_path, corpus, undisturbed, monkeypatch, is_recorded, is_memory_lost, starts
):
    run = Run(tmp_path / "run", corpus)
    poison(monkeypatch, 6)
    run.train(6)
    distrust = run_saver.RunSaver.distrust

    def distrust_and_die(saver, *arguments, **options):
        assert not is_recorded or distrust(saver, *arguments, **options)
        raise DeadError

    monkeypatch.setattr(run_saver.RunSaver, "distrust", distrust_and_die)
    with pytest.raises(DeadError):
        run.train(12)
    monkeypatch.setattr(run_saver.RunSaver, "distrust", distrust)
    if is_memory_lost:
        shutil.rmtree(tmp_path / "run" / "ram")
    ended = run.train(12)
    assert len(run.events) == (not is_recorded)
    assert run.starts() == starts
    check_same(run, ended.state, undisturbed)
    run.audit()


@pytest.mark.slow
def test_a_batch_size_that_has_grown_since_is_that_of_the_step_again(
    tmp_path, corpus, monkeypatch
):
    ramp = {
        "global_batch_size": 0,
        "per_device_batch_size": 4,
        "enable_rampup_batch_size": True,
        "per_device_batch_size_start": 2,
        "per_device_batch_size_increment": 1,
        "global_rampup_samples": 60,
    }
    other = Run(tmp_path / "undisturbed", corpus, **ramp)
    expected = other.train(9).state
    rows = [step.num_rows for step in runs.steps(other.path)]
    assert rows == [8] * 4 + [12] * 2 + [16] * 3
    run = Run(tmp_path / "run", corpus, **ramp)
    poison(monkeypatch, 6)
    run.train(6)
    ended = run.train(9)
    assert run.starts() == [0, 6, 4]
    check_same(run, ended.state, (other, expected))
    run.audit()
