"""DeepSpeed checkpoints load as they describe themselves; contradictions are refused.

`test_samples` has the values of those that DeepSpeed wrote.
"""

import dataclasses
import itertools
import shutil

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
from tests.universal.formats import stored_values, torch_files
from tests.universal.rules import relayout

STATES = ("master", "first_moment", "second_moment")
SAMPLES = (
    *("zero1_dp2", "zero2_dp4", "zero3_dp4", "zero1_pp2_dp2", "zero1_tp2_pp2_dp2"),
    *("zero1_tp4", "zero3_tp2_dp2"),
)
REPLICATED = "tp_replicated_parameter_patterns"
HALVES = "parameter_with_2_sub_params_cat_dim_0"
PARTS = "parameter_with_sub_params"
ROWS = "parameter_with_row_parallelism_patterns"
VOCABULARY = "vocabulary_parameter_patterns"


def load(path, whole):
    """The states of `whole` tensors, loaded by the checkpoint's own description."""
    checkpoint, tree = opening.open_checkpoint(path), {}
    info = checkpoint.values.get("universal_checkpoint_info", {})
    of_autotp = ("affine_map", "sub_param_shard_widths")
    kept = {key: value for key, value in info.items() if key not in of_autotp}
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


ENTRY = {"patterns": ["w"], "partition_dim": 0}
ROWS_OF_RANKS = [relayout.numbered(3, 1)] * 2
MALFORMED = "universal_checkpoint_info is malformed"


@pytest.mark.parametrize(
    ("info", "match"),
    [
        (None, "no universal_checkpoint_info"),
        ({"universal_checkpoint_version": 0.5}, "version 0.5"),
        ({"affine_map": {"version": 1}}, "AutoTP's affine_map.* specify your own lay"),
        ({"sub_param_shard_widths": {"w": [[1, 3]]}}, "sub_param_shard_widths"),
        ({"autotp_unsupported_parameter_patterns": {"w": "x"}}, "AutoTP's"),
        ([REPLICATED], MALFORMED),
        ({REPLICATED: 1}, MALFORMED),
        ({REPLICATED: ["(w"]}, MALFORMED),
        ({VOCABULARY: ["w"]}, rf"{MALFORMED} \(KeyError\('original_vocab_size'"),
        ({VOCABULARY: ["w"], HALVES: ["w"]}, "match it"),
        ({PARTS: [{"patterns": ["w"]}]}, MALFORMED),
        ({PARTS: [{"patterns": "w", "shape": [2], "partition_dim": 2}]}, MALFORMED),
        ({PARTS: [{"shape": [[3, 3], 1], **ENTRY}]}, "w"),
        ({PARTS: [{"shape": [[2, 2], 1], **ENTRY}]}, "w"),
        ({HALVES: ["w"]}, "w"),
        ({VOCABULARY: ["w"], "original_vocab_size": 7}, "w"),
    ],
)
def test_descriptions_that_do_not_fit_are_refused(info, match):
    with pytest.raises((FormatError, LayoutError), match=match):
        merged({"w": ROWS_OF_RANKS}, info)


def test_ranks_that_differ_are_refused():
    info = {"parameter_to_average_patterns": ["w"]}
    saved, checkpoint = checkpoint_of({"w": ROWS_OF_RANKS}, info)
    checkpoint = dataclasses.replace(checkpoint, tensors=saved[:3])
    with pytest.raises(FormatError, match=r"1 of 2 ranks have w \(first_moment\)"):
        deepspeed_rules.layout(checkpoint)
    with pytest.raises(FormatError, match=r"w: shards of different shapes.* `widths`"):
        merged({"w": [relayout.numbered(rows, 2) for rows in (3, 5)]}, {})


FLAT = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


def numbered(folder, groups, **optimizer):
    array = np.ones((2, 2), np.float32)
    state = {number: {"exp_avg": array} for number in (0, 1)}
    param_groups = [{"params": group} for group in groups]
    value = {
        "module": {"a": torch_files.tensor(), "b": array, "tied": torch_files.tensor()},
        "optimizer": {"state": state, "param_groups": param_groups, **optimizer},
    }
    torch_files.write(folder / "mp_rank_00_model_states.pt", value)
    tensors = opening.open_checkpoint(folder).tensors
    return [each.name for each in tensors if each.kind == "first_moment"]


def test_numbered_states_are_named_only_if_their_order_is_certain(tmp_path):
    assert numbered(tmp_path, [[0, 1]]) == ["a", "b"]
    assert numbered(tmp_path, [[0], [1]]) == ["optimizer/0", "optimizer/1"]
    # Float32 parameters of no group.
    with pytest.raises(FormatError, match="states that are not in PyTorch's format"):
        numbered(tmp_path, [[0, 1]], fp32_groups=[])


