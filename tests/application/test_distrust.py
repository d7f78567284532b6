"""A run whose copy in RAM was corrupt when it was saved goes back to storage."""

import json

import jax
import numpy as np
import pytest

from elastic_ckpt.application.assemble import assemble
from elastic_ckpt.checkpoint import run_saver
from elastic_ckpt.config import load
from elastic_ckpt.core import topology
from elastic_ckpt.training import step_log
from tests import runs
from tests.recorded_events import RecordedEvents

DEVICES = 4


def poison(monkeypatch, *steps):
    """Has the state be NaN when these steps are captured, and the training go on."""
    save = run_saver.RunSaver.save

    def poisoned(saver, step, state, *, last):
        if step in steps:
            params = jax.tree.map(lambda leaf: leaf * np.nan, state["params"])
            state = {**state, "params": params}
        save(saver, step, state, last=last)

    monkeypatch.setattr(run_saver.RunSaver, "save", poisoned)


class Run:
    """Worlds of one run in this process."""

    def __init__(self, directory, corpus, **settings):
        directory.mkdir()
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
        self.events = []

    def train(self, steps, **settings):
        """Trains in a new world; returns how its loop ended."""
        values = {**self._settings, **settings, "steps": steps}
        config = load.load(runs.write_config(self._directory, self._corpus, **values))
        world = topology.Topology(hosts=1, slices=1, devices=DEVICES)
        recorded = RecordedEvents()
        job = assemble(config, world, devices=jax.devices()[:DEVICES], emit=recorded)
        ended = job.run(job.restore_or_init())
        job.close()
        self.events = recorded.named("restore_distrusted")
        return ended

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
    check_same(run, ended.state, undisturbed)
    assert [each.start_step for each in step_log.read(run.path)] == [0, 6, 4]
    outcome = run.audit()
    assert outcome["num_left_out"] == 0
