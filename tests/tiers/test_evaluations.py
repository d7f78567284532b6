import json

import pytest

from elastic_ckpt.core import storage
from elastic_ckpt.steps import retention
from elastic_ckpt.steps.step import Line
from elastic_ckpt.tiers.persistent import persistent_root, run_files
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
    run_files.record_evaluation(
        root,
        run_files.Evaluation(
            run=run, step=step, save=save, metrics=f'{{"loss":{loss}}}'
        ),
    )


def metrics(root, line=LINE, saved=None):
    """By step, the metrics that retention sees."""
    counted = run_files.evaluations(root, line, run=uploaded.RUN)
    evaluated = {step: json.loads(text) for step, text in counted}
    steps = [
        retention.HeldStep(step=step, time_ms=0, metrics=saved, complete=True)
        for step in root.steps()
    ]
    ranked = retention.with_evaluations(steps, evaluated)
    return {each.step: each.metrics for each in ranked}


def waiting(root):
    return sorted(each.name for each in (root.path / "evaluations").iterdir())


def test_the_nearest_evaluation_counts_and_a_later_one_of_the_same_step(root):
    committed(root, 2, 6)
    # One before all saved steps counts for none.
    for step, loss in ((4, 0.4), (3, 0.3), (5, 0.5), (1, 0.1)):
        record(root, step, loss)
    assert metrics(root) == {2: {"loss": 0.3}, 6: None}
    record(root, 6, 0.6, run="another")
    for loss in (0.2, 0.1):
        record(root, 2, loss)
        assert metrics(root) == {2: {"loss": loss}, 6: None}
    # Metrics of a save count unless the step itself was evaluated later.
    saved = {"loss": 9.0, "other": 1}
    assert metrics(root, saved=saved)[2] == {"loss": 0.1, "other": 1}
    storage.remove(root.path / "evaluations" / f"2-{SAVE}.json")
    assert metrics(root, saved=saved)[2] == saved


def test_evaluations_go_with_their_step_and_do_not_pass_on_to_another(root):
    committed(root, 1, 2, 4)
    for step in (2, 3, 4):
        record(root, step, step / 10)
    run_files.forget_evaluations(root, {2}, LINE)
    storage.remove(root.final(2))
    assert metrics(root) == {1: None, 4: {"loss": 0.4}}
    assert waiting(root) == [f"4-{SAVE}.json"]


def test_what_an_abandoned_or_replaced_world_recorded_does_not_count(root):
    committed(root, 2, 4)
    newer = f"{200:015d}"
    # The run went back to step 2, and goes on under a newer save.
    line = Line(save=newer, parents=((2, SAVE),))
    record(root, 4, 0.1)
    record(root, 2, 0.2)
    record(root, 3, 0.3, save=newer)
    assert metrics(root, line) == {2: {"loss": 0.2}, 4: None}
    # Nor does the old world count those of the new one, or remove them.
    assert metrics(root) == {2: {"loss": 0.2}, 4: {"loss": 0.1}}
    run_files.forget_evaluations(root, {2, 4}, LINE)
    assert waiting(root) == [f"3-{newer}.json"]
    # Those that the new line has passed go.
    record(root, 4, 0.1)
    run_files.forget_evaluations(root, (), line)
    assert waiting(root) == [f"3-{newer}.json"]


def test_a_damaged_evaluation_counts_as_none(root):
    committed(root, 2)
    record(root, 2, 0.2)
    path = root.path / "evaluations" / f"2-{SAVE}.json"
    path.write_bytes(path.read_bytes().replace(b"0.2", b"0.3"))
    assert metrics(root) == {2: None}
