"""A DeepSpeed checkpoint is loaded by its own description, as DeepSpeed converts it."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt import universal
from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats import deepspeed_rules
from elastic_ckpt.universal.formats.checkpoint import Checkpoint
from elastic_ckpt.universal.formats.files import FormatError
from elastic_ckpt.universal.rules.layout import LayoutError
from tests.universal.formats import stored_values
from tests.universal.rules import relayout

STATES = ("master", "first_moment", "second_moment")
SAMPLES = (
    *("zero1_dp2", "zero2_dp4", "zero3_dp4", "zero1_pp2_dp2", "zero1_tp2_pp2_dp2"),
    *("zero1_tp4", "zero3_tp2_dp2"),
)
REPLICATED = "tp_replicated_parameter_patterns"
AVERAGED = "parameter_to_average_patterns"
HALVES = "parameter_with_2_sub_params_cat_dim_0"
PARTS = "parameter_with_sub_params"
ROWS = "parameter_with_row_parallelism_patterns"
VOCABULARY = "vocabulary_parameter_patterns"
AUTOTP = ("affine_map", "sub_param_shard_widths")


def load(path, whole):
    """The states of `whole` tensors, loaded by the checkpoint's own description."""
    checkpoint, tree = opening.open_checkpoint(path), {}
    info = checkpoint.values.get("universal_checkpoint_info", {})
    # Without what AutoTP adds.
    kept = {key: value for key, value in info.items() if key not in AUTOTP}
    values = {"universal_checkpoint_info": kept}
    for tensor in whole:
        like = jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)
        tree.setdefault(tensor.kind, {})[tensor.name] = like
    checkpoint = dataclasses.replace(checkpoint, values=values)
    layout = deepspeed_rules.layout(checkpoint, {f"{kind}/" for kind in tree})
    return universal.load(path, tree, layout=layout)


@pytest.mark.parametrize("name", SAMPLES)
def test_states_are_those_of_the_conversion_by_deepspeed(sample, name):
    path = f"deepspeed/{name}"
    converted = opening.open_checkpoint(sample(f"{path}_universal")).tensors
    # Files from ZeRO-3 have no steps.
    kinds = {*STATES} | ({"step"} if "zero3" not in name else set())
    # The conversion takes buffers for parameters.
    trained = {each.name for each in converted if each.kind == "first_moment"}
    whole = [t for t in converted if t.kind in kinds and t.name in trained]
    state = load(sample(path), whole)
    for tensor in whole:
        array = np.asarray(state[tensor.kind][tensor.name])
        stored_values.assert_equal(array, stored_values.read(tensor))
    assert {each.kind for each in whole} == kinds


def checkpoint_of(shards, info):
    """Tensors of several ranks, and an opened checkpoint that has them."""
    saved = [
        relayout.saved(name, array * (1 + at), kind, tp=rank)
        for name, arrays in shards.items()
        for rank, array in enumerate(arrays)
        for at, kind in enumerate(STATES)
    ]
    return saved, Checkpoint(
        format="DeepSpeed ZeRO-1",
        tensors=saved,
        axes={"tp": len(shards["w"])},
        values={"universal_checkpoint_info": info},
    )


def merged(shards, info):
    saved, checkpoint = checkpoint_of(shards, info)
    layout = deepspeed_rules.layout(checkpoint)
    return relayout.relayout(layout, saved, checkpoint.axes)


