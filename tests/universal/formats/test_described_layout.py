"""A DeepSpeed checkpoint is loaded by its own description, as DeepSpeed converts it."""

import itertools

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt import universal
from elastic_ckpt.universal import opening
from elastic_ckpt.universal.deepspeed_layout import described_layout
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.opened import OpenedCheckpoint
from tests.universal.formats import known_values as kv
from tests.universal.formats import stored_values
from tests.universal.rules import relayout

STATES = {"master": "fp32", "first_moment": "exp_avg", "second_moment": "exp_avg_sq"}
SAMPLES = (
    *("zero1_dp2", "zero2_dp4", "zero3_dp4", "zero1_pp2_dp2", "zero1_tp2_pp2_dp2"),
    *("zero1_tp4", "zero3_tp2_dp2"),
)


def whole_values(path):
    """The tensors of the target that the checkpoint's own layout makes."""
    checkpoint = opening.open_checkpoint(path)
    saved = [
        relayout.Saved(
            name=each.name,
            values=stored_values.read(each),
            ranks=each.ranks,
            kind=each.kind,
        )
        for each in checkpoint.tensors
    ]
    layout = described_layout.layout(checkpoint)
    return layout, relayout.relayout(layout, saved, checkpoint.axes)


@pytest.mark.parametrize("sample", SAMPLES)
def test_states_are_those_of_the_conversion_by_deepspeed(samples, sample):
    _, arrays = whole_values(samples(sample))
    _, converted = whole_values(samples(f"{sample}_universal"))
    trained = {name for name in arrays if name.startswith("first_moment/")}
    assert trained == {name for name in converted if name.startswith("first_moment/")}
    for name in trained:
        # Files from ZeRO-3 have no steps.
        for kind in (*STATES, "step")[: 3 + ("zero3" not in sample)]:
            each = name.replace("first_moment", kind)
            assert arrays[each].shape == converted[each].shape, each
            assert arrays[each].tobytes() == converted[each].tobytes(), each


def test_shards_of_ranks_become_the_parameters_that_they_were_cut_from(samples):
    path = samples("zero1_tp2_pp2_dp2")
    tree, expected = {}, {}
    for tensor in opening.open_checkpoint(samples(f"{path.name}_universal")).tensors:
        if tensor.kind in STATES:
            key = STATES[tensor.kind]
            shape = kv.full_shape(tensor.name, tensor.shape)
            shards = [kv.of_rank(key, tensor.name, shape, rank, 2) for rank in (0, 1)]
            array = kv.merged(tensor.name, shards)
            expected[tensor.kind, tensor.name] = array
            like = jax.ShapeDtypeStruct(array.shape, np.float32)
            tree.setdefault(tensor.kind, {})[tensor.name] = like
    state = universal.load(path, tree)
    for (kind, name), array in expected.items():
        assert np.asarray(state[kind][name]).tobytes() == array.tobytes(), name
    assert len(expected) == 3 * (kv.BLOCKS * len(kv.BLOCK) + len(kv.FINAL) + 1)


@pytest.mark.parametrize(
    ("sample", "sizes"),
    [
        ("zero0_bf16_dp2", (2, 2, 2)),
        ("zero2_dp4", (8, 1, 1)),
        ("zero1_tp2_pp2_dp2", (1, 4, 2)),
        ("zero3_tp2_dp2_universal", (4, 1, 2)),
    ],
)
def test_a_checkpoint_is_loaded_under_any_parallelism(samples, sample, sizes):
    _, arrays = whole_values(samples(sample))
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    mesh = jax.sharding.Mesh(devices, ("tp", "pp", "dp"))
    tree, names = {}, itertools.cycle(itertools.permutations(mesh.axis_names))
    for path, array in arrays.items():
        kind, _, parameter = path.partition("/")
        spec = [
            axis if size % mesh.shape[axis] == 0 else None
            for axis, size in zip(next(names), array.shape, strict=False)
        ]
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        leaf = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        tree.setdefault(kind, {})[parameter] = leaf
    state = universal.load(samples(sample), tree)
    for path, array in arrays.items():
        kind, _, parameter = path.partition("/")
        loaded = state[kind][parameter]
        assert loaded.sharding == tree[kind][parameter].sharding
        assert np.asarray(loaded).tobytes() == array.tobytes(), path


