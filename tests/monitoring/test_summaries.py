import threading
import time

import pytest

from elastic_ckpt.core import metrics
from elastic_ckpt.monitoring import summaries


class Kept:
    """A sink in memory."""

    def __init__(self):
        self.batches = []
        self.wrote = threading.Event()
        self.is_closed = False

    def write(self, batch):
        self.batches.append(list(batch))
        self.wrote.set()

    def close(self):
        self.is_closed = True

    def all(self):
        return [summary for batch in self.batches for summary in batch]


@pytest.fixture
def start():
    started = []

    def start(sink, **options):
        started.append(summaries.Summaries(sink, name="kept", **options))
        return started[-1]

    yield start
    for listener in started:
        listener.close()


def test_later_values_are_summed_up_and_none_is_lost(start, monkeypatch):
    monkeypatch.setattr(summaries, "NUM_SINGLE", 2)
    sink = Kept()
    listener = start(sink)
    before = time.time()
    for value in (1, 2, 8, 4, 6):
        metrics.DATA_ROWS.record(value)
    metrics.DATA_WAIT.record(0.5)
    listener.close()
    rows = [s for s in sink.all() if s.metric == metrics.DATA_ROWS.name]
    assert [(s.number, s.count, s.sum, s.min, s.max, s.last) for s in rows] == [
        (1, 1, 1.0, 1.0, 1.0, 1.0),
        (2, 1, 2.0, 2.0, 2.0, 2.0),
        (5, 3, 18.0, 4.0, 8.0, 6.0),
    ]
    assert len(sink.all()) == 4
    assert all(before <= each.time <= time.time() for each in sink.all())
    assert sink.is_closed


def test_intervals_grow_with_the_run(start):
    listener = start(Kept())
    assert listener._pause_secs() == 10.0
    listener._began_secs -= 100_000
    assert listener._pause_secs() == pytest.approx(100.0, abs=1.0)


def test_disk_that_hangs_holds_up_neither_recording_nor_the_end(
    start, monkeypatch, caplog
):
    monkeypatch.setattr(summaries, "_CLOSE_SECS", 0.05)
    answer, asked = threading.Event(), threading.Event()

    class Hanging(Kept):
        def write(self, batch):
            asked.set()
            answer.wait()
            super().write(batch)

    sink = Hanging()
    listener = start(sink, interval_secs=0.01)
    metrics.DATA_ROWS.record(1)
    assert asked.wait(600)
    metrics.DATA_ROWS.record(2)
    listener.close()
    assert sink.batches == []
    assert "no answer" in caplog.text
    answer.set()
    listener._thread.join()
    assert [s.last for s in sink.all()] == [1.0, 2.0]
