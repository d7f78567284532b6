"""Rows that are made of blocks, and their states, are those of single examples."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt.data import blocks, mixing, records, shard_rows, shuffling
from elastic_ckpt.data.lm import block_maps, language, row_blocks, token_blocks
from tests import formats

TOKENS = language.Documents(column="tokens", tokenizer=None)
MOST_ROWS = 60


def longest_left_out(block):
    return block.keep_documents(block.lengths < 20)


def most_left_out(block):
    return block.keep_tokens(block.values % 16 < 2)


def shortened(block):
    within = np.arange(len(block.values)) - np.repeat(block.offsets[:-1], block.lengths)
    return block.keep_tokens(within % 3 > 0)


def lengthened(block):
    # Also documents without tokens; numbers do not fit into 16 bits.
    return block_maps.TokenBlock(
        np.insert(block.values.astype(np.int64) + 2**20, block.offsets[1:], 7),
        block.offsets + np.arange(len(block) + 1),
    )


FUNCTIONS = (longest_left_out, most_left_out, shortened, lengthened)


class InBlocks:
    """Applies a function to blocks, where it is asked to."""

    def __init__(self, function, places):
        self.function, self.places = function, places

    def at(self, place, documents):
        if self.function is None or place not in self.places:
            return documents
        return self.mapped(documents)

    def mapped(self, documents):
        return block_maps.BlockMap(documents, self.function)


class Singly(InBlocks):
    """Applies a function to documents, as Grain does."""

    def mapped(self, documents):
        return documents.map(self.document).filter(lambda tokens: len(tokens) > 0)

    def document(self, tokens):
        block = block_maps.TokenBlock(tokens, np.array([0, len(tokens)]))
        return self.function(block).values


def by_place(parts, reading, make, mapped):
    """Datasets that are made when they are opened, with columns if they have some."""

    def columns(name):
        if mapped or not records.SmallBlocks.exist(parts[name].source, 3):
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
    mapping,
):
    """The examples of a shard, and what makes rows of them."""
    of_name = {part.name: part for part in parts if part.name in weights}
    reading = records.ReadOptions(num_epochs=epochs, shuffle_seed=3)

    def made(name):
        of_shard = records.Records(
            of_name[name].source, shard=1, num_shards=3, read_options=reading
        )
        tokens = token_blocks.Tokens(of_shard, documents=TOKENS)
        return mapping.at("dataset", tokens)

    if is_by_place:
        is_mapped = mapping.function is not None and "dataset" in mapping.places
        read = by_place(of_name, reading, made, is_mapped)
    else:
        read = {name: made(name) for name in of_name}
    documents = mapping.at("mixture", mixing.Mixture(read, weights, shard=1))
    if "window" in mapping.places:
        documents = shuffling.WindowShuffle(documents, window_size=5, seed=9)
        documents = mapping.at("window", documents)
    examples = language.Examples(documents, length=length, truncate=truncate)
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
MAPPINGS = st.tuples(
    st.sampled_from((None, *FUNCTIONS)),
    st.sets(st.sampled_from(["dataset", "mixture", "window"]), min_size=1),
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
@given(chosen=PIPELINES, mapping=MAPPINGS, stops=STOPS)
@settings(max_examples=12)
@pytest.mark.slow
def test_rows_of_blocks_are_those_of_single_examples_from_every_state(
    files, file_format, chosen, mapping, stops
):
    check_rows(files[file_format], chosen, mapping, stops)


@pytest.mark.parametrize("file_format", formats.FORMATS)
@given(chosen=PIPELINES, mapping=MAPPINGS, stops=STOPS)
@settings(max_examples=30)
@pytest.mark.night
def test_rows_of_many_blocks_are_those_of_single_examples(
    files, file_format, chosen, mapping, stops
):
    check_rows(files[file_format], chosen, mapping, stops)


def drawn(iterator):
    """What the mixture has drawn, after which new weights would apply."""
    states = mixing.states_by_name(iterator.get_state())
    return [(each["turn"], each[mixing.TAKEN]) for _, each in states if "turn" in each]


def check_rows(parts, chosen, mapping, stops):
    examples, rows = pipeline(parts, **chosen, mapping=InBlocks(*mapping))
    singly, _ = pipeline(parts, **chosen, mapping=Singly(*mapping))
    made = [
        rows(examples),
        rows(formats.Single(examples)),
        rows(formats.Single(singly)),
    ]
    of_single = made[-1]
    ours, *others = iterators = list(map(iter, made))
    assert isinstance(ours, row_blocks.RowBlocks)
    assert not any(isinstance(each, row_blocks.RowBlocks) for each in others)
    expected = following(iter(of_single), 2 * MOST_ROWS)
    for number, row in enumerate(expected[:MOST_ROWS]):
        assert [drawn(each) for each in iterators] == 3 * [drawn(ours)]
        if number in stops:
            for state, dataset in itertools.product(
                [each.get_state() for each in iterators], made
            ):
                rest = following(restored(dataset, state), MOST_ROWS)
                assert rest == expected[number : number + MOST_ROWS]
        assert [content(next(each)) for each in iterators] == 3 * [row]
    if len(expected) < MOST_ROWS:
        for each in iterators:
            with pytest.raises(StopIteration):
                next(each)
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
