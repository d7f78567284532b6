"""The iterator for loops without JAX, with both spellings of a state."""

import collections
import dataclasses
import functools
import itertools
import json
import pathlib

import grain
import jsonschema
import numpy as np
import pytest

from elastic_ckpt.core import errors
from elastic_ckpt.data import (
    elastic_data,
    example_id,
    local_batches,
    sharded_data,
)
from tests import conftest, pipelines

NUM_SHARDS = SIZE = 12
GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
SCHEMAS = pathlib.Path(elastic_data.__file__).parent / "schemas"


def data(pipeline="everything", **more):
    make_shard = functools.partial(pipelines.ALL[pipeline], num_shards=NUM_SHARDS)
    return sharded_data.sharded(
        make_shard, num_shards=NUM_SHARDS, pipeline=pipeline, **more
    )


def world(dataset, num_ranks):
    return [
        local_batches.LocalBatches(
            dataset, rank=rank, num_ranks=num_ranks, global_batch_size=SIZE
        )
        for rank in range(num_ranks)
    ]


def next_rows(ranks):
    return [row.tobytes() for rank in ranks for row in next(rank)["tokens"]]


def through_text(state):
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("pipeline", ["everything", "shuffled"])
def test_ranks_that_come_and_go_have_the_batches_of_one(pipeline):
    one = world(data(pipeline), 1)
    ranks = world(data(pipeline), 4)
    for num_ranks in (3, 6, 1, 12):
        assert next_rows(ranks) == next_rows(one)
        saved = [through_text(rank.state_dict()) for rank in ranks]
        ranks = world(data(pipeline), num_ranks)
        for rank in ranks:
            rank.load_state_dict(saved)
    assert next_rows(ranks) == next_rows(one)


class Stepping(grain.IterDataset):
    """A user's own dataset, whose iterator has a state with whatever it needs."""

    def __init__(self, shard):
        super().__init__()
        self._shard = shard

    def __iter__(self):
        return SteppingIterator(self._shard)


class SteppingIterator(grain.DatasetIterator):
    def __init__(self, shard):
        super().__init__()
        self._state = {
            "number": shard,
            1: {"a": 2, (3, "b"): [4]},
            "key": b"\x00\xff",
            "seen": {b"one": 1},
            "generator": np.random.RandomState(shard).get_state(legacy=False),
            "()": {"()": [1]},
            "none": {},
        }

    def __next__(self):
        self._state["number"] += NUM_SHARDS
        return {"tokens": np.array(self._state["number"])}

    def get_state(self):
        return dict(self._state)

    def set_state(self, state):
        assert repr(state | {"number": 0}) == repr(self._state | {"number": 0})
        self._state = state


def test_a_state_of_a_users_iterator_comes_back_as_it_was():
    own = sharded_data.sharded(Stepping, num_shards=NUM_SHARDS, pipeline="own")
    (one,), (other,) = world(own, 1), world(own, 1)
    for _ in range(2):
        next(one)
        other.set_state(through_text(one.get_state()))
        assert next_rows([one]) == next_rows([other])


def test_a_rank_that_lacks_shards_says_so():
    ranks = world(data(), 4)
    next_rows(ranks)
    (one,) = world(data(), 1)
    with pytest.raises(errors.DataError, match=r"lacks logical shards \[3, 4.*as a"):
        one.load_state_dict(ranks[0].state_dict())


def test_states_of_two_moments_are_refused():
    ranks = world(data(), 2)
    first = ranks[0].state_dict()
    next_rows(ranks)
    (one,) = world(data(), 1)
    with pytest.raises(errors.DataError, match=r"rank 1 has position .*at the same"):
        one.load_state_dict([first, ranks[1].state_dict()])


def test_a_state_of_another_pipeline_or_program_is_refused():
    (one,) = world(data(), 1)
    with pytest.raises(errors.DataError, match='saved "everything", now "plain"'):
        world(data("plain"), 1)[0].set_state(one.get_state())
    with pytest.raises(errors.DataError, match=r"rank 0 is not a state of .*; load"):
        one.set_state({"_num_yielded": 3})
    with pytest.raises(errors.DataError, match="version 2, and this program reads"):
        one.set_state(one.get_state() | {"version": 2})


