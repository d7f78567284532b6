"""Rows that are made of blocks, and their states, are those of single examples."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.data import blocks, mixing, records, shard_rows, shuffling
from elastic_ckpt.data.lm import language, row_blocks, token_blocks
from tests import formats

TOKENS = language.Documents(column="tokens", tokenizer=None)
MOST_ROWS = 60


def by_place(parts, reading, make):
    """Datasets that are made when they are opened, with columns if they have some."""

    def columns(name):
        if not records.SmallBlocks.exist(parts[name].source, 3):
            return None
        return records.SmallBlocks(parts[name].source, 3, reading, tokens="tokens")

    return mixing.Parts(list(parts), make, columns=columns)


def pipeline(
    parts,
    *,
    packing,
    length,
    truncate,
    window,
    epochs,
    weights,
    max_examples,
    is_by_place,
):
    """The examples of a shard, and what makes rows of them."""
    of_name = {part.name: part for part in parts if part.name in weights}
    reading = records.ReadOptions(num_epochs=epochs, shuffle_seed=3)

    def made(name):
        of_shard = records.Records(
            of_name[name].source, shard=1, num_shards=3, read_options=reading
        )
        return token_blocks.Tokens(of_shard, documents=TOKENS)

    if is_by_place:
        read = by_place(of_name, reading, made)
    else:
        read = {name: made(name) for name in of_name}
    examples = language.Examples(
        mixing.Mixture(read, weights, shard=1), length=length, truncate=truncate
    )
    if window:
        examples = shuffling.WindowShuffle(examples, window_size=window, seed=7)

    def rows(examples):
        if not packing:
            return language.Padded(examples, length=length)
        return language.packed(
            examples,
            packing=packing,
            length=length,
            seed=11,
            max_examples=0 if packing == language.CONCAT_THEN_SPLIT else max_examples,
        )

    return examples, rows


PIPELINES = st.fixed_dictionaries(
    {
        "packing": st.sampled_from(["", *language.PACKINGS]),
        "length": st.integers(1, 40),
        "truncate": st.booleans(),
        "window": st.sampled_from([0, 1, 3, 20]),
        "epochs": st.sampled_from([1, 2, None]),
        "weights": st.sampled_from(
            [
                {"web": 1.0},
                {"books": 1.0},
                {"books": 0.2, "web": 0.8},
                {"books": 0.0, "code": 1.0, "web": 0.05},
                {"books": 0.2, "code": 0.3, "web": 0.5},
            ]
        ),
        "max_examples": st.sampled_from([0, 1, 3]),
        "is_by_place": st.booleans(),
    }
)


def content(row):
    return {name: (each.dtype, each.tolist()) for name, each in row.items()}


def following(iterator, num_rows):
    return [content(row) for row in itertools.islice(iterator, num_rows)]


def restored(dataset, state):
    iterator = iter(dataset)
    iterator.set_state(shard_rows.from_json(shard_rows.to_json(state)))
    return iterator


STOPS = st.lists(st.integers(0, MOST_ROWS), max_size=3)


@pytest.mark.parametrize("file_format", formats.FORMATS)
@given(chosen=PIPELINES, stops=STOPS)
@settings(max_examples=12)
def test_rows_of_blocks_are_those_of_single_examples_from_every_state(
    files, file_format, chosen, stops
):
    check_rows(files[file_format], chosen, stops)


@pytest.mark.slow(minutes=0.5)
@pytest.mark.parametrize("file_format", formats.FORMATS)
@given(chosen=PIPELINES, stops=STOPS)
@settings(max_examples=30)
def test_rows_of_many_blocks_are_those_of_single_examples(
    files, file_format, chosen, stops
):
    check_rows(files[file_format], chosen, stops)


def check_rows(parts, chosen, stops):
    examples, rows = pipeline(parts, **chosen)
    of_blocks, of_single = rows(examples), rows(formats.Single(examples))
    ours, theirs = iter(of_blocks), iter(of_single)
    assert isinstance(ours, row_blocks.RowBlocks)
    assert not isinstance(theirs, row_blocks.RowBlocks)
    expected = following(iter(of_single), 2 * MOST_ROWS)
    for number, row in enumerate(expected[:MOST_ROWS]):
        if number in stops:
            for state, dataset in itertools.product(
                (ours.get_state(), theirs.get_state()), (of_blocks, of_single)
            ):
                rest = following(restored(dataset, state), MOST_ROWS)
                assert rest == expected[number : number + MOST_ROWS]
        assert content(next(ours)) == row
        next(theirs)
    if len(expected) < MOST_ROWS:
        with pytest.raises(StopIteration):
            next(ours)
        with pytest.raises(StopIteration):
            next(restored(of_single, ours.get_state()))


class OneBlock:
    """A single block of examples."""

    def __init__(self, block):
        self.block = block

    def read(self, at_most):
        assert at_most
        if self.block is None:
            raise StopIteration
        block, self.block = self.block, None
        return block

    def get_state(self):
        return None

    def close(self):
        self.block = None


@given(
    starts=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    step=st.none() | st.integers(-9, 9),
    dtype=st.sampled_from([np.uint16, np.int32]),
)
def test_padded_rows_are_those_of_examples_in_any_order(starts, step, dtype):
    length, values = 5, np.arange(100, 200).astype(dtype)
    if step is not None:
        # Evenly apart, forwards or backwards.
        starts = [40 + number * step for number in range(len(starts))]
    block = blocks.Block(
        values=values,
        start=np.array(starts, np.int64),
        length=np.full(len(starts), length),
        runs=((0, blocks.Place(blocks.Fixed(None), 0)),),
    )
    rows = list(itertools.islice(row_blocks.Padded(OneBlock(block), length), 4))
    for first, row in zip(starts, rows, strict=True):
        assert row["inputs"].tolist() == values[first : first + length].tolist()
        ahead = values[first + 1 : first + 1 + length]
        assert row["targets"].tolist() == ahead.tolist()
        assert row["inputs"].dtype == np.int32
