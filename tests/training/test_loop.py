import numpy as np
import pytest

from elastic_ckpt.training import loop, train_step


class Journal:
    """Every part of a loop in one, noting who is called when."""

    def __init__(self, due=()):
        self.calls = []
        self._due = due

    def step(self, state, batch):
        self.calls.append(f"step {batch}")
        report = train_step.StepReport(
            loss=np.float32(batch), example_id=None, row_digests=None
        )
        return state + 1, report

    def is_due(self, step, *, last):
        return step in self._due or last

    def save(self, step, state):
        self.calls.append(f"save {step}: {state}")

    def append(self, step, report):
        self.calls.append(f"log {step}")
        return float(report.loss)

    def sync(self):
        self.calls.append("sync")

    def emit(self, name, **fields):
        assert name == "step"
        self.calls.append(f"emit {fields['step']}/{fields['steps']}: {fields['loss']}")


@pytest.fixture
def journal():
    return Journal(due={2})


def run(journal, **changes):
    parts = {"batches": iter(range(100)), "log": journal, "saver": journal} | changes
    loop_ = loop.Loop(program=journal, emit=journal.emit, **parts)
    return loop_.run(0, start_step=0, steps=3)


def test_what_is_saved_is_logged_and_durable_before(journal):
    assert run(journal) == 3
    assert journal.calls == [
        "step 0",
        "step 1",
        "log 0",
        "emit 1/3: 0.0",
        "log 1",
        "emit 2/3: 1.0",
        "sync",
        "save 2: 2",
        "step 2",
        "log 2",
        "emit 3/3: 2.0",
        "sync",
        "save 3: 3",
        "sync",
    ]


def test_a_host_that_writes_no_log_still_saves(journal):
    run(journal, log=None)
    assert journal.calls == ["step 0", "step 1", "save 2: 2", "step 2", "save 3: 3"]


def test_without_a_saver_every_step_is_logged(journal):
    run(journal, saver=None)
    assert [c for c in journal.calls if c.startswith(("log", "save"))] == [
        "log 0",
        "log 1",
        "log 2",
    ]