@pytest.mark.parametrize("nothing", [None, [], "text"])
def test_what_is_no_state_is_refused(nothing):
    (one,) = world(data(), 1)
    with pytest.raises(errors.DataError, match=r"is not a state of LocalBatches; load"):
        one.set_state(nothing)
    with pytest.raises(errors.DataError, match="rank 1 is not a state of LocalBatches"):
        one.set_state([one.get_state(), nothing])


def leaves(content, path=()):
    """The path of every value in a JSON object."""
    if not isinstance(content, dict) or not content:
        return [path]
    inner = [leaves(value, (*path, key)) for key, value in content.items()]
    return list(itertools.chain.from_iterable(inner))


def without(content, path):
    """A copy of `content` that lacks the value at `path`."""
    key, *rest = path
    if not rest:
        return {name: value for name, value in content.items() if name != key}
    return content | {key: without(content[key], rest)}


def altered(content, path):
    """A copy of `content` with another value at `path`."""
    if not path:
        return content + 1 if isinstance(content, int) else f"{content}!"
    key, *rest = path
    return content | {key: altered(content[key], rest)}


def test_a_state_is_of_the_schema_and_of_the_golden_file():
    # Without its steps, which depend on Grain's own names for them.
    make_shard = data().make_shard.make_shard
    (one,) = world(dataclasses.replace(data(), make_shard=make_shard), 1)
    for _ in range(3):
        next(one)
    saved = one.get_state()
    assert saved == one.state_dict()
    schema = json.loads((SCHEMAS / "local_batches.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(saved, schema)
    assert saved == json.loads((GOLDEN / "local_batches_v1.json").read_text())
    (other,) = world(dataclasses.replace(data(), make_shard=make_shard), 1)
    other.set_state(through_text(saved))
    assert next_rows([other]) == next_rows([one])


def test_a_state_of_which_anything_was_changed_is_refused_and_the_position_stays():
    one, other = (world(data(), 1)[0] for _ in range(2))
    next(one)
    next(other)
    saved = through_text(one.get_state())
    paths = leaves(saved)
    assert len(paths) > 50
    for path in paths:
        for change in (altered, without):
            with pytest.raises(errors.DataError, match="the state of rank 0 "):
                one.set_state(change(saved, path))
    assert next_rows([one]) == next_rows([other])


# Images whose last bytes are NULs, and texts likewise.
BLOBS = [b"\x89PNG\0\0", b"JFIF", b"\0", b"", b"GIF\0", b"a", b"\0\0a\0", b"b" * 9]


def blobs(shard):
    drawn = grain.MapDataset.range(shard, len(BLOBS), 2)
    examples = drawn.map(
        lambda n: {
            "image": BLOBS[n],
            "text": BLOBS[n].decode("latin1"),
            "parts": [BLOBS[n], b"\0"],
            "maybe": BLOBS[n] if n % 2 else None,
            "number": n,
        }
    )
    return examples.to_iter_dataset(pipelines.IN_CALLER)


def test_bytes_and_text_are_delivered_as_they_are():
    ends = sharded_data.sharded(blobs, num_shards=2, pipeline="blobs", end="padded")
    one = local_batches.LocalBatches(ends, global_batch_size=6)
    rows = collections.defaultdict(list)
    for batch in one:
        assert batch["image"].dtype == batch["text"].dtype == object
        assert batch["number"].dtype == np.int64
        for name, feature in batch.items():
            rows[name] += feature[batch["mask"]].tolist()
        padding = batch["image"][~batch["mask"]].tolist()
        assert padding == [b""] * len(padding)
    one.close()
    order = np.argsort(rows["number"]).tolist()
    assert [rows["image"][n] for n in order] == BLOBS
    assert [rows["text"][n].encode("latin1") for n in order] == BLOBS
    assert [rows["parts"][n] for n in order] == [[blob, b"\0"] for blob in BLOBS]
    assert [rows["maybe"][n] for n in order[1::2]] == BLOBS[1::2]


def test_data_that_ends_has_to_be_agreed_on(corpus):
    finite = conftest.data_of(corpus, num_epoch=1)
    with pytest.raises(errors.ConfigError, match="pass agree="):
        world(finite, 2)
    one = local_batches.LocalBatches(finite, global_batch_size=SIZE)
    batches = list(one)
    assert [int(b[elastic_data.MASK].sum()) for b in batches] == [12] * 8 + [4]
    ids = itertools.chain.from_iterable(
        example_id.join(b["example_id"][b[elastic_data.MASK]]) for b in batches
    )
    assert sorted(ids) == list(range(100))
    one.close()