def test_a_parameter_that_layers_share_is_one_of_its_optimizer(tmp_path):
    names = ["tied_modules.a.w"]
    for layer in range(2):
        path = tmp_path / f"layer_{layer:02d}-model_states.pt"
        torch_files.write(path, {"w": torch_files.tensor()})
    state = {"state": {0: {"exp_avg": torch_files.tensor()}}}
    value = {
        "module": None,
        "param_shapes": [dict.fromkeys(names, (2, 2))],
        "optimizer": {**state, "param_groups": [{"params": [0]}]},
    }
    torch_files.write(tmp_path / "mp_rank_00_model_states.pt", value)
    tensors = opening.open_checkpoint(tmp_path).tensors
    assert [each.name for each in tensors] == names * 2


FLAT_TENSOR = torch_files.tensor(shape=(4,), strides=(1,))
MOMENTUM = {"momentum_buffer": FLAT_TENSOR}
OF_MUON = {"ds_config": {"optimizer": {"type": "Muon"}}}
GROUPS = {"state": {0: MOMENTUM}, "param_groups": [{}]}


def by_hand(
    folder, *, places=((0, 4),), shape=(2, 2), flat=FLAT_TENSOR, more=(), **stated
):
    """A checkpoint of a parameter `w` of ZeRO-1; ranks have these places of it."""
    value = {"module": None, "param_shapes": [{"w": shape}]}
    torch_files.write(folder / "mp_rank_00_model_states.pt", value)
    for rank, (start, size) in enumerate(places):
        optimizer = {
            "single_partition_of_fp32_groups": [flat],
            "base_optimizer_state": {"state": {}},
            "param_slice_mappings": [{"w": {"start": start, "numel": size}}],
            "partition_count": [1],
            **stated,
        }
        path = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch_files.write(path, {"optimizer_state_dict": optimizer, **dict(more)})
    return opening.open_checkpoint(folder)


@pytest.mark.parametrize(
    "parts",
    [
        {"base_optimizer_state": GROUPS | {"param_groups": [{"use_muon": True}]}},
        # With the option `elastic_checkpoint`.
        {"base_optimizer_state": [MOMENTUM], "more": OF_MUON},
        {"whole_param_optimizer_states": [["momentum_buffer"]]},
    ],
)
def test_muon_under_zero_1_and_2_is_refused_but_its_weights_load(tmp_path, parts):
    with pytest.raises(FormatError, match="has Muon's momentum"):
        by_hand(tmp_path, **parts)
    for optimizer in tmp_path.glob("*_optim_states.pt"):
        optimizer.unlink()
    assert opening.open_checkpoint(tmp_path).format == "DeepSpeed ZeRO-0"


def test_the_momentum_of_other_optimizers_is_divided_like_their_masters(tmp_path):
    checkpoint = by_hand(tmp_path, base_optimizer_state=GROUPS)
    by_kind = {each.kind: each.shape for each in checkpoint.tensors}
    assert by_kind == {"master": (2, 2), "momentum_buffer": (2, 2)}


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ({"places": [(0, 3)]}, "have 3 elements of w"),
        ({"places": [(1, 4)]}, "elements 1 to 5 of a tensor"),
        ({"places": [(-1, 4)]}, "elements -1 to 3 of a tensor"),
        ({"places": [("0", 4)]}, "not in ZeRO's format"),
        ({"places": [(0, 4), (2, -2)], "shape": (2,)}, "have 4 elements"),
        ({"param_slice_mappings": [{"v": {"start": 0, "numel": 4}}]}, "has v, which"),
        ({"shape": (1 << 30,)}, "4 elements of w, but its shape needs 1073741824"),
        ({"flat": torch_files.tensor()}, "that is not flat"),
        ({"flat": torch_files.lazy(FLAT_TENSOR, "neg")}, "neg that is not flat"),
        ({"flat": 4}, "no float32 parameters"),
        ({"partition_count": [3]}, "partition_count is 3, but"),
    ],
)
def test_lying_places_and_shapes_are_refused(tmp_path, parts, match):
    with pytest.raises(FormatError, match=match) as error:
        by_hand(tmp_path, **parts)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("sample", "name"),
    [
        ("zero1_dp2", FLAT),
        ("zero3_dp4", FLAT),
        ("zero3_dp4", "zero_pp_rank_2_mp_rank_00_model_states.pt"),
        ("zero1_tp2_pp2_dp2", "mp_rank_02_model_states.pt"),
    ],
)
def test_a_missing_file_is_named(tmp_path, sample, name):
    path = stored_values.sample(f"deepspeed/{sample}", tmp_path)
    (path / "global_step2" / name).unlink()
    rank = name.removeprefix("bf16_").rsplit("_", 2)[0]
    with pytest.raises(FormatError, match=f"lacks the files of {rank}|files of 3"):
        opening.open_checkpoint(path)


def test_files_of_two_saves_are_refused(tmp_path):
    folder = stored_values.sample("deepspeed/zero1_dp2", tmp_path) / "global_step2"
    shutil.copy(folder / FLAT, folder / FLAT.removeprefix("bf16_"))
    with pytest.raises(FormatError, match=f"and {FLAT} belong to the same rank"):
        opening.open_checkpoint(folder)
