import collections

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.core import errors
from elastic_ckpt.data.lm import language, token_blocks
from tests import pipelines

LENGTHS = st.integers(1, 12)
# Lengths of documents, in tokens; 0 and 1 make no example.
SIZES = st.lists(st.integers(0, 40), max_size=20)
TOKENS = language.Documents(column="tokens", tokenizer=None)


def documents(sizes):
    """Documents of so many tokens; no token is twice in them, and none is 0."""
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    return [
        np.arange(end - size + 1, end + 1, dtype=np.int32)
        for end, size in zip(ends, sizes, strict=True)
    ]


def source(records):
    def get(index):
        return records[index]

    return (
        grain.MapDataset.range(len(records))
        .map(get)
        .to_iter_dataset(pipelines.IN_CALLER)
    )


def examples(sizes, *, length, truncate):
    return language.Examples(source(documents(sizes)), length=length, truncate=truncate)


def pairs(example):
    return list(
        zip(example["inputs"].tolist(), example["targets"].tolist(), strict=True)
    )


def all_pairs(sizes, *, length=None):
    """A token and the one after it, of every document, or of its first tokens."""
    end = None if length is None else length + 1
    cut = [document[:end] for document in documents(sizes)]
    return sorted(pair for tokens in cut for pair in pairs(language.pair(tokens)))


@given(SIZES, LENGTHS)
def test_trimmed_documents_give_their_first_tokens_and_chunked_ones_all(sizes, length):
    actual = list(examples(sizes, length=length, truncate=True))
    assert sorted(p for example in actual for p in pairs(example)) == all_pairs(
        sizes, length=length
    )
    assert len(actual) == sum(size > 1 for size in sizes)
    actual = list(examples(sizes, length=length, truncate=False))
    assert [p for example in actual for p in pairs(example)] == all_pairs(sizes)
    assert all(0 < len(example["inputs"]) <= length for example in actual)


@given(st.integers(0, 12), st.integers(0, 5))
def test_a_padded_row_says_where_its_tokens_are(size, more):
    length = size + more
    (document,) = documents([size + 1])
    row = language.padded(language.pair(document), length)
    for name in ("inputs", "targets"):
        first = document[0] + (name == "targets")
        assert row[name].tolist() == [*range(first, first + size)] + [0] * more
        segmentation = row[f"{name}_segmentation"]
        assert segmentation.tolist() == [1] * size + [0] * more
        assert row[f"{name}_position"].tolist() == list(range(length))
    assert {(array.dtype, array.shape) for array in row.values()} == {
        (np.dtype(np.int32), (length,))
    }
    assert len(row) == 6


def rows(sizes, packing, length):
    chunked = examples(sizes, length=length, truncate=False)
    return list(language.packed(chunked, packing=packing, length=length, seed=3))


def segments(row):
    """The examples of a packed row, by segment; checks segmentation and positions."""
    actual = {}
    marks = row["targets_segmentation"]
    np.testing.assert_array_equal(row["inputs_segmentation"], marks)
    np.testing.assert_array_equal(row["inputs_position"], row["targets_position"])
    for name in ("inputs", "targets"):
        assert not row[name][marks == 0].any()
    for segment in range(1, marks.max(initial=0) + 1):
        (indices,) = np.nonzero(marks == segment)
        assert indices.tolist() == list(range(indices[0], indices[-1] + 1))
        actual[segment] = {name: row[name][indices] for name in ("inputs", "targets")}
        position = row["inputs_position"][indices]
        assert position.tolist() == list(range(len(indices)))
    return actual


@pytest.mark.parametrize("packing", language.PACKINGS)
@settings(max_examples=10)
@given(sizes=SIZES, length=LENGTHS)
def test_packed_rows_have_every_pair_once_in_segments_of_one_document(
    packing, sizes, length
):
    packed = rows(sizes, packing, length)
    assert all(
        (array.dtype, array.shape) == (np.int32, (length,))
        for row in packed
        for array in row.values()
    )
    actual = [example for row in packed for example in segments(row).values()]
    for example in actual:
        inputs, targets = example["inputs"], example["targets"]
        # Successors inside a segment, which never reaches into the next document.
        np.testing.assert_array_equal(inputs + 1, targets)
        np.testing.assert_array_equal(inputs[1:], targets[:-1])
    assert sorted(p for example in actual for p in pairs(example)) == all_pairs(sizes)