def checkpoint_of(shards, info, kinds=("master", "first_moment", "second_moment")):
    """Tensors of several ranks, and an opened checkpoint that has them."""
    saved = [
        relayout.saved(name, array * (1 + at), kind, tp=rank)
        for name, arrays in shards.items()
        for rank, array in enumerate(arrays)
        for at, kind in enumerate(kinds)
    ]
    ranks = len(next(iter(shards.values())))
    return saved, OpenedCheckpoint(
        format="DeepSpeed ZeRO-1",
        tensors=relayout.stored(saved),
        axes={"tp": ranks},
        values={"universal_checkpoint_info": info},
    )


def merged(shards, info, **kinds):
    saved, checkpoint = checkpoint_of(shards, info, **kinds)
    layout = described_layout.layout(checkpoint)
    return relayout.relayout(layout, saved, checkpoint.axes)


def block(shape, source, dest, locations, **scale):
    entry = {"shape": shape, "source": source, "dest": dest}
    return {**entry, "locations": locations, **scale}


def affine(logical, shards, *pieces):
    ranks = {
        str(rank): {"shard_shape": list(shard), "pieces": list(listed)}
        for rank, (shard, listed) in enumerate(zip(shards, pieces, strict=True))
    }
    entry = {"logical_shape": list(logical), "ranks": ranks}
    return {"affine_map": {"version": 1, "params": {r"w$": entry}}}


def test_halves_and_rows_are_joined_and_a_vocabulary_loses_its_padding():
    halves, rows, words = (relayout.numbered(8, 4, start=n) for n in (0, 50, 100))
    shards = {
        "halves": [halves[[0, 1, 4, 5]], halves[[2, 3, 6, 7]]],
        "rows": [rows[:, :1], rows[:, 1:]],
        "words": [words[:5], words[5:]],
        "rest": [words[:3], words[3:]],
    }
    info = {
        "parameter_with_2_sub_params_cat_dim_0": ["hal"],
        "parameter_with_row_parallelism_patterns": [".*ows$"],
        "vocabulary_parameter_patterns": [".*words"],
        "original_vocab_size": 4,
    }
    arrays = merged(shards, info)
    assert (arrays["first_moment/halves"] == 2 * halves).all()
    assert (arrays["master/rows"] == rows).all()
    assert (arrays["second_moment/words"] == 3 * words[:4]).all()
    assert (arrays["master/rest"] == words).all()


def test_moments_of_a_scaled_map_take_inverse_powers():
    shard = relayout.numbered(3)
    piece = block([3], [0, [1]], [0, [1]], [0, 1], scale=0.5)
    arrays = merged({"w": [shard, shard]}, affine((3,), [(3,), (3,)], [piece], [piece]))
    assert arrays["master/w"].tolist() == (shard / 0.5).tolist()
    assert arrays["first_moment/w"].tolist() == (2 * shard * 0.5).tolist()
    assert arrays["second_moment/w"].tolist() == (3 * shard * 0.25).tolist()


def test_the_momentum_of_muon_is_loaded_by_the_description(samples):
    path = samples("zero3_muon_dp2")
    tensors = opening.open_checkpoint(path).tensors
    held = [each for each in tensors if each.kind == "momentum_buffer"]
    like = {t.name: jax.ShapeDtypeStruct(t.shape, np.float32) for t in held}
    state = universal.load(path, {"momentum_buffer": like})
    for name, array in state["momentum_buffer"].items():
        known = kv.known("momentum_buffer", name, array.shape)
        known = known.astype(ml_dtypes.bfloat16).astype(np.float32)
        assert np.asarray(array).tobytes() == known.tobytes(), name


