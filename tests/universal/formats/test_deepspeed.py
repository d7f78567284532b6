"""DeepSpeed's checkpoints that lack files, or contradict themselves, are refused.

`test_samples` has those that DeepSpeed wrote.
"""

import shutil

import numpy as np
import pytest

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats.files import FormatError
from tests.universal.formats import stored_values, torch_files

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
    with pytest.raises(FormatError, match="whose states are none of PyTorch"):
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
GROUPS = {"state": {0: MOMENTUM}, "param_groups": [{}]}


def by_hand(
    folder, *, mapping=None, second=None, shape=(2, 2), flat=None, more=(), **stated
):
    """A checkpoint of one parameter `w` of ZeRO-1, and one rank or a second one."""
    flat = flat or FLAT_TENSOR
    value = {"module": None, "param_shapes": [{"w": shape}]}
    torch_files.write(folder / "mp_rank_00_model_states.pt", value)
    mappings = [mapping or {"w": {"start": 0, "numel": 4}}, second]
    for rank, held in enumerate(mappings if second else mappings[:1]):
        optimizer = {
            "single_partition_of_fp32_groups": [flat],
            "base_optimizer_state": {"state": {}},
            "param_slice_mappings": [held],
            "partition_count": [1],
            **stated,
        }
        path = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch_files.write(path, {"optimizer_state_dict": optimizer, **dict(more)})
    return opening.open_checkpoint(folder)


OF_MUON = {"ds_config": {"optimizer": {"type": "Muon"}}}


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
    with pytest.raises(FormatError, match="has the momentum of Muon"):
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
        ({"mapping": {"w": {"start": 0, "numel": 3}}}, "hold 3 elements of w"),
        ({"mapping": {"w": {"start": 1, "numel": 4}}}, "elements 1 to 5 of a tensor"),
        ({"mapping": {"w": {"start": -1, "numel": 4}}}, "elements -1 to 3 of a tensor"),
        ({"mapping": {"w": {"start": "0", "numel": 4}}}, "that are none of ZeRO"),
        (
            {"shape": (2,), "second": {"w": {"start": 2, "numel": -2}}},
            "hold 4 elements",
        ),
        ({"mapping": {"v": {"start": 0, "numel": 4}}}, "has v, which param_shapes"),
        ({"shape": (1 << 30,)}, "hold 4 elements of w, which has 1073741824"),
        ({"flat": torch_files.tensor()}, "that is not flat"),
        ({"flat": torch_files.lazy(FLAT_TENSOR, "neg")}, "neg that is not flat"),
        ({"flat": 4}, "no float32 parameters"),
        ({"partition_count": [3]}, "partition_count is 3 of 1"),
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
    with pytest.raises(FormatError, match=f"and {FLAT} are of the same rank"):
        opening.open_checkpoint(folder)
