import contextlib
import threading
import time

from elastic_ckpt.core import metrics
from elastic_ckpt.monitoring import summaries


def test_later_values_are_summed_up_and_none_is_lost(monkeypatch):
    monkeypatch.setattr(summaries, "NUM_SINGLE", 2)
    kept = []
    before = time.time()
    with summaries.listening(contextlib.nullcontext(kept.extend), name="kept"):
        for value in (1, 2, 8, 4, 6):
            metrics.DATA_ROWS.record(value)
        metrics.DATA_WAIT.record(0.5)
    fields = ("count", "sum", "min", "max", "last")
    rows = [s for s in kept if s["metric"] == metrics.DATA_ROWS.name]
    assert [tuple(map(each.get, fields)) for each in rows] == [
        (1, 1.0, 1.0, 1.0, 1.0),
        (1, 2.0, 2.0, 2.0, 2.0),
        (3, 18.0, 4.0, 8.0, 6.0),
    ]
    assert len(kept) == 4
    assert all(before <= each["time"] <= time.time() for each in kept)


def test_disk_that_hangs_holds_up_neither_recording_nor_the_end(monkeypatch, caplog):
    monkeypatch.setattr(summaries, "_CLOSE_SECS", 0.05)
    answer, asked, ended = threading.Event(), threading.Event(), threading.Event()
    kept = []

    def hanging(batch):
        asked.set()
        answer.wait()
        kept.extend(batch)
        if kept[1:]:
            ended.set()

    with summaries.listening(
        contextlib.nullcontext(hanging), name="hanging", interval_secs=0.01
    ):
        metrics.DATA_ROWS.record(1)
        assert asked.wait(600)
        metrics.DATA_ROWS.record(2)
    assert kept == []
    assert "no answer" in caplog.text
    answer.set()
    assert ended.wait(600)
    assert [s["last"] for s in kept] == [1.0, 2.0]
