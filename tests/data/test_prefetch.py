import functools
import json
import threading
import types
from concurrent import futures

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core import background, errors
from elastic_ckpt.data import local_batches, prefetch, rows, sharded_data
from tests import pipelines, worlds

NUM_SHARDS = 12
SIZE = 12


def sharded(name="everything", **more):
    make_shard = functools.partial(pipelines.ALL[name], num_shards=NUM_SHARDS)
    return sharded_data.sharded(
        make_shard, num_shards=NUM_SHARDS, pipeline=name, **more
    )


def host_batches(dataset, host=0, num_hosts=1, size=SIZE):
    return dataset.host_batches(
        rows.Placement.in_order(host, num_hosts=num_hosts, global_batch_size=size)
    )


@pytest.fixture
def read_ahead():
    """Makes a `Prefetched`, closed at the end."""
    made = []

    def make(dataset, *, make=dict, **how):
        made.append(
            prefetch.Prefetched(
                dataset, make=make, read_ahead=prefetch.ReadAhead(**how)
            )
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


def saved(one):
    """The whole state, through JSON."""
    return through_json([one.position(), sorted(one.shard_cursors().items())])


def through_json(state):
    return json.loads(json.dumps(state))


def go_to(one, state):
    actual = dict(map(tuple, state[1]))
    one.go_to(state[0], lambda shards: {shard: actual[shard] for shard in shards})


def next_of(one):
    return worlds.by_row(next(one))


class Counting:
    """Rows that count their reads, and record the thread that read them.

    Args:
      fail_at: the batch that cannot be read.
    """

    in_process_by_default = True

    def __init__(self, *, fail_at=None):
        self.read = 0
        self.readers = []
        self.fails = False
        self.closed = 0
        self._fail_at = fail_at

    def __next__(self):
        self.readers.append(threading.current_thread())
        if self.read == self._fail_at:
            raise KeyError(self.read)
        self.read += 1
        self._work()
        return {"x": np.full(10, self.read - 1)}

    def _work(self):
        pass

    def position(self):
        return {"next": self.read}

    def shard_cursors(self):
        return {0: self.read}

    def go_to(self, position, read):
        read([0])
        self.read = position["next"]

    def close(self):
        self.closed += 1


def settle(one):
    """Waits until everything that may be read ahead was."""
    if one._source.calls:
        one._source.calls.submit(lambda: None).result()


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
    read_ahead, monkeypatch, busy_secs, secs, by_default, warns
):
    now = iter([0.0])
    clock = types.SimpleNamespace(
        thread_time=lambda: busy_secs, monotonic=lambda: next(now, secs)
    )
    monkeypatch.setattr(prefetch, "time", clock)
    warned = []
    monkeypatch.setattr(
        prefetch.logging, "log_first_n", lambda *told: warned.append(told)
    )
    counting = Counting()
    counting.in_process_by_default = by_default
    one = read_ahead(counting, batches=2)
    for _ in range(2):
        next(one)
    settle(one)
    assert bool(warned) is warns
    for _, text, times, percent in warned:
        assert "set num_workers=1" in text % percent
        assert times == 1


@pytest.mark.parametrize("depth", [2, 0])
def test_reading_ahead_is_bounded_in_batches(read_ahead, depth):
    counting = Counting()
    one = read_ahead(counting, batches=depth)
    # The first is read when it is requested.
    assert [number(next(one)), counting.read] == [0, 1]
    for taken in range(2, 8):
        assert number(next(one)) == taken - 1
        settle(one)
        assert counting.read == taken + depth
        assert one.num_ready() == depth
    in_caller = {
        dataset is threading.current_thread() for dataset in counting.readers[1:]
    }
    assert in_caller == {not depth}


def local(dataset, depth, size=SIZE):
    return local_batches.LocalBatches(
        dataset,
        global_batch_size=size,
        read_ahead=prefetch.ReadAhead(batches=depth),
    )


def without_cursors(state):
    """A state whose position can be read, and whose cursors are missing."""
    fields = {key: state[key] for key in ("engine", "pipeline", "position")}
    return {**fields, "position": {"batches": [[12, 10]]}, "cursors": {}, "version": 1}


