import pytest

from elastic_ckpt.core import storage
from elastic_ckpt.steps.line import Line
from elastic_ckpt.tiers.persistent import evaluations, persistent_root
from tests.tiers import uploaded

SAVE = f"{100:015d}"
LINE = Line(save=SAVE, parents=())


@pytest.fixture
def root(tmp_path):
    return persistent_root.PersistentRoot.from_path(tmp_path / "steps")


def committed(root, *steps, save=SAVE):
    """Directories of steps, with what commits them alone."""
    for step in steps:
        content = persistent_root.commit_text(root.final(step), "run-7", save)
        storage.write_atomic(root.final(step) / persistent_root.COMMIT_FILE, content)


def record(root, step, loss, *, save=SAVE, run=uploaded.RUN):
    evaluations.record(
        root,
        evaluations.Evaluation(
            run=run, step=step, save=save, metrics=f'{{"loss":{loss}}}'
        ),
    )


def settle(root, line=LINE):
    evaluations.settle(root, line, run=uploaded.RUN)


def metrics(root, step, saved=None):
    return evaluations.metrics_of(root.final(step), saved)


def waiting(root):
    return sorted(each.name for each in (root.path / "evaluations").iterdir())


def test_an_evaluation_that_did_not_save_counts_for_the_step_before(root):
    committed(root, 2)
    record(root, 3, 0.5)
    settle(root)
    # Step 3 may still be saved.
    assert metrics(root, 2) is None
    committed(root, 4)
    settle(root)
    assert metrics(root, 2) == {"loss": 0.5}
    assert waiting(root) == []
    # Also when the steps between are gone: it does not pass on to others.
    storage.remove(root.final(2))
    committed(root, 1, 6)
    settle(root)
    assert metrics(root, 1) is None
    # One before all saved steps counts for none.
    assert evaluations.saved_step(1, [2, 4]) is None
    assert evaluations.saved_step(5, [2, 4, 6]) == 4


def test_the_nearest_evaluation_counts_and_a_later_one_of_the_same_step(root):
    committed(root, 2, 6)
    for step, loss in ((4, 0.4), (3, 0.3), (5, 0.5)):
        record(root, step, loss)
    settle(root)
    assert metrics(root, 2) == {"loss": 0.3}
    for loss in (0.2, 0.1):
        record(root, 2, loss)
        settle(root)
        assert metrics(root, 2) == {"loss": loss}


def test_metrics_of_a_save_count_unless_the_step_itself_was_evaluated_later(root):
    committed(root, 2, 6)
    record(root, 3, 0.3)
    settle(root)
    assert metrics(root, 2, {"loss": 9.0, "other": 1}) == {"loss": 9.0, "other": 1}
    record(root, 2, 0.2)
    settle(root)
    assert metrics(root, 2, {"loss": 9.0, "other": 1}) == {"loss": 0.2, "other": 1}


def test_what_an_abandoned_world_recorded_does_not_count(root):
    committed(root, 2, 4)
    newer = f"{200:015d}"
    # The run went back to step 2, and goes on under a newer save.
    line = Line(save=newer, parents=((2, SAVE),))
    record(root, 4, 0.1)
    record(root, 2, 0.2)
    settle(root, line)
    assert metrics(root, 4) is None
    assert metrics(root, 2) == {"loss": 0.2}
    assert waiting(root) == []


def test_a_world_that_was_replaced_leaves_the_evaluations_of_its_successor(root):
    committed(root, 2, 4)
    newer = f"{200:015d}"
    record(root, 2, 0.1, save=newer)
    settle(root)
    assert metrics(root, 2) is None
    assert waiting(root) == [f"2-{newer}.json"]
    assert evaluations.counted(root, LINE, run=uploaded.RUN) == []


def test_settled_and_recorded_evaluations_are_listed(root):
    committed(root, 2, 4)
    record(root, 2, 0.2)
    settle(root)
    record(root, 5, 0.5)
    record(root, 5, 0.5, run="another")
    listed = evaluations.counted(root, LINE, run=uploaded.RUN)
    assert listed == [(2, '{"loss":0.2}')]
    record(root, 5, 0.5)
    assert [step for step, _ in evaluations.counted(root, LINE, run="run-7")] == [2, 5]


def test_settling_again_after_a_crash_changes_nothing(root, monkeypatch):
    committed(root, 2, 4)
    record(root, 2, 0.2)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, "remove", killed)
    with pytest.raises(KeyboardInterrupt):
        settle(root)
    monkeypatch.undo()
    assert metrics(root, 2) == {"loss": 0.2}
    settle(root)
    assert metrics(root, 2) == {"loss": 0.2}
    assert waiting(root) == []
    # A damaged one counts as none.
    path = root.final(2) / evaluations.FILE
    path.write_bytes(path.read_bytes().replace(b"0.2", b"0.3"))
    assert metrics(root, 2, {"loss": 1.0}) == {"loss": 1.0}
