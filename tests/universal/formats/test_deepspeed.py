"""DeepSpeed's checkpoints: every value is bit-equal at the place that is reported.

`write_deepspeed.py` wrote the samples, with DeepSpeed itself; `known_values` has the
values that were put into its models and optimizers.
"""

import re
import shutil
import struct

import ml_dtypes
import numpy as np
import pytest

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats.files import FormatError
from tests.universal.formats import known_values as kv
from tests.universal.formats import stored_values, torch_files
from tests.universal.formats.stored_values import assert_equal

SAMPLES = (
    *(
        "zero0_dp2",
        "zero0_bf16_dp2",
        "zero1_dp2",
        "zero2_dp4",
        "zero3_dp2",
        "zero3_dp4",
    ),
    *("zero1_pp2_dp2", "zero1_tp2_pp2_dp2", "zero1_ep2_dp4", "zero1_tp4"),
    *("zero3_tp2_dp2", "zero1_tp2_ep2_dp2", "zero3_muon_dp2"),
)
STATE_OF = {"master": "fp32", "first_moment": "exp_avg", "second_moment": "exp_avg_sq"}
FLAT = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


@pytest.fixture
def copied(samples, tmp_path):
    """A copy of the files of a sample, that may be damaged."""

    def copy(name):
        return shutil.copytree(samples(name) / "global_step2", tmp_path / name)

    return copy


def trained(sample):
    """The names of the parameters that optimizers have."""
    count = 2 if "ep2" in sample else kv.BLOCKS
    blocks, first, last = [f"layers.{n}" for n in range(count)], "embed", "final"
    if "pp2" in sample:
        blocks = [f"{n + 1}" for n in range(count)]
        first, last = "tied_modules.embed", f"{count + 1}"
    names = {f"{first}.words.weight", *(f"{last}.{leaf}" for leaf in kv.FINAL)}
    names |= {f"{block}.{leaf}" for block in blocks for leaf in kv.BLOCK}
    is_whole = "pp2" not in sample and sample[:5] in ("zero0", "zero1")
    if is_whole or "muon" in sample:
        names.add("frozen")
    if "ep2" in sample:
        moe = [f"{block}.moe.deepspeed_moe" for block in blocks]
        names |= {f"{each}.gate.wg.weight" for each in moe}
        names |= {
            f"{each}.experts.deepspeed_experts.{number}.{leaf}"
            for each in moe
            for number in range(4)
            for leaf in kv.EXPERT
        }
    return names


def tensor_parallel(sample):
    """The number of tensor-parallel ranks of a sample."""
    match = re.search(r"tp(\d)", sample)
    return int(match[1]) if match else 1


def shape_of(name):
    is_gate = name.endswith("gate.wg.weight")
    return kv.full_shape(name, (4, kv.EMBED) if is_gate else (3, 5))


def states(sample, rank):
    """The states that the optimizers of a rank of the model have, by name and kind."""
    tp, made = tensor_parallel(sample), {}
    for name in trained(sample):
        shape, kinds = shape_of(name), dict(STATE_OF)
        if sample == "zero0_dp2":
            # Its optimizer has no other weights.
            del kinds["master"]
        if "muon" in sample and len(shape) > 1 and "embed" not in name:
            kinds = {"master": "fp32", "momentum_buffer": "momentum_buffer"}
        for kind, state in kinds.items():
            dtype = ml_dtypes.bfloat16 if kind == "momentum_buffer" else np.float32
            array = kv.of_rank(state, name, shape, rank, tp)
            made[name, kind] = array.astype(dtype)
    return made


def weights(sample, rank):
    """The weights of a rank, by name and kind."""
    dtype = np.float32 if sample == "zero0_dp2" else ml_dtypes.bfloat16
    names = {"frozen"} if "pp2" not in sample else set()
    names |= trained(sample) if "zero3" not in sample else set()
    tp = tensor_parallel(sample)
    arrays = {n: kv.of_rank("fp32", n, shape_of(n), rank, tp) for n in names}
    return {(n, "parameter"): array.astype(dtype) for n, array in arrays.items()}


