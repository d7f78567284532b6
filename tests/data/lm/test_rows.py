"""Rows: whole or cut documents, shuffled, packed, and read again from any state."""

import collections
import itertools
import json

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt import data as ec_data
from elastic_ckpt.core import errors
from elastic_ckpt.data import mixing, shard_rows
from elastic_ckpt.data.lm import rows
from tests import pipelines, worlds

# Lengths of documents, in tokens; 0 and 1 have no input.
SIZES = st.lists(st.integers(0, 40), max_size=20)
SETTINGS = st.fixed_dictionaries(
    {
        "length": st.integers(1, 12),
        "packing": st.sampled_from(["", *rows.PACKINGS]),
        "window": st.sampled_from([0, 1, 5]),
        "truncate": st.booleans(),
        "max_examples": st.sampled_from([0, 2]),
    }
).filter(
    lambda chosen: (
        not chosen["max_examples"] or chosen["packing"] != rows.CONCAT_THEN_SPLIT
    )
)


def documents(sizes, *, first=0):
    """Documents of so many tokens; no token is twice in them, and none is 0."""
    ends = (first + np.cumsum(sizes, dtype=np.int64)).tolist()
    return [
        np.arange(end - size + 1, end + 1, dtype=np.int32)
        for end, size in zip(ends, sizes, strict=True)
    ]


def source(elements):
    elements = list(elements)
    numbers = grain.MapDataset.range(len(elements))
    return numbers.map(lambda n: elements[n]).to_iter_dataset(pipelines.IN_CALLER)


def rows_of(sizes, **more):
    return rows.Rows(source(documents(sizes)), **more)


def segments(row):
    """The pieces of documents in a row: of each, its inputs and targets."""
    actual = []
    marks = row["targets_segmentation"]
    np.testing.assert_array_equal(row["inputs_segmentation"], marks)
    np.testing.assert_array_equal(row["inputs_position"], row["targets_position"])
    for name in rows.FEATURES:
        assert row[name].dtype == np.int32
        assert not row[name][marks == 0].any()
    for segment in range(1, marks.max(initial=0) + 1):
        (indices,) = np.nonzero(marks == segment)
        assert indices.tolist() == list(range(indices[0], indices[-1] + 1))
        position = row["inputs_position"][indices]
        assert position.tolist() == list(range(len(indices)))
        actual.append(
            (row["inputs"][indices].tolist(), row["targets"][indices].tolist())
        )
    return actual


def all_segments(made):
    return list(itertools.chain(*map(segments, made)))


def scores(tokens):
    return np.stack([tokens * 2.5, -tokens], axis=1)


@settings(max_examples=40)
@given(sizes=SIZES, chosen=SETTINGS)
def test_rows_have_every_token_and_its_next_one_once(sizes, chosen):
    length = chosen["length"]
    made = list(rows_of(sizes, **chosen))
    # Further features go with their inputs.
    held = [{"tokens": each, "score": scores(each)} for each in documents(sizes)]
    scored = rows.Rows(source(held), features=("score",), **chosen)
    for row, expected in zip(scored, made, strict=True):
        np.testing.assert_array_equal(row.pop("score"), scores(expected["inputs"]))
        assert worlds.content(row) == worlds.content(expected)
    assert {each.shape for row in made for each in row.values()} <= {(length,)}
    targets, pieces = [], collections.Counter()
    for inputs, following in all_segments(made):
        # Successors, which never reach into the next document.
        assert [token + 1 for token in inputs] == following
        targets += following
        pieces[tuple(following)] += 1
    end = length + 1 if chosen["truncate"] else None
    held = [document[:end] for document in documents(sizes)]
    expected = [token for document in held for token in document[1:].tolist()]
    assert sorted(targets) == expected
    if chosen["packing"] == rows.CONCAT_THEN_SPLIT:
        assert all(row["inputs_segmentation"].all() for row in made[:-1])
        if not chosen["window"]:
            assert targets == expected
        return
    # Other rows hold whole pieces, no more than they may.
    assert pieces == collections.Counter(
        tuple(document[n + 1 : n + length + 1].tolist())
        for document in held
        for n in range(0, len(document) - 1, length)
    )
    limit = chosen["max_examples"] if chosen["packing"] else 1
    assert all(len(segments(row)) <= (limit or length) for row in made)


