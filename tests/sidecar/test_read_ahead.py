"""The batches in flight between a worker and the loop."""

import asyncio
import gc
import re
import threading
import types

import numpy as np
import pytest
from elastic_ckpt_sidecar import RemoteIterator, remote_iterator, worker
from etils import epath

from elastic_ckpt.core import background, errors, metrics, topology
from elastic_ckpt.data import iterator, prefetch, state
from tests import ctrl_c, iterator_contract
from tests.sidecar import held_pipeline
from tests.sidecar.held_pipeline import number, settled
from tests.tiers import served

SIZE = held_pipeline.NUM_SHARDS


def batches_of(remote, **how):
    read_ahead = prefetch.ReadAhead(**how)
    return remote(held_pipeline.data(), size=SIZE, read_ahead=read_ahead)


@pytest.mark.parametrize("depth", [0, 2])
def test_the_next_batches_are_ready_while_the_step_runs(remote, valve, depth):
    batches = batches_of(remote, batches=depth)
    assert valve.num_batches() == 0
    for taken in range(1, 5):
        assert number(next(batches)) == taken - 1
        # During a step no batch is requested. The head has one, the worker others.
        ahead_of_loop = worker.HEAD_AHEAD + depth
        assert settled(lambda n=taken + ahead_of_loop: valve.num_batches() == n)
        assert batches._hosts.num_ready() == worker.HEAD_AHEAD


def saved_rows(batches, directory):
    """The rows before the state that is saved now."""
    iterator_contract.run(batches.save(iterator_contract.Created(directory)))
    return state.read(directory).row


def test_a_save_does_not_wait_for_a_batch_that_is_on_its_way(remote, valve, tmp_path):
    batches = batches_of(remote, batches=1)
    valve.close(at=3)
    assert [number(next(batches)) for _ in range(2)] == [0, 1]

    async def save():
        # Here the head's own batch is held up.
        writing = await batches.save(iterator_contract.Created(tmp_path))
        assert number(next(batches)) == 2
        valve.open()
        assert number(next(batches)) == 3
        await writing

    asyncio.run(save())
    assert state.read(tmp_path).row == 2 * SIZE


def test_a_reset_that_gets_no_answer_says_so_and_is_made_up_for_later(
    remote, valve, tmp_path, monkeypatch
):
    monkeypatch.setattr(remote_iterator, "_ANSWER_SECS", 0.1)
    batches = batches_of(remote, batches=1)
    valve.close(at=3)
    for _ in range(3):
        next(batches)
    with pytest.raises(errors.DataError, match=r"not answer within 0\.1 s"):
        batches.reset()
    valve.open()
    # The workers begin again when they can, and the head continues with them.
    assert [number(next(batches)) for _ in range(4)] == [0, 1, 2, 3]
    assert saved_rows(batches, tmp_path) == 4 * SIZE


def test_a_change_of_size_that_is_refused_leaves_the_position(
    remote, tmp_path, monkeypatch
):
    def refuse(*_):
        raise errors.ConfigError("has logical shards [3], which this run does not have")

    monkeypatch.setattr(iterator.HostIterator, "continue_with", refuse)
    batches = batches_of(remote)
    for step in range(2):
        if step % 2:
            served.until(lambda: batches._hosts.num_ready() == worker.HEAD_AHEAD)
        with pytest.raises(errors.ConfigError, match="has logical shards"):
            batches.resize(16)
        assert number(next(batches)) == step
    assert saved_rows(batches, tmp_path) == 2 * SIZE


def test_a_next_that_is_interrupted_loses_no_batch_and_no_count(
    remote, valve, tmp_path
):
    batches = batches_of(remote)
    valve.close(at=6)
    assert [number(next(batches)) for _ in range(6)] == list(range(6))
    with pytest.raises(KeyboardInterrupt):
        ctrl_c.pressed_during(lambda: next(batches))
    valve.open()
    assert number(next(batches)) == 6
    assert saved_rows(batches, tmp_path) == 7 * SIZE
    assert number(next(batches)) == 7


def test_closing_does_not_wait_for_a_pipeline_that_hangs(valve, monkeypatch, remote):
    monkeypatch.setattr(background, "_CLOSE_SECS", 0.1)
    batches = batches_of(remote, batches=1)
    valve.close(at=2)
    for _ in range(2):
        next(batches)
    # The valve is closed still.
    batches.close()
    with pytest.raises(errors.DataError, match="was closed; create a new one"):
        next(batches)


def test_garbage_ends_its_threads_whatever_is_under_way(valve, threads):
    del valve
    before = threads()
    for taken in range(3):
        batches = RemoteIterator(
            held_pipeline.data(),
            mesh=topology.mesh_of(topology.present(2)),
            global_batch_size=SIZE,
            read_ahead=prefetch.ReadAhead(batches=taken),
        )
        for _ in range(taken):
            next(batches)
        batches.itself = batches
        del batches
    gc.collect()
    served.until(lambda: threads() <= before)


def test_a_host_that_is_late_is_named_with_its_wait(remote, valve, caplog):
    batches = batches_of(remote, batches=1, warn_after_secs=0.2)
    valve.close()
    # The first batch may take its time.
    threading.Timer(0.3, valve.open).start()
    assert number(next(batches)) == 0
    assert settled(lambda: valve.num_batches() == 3)
    assert "waited" not in caplog.text
    valve.close()
    threading.Timer(0.5, valve.open).start()
    assert [number(next(batches)) for _ in range(4)] == [1, 2, 3, 4]
    warning, *_ = [r.getMessage() for r in caplog.records if "waited" in r.getMessage()]
    assert re.search(
        r"^waited [0-9.]+ s for a batch: host 0 waited [0-9.]+ s.*"
        r"others at most 0\.0 s",
        warning,
    )


def test_of_several_hosts_the_slowest_is_named(remote):
    def shard(host, secs):
        device = types.SimpleNamespace(process_index=host)
        return types.SimpleNamespace(device=device, data=np.array([secs]))

    batches = batches_of(remote)
    shards = [shard(0, 0.1), shard(0, 0.1), shard(7, 4.2), shard(3, 0.6)]
    batches._hosts._waited_secs = types.SimpleNamespace(addressable_shards=shards)
    assert batches._hosts.explain() == (
        "host 7 waited 4.2 s for its rows, the others at most 0.6 s"
    )


def test_the_metrics_of_the_data_are_recorded(remote, recorded, tmp_path):
    batches = batches_of(remote)
    for _ in range(3):
        next(batches)
    for _ in range(2):
        saved_rows(batches, tmp_path)
    iterator_contract.run(batches.load(epath.Path(tmp_path)))
    next(batches)
    batches.close()
    assert recorded[metrics.DATA_ROWS] == [SIZE] * 4
    assert recorded[metrics.DATA_BYTES] == [SIZE * 16] * 4
    assert recorded[metrics.DATA_READ_AHEAD][0] == 0
    blocked, saved = recorded[metrics.DATA_SAVE_BLOCK], recorded[metrics.DATA_SAVE]
    assert all(0 <= block <= whole for block, whole in zip(blocked, saved, strict=True))
    several = (metrics.DATA_WAIT, metrics.DATA_READ_AHEAD, metrics.DATA_SAVE)
    numbers = [len(recorded[each]) for each in (*several, metrics.DATA_LOAD)]
    assert numbers == [4, 4, 2, 1]
    assert min(value for values in recorded.values() for value in values) >= 0