@pytest.mark.parametrize("sample", SAMPLES)
def test_every_state_of_every_parameter_is_read_bit_equal(samples, sample):
    checkpoint = opening.open_checkpoint(samples(sample))
    assert checkpoint.format == f"DeepSpeed ZeRO-{sample[4]}"
    tp, wanted = tensor_parallel(sample), {}
    assert checkpoint.axes == ({"tp": tp} if tp > 1 else {})
    for rank in range(tp):
        ranks = (("tp", rank),) if tp > 1 else ()
        held = states(sample, rank)
        if "muon" not in sample:
            held |= weights(sample, rank)
        wanted |= {(*key, ranks): array for key, array in held.items()}
    by_key = stored_values.by_key(checkpoint)
    # ZeRO-3 leaves some parameters whole.
    others = {"step", "buffer"} | ({"parameter"} if "zero3" in sample else set())
    assert wanted.keys() - by_key.keys() == set()
    assert {kind for _, kind, _ in by_key.keys() - wanted.keys()} <= others
    for key, array in wanted.items():
        assert_equal(stored_values.read(by_key[key]), array)
    steps = [t for t in checkpoint.tensors if t.kind == "step"]
    # This optimizer makes one step more, to create its states.
    count = 2 + ("zero0_bf16" in sample)
    assert {float(stored_values.read(each)) for each in steps} == {count}
    if "pp2" in sample:
        # Ranges of data-parallel ranks are fragments of one tensor.
        masters = [each for each in checkpoint.tensors if each.kind == "master"]
        assert 2 in {len({part.file for part in t.fragments}) for t in masters}


def test_numbers_and_the_description_are_values(samples):
    values = opening.open_checkpoint(samples("zero1_tp2_pp2_dp2")).values
    info = values["universal_checkpoint_info"]
    assert info["parameter_to_average_patterns"] == [r".*norm2\.weight"]
    assert info["original_vocab_size"] == kv.VOCAB
    (sub_params,) = info["parameter_with_sub_params"]
    assert sub_params["shape"] == ((kv.FF, kv.FF), kv.EMBED)
    assert (values["iteration"], values["args/lr"], values["global_steps"]) == (
        *(2, 0.01, 2),
    )
    assert values["optimizer/base_optimizer_state/param_groups/0/weight_decay"] == 0.1


def numbered(folder, groups, **optimizer):
    state = {number: {"exp_avg": torch_files.tensor()} for number in (0, 1)}
    param_groups = [{"params": group} for group in groups]
    first, second = torch_files.tensor(), torch_files.tensor(key="1")
    value = {
        "module": {"a": first, "b": second, "tied to a": first},
        "optimizer": {"state": state, "param_groups": param_groups, **optimizer},
    }
    entries = {f"data/{key}": bytes(16) for key in "01"}
    path = folder / "mp_rank_00_model_states.pt"
    torch_files.write(path, value, entries=entries)
    tensors = opening.open_checkpoint(folder).tensors
    return [each.name for each in tensors if each.kind == "first_moment"]


def test_numbered_states_are_named_only_if_their_order_is_certain(tmp_path):
    assert numbered(tmp_path, [[0, 1]]) == ["a", "b"]
    assert numbered(tmp_path, [[0], [1]]) == ["optimizer/0", "optimizer/1"]
    # Float32 parameters of no group.
    with pytest.raises(FormatError, match="whose states are none of PyTorch"):
        numbered(tmp_path, [[0, 1]], fp32_groups=[])


def test_files_of_two_saves_are_refused(copied):
    folder = copied("zero1_dp2")
    shutil.copy(folder / FLAT, folder / FLAT.removeprefix("bf16_"))
    with pytest.raises(FormatError, match=f"and {FLAT} are of the same rank"):
        opening.open_checkpoint(folder)


FLAT_TENSOR = torch_files.tensor(shape=(4,), strides=(1,))
MOMENTUM = {"momentum_buffer": FLAT_TENSOR}
GROUPS = {"state": {0: MOMENTUM}, "param_groups": [{}]}


def by_hand(folder, *, mapping=None, shape=(2, 2), flat=None, more=(), **stated):
    """A checkpoint of one parameter `w` of ZeRO-1 and one rank."""
    flat = flat or FLAT_TENSOR
    value = {"module": None, "param_shapes": [{"w": shape}]}
    torch_files.write(folder / "mp_rank_00_model_states.pt", value)
    optimizer = {
        "single_partition_of_fp32_groups": [flat],
        "base_optimizer_state": {"state": {}},
        "param_slice_mappings": [mapping or {"w": {"start": 0, "numel": 4}}],
        "partition_count": [1],
        **stated,
    }
    path = folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    entries = {"data/0": struct.pack("<4f", 1, 2, 3, 4)}
    value = {"optimizer_state_dict": optimizer, **dict(more)}
    torch_files.write(path, value, entries=entries)
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
def test_a_missing_file_is_named(copied, sample, name):
    folder = copied(sample)
    (folder / name).unlink()
    rank = name.removeprefix("bf16_").rsplit("_", 2)[0]
    with pytest.raises(FormatError, match=f"lacks the files of {rank}|files of 3"):
        opening.open_checkpoint(folder)


@pytest.mark.parametrize("tag", ["../x", "/x", "", "absent"])
def test_latest_leads_to_a_directory_beside_it(tmp_path, tag):
    (tmp_path / "latest").write_text(tag)
    with pytest.raises(FormatError, match="latest"):
        opening.open_checkpoint(tmp_path)
