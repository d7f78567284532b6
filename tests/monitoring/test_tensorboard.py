import time

import pytest

from elastic_ckpt.core import metrics
from elastic_ckpt.monitoring import summaries, tensorboard
from tests.monitoring import event_file


def test_point_is_the_mean_at_the_number_of_its_last_value(tmp_path, monkeypatch):
    monkeypatch.setattr(summaries, "NUM_SINGLE", 1)
    with summaries.listening(tensorboard.event_file(tmp_path), name="board"):
        for value in (0.5, 0.25, 0.75):
            metrics.DATA_WAIT.record(value)
    assert event_file.scalars(tmp_path) == [
        ("elastic_ckpt/data/wait_secs", 1, 0.5),
        ("elastic_ckpt/data/wait_secs", 3, 0.5),
    ]


@pytest.mark.slow
def test_worlds_add_to_one_series_at_the_number_of_steps_done(tmp_path):
    for steps in ((1, 2, 3), (3, 4)):
        with summaries.listening(tensorboard.event_file(tmp_path), name="board"):
            for step in steps:
                metrics.TRAIN_STEPS.record(step)
                metrics.TRAIN_LOSS.record(step / 4)
        # The names of the files order them by seconds.
        time.sleep(1.1)
    points = [p for p in event_file.scalars(tmp_path) if p[0].endswith("loss")]
    assert [p[1:] for p in points] == [
        *((1, 0.25), (2, 0.5), (3, 0.75)),
        *((3, 0.75), (4, 1.0)),
    ]
    assert event_file.marks(tmp_path) == [1, 3]


def test_what_has_no_step_does_not_drop_the_steps_of_an_earlier_start(tmp_path):
    with summaries.listening(tensorboard.event_file(tmp_path), name="board"):
        metrics.SLICES.record(4)
        metrics.TRAIN_STEPS.record(41)
        metrics.TRAIN_LOSS.record(2.0)
    assert event_file.marks(tmp_path) == [41]
