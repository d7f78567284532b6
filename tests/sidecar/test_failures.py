"""What a worker raises reaches the head as one error, whatever the runtime adds."""

import itertools
import traceback

import grain
import numpy as np
import pytest
from elastic_ckpt_sidecar import failures
from etils import epath

from elastic_ckpt.core import errors, topology
from elastic_ckpt.data import compatibility, positional_data, sharded_data, state
from tests import iterator_contract, pipelines


class OfTheUser(Exception):
    """With arguments that no other process could make it from."""

    def __init__(self, *, place, reason):
        super().__init__(f"{reason} at {place}")


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def failing(error):
    raise error


def text_of(error):
    """The report of a worker on an error."""
    with pytest.raises(failures.WorkerFailure) as raised:
        failures.reported()(failing)(error)
    return str(raised.value)


def at_the_head(text):
    """The error that the head raises for a runtime's error with that text."""
    with pytest.raises(errors.ElasticCkptError) as raised, failures.reaching_the_head():
        raise RuntimeError(text)
    return raised.value


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (OfTheUser(place=3, reason="stop"), "OfTheUser: stop at 3"),
        (ValueError('größer \U0001f600 \ud800 "\\ {}'), '\ud800 "\\ {}'),
        (ExceptionGroup("two", [ValueError("a"), KeyError("b")]), "two (2 sub-exc"),
        (Unspeakable(), "Unspeakable: <exception str() failed>"),
        (ValueError("x" * 100_000 + "end"), "x" * 100_000 + "end"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_exception_reaches_the_head_with_its_host_and_traceback(error, shown):
    # What the runtime adds may look like a report, or be another one.
    before, behind = "XlaRuntimeError: UNKNOWN: [host7] {1}\u2028{\n", '\n} ["a\\"]'
    raised = at_the_head(before + text_of(error) + behind + text_of(KeyError("other")))
    assert type(raised) is errors.DataError
    message = str(raised)
    assert message.startswith(f"{compatibility.host_name()}: ")
    assert shown in message
    assert "in failing\n" in message
    assert message.count("Its traceback:") == 1
    assert "".join(traceback.format_exception_only(error)) in message
    assert "other" not in message


def test_our_own_errors_keep_their_class_and_need_no_traceback():
    raised = at_the_head(text_of(errors.CheckpointError("the problem; the remedy")))
    assert type(raised) is errors.CheckpointError
    assert str(raised) == f"{compatibility.host_name()}: the problem; the remedy"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("connection lost"),
        RuntimeError(failures._MARK),
        RuntimeError(failures._MARK + '{"host": '),
        errors.ConfigError("of the head"),
    ],
)
def test_an_error_that_no_worker_marked_passes_as_it_is(error):
    with pytest.raises(type(error)) as raised, failures.reaching_the_head():
        raise error
    assert raised.value is error


def function_of_the_user(shard, n):
    if (shard, n) == (5, 3):
        raise OfTheUser(place=n, reason="größe")
    return {"x": np.array([shard, n], np.int32)}


def pipeline_of_the_user(shard):
    examples = grain.MapDataset.range(1000)
    return examples.map(lambda n: function_of_the_user(shard, n)).to_iter_dataset(
        pipelines.IN_CALLER
    )


def data_of_the_user():
    return sharded_data.sharded(
        pipeline_of_the_user, num_shards=8, pipeline="of the user"
    )


def test_after_a_users_error_the_state_before_it_is_saved_and_loaded(remote, tmp_path):
    batches = remote(data_of_the_user(), size=8)
    next(batches)
    iterator_contract.run(batches.save(iterator_contract.Created(tmp_path)))
    delivered = [np.asarray(next(batches)["x"]).tolist() for _ in range(2)]
    with pytest.raises(errors.DataError) as raised:
        next(batches)
    message = str(raised.value)
    assert message.startswith(f"{compatibility.host_name()}: OfTheUser: grö")
    assert "größe at 3" in message
    assert "in function_of_the_user\n" in message
    assert "in the pipeline of logical shard 5" in message
    for _ in range(2):
        with pytest.raises(errors.DataError, match="OfTheUser: größe at 3"):
            next(batches)
    iterator_contract.run(batches.load(epath.Path(tmp_path)))
    assert [np.asarray(next(batches)["x"]).tolist() for _ in range(2)] == delivered
    with pytest.raises(errors.DataError, match="OfTheUser"):
        next(batches)
    # The state of the failed iterator can still be saved: there it is again.
    iterator_contract.run(batches.save(iterator_contract.Created(tmp_path)))
    iterator_contract.run(batches.load(epath.Path(tmp_path)))
    with pytest.raises(errors.DataError, match="OfTheUser"):
        next(batches)


def test_a_batch_that_does_not_arrive_at_the_head_comes_with_the_next_call(
    remote, monkeypatch
):
    place, calls = topology.place, itertools.count()

    def placed(*args):
        if next(calls) == 5:
            raise RuntimeError("no memory on the accelerator")
        return place(*args)

    monkeypatch.setattr(topology, "place", placed)
    dataset = grain.MapDataset.range(100).map(lambda number: {"x": np.array([number])})
    batches = remote(positional_data.positional(dataset, pipeline="numbers"), size=8)
    numbers, failures_seen = [], 0
    while len(numbers) < 48:
        try:
            numbers += iterator_contract.ids(next(batches))
        except RuntimeError:
            failures_seen += 1
    assert numbers == list(range(48))
    assert failures_seen == 1


def test_after_an_error_of_the_storage_the_next_call_reads_the_same_batch(
    remote, tmp_path
):
    tries = iter([True])

    def flaky(number):
        if number == 20 and next(tries, False):
            raise OSError("the storage is busy")
        return {"x": np.array([number])}

    dataset = grain.MapDataset.range(100).map(flaky).repeat()
    batches = remote(positional_data.positional(dataset, pipeline="flaky"), size=8)
    numbers, recorded = [], []
    while len(numbers) < 6:
        try:
            numbers.append(iterator_contract.ids(next(batches)))
        except errors.DataError as error:
            recorded.append(str(error))
        iterator_contract.run(batches.save(iterator_contract.Created(tmp_path)))
        position = {"global_next_index": 8 * len(numbers)}
        assert state.read(tmp_path).position == position
    (message,) = recorded
    assert "the storage is busy" in message
    assert numbers == [list(range(n, n + 8)) for n in range(0, 48, 8)]


def test_an_error_while_the_state_is_written_reaches_who_saves(remote, tmp_path):
    batches = remote(data_of_the_user(), size=8)
    next(batches)
    gone = iterator_contract.Created(tmp_path / "a file" / "below")
    (tmp_path / "a file").write_text("")
    with pytest.raises(errors.DataError, match=r"host 0 .*Not a directory"):
        iterator_contract.run(batches.save(gone))
    # The next save is not troubled by it.
    iterator_contract.run(batches.save(iterator_contract.Created(tmp_path)))
    assert (tmp_path / "data_state.json").exists()