@st.composite
def described(draw):
    """Shards of a parameter, the entry of a list that has it, and the whole of it."""
    ranks = draw(st.integers(1, 4))
    key = draw(st.sampled_from(["", HALVES, PARTS, ROWS, VOCABULARY]))
    dim = {PARTS: draw(st.integers(0, 2)), ROWS: 1}.get(key, 0)
    count = {HALVES: 2, PARTS: draw(st.integers(1, 3))}.get(key, 1)
    length = st.integers(1, 3).map(lambda number: number * ranks)
    are_equal = key != PARTS or draw(st.booleans())
    lengths = (
        [draw(length)] * count if are_equal else [draw(length) for _ in range(count)]
    )
    info = {key: ["w"]}
    if key == PARTS:
        shape = [4, 4, 4]
        shape[dim] = count if are_equal and draw(st.booleans()) else lengths
        info = {PARTS: [{"patterns": ["w"], "shape": shape, "partition_dim": dim}]}
    shape = [3, 3, 3]
    shape[dim] = sum(lengths)
    whole = relayout.numbered(*shape)
    bounds = list(itertools.accumulate(lengths))[:-1]
    split = [np.split(part, ranks, dim) for part in np.split(whole, bounds, dim)]
    shards = [np.concatenate(held, dim) for held in zip(*split, strict=True)]
    if key == VOCABULARY:
        whole = whole[: draw(st.integers(1, len(whole)))]
        info["original_vocab_size"] = len(whole)
    return shards, info, whole


@given(described())
def test_shards_are_joined_as_their_list_says(made):
    shards, info, whole = made
    arrays = merged({"w": shards}, info)
    assert (arrays["master/w"] == whole).all()
    assert (arrays["second_moment/w"] == 3 * whole).all()


def test_the_description_that_autotp_writes_is_refused(sample):
    checkpoint = opening.open_checkpoint(sample("deepspeed/zero1_tp4"))
    with pytest.raises(FormatError, match=r"has affine_map, of AutoTP.* give a layout"):
        deepspeed_rules.layout(checkpoint)


ENTRY = {"patterns": ["w"], "partition_dim": 0}
MALFORMED = "is not as DeepSpeed writes it"


@pytest.mark.parametrize(
    ("info", "match"),
    [
        (None, "no universal_checkpoint_info"),
        ({"universal_checkpoint_version": 0.5}, "version 0.5"),
        ({"sub_param_shard_widths": {"w": [[1, 3]]}}, "sub_param_shard_widths"),
        ({"autotp_unsupported_parameter_patterns": {"w": "x"}}, "of AutoTP"),
        ([REPLICATED], MALFORMED),
        ({REPLICATED: 1}, MALFORMED),
        ({REPLICATED: ["(w"]}, MALFORMED),
        ({VOCABULARY: ["w"]}, rf"{MALFORMED} \(KeyError\('original_vocab_size'"),
        ({VOCABULARY: ["w"], HALVES: ["w"]}, "both have it"),
        ({PARTS: [{"patterns": ["w"]}]}, MALFORMED),
        ({PARTS: [{"patterns": "w", "shape": [2], "partition_dim": 2}]}, MALFORMED),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(info, match):
    shards = {"w": [relayout.numbered(2, 2)] * 2}
    _, checkpoint = checkpoint_of(shards, info)
    with pytest.raises(FormatError, match=match):
        deepspeed_rules.layout(checkpoint)


ROWS_OF_RANKS = [relayout.numbered(3, 1)] * 2


@pytest.mark.parametrize(
    ("shards", "info", "match"),
    [
        ([relayout.numbered(n, 2) for n in (3, 5)], {}, "w: ranks have .* `widths`"),
        (ROWS_OF_RANKS, {PARTS: [{"shape": [[3, 3], 1], **ENTRY}]}, "w"),
        (ROWS_OF_RANKS, {PARTS: [{"shape": [[2, 2], 1], **ENTRY}]}, "w"),
        (ROWS_OF_RANKS, {HALVES: ["w"]}, "w"),
        (ROWS_OF_RANKS, {VOCABULARY: ["w"], "original_vocab_size": 7}, "w"),
    ],
)
def test_sizes_that_shards_do_not_have_are_refused(shards, info, match):
    with pytest.raises((FormatError, LayoutError), match=match):
        merged({"w": shards}, info)


def test_a_parameter_that_a_rank_lacks_is_refused():
    saved, checkpoint = checkpoint_of({"w": ROWS_OF_RANKS}, {AVERAGED: ["w"]})
    checkpoint = dataclasses.replace(checkpoint, tensors=saved[:3])
    with pytest.raises(FormatError, match=r"1 of 2 ranks have w \(first_moment\)"):
        deepspeed_rules.layout(checkpoint)
