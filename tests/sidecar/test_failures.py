import asyncio
import json
import traceback

import grain
import numpy as np
import pytest
from elastic_ckpt_sidecar import failures
from etils import epath

from elastic_ckpt.core import errors
from elastic_ckpt.data import compatibility, sharded_data, state
from tests import iterator_contract, pipelines
from tests.data import test_positional

OWN = [
    errors.ConfigError,
    errors.DataError,
    errors.CheckpointError,
    errors.RunError,
]


class OfTheUser(Exception):
    """With arguments that no other process could make it from."""

    def __init__(self, *, place, reason):
        super().__init__(f"{reason} at {place}")


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


def failing(error, depth=0):
    if depth:
        failing(error, depth - 1)
    raise error


def text_of(error, *, depth=0):
    """The report of a worker on an error."""
    with pytest.raises(failures.WorkerFailure) as raised:
        failures.reported(failing)(error, depth)
    return str(raised.value)


def at_the_head(text, *, kind=RuntimeError):
    """The error that the head raises for a runtime's error with that text."""
    with pytest.raises(errors.ElasticCkptError) as raised, failures.reaching_the_head():
        raise kind(text)
    return raised.value


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (ValueError("no"), "failed with ValueError: no"),
        (OfTheUser(place=3, reason="stop"), "failed with OfTheUser: stop at 3"),
        (KeyError("a"), "failed with KeyError: 'a'"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"), "UnicodeDecodeError"),
        (ValueError('größer 日本 \U0001f600 \ud800 "\\ {}'), '\ud800 "\\ {}'),
        (ValueError(""), "failed with ValueError: \n"),
        (ExceptionGroup("two", [ValueError("a"), KeyError("b")]), "two (2 sub-exc"),
        (StopIteration(), "failed with StopIteration"),
        (Unspeakable(), "failed with Unspeakable: <exception str() failed>"),
    ],
)
def test_any_exception_reaches_the_head_with_its_host_and_traceback(error, shown):
    raised = at_the_head(text_of(error))
    assert type(raised) is errors.DataError
    message = str(raised)
    assert message.startswith(f"{compatibility.host_name()} failed with ")
    assert shown in message
    assert "in failing\n" in message
    assert message.count("Its traceback:") == 1
    assert "".join(traceback.format_exception_only(error)) in message


def test_notes_and_causes_come_along():
    cause = OSError("the disk is gone")
    error = ValueError("cannot read")
    error.add_note("in the pipeline of logical shard 3")
    error.__cause__ = cause
    message = str(at_the_head(text_of(error)))
    assert "in the pipeline of logical shard 3" in message
    assert "OSError: the disk is gone" in message
    assert "The above exception was the direct cause" in message


def test_a_long_traceback_and_a_long_message_come_whole():
    error = ValueError("x" * 100_000 + "end")
    message = str(at_the_head(text_of(error, depth=200)))
    assert "x" * 100_000 + "end" in message
    assert "repeated" in message


@pytest.mark.parametrize(
    ("before", "behind"),
    [
        ("INTERNAL: ", ""),
        ("XlaRuntimeError: UNKNOWN: [host7] Traceback:\n  line {1}\n", "\n\nsee: {}"),
        ("ifrt_proxy: rpc failed: ", ' [type.googleapis.com/x="{\\"a\\": 1}"]'),
        ("é\u2028{", "}"),
    ],
)
def test_what_the_runtime_writes_around_it_does_not_matter(before, behind):
    text = text_of(ValueError("line\nbreak {not JSON}"))
    message = str(at_the_head(before + text + behind))
    assert message.startswith(compatibility.host_name())
    assert "failed with ValueError: line\nbreak {not JSON}\n" in message


def test_of_the_same_failure_told_twice_the_first_is_heard():
    inner = text_of(ValueError("inner"))
    message = str(at_the_head(inner + "\n" + text_of(KeyError("other"))))
    assert "ValueError: inner" in message
    assert "KeyError" not in message