@pytest.mark.parametrize("packing", ["first_fit", "best_fit"])
@settings(max_examples=10)
@given(sizes=SIZES, length=LENGTHS)
def test_fitted_rows_hold_whole_examples(packing, sizes, length):
    packed = rows(sizes, packing, length)
    actual = collections.Counter(
        tuple(pairs(example)) for row in packed for example in segments(row).values()
    )
    chunked = examples(sizes, length=length, truncate=False)
    assert actual == collections.Counter(tuple(pairs(example)) for example in chunked)


@pytest.mark.parametrize("packing", ["first_fit", "best_fit"])
def test_a_limit_of_examples_to_a_row_is_kept_and_nothing_is_lost(packing):
    sizes = [3] * 40
    chunked = examples(sizes, length=20, truncate=False)
    limited = list(
        language.packed(chunked, packing=packing, length=20, seed=3, max_examples=4)
    )
    assert {len(segments(row)) for row in limited} == {4}
    assert {len(segments(row)) for row in rows(sizes, packing, 20)} == {10}
    actual = [e for row in limited for e in segments(row).values()]
    assert sorted(p for e in actual for p in pairs(e)) == all_pairs(sizes)


@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize("packing", ["first_fit", "best_fit"])
def test_an_example_that_is_longer_than_a_row_is_an_error(packing, in_blocks):
    tokens = source(documents([8, 3, 40]))
    if in_blocks:
        tokens = token_blocks.Tokens(
            tokens.map(lambda values: {"tokens": values}),
            documents=TOKENS,
        )
    chunked = language.Examples(tokens, length=32, truncate=True)
    made = language.packed(chunked, packing=packing, length=16, seed=0)
    with pytest.raises(
        errors.DataError,
        match=r"an example has 32 tokens, but rows have 16 .*Examples\(length=16\)",
    ):
        list(made)


@given(sizes=SIZES, length=LENGTHS)
def test_joined_rows_are_full_but_for_the_last(sizes, length):
    packed = rows(sizes, "concat_then_split", length)
    assert all(row["targets_segmentation"].all() for row in packed[:-1])
    order = [
        p
        for row in packed
        for example in segments(row).values()
        for p in pairs(example)
    ]
    assert order == all_pairs(sizes)


def masked(sizes, packing, length, **more):
    """Packed rows of examples that also have a mask, which equals their targets."""
    parent = examples(sizes, length=length, truncate=False)
    with_mask = parent.map(lambda row: row | {"loss_mask": row["targets"] * 10})
    return language.packed(with_mask, packing=packing, length=length, seed=3, **more)


@pytest.mark.parametrize("packing", language.PACKINGS)
def test_further_features_are_packed_like_the_tokens(packing):
    sizes = [5, 3, 7, 2, 9, 4]
    packed_rows = list(masked(sizes, packing, 8, features=("loss_mask",)))
    plain_rows = rows(sizes, packing, 8)
    for row, expected in zip(packed_rows, plain_rows, strict=True):
        np.testing.assert_array_equal(row["loss_mask"], row["targets"] * 10)
        assert row.keys() == expected.keys() | {"loss_mask"}
        for name, values in expected.items():
            np.testing.assert_array_equal(row[name], values)
            assert row[name].dtype == values.dtype


@pytest.mark.parametrize("packing", ["best_fit"])
def test_a_feature_that_packing_would_drop_is_refused(packing):
    message = r"has the features inputs, loss_mask, targets; packed expects inputs, ta"
    with pytest.raises(errors.DataError, match=f"{message}.* in its features="):
        list(masked([5, 3], packing, 8))


def text_tokens(text, **settings):
    return tokens_of(language.Documents(**settings), {"text": text}).tolist()


def tokens_of(documents, record):
    (actual,) = documents.tokens([documents.value(record)])
    return actual


def test_a_text_begins_and_ends_with_its_tokens_unless_told_otherwise():
    assert text_tokens("ab") == [2, 100, 101, 1]
    assert text_tokens(b"ab") == [2, 100, 101, 1]
    assert text_tokens("ab", add_begin=False) == [100, 101, 1]
    assert text_tokens("ab", add_end=False) == [2, 100, 101]
    assert text_tokens("", add_begin=False, add_end=False) == []
    assert tokens_of(language.Documents(), {"text": "ab"}).dtype == np.int32
