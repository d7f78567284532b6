"""Batches that a thread of a host makes ahead of the loop."""

import contextlib
import threading
import types
from concurrent import futures

import grain
import numpy as np
import pytest

from elastic_ckpt.core import background, errors
from elastic_ckpt.data import local_batches, positional_data, prefetch
from tests import pipelines


def read_ahead(dataset, *, make=dict, batches):
    how = prefetch.ReadAhead(batches=batches)
    return prefetch.Prefetched(dataset, make=make, read_ahead=how)


class Counting:
    """Rows that count their reads, and record the threads that read and close them."""

    in_process_by_default = True

    def __init__(self, *, fail_at=None):
        self.read = 0
        self.readers = []
        self._fail_at = fail_at

    def __next__(self):
        self.readers.append(threading.current_thread())
        if self.read == self._fail_at:
            raise KeyError(self.read)
        self.read += 1
        return {"x": np.full(10, self.read - 1)}

    def get_state(self):
        return {"next": self.read}, {0: self.read}

    def close(self):
        self.readers.append(threading.current_thread())


def settle(one):
    """Waits until everything that may be read ahead was."""
    if one._calls:
        one._calls.submit(lambda: None).result()


def number(batch):
    return int(batch["x"][0])


@pytest.mark.parametrize(
    ("busy_secs", "secs", "by_default", "warns"),
    [
        (0.9, 1.0, True, False),
        (1.1, 2.0, True, True),
        (49.0, 1000.0, True, False),
        (51.0, 1000.0, True, True),
        (51.0, 1000.0, False, False),
    ],
)
def test_a_warning_proposes_a_worker_process_for_slow_rows(
    monkeypatch, busy_secs, secs, by_default, warns
):
    now, warned = iter([0.0]), set()
    clock = types.SimpleNamespace(
        thread_time=lambda: busy_secs, monotonic=lambda: next(now, secs)
    )
    monkeypatch.setattr(prefetch, "time", clock)

    def log_first_n(_, text, times, percent):
        assert times == 1
        warned.add("set num_workers=1" in text % percent)

    monkeypatch.setattr(prefetch.logging, "log_first_n", log_first_n)
    counting = Counting()
    counting.in_process_by_default = by_default
    one = read_ahead(counting, batches=2)
    for _ in range(2):
        next(one)
    settle(one)
    assert warned == ({True} if warns else set())


@pytest.mark.parametrize("depth", [2, 0])
def test_reading_ahead_is_bounded_and_an_error_is_raised_when_it_is_due(depth):
    counting = Counting(fail_at=7)
    one = read_ahead(counting, batches=depth)
    settle(one)
    assert counting.read == 0
    for taken in range(1, 8):
        assert number(next(one)) == taken - 1
        settle(one)
        assert counting.read == min(taken + depth, 7)
        assert one.num_ready() == depth
        assert one.get_state() == ({"next": taken}, {0: taken})
    for _ in range(2):
        with pytest.raises(KeyError, match="7"):
            next(one)
        assert one.get_state() == ({"next": 7}, {0: 7})
    one.close()
    with pytest.raises(errors.DataError, match="this iterator was closed"):
        next(one)
    (reader,) = set(counting.readers)
    assert (reader is threading.current_thread()) == (depth == 0)


def test_closing_does_not_wait_for_a_read_that_hangs(monkeypatch):
    monkeypatch.setattr(background, "_CLOSE_SECS", 0.05)
    reading, may_go_on = threading.Event(), threading.Event()

    def make(rows):
        if number(rows) == 1:
            reading.set()
            assert may_go_on.wait(600)
        return rows

    one = read_ahead(Counting(), make=make, batches=2)
    next(one)
    taking = futures.ThreadPoolExecutor().submit(next, one)
    assert reading.wait(600)
    one.close()
    may_go_on.set()
    assert number(taking.result(600)) == 1


def test_rows_are_not_read_by_two_threads_when_they_move_to_a_state():
    busy, reading = threading.Lock(), threading.Event()

    def row(n):
        assert busy.acquire(blocking=False)
        if n == 8:
            reading.set()
            # Longer than what does not wait for it takes.
            threading.Event().wait(0.3)
        busy.release()
        return {"x": np.array(n)}

    data = positional_data.positional(
        grain.MapDataset.range(100).map(row),
        pipeline="numbers",
        read_options=pipelines.IN_CALLER,
    )
    one = local_batches.LocalBatches(data, global_batch_size=2, read_ahead=4)
    state = one.get_state()
    for _ in range(2):
        next(one)
    assert reading.wait(600)
    one.set_state(state)
    assert next(one)["x"].tolist() == [0, 1]
    one.close()


@pytest.mark.parametrize("depth", [0, 2])
def test_a_batch_that_cannot_be_placed_is_tried_again_and_none_is_lost(depth):
    made = []

    def place(loaded):
        made.append(loaded)
        if len(made) in (3, 4, 9):
            raise MemoryError("no room on the device")
        return loaded

    one, taken = read_ahead(Counting(), make=place, batches=depth), []
    while len(taken) < 8:
        with contextlib.suppress(MemoryError):
            taken.append(number(next(one)))
        assert one.get_state() == ({"next": len(taken)}, {0: len(taken)})
    assert taken == [*range(8)]