@pytest.mark.parametrize("kind", OWN)
def test_our_own_errors_keep_their_class_and_need_no_traceback(kind):
    raised = at_the_head(text_of(kind("the problem; the remedy")))
    assert type(raised) is kind
    assert str(raised) == f"{compatibility.host_name()}: the problem; the remedy"


def test_an_error_that_no_worker_marked_passes_as_it_is():
    for text in ("connection lost", failures._MARK, failures._MARK + '{"host": '):
        error = RuntimeError(text)
        with pytest.raises(RuntimeError) as raised, failures.reaching_the_head():
            raise error
        assert raised.value is error


def test_an_error_of_the_head_passes_as_it_is():
    error = errors.ConfigError("of the head")
    with pytest.raises(errors.ConfigError) as raised, failures.reaching_the_head():
        raise error
    assert raised.value is error


def test_what_a_worker_tells_is_json_behind_the_mark():
    text = text_of(ValueError("no"))
    content = json.loads(text.removeprefix(failures._MARK))
    assert sorted(content) == ["host", "kind", "message", "traceback"]


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


def test_a_users_error_is_told_with_host_and_traceback_and_then_shortly(
    remote, tmp_path
):
    batches = remote(data_of_the_user(), size=8)
    next(batches)
    iterator_contract.run(batches.save(iterator_contract.Created(tmp_path)))
    delivered = [np.asarray(next(batches)["x"]).tolist() for _ in range(2)]
    with pytest.raises(errors.DataError) as raised:
        next(batches)
    message = str(raised.value)
    assert message.startswith(f"{compatibility.host_name()} failed with OfTheUser: grö")
    assert "größe at 3" in message
    assert "in function_of_the_user\n" in message
    assert "in the pipeline of logical shard 5" in message
    for _ in range(3):
        with pytest.raises(errors.DataError, match="load a saved state") as raised:
            next(batches)
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 300
    # The state before it can be saved, and loaded.
    iterator_contract.run(batches.load(epath.Path(tmp_path)))
    assert [np.asarray(next(batches)["x"]).tolist() for _ in range(2)] == delivered


def test_the_state_before_a_users_error_can_still_be_saved(remote, tmp_path):
    batches = remote(data_of_the_user(), size=8)
    for _ in range(3):
        next(batches)
    with pytest.raises(errors.DataError, match="OfTheUser"):
        next(batches)
    iterator_contract.run(batches.save(iterator_contract.Created(tmp_path)))
    iterator_contract.run(batches.load(epath.Path(tmp_path)))
    # There it is again.
    with pytest.raises(errors.DataError, match="OfTheUser"):
        next(batches)


def test_after_an_error_of_the_storage_the_next_call_reads_the_same_batch(
    remote, corpus, tmp_path
):
    flaky = test_positional.FlakyData(
        files=(corpus,),
        max_target_length=16,
        shuffle=False,
        num_threads=0,
        error=OSError("the storage is busy"),
    )
    batches = remote(flaky, size=8)
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
    assert "failed with OSError: the storage is busy" in message
    assert numbers == [list(range(n, n + 8)) for n in range(0, 48, 8)]


def test_an_error_while_the_state_is_written_reaches_who_saves(remote, tmp_path):
    batches = remote(data_of_the_user(), size=8)
    next(batches)
    gone = iterator_contract.Created(tmp_path / "a file" / "below")
    (tmp_path / "a file").write_text("")
    with pytest.raises(errors.DataError, match=r"host 0 .* failed with \w+Error"):
        asyncio.run(save_whole(batches, gone))
    # The next save is not troubled by it.
    iterator_contract.run(batches.save(iterator_contract.Created(tmp_path)))
    assert (tmp_path / "data_state.json").exists()


async def save_whole(batches, directory):
    await (await batches.save(directory))