@st.composite
def cuts(draw):
    """Segments along a dim, and the ranks that have each, in an order of their own."""
    ranks = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    subsets = st.sets(st.integers(0, ranks - 1), min_size=1)
    holders = [draw(subsets) for _ in lengths]
    ends = list(itertools.accumulate(lengths, initial=0))
    segments = list(itertools.pairwise(ends))
    held = [
        draw(
            st.permutations(
                [each for each, h in zip(segments, holders, strict=True) if rank in h]
            )
        )
        for rank in range(ranks)
    ]
    return ends[-1], held, draw(st.integers(0, 1)), draw(st.booleans())


@given(cuts())
def test_shards_of_any_parts_along_a_dim_are_joined(made):
    length, held, dim, has_padding = made
    whole = relayout.numbered(*((length, 2) if dim == 0 else (2, length)))
    shards, pieces = [], []
    for segments in held:
        parts = [np.take(whole, range(*each), axis=dim) for each in segments]
        parts = parts or [np.take(whole, [], axis=dim)]
        shards.append(np.concatenate(parts, axis=dim))
        strides = [[each.shape[1], 1] for each in (whole, shards[-1])]
        listed, at = [], 0
        for (start, _), part in zip(segments, parts, strict=False):
            source, dest = (
                (n * s[dim], s) for n, s in zip((start, at), strides, strict=True)
            )
            listed.append(block(list(part.shape), list(source), list(dest), []))
            at += part.shape[dim]
        pieces.append(listed)
    info = affine(whole.shape, [each.shape for each in shards], *pieces)
    if has_padding and dim == 0 and length > 1:
        info |= {"vocabulary_parameter_patterns": ["w"], "original_vocab_size": 1}
        whole = whole[:1]
    assert (merged({"w": shards}, info)["master/w"] == whole).all()


def whole_piece(**parts):
    piece = block([2, 2], [0, [2, 1]], [0, [2, 1]], [0])
    return {**piece, **parts}


@pytest.mark.parametrize(
    ("info", "match"),
    [
        (None, "no universal_checkpoint_info"),
        ({"universal_checkpoint_version": 0.5}, "version 0.5"),
        ({"affine_map": {"version": 2}}, "version 2"),
        ({"tp_replicated_parameter_patterns": 1}, "is no list"),
        ({"tp_replicated_parameter_patterns": ["(w"]}, "is no regular expression"),
        ({"tp_replicated_parameter_patterns": ["w", ".*"]}, "both match"),
        ({"autotp_unsupported_parameter_patterns": {"w": "x"}}, "not describe"),
        ({"vocabulary_parameter_patterns": ["w"]}, "original_vocab_size is None"),
        ({"parameter_with_sub_params": [{"patterns": ["w"]}]}, "is no list"),
        (affine((4, 2), [(2, 2)] * 2, [whole_piece()], []), "no rank has 2"),
        (affine((2, 2), [(2, 2)] * 2, [whole_piece()], []), r"parts of \[2, 0\]"),
        (affine((4, 2), [(3, 2)] * 2, [], []), r"\(3, 2\)\] are stated"),
        (
            affine((4, 2), [(2, 2)] * 2, [whole_piece(shape=[2, 1])], []),
            "cuts the dims",
        ),
        (affine((4, 2), [(2, 2)] * 2, [whole_piece(dest=[2, [2, 1]])], []), "outside"),
        (affine((4, 2), [(2, 2)] * 2, [], [{}]), "malformed"),
        (affine((4, 2), [(2, 2)] * 2, [whole_piece()] * 2, []), "rank 0 has 0 twice"),
        (affine((4, 2), [(2, 2)] * 2, [whole_piece(dest=[0, [1, 2]])], []), "no box"),
        (
            affine(
                *((4, 2), [(2, 2)] * 2),
                *([whole_piece()], [whole_piece(source=[4, [2, 1]], scale=2.0)]),
            ),
            "scales",
        ),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(info, match):
    shards = {"w": [relayout.numbered(2, 2)] * 2}
    _, checkpoint = checkpoint_of(shards, info)
    with pytest.raises(FormatError, match=match):
        described_layout.layout(checkpoint)