@pytest.mark.parametrize(
    ("packing", "expected"),
    [(rows.FIRST_FIT, [[5, 3, 2], [7], [9]]), (rows.BEST_FIT, [[5, 2], [7, 3], [9]])],
)
def test_a_piece_goes_into_the_first_row_with_room_or_the_fullest(packing, expected):
    is_best = packing == rows.BEST_FIT
    pieces = list(enumerate([5, 7, 3, 2, 9]))
    made = rows.fitted(pieces, [()] * 5, (), length=10, is_best=is_best)
    assert [[size for _, size in row] for row in made] == expected
    limited = rows_of([3] * 40, packing=packing, length=20, max_examples=4, window=40)
    assert [len(segments(row)) for row in limited] == [4] * 10
    # Each of several limits is kept.
    pieces, costs = [(n, 1) for n in range(4)], [(1, 2), (1, 2), (1, 0), (1, 0)]
    fitted = rows.fitted(pieces, costs, (3, 3), length=9, is_best=is_best)
    assert [[number for number, _ in row] for row in fitted] == [[0, 2, 3], [1]]


@pytest.mark.parametrize(
    ("length", "num_shards", "of_long"),
    [(2**11, 1, 0.95), (2**14, 1, 0.95), (2**17, 1, 0.95), (2**15, 2**11, 0.85)],
)
@pytest.mark.parametrize("packing", [rows.FIRST_FIT, rows.BEST_FIT])
def test_rows_of_whole_documents_are_full_at_every_length(
    packing, length, num_shards, of_long
):
    generator, longest = np.random.default_rng(0), np.zeros(length + 1, np.uint16)
    num_rows = max(96, 2**20 // length)
    # Documents of a median of 365 tokens, and of a quarter of a row. The chapters of
    # many shards have four rows.
    for median, sigma, least in ((365, 0.8, 0.97), (length / 4, 1, of_long)):
        number = 2 * num_rows * length // int(median)
        sizes = generator.lognormal(np.log(median), sigma, number).astype(int) + 2
        held = source(longest[:size] for size in sizes)
        packed = rows.Rows(held, packing=packing, length=length)
        packed.num_shards = num_shards
        made = iter(packed)
        # From row 64 on, chapters are as long as later.
        pieces = [made.unmade().pieces for _ in range(64 + num_rows)][64:]
        used = sum(size for _, size in itertools.chain(*pieces))
        assert used >= least * num_rows * length


@pytest.mark.parametrize(("num_shards", "most"), [(8, 48), (512, 16)])
def test_the_chapters_of_all_shards_take_at_most_a_gibibyte(num_shards, most):
    length = 2**15

    def make_shard(shard):
        numbers = grain.MapDataset.range(300 * num_shards)[shard::num_shards]
        held = numbers.map(lambda _: np.zeros(length // 2, np.int32))
        made = held.to_iter_dataset(pipelines.IN_CALLER)
        return rows.Rows(made, length=length, shard=shard)

    data = ec_data.sharded(make_shard, num_shards=num_shards, pipeline="zeros")
    made, sizes = iter(data.make_shard(num_shards - 1)), collections.Counter()
    for _ in range(130):
        made.unmade()
        sizes[made.chapter] += 1
    assert max(sizes.values()) == most
    assert most * length * 4 * num_shards <= 2**30


def test_windows_seeds_and_shards_have_orders_of_their_own():
    def order(**settings):
        made = rows_of((2,) * 300, length=4, packing="", **settings)
        return [int(row["inputs"][0]) for row in made]

    plain, windows = order(), set()
    for seed, shard in itertools.product((3, 4), (0, 1)):
        found = order(window=50, seed=seed, shard=shard)
        assert sorted(found) == plain != found
        assert order(window=50, seed=seed, shard=shard) == found
        windows |= {
            tuple(number % 100 for number in found[n : n + 50]) for n in (0, 50)
        }
    assert len(windows) == 8


@pytest.mark.parametrize(("num_tokens", "at_most"), [(17, 2), (65, 6)])
def test_shards_do_not_make_all_of_their_rows_in_the_same_batch(num_tokens, at_most):
    num_shards, held = 32, source(documents([num_tokens] * 4000))
    made = np.zeros(150, int)
    for shard in range(num_shards):
        of_shard, chapter = iter(rows.Rows(held, length=64, shard=shard)), 0
        for batch in range(len(made)):
            next(of_shard)
            made[batch] += of_shard.chapter != chapter and len(of_shard._rows)
            chapter = of_shard.chapter
    assert made.sum() >= num_shards * len(made)
    assert made.max() <= num_shards * at_most


def test_a_state_is_as_small_as_that_of_the_documents():
    made = iter(rows_of([9] * 3000, length=64, packing=rows.BEST_FIT, window=100))
    sizes = [len(json.dumps(made.get_state())) for _ in itertools.islice(made, 300)]
    assert max(sizes) < 180


def test_documents_that_are_others_when_they_are_read_again_are_refused():
    held = documents([9] * 60)
    one, *others = (
        iter(rows.Rows(source(each), length=20, shard=7))
        for each in (held, held[::-1], held[:6])
    )
    for _ in range(4):
        next(one)
    for other in others:
        message = r"shard 7: the documents .* have changed"
        with pytest.raises(errors.DataError, match=message):
            other.set_state(json.loads(json.dumps(one.get_state())))


@pytest.mark.parametrize(
    ("document", "more", "message"),
    [
        ([1, 2, 3], {}, "a document to pack is of type list; Rows accepts only one"),
        (np.ones(3), {}, "a document to pack is of type ndarray; Rows accepts"),
        (np.array([1, 2**40]), {}, f"contains token {2**40}, which does not fit"),
        (np.array([2**31], np.uint32), {}, f"contains token {2**31}, which does not"),
        (np.array([1, 9]), {"vocab_size": 9}, "contains token 9, but .* from 0 to 8"),
        (np.array([~9, 1]), {"vocab_size": 9}, "contains token 9, but"),
        ({"tokens": np.arange(3)}, {}, "a document to pack is of type dict"),
        (
            {"tokens": np.arange(3), "other": np.arange(3)},
            {"features": ("mask",)},
            r"has \['other', 'tokens'\], but Rows expects a dict of tokens, mask; list",
        ),
        (
            {"tokens": np.arange(3), "mask": np.arange(2)},
            {"features": ("mask",)},
            "features of different lengths, {'tokens': 3, 'mask': 2}",
        ),
    ],
)
def test_a_document_that_makes_no_row_is_refused(document, more, message):
    with pytest.raises(errors.DataError, match=message):
        list(rows.Rows(source([document]), length=8, **more))
    # A token without loss is known by its complement, as in a conversation.
    (row,) = rows.Rows(source([np.array([5, ~6, 7])]), length=2, vocab_size=8)
    assert (row["inputs"].tolist(), row["targets"].tolist()) == ([5, 6], [0, 7])


def mixture(weights):
    parts = {name: source(documents([5] * 50)) for name in weights}
    return mixing.Mixture(parts, weights, shard=1)


def shuffled(parent):
    return grain.experimental.WindowShuffleIterDataset(parent, window_size=5, seed=1)


@pytest.mark.parametrize("is_of_rows", [False, True])
def test_weights_cannot_change_below_a_step_that_may_hold_elements(is_of_rows):
    def made(weights):
        if is_of_rows:
            return shuffled(rows.Rows(mixture(weights), length=8))
        return rows.Rows(shuffled(mixture(weights)), length=8)

    def opened(weights, state):
        cursor = {"row": 1, "state": shard_rows.to_json(state)}
        return list(shard_rows.iterator(made(weights), cursor, 1))

    one = iter(made({"a": 1, "b": 1}))
    next(one)
    state = one.get_state()
    assert len(opened({"a": 1, "b": 1}, state)) == len(list(one)) > 20
    with pytest.raises(errors.DataError, match=r"Shuffle.* may have buffered some"):
        opened({"a": 1, "b": 2}, state)
