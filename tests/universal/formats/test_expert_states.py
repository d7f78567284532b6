"""States of experts without ZeRO: which are named, and which are refused.

`test_deepspeed` reads the samples that DeepSpeed wrote.
"""

import shutil

import pytest

from elastic_ckpt.universal.formats import deepspeed
from elastic_ckpt.universal.formats.format_error import FormatError
from tests.universal.formats import torch_files

PREFIX = "{}.deepspeed_moe.experts.deepspeed_experts"


@pytest.fixture
def folder(samples, tmp_path):
    return shutil.copytree(samples("zero0_ep2_dp2") / "global_step2", tmp_path / "x")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_file_of_an_expert_parallel_rank_is_refused(folder, rank):
    (folder / f"expp_rank_{rank}_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(FormatError, match="of 2 expert-parallel ranks"):
        deepspeed.open_checkpoint(folder)


def test_experts_that_not_all_tensor_parallel_ranks_have_are_refused(samples, tmp_path):
    # DeepSpeed spreads experts over them unless tensor parallelism holds for experts.
    source = samples("zero1_tp2_ep2_dp2") / "global_step2"
    folder = shutil.copytree(source, tmp_path / "x")
    for layer in (0, 1):
        for expert, rank in ((0, 1), (1, 1), (2, 0), (3, 0)):
            name = f"layer_{layer}_expert_{expert}_mp_rank_{rank:02d}_model_states.pt"
            (folder / name).unlink()
    with pytest.raises(FormatError, match="save with enable_expert_tensor_parallelism"):
        deepspeed.open_checkpoint(folder)


def write(folder, groups, *, layers=("9", "10"), old_names=False):
    """Files of two experts of two layers, one for each of two ranks."""
    entry = torch_files.tensor()
    torch_files.write(folder / "mp_rank_00_model_states.pt", {"module": {"w": entry}})
    for rank in (0, 1):
        names = {layer: f"{PREFIX.format(layer)}.{rank}.up.weight" for layer in layers}
        if old_names:
            value = {
                name: torch_files.tensor(key=str(number))
                for number, name in enumerate(names.values())
            }
            path = folder / f"expert_{rank}_mp_rank_00_model_states.pt"
            storages = {f"data/{number}": bytes(16) for number in range(len(names))}
            torch_files.write(path, value, entries=storages)
        for number, name in enumerate(names.values()):
            path = f"layer_{number}_expert_{rank}_mp_rank_00_model_states.pt"
            if not old_names:
                torch_files.write(folder / path, {name: torch_files.tensor()})
        entries, state = {}, {}
        for number in range(3):
            key = str(number)
            entries[f"data/{key}"] = bytes([number + 16 * rank]) * 16
            state[number] = {"exp_avg": torch_files.tensor(key=key)}
        optimizer = {"state": state, "param_groups": groups}
        path = folder / f"expp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch_files.write(path, {"optimizer": optimizer}, entries=entries)
    return deepspeed.open_checkpoint(folder).tensors


DENSE = {"params": [0]}
EXPERTS = {"params": [1, 2], "moe": True, "name": "ep_size_2"}


@pytest.mark.parametrize("old_names", [False, True])
def test_experts_are_named_in_the_order_of_layers(tmp_path, old_names):
    tensors = write(tmp_path, [DENSE, EXPERTS], old_names=old_names)
    first_bytes = {}
    for each in tensors:
        if each.kind == "first_moment":
            (fragment,) = each.fragments
            with open(fragment.file, "rb") as file:
                file.seek(fragment.offset)
                first_bytes[each.name] = file.read(1)[0]
    assert first_bytes == {
        "w": 0,
        **{
            f"{PREFIX.format(layer)}.{rank}.up.weight": 16 * rank + number
            for number, layer in ((1, "9"), (2, "10"))
            for rank in (0, 1)
        },
    }


def test_groups_of_experts_whose_order_is_not_certain_are_refused(tmp_path):
    groups = [DENSE, *({**EXPERTS, "params": [number]} for number in (1, 2))]
    with pytest.raises(FormatError, match=r"of shape \[2, 2\], so which they are of"):
        write(tmp_path, groups)


def test_experts_that_ranks_do_not_divide_are_refused(tmp_path):
    write(tmp_path, [DENSE, EXPERTS])
    name = f"{PREFIX.format(9)}.2.up.weight"
    path = tmp_path / "layer_0_expert_2_mp_rank_00_model_states.pt"
    torch_files.write(path, {name: torch_files.tensor()})
    with pytest.raises(FormatError, match="do not divide the 3 experts of 9"):
        deepspeed.open_checkpoint(tmp_path)
