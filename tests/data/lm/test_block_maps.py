"""A function of blocks: hosts, errors, and what it may return.

That its rows and states are those of Grain's `.map` and `.filter` is in `test_blocks`.
"""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_ckpt import data as ec_data
from elastic_ckpt.core import errors
from elastic_ckpt.data import (
    blocks,
    elastic_data,
    mixing,
    provenance,
    records,
    sharded_data,
    shuffling,
)
from elastic_ckpt.data.lm import block_maps, language, token_blocks
from tests import formats, stages, worlds

TOKENS = language.Documents(column="tokens", tokenizer=None)


def even_cut(block):
    """Leaves out every third document, and cuts the others at both ends."""
    short = block.keep_documents(block.lengths % 3 > 0)
    within = np.arange(len(short.values)) - np.repeat(short.offsets[:-1], short.lengths)
    return short.keep_tokens((within > 0) & (within < 17))


def even_cut_document(tokens):
    return tokens[1:17] if len(tokens) % 3 else tokens[:0]


def documents(parts, shard, *, num_epochs=1, dataset="web"):
    (part,) = (part for part in parts if part.name == dataset)
    reading = records.ReadOptions(shuffle_seed=3, num_epochs=num_epochs)
    of_shard = records.Records(
        part.source, shard=shard, num_shards=formats.NUM_SHARDS, read_options=reading
    )
    return token_blocks.Tokens(of_shard, documents=TOKENS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MakeShard:
    """Rows of documents after a function of blocks, or of single documents."""

    parts: tuple
    packing: str
    num_epochs: int | None
    singly: bool = False

    def __call__(self, shard):
        mixed = mixing.Mixture(
            {
                name: documents(
                    self.parts, shard, num_epochs=self.num_epochs, dataset=name
                )
                for name in formats.WEIGHTS
            },
            formats.WEIGHTS,
            shard=shard,
        )
        if self.singly:
            mapped = mixed.map(even_cut_document).filter(lambda tokens: tokens.size)
        else:
            mapped = block_maps.BlockMap(mixed, even_cut)
        examples = language.Examples(mapped, length=formats.LENGTH, truncate=False)
        shuffled = shuffling.WindowShuffle(examples, window_size=7, seed=shard)
        return language.packed(
            shuffled, packing=self.packing, length=formats.LENGTH, seed=shard
        )


def data(parts, **chosen):
    return sharded_data.sharded(
        MakeShard(parts=parts, **chosen),
        num_shards=formats.NUM_SHARDS,
        pipeline="cut",
        **({"end": elastic_data.End.PADDED} if chosen["num_epochs"] else {}),
    )


@settings(max_examples=8)
@given(
    packing=st.sampled_from(language.PACKINGS),
    num_epochs=st.sampled_from([None, 1]),
    run=st.lists(stages.stages(), min_size=2, max_size=5),
)
def test_any_run_has_the_bytes_of_one_host(
    files, tmp_path_factory, packing, num_epochs, run
):
    mapped = data(files["parquet"], packing=packing, num_epochs=num_epochs)
    stages.check([mapped] * len(run), run, tmp_path_factory.mktemp)


@pytest.mark.parametrize("packing", language.PACKINGS)
def test_an_epoch_on_any_hosts_is_that_of_a_function_of_documents(files, packing):
    chosen = {"packing": packing, "num_epochs": 1}
    singly = data(files["parquet"], **chosen, singly=True)
    expected = worlds.World(singly, 1, 24).rest()
    mapped = data(files["parquet"], **chosen)
    for num_hosts in (1, 3):
        actual = worlds.World(mapped, num_hosts, 24).rest()
        assert list(map(worlds.content, actual)) == list(map(worlds.content, expected))
    targets = [b["targets"][b["targets_segmentation"] > 0] for b in expected]
    cut = map(even_cut_document, formats.documents(*formats.WEIGHTS))
    assert sorted(np.concatenate(targets)) == sorted(
        np.concatenate([d[1:] for d in cut])
    )


@pytest.mark.slow
def test_documents_that_a_stage_hands_on_were_mapped_once(files):
    def batches(*, singly):
        run = [
            data(files["parquet"], packing=packing, num_epochs=None, singly=singly)
            for packing in (language.BEST_FIT, language.CONCAT_THEN_SPLIT)
        ]
        staged = ec_data.staged(
            [ec_data.Stage(begin=3 * number, data=of) for number, of in enumerate(run)]
        )
        found, saved = [], None
        for step, num_hosts in ((0, 1), (3, 4), (6, 2)):
            world = worlds.World(staged.at(step), num_hosts, 24)
            if saved:
                world.load(saved)
            found += [worlds.content(world.batch()) for _ in range(3)]
            saved = world.save()
        return found

    assert batches(singly=False) == batches(singly=True)


def read_singly(dataset, at_most=1000):
    """The documents of blocks, and the error that ended them."""
    of_blocks, found = blocks.of(dataset), []
    while True:
        try:
            block = of_blocks.read(at_most)
        except Exception as error:
            return found, error, of_blocks
        for start, length in zip(block.start, block.length, strict=True):
            found.append(block.values[start : start + length].tolist())


def test_a_wrong_number_of_documents_is_told_when_they_are_due(files):
    expected = [d.tolist() for d in documents(files["parquet"], 0) if len(d)]
    wrong = expected[5][0]

    def lacking(block):
        if wrong not in block.values:
            return block
        return block_maps.TokenBlock(block.values[:0], np.array([0]))

    mapped = block_maps.BlockMap(documents(files["parquet"], 0), lacking)
    found, error, _ = read_singly(mapped)
    assert found == expected[:5]
    assert "returned 0 documents for 1" in str(error)


@given(wrong=st.sets(st.integers(0, 170), min_size=1, max_size=4))
def test_an_error_is_raised_after_the_documents_before_it(files, wrong):
    expected = [d.tolist() for d in documents(files["parquet"], 0) if len(d)]
    wrong = {number % len(expected) for number in wrong}
    tokens = {expected[number][0] for number in wrong}

    def failing(block):
        found = tokens & set(block.values.tolist())
        if found:
            raise ValueError(f"{sorted(found)} of {len(block)}")
        return block

    mapped = block_maps.BlockMap(documents(files["parquet"], 0), failing)
    first = min(wrong)
    found, error, of_blocks = read_singly(mapped)
    assert found == expected[:first]
    assert str(error) == f"[{expected[first][0]}] of 1"
    for _ in range(2):
        with pytest.raises(ValueError, match="of 1"):
            of_blocks.read(1)


def test_blocks_are_read_only_and_have_the_type_of_single_documents(files):
    seen = []

    def noted(block):
        seen.append((block.values.dtype, block.offsets.dtype))
        for array in (block.values, block.offsets):
            with pytest.raises(ValueError, match="read-only"):
                array[:1] = 0
        with pytest.raises(dataclasses.FrozenInstanceError):
            block.values = block.values
        return block

    for file_format in formats.FORMATS:
        mapped = block_maps.BlockMap(documents(files[file_format], 0), noted)
        list(mapped)
        assert isinstance(read_singly(mapped)[1], StopIteration)
    assert set(seen) == {(np.dtype(np.int32), np.dtype(np.int64))}


def test_what_a_function_returns_is_checked(files):
    def fewer(block):
        return block_maps.TokenBlock(
            block.values[: block.offsets[-2]], block.offsets[:-1]
        )

    def bare(block):
        return block.values

    def numbered(block):
        # The first document of a block is 0, and so on.
        return block_maps.TokenBlock(
            block.values + np.repeat(np.arange(len(block)), block.lengths),
            block.offsets,
        )

    for function, message in (
        (fewer, r"BlockMap\(fewer\) returned \d+ documents for \d+; return one for ea"),
        (bare, r"BlockMap\(bare\) returned a ndarray; return an ec.data.lm.TokenBlock"),
        (numbered, r"BlockMap\(numbered\) returned other tokens .* treat each on its"),
    ):
        mapped = block_maps.BlockMap(documents(files["parquet"], 0), function)
        of_blocks = blocks.of(mapped)
        for _ in range(2):
            with pytest.raises(errors.DataError, match=message):
                of_blocks.read(100)


def test_it_maps_documents_not_records_and_not_examples(files):
    tokens = documents(files["parquet"], 0)
    examples = language.Examples(tokens, length=5, truncate=True)
    with pytest.raises(errors.ConfigError, match="apply it before Examples"):
        block_maps.BlockMap(examples, even_cut)
    (of_records,) = tokens.parents
    mapped = block_maps.BlockMap(of_records, even_cut)
    assert blocks.of(mapped) is None
    with pytest.raises(errors.DataError, match=r"apply it after ec\.data\.lm\.Tokens"):
        next(iter(mapped))


@pytest.mark.parametrize(
    ("values", "offsets", "message"),
    [
        ([[1, 2]], [0, 1], r"values are int64\[1, 2\]"),
        ([1.5], [0, 1], r"values are float64\[1\]"),
        ([1, 2], [0, 1], r"offsets \[0 1\] of 2 tokens"),
        ([1, 2], [1, 2], r"offsets \[1 2\] of 2 tokens"),
        ([1, 2], [0, 2, 1, 2], r"offsets \[0 2 1 2\] of 2 tokens"),
        ([], [], r"offsets \[\] of 0 tokens"),
        ([2**31], [0, 1], "token 2147483648, which does not fit into 32 bits"),
    ],
)
def test_arrays_that_are_no_documents_are_refused(values, offsets, message):
    with pytest.raises(errors.DataError, match=message):
        block_maps.TokenBlock(np.array(values), np.array(offsets))


def test_masks_are_of_documents_or_of_tokens():
    block = block_maps.TokenBlock(np.arange(5), np.array([0, 3, 5]))
    with pytest.raises(
        errors.DataError, match=r"keep_tokens=bool\[2\]; give bool\[5\]"
    ):
        block.keep_tokens(block.lengths > 2)
    with pytest.raises(errors.DataError, match=r"keep_documents=int64.*each document"):
        block.keep_documents(block.lengths)


@given(lengths=st.lists(st.integers(0, 5)), of=st.data())
def test_documents_and_tokens_are_kept_as_in_lists(lengths, of):
    ends = np.cumsum([0, *lengths])
    block = block_maps.TokenBlock(np.arange(ends[-1]), ends)
    each = np.split(np.arange(ends[-1]), ends[1:-1]) if lengths else []
    is_kept = of.draw(st.lists(st.booleans(), min_size=len(each), max_size=len(each)))
    kept = block.keep_documents(np.array(is_kept, bool))
    assert np.split(kept.values, kept.offsets[1:-1])[: len(each)] == [
        pytest.approx(d if keep else d[:0])
        for d, keep in zip(each, is_kept, strict=True)
    ]
    odd = block.keep_tokens(block.values % 2 > 0)
    assert len(block) == len(kept) == len(odd) == len(lengths)
    assert odd.values.tolist() == [value for value in block.values if value % 2]
    assert odd.lengths.tolist() == [int((d % 2).sum()) for d in each]


@pytest.mark.parametrize("hide", [lambda documents: documents, formats.Single])
def test_endless_data_of_which_all_is_left_out_is_an_error(files, hide, monkeypatch):
    monkeypatch.setattr(records, "_MIN_FRUITLESS_RECORDS", 1000)

    def make_shard(shard):
        endless = hide(documents(files["parquet"], shard, num_epochs=None))
        none = block_maps.BlockMap(
            endless, lambda block: block.keep_documents(block.lengths < 0)
        )
        return language.Padded(
            language.Examples(none, length=9, truncate=True), length=9
        )

    nothing = sharded_data.sharded(
        make_shard, num_shards=formats.NUM_SHARDS, pipeline="nothing"
    )
    with pytest.raises(errors.DataError, match="records in a row made no example"):
        worlds.World(nothing, 1, 12).batch()


def test_a_pipeline_with_a_function_is_named_and_its_documents_are_not_told(files):
    make_shard = MakeShard(
        parts=files["parquet"], packing=language.BEST_FIT, num_epochs=1
    )
    with pytest.raises(
        errors.ConfigError, match=r"with a saved state, .*BlockMap\(even_cut\)"
    ):
        sharded_data.sharded(make_shard, num_shards=formats.NUM_SHARDS)
    with pytest.raises(errors.DataError, match=r"told: BlockMap\(even_cut\)"):
        provenance.FollowedShard(make_shard, 0)


def test_a_dataset_of_a_mixture_may_have_no_blocks(files):
    tokens = documents(files["parquet"], 0)
    mixtures = [
        mixing.Mixture({"a": part, "b": tokens}, {"a": 0.5, "b": 0.5}, shard=0)
        for part in (
            shuffling.WindowShuffle(formats.Single(tokens), window_size=3, seed=1),
            block_maps.BlockMap(formats.Single(tokens), even_cut),
            shuffling.WindowShuffle(
                mixing.Mixture({"c": tokens}, {"c": 1}, shard=0), window_size=3, seed=1
            ),
        )
    ]
    for mixture in mixtures:
        assert blocks.of(mixture) is None
        examples = language.Examples(mixture, length=9, truncate=True)
        rows = language.Padded(examples, length=9)
        assert len(list(itertools.islice(rows, 10))) == 10