def test_an_error_ahead_is_raised_when_its_batch_is_due_and_not_before(read_ahead):
    counting = Counting(fail_at=4)
    one = read_ahead(counting, batches=3)
    for expected in range(4):
        assert number(next(one)) == expected
        settle(one)
        assert one.position() == {"next": expected + 1}
        assert one.shard_cursors() == {0: expected + 1}
    for _ in range(2):
        with pytest.raises(KeyError, match="4"):
            next(one)
        assert one.position() == {"next": 4}
        assert one.shard_cursors() == {0: 4}


def test_closing_does_not_wait_for_a_read_that_hangs(read_ahead, monkeypatch):
    monkeypatch.setattr(background, "_CLOSE_SECS", 0.05)
    reading, may_go_on = threading.Event(), threading.Event()

    class Hanging(Counting):
        def __next__(self):
            if self.read == 1:
                reading.set()
                assert may_go_on.wait(600)
            return super().__next__()

    hanging = Hanging()
    one = read_ahead(hanging, batches=2)
    next(one)
    taking = futures.ThreadPoolExecutor().submit(next, one)
    assert reading.wait(600)
    one.close()
    assert hanging.closed == 0
    may_go_on.set()
    assert number(taking.result(600)) == 1


class Plain:
    """The engine with no reading ahead, and what was saved of it."""

    def __init__(self, size):
        self.host = host_batches(sharded("first_fit"), size=size)

    def resize(self, size):
        state = saved(self.host)
        self.host = host_batches(sharded("first_fit"), size=size)
        go_to(self.host, state)


class Iterator:
    """`LocalBatches` that reads ahead."""

    def __init__(self, depth, size):
        self._depth = depth
        self.rows = local(sharded("first_fit"), depth, size)

    def resize(self, size):
        state = self.rows.get_state()
        self.rows.close()
        self.rows = local(sharded("first_fit"), self._depth, size)
        self.rows.set_state(state)

    def state(self):
        """The same as `saved`."""
        state = through_json(self.rows.get_state())
        cursors = sorted([int(s), cursor] for s, cursor in state["cursors"].items())
        return [state["position"], cursors]


ACTIONS = st.one_of(
    st.tuples(st.just("next"), st.integers(1, 4)),
    st.tuples(st.just("save"), st.just(0)),
    st.tuples(st.just("go_to"), st.integers(0, 9)),
    st.tuples(st.just("fail"), st.just(0)),
    st.tuples(st.just("resize"), st.sampled_from([6, 12, 24])),
)


@settings(max_examples=12)
@given(st.integers(0, 4), st.lists(ACTIONS, min_size=3, max_size=12))
def test_whatever_is_done_it_is_the_plain_engine(depth, actions):
    plain, one = Plain(SIZE), Iterator(depth, SIZE)
    states = [(saved(plain.host), one.rows.get_state())]
    for action, amount in actions:
        if action == "next":
            for _ in range(amount):
                assert next_of(one.rows) == next_of(plain.host)
        elif action == "save":
            states.append((saved(plain.host), one.rows.get_state()))
        elif action == "go_to":
            of_plain, of_one = states[amount % len(states)]
            one.rows.set_state(of_one)
            go_to(plain.host, of_plain)
        elif action == "fail":
            with pytest.raises(errors.DataError):
                one.rows.set_state(without_cursors(one.rows.get_state()))
        else:
            one.resize(amount)
            plain.resize(amount)
        assert one.state() == saved(plain.host)
    one.rows.close()


@pytest.mark.parametrize("depth", [0, 2])
def test_a_batch_that_cannot_be_placed_is_tried_again_and_none_is_lost(
    read_ahead, depth
):
    plain, full = host_batches(sharded()), [3, 4, 9]
    made = []

    def place(loaded):
        made.append(loaded)
        if len(made) in full:
            raise MemoryError("no room on the device")
        return loaded

    one = read_ahead(host_batches(sharded()), make=place, batches=depth)
    failures = 0
    for _ in range(8):
        while True:
            try:
                actual = next_of(one)
                break
            except MemoryError:
                failures += 1
                assert saved(one) == saved(plain)
        assert actual == next_of(plain)
        assert saved(one) == saved(plain)
    assert failures == len(full)
