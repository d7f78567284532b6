"""Megatron's checkpoints: every value is bit-equal at the place that is reported.

`write_megatron.py` wrote the samples, with Megatron-core. Its writer of one file for
each rank is outside of that package: these tests write such files as that writer does.
"""

import argparse
import itertools
import shutil
import sys

import ml_dtypes
import numpy as np
import pytest

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats import megatron
from elastic_ckpt.universal.formats.files import FormatError
from tests.universal.formats import known_values as kv
from tests.universal.formats import stored_values, torch_files
from tests.universal.formats.stored_values import assert_equal

SAMPLES = ("torch_dist_tp2_pp2", "torch_dist_ep2")
STATE_OF = {"master": "fp32", "first_moment": "exp_avg", "second_moment": "exp_avg_sq"}


@pytest.mark.parametrize("sample", SAMPLES)
def test_every_tensor_of_torch_dist_is_read_bit_equal(megatron_samples, sample):
    checkpoint = opening.open_checkpoint(megatron_samples(sample))
    assert (checkpoint.format, checkpoint.axes) == ("Megatron torch_dist", {})
    by_key = stored_values.by_key(checkpoint)
    step = by_key.pop(("optimizer/optimizer/state/common_step", "step", ()))
    assert stored_values.read(step) == 2
    names = {name for name, _, _ in by_key}
    assert set(by_key) == {
        (name, kind, ()) for name in names for kind in ("parameter", *STATE_OF)
    }
    for (name, kind, _), tensor in by_key.items():
        array = kv.known(STATE_OF.get(kind, "fp32"), name, tensor.shape)
        if kind == "parameter":
            array = array.astype(ml_dtypes.bfloat16)
        assert_equal(stored_values.read(tensor), array)
    assert "torch" not in sys.modules


def test_numbers_and_texts_are_values(megatron_samples):
    values = megatron.open_checkpoint(megatron_samples("torch_dist_tp2_pp2")).values
    assert (values["iteration"], values["args/num_layers"]) == (2, 4)
    assert values["optimizer/optimizer/param_groups/0/weight_decay"] == 0.1


@pytest.mark.parametrize("text", ["", "3", "../x", "release"])
def test_the_latest_iteration_must_be_beside_its_file(tmp_path, text):
    (tmp_path / megatron.LATEST).write_text(text)
    with pytest.raises(FormatError, match=megatron.LATEST):
        megatron.open_checkpoint(tmp_path)


def write_rank(folder, rank, arrays, *, optimizer=True, **arguments):
    """The file of a rank, as Megatron's training loop writes it.

    Names of chunks of interleaved stages begin with them, `model1/norm`.
    """
    entries = {}

    def tensor(array):
        kind = {2: "BFloat16Storage", 4: "FloatStorage"}[array.dtype.itemsize]
        key = str(len(entries))
        entries[f"data/{key}"] = array.tobytes()
        strides = tuple(stride // array.itemsize for stride in array.strides)
        place = {"kind": kind, "key": key, "elements": array.size}
        return torch_files.tensor(array.shape, strides, **place)

    content = {"args": argparse.Namespace(**arguments), "checkpoint_version": 3.0}
    for name, array in arrays.items():
        chunk, _, rest = name.rpartition("/")
        weight = tensor(array["fp32"].astype(ml_dtypes.bfloat16))
        content.setdefault(chunk or "model", {})[rest] = weight
    if optimizer:
        groups = [[n for n in arrays if arrays[n]["fp32"].ndim == d] for d in (2, 1)]
        numbers = {name: n for n, name in enumerate([*groups[0], *groups[1]])}
        state = {
            n: {key: tensor(arrays[name][key]) for key in ("exp_avg", "exp_avg_sq")}
            for name, n in numbers.items()
        }
        masters = [[tensor(arrays[n]["fp32"]) for n in group] for group in groups]
        param_groups = [{"params": [numbers[n] for n in group]} for group in groups]
        content["optimizer"] = {
            "optimizer": {"state": state, "param_groups": param_groups},
            "fp32_from_fp16_params": masters,
        }
    path = folder / "iter_0000002" / rank / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    torch_files.write(path, content, entries=entries)


def known(names, place):
    """The states of parameters, which differ from place to place."""
    return {
        name: {key: kv.known(key, f"{name} {place}", shape) for key in kv.STATES}
        for name, shape in names.items()
    }


def check(checkpoint, held):
    """All states of each rank, by its coordinates, and no others."""
    by_key, expected = stored_values.by_key(checkpoint), {}
    for ranks, arrays in held.items():
        for name, states in arrays.items():
            weights = states["fp32"].astype(ml_dtypes.bfloat16)
            expected[name, "parameter", ranks] = weights
            for kind, key in STATE_OF.items():
                expected[name, kind, ranks] = states[key]
    assert by_key.keys() == expected.keys()
    for key, array in expected.items():
        assert_equal(stored_values.read(by_key[key]), array)


@pytest.fixture
def ranks(tmp_path):
    """The states of two tensor-parallel ranks of two stages, and their files."""
    held = {}
    for tp, pp in itertools.product(range(2), repeat=2):
        names = {"layers.0.fc2.weight": (8, 6), "layers.0.norm.weight": (8,)}
        names |= {"embedding.weight": (8, 8)} if pp == 0 else {}
        arrays = held[("tp", tp), ("pp", pp)] = known(names, (tp, pp))
        write_rank(tmp_path, f"mp_rank_{tp:02d}_{pp:03d}", arrays)
    (tmp_path / megatron.LATEST).write_text("2")
    return held


def test_files_of_ranks_are_read_bit_equal(ranks, tmp_path):
    checkpoint = opening.open_checkpoint(tmp_path)
    assert checkpoint.format == "Megatron mp_rank"
    assert checkpoint.axes == {"tp": 2, "pp": 2}
    check(checkpoint, ranks)
    assert checkpoint.values["checkpoint_version"] == 3.0


def test_chunks_of_interleaved_stages_have_states_of_their_own(tmp_path):
    names = {"norm": (8,), "fc": (8, 4)}
    held = {(("vp", chunk),): known(names, chunk) for chunk in (0, 1)}
    arrays = {
        f"model{chunk}/{name}": states
        for ((_, chunk),), of_chunk in held.items()
        for name, states in of_chunk.items()
    }
    write_rank(tmp_path, "mp_rank_00", arrays)
    checkpoint = megatron.open_checkpoint(tmp_path / "iter_0000002")
    assert checkpoint.axes == {"vp": 2}
    check(checkpoint, held)


@pytest.mark.usefixtures("ranks")
def test_a_missing_rank_is_named(tmp_path):
    shutil.rmtree(tmp_path / "iter_0000002" / "mp_rank_01_000")
    with pytest.raises(FormatError, match="files of 3 ranks"):
        megatron.open_checkpoint(tmp_path)
    (tmp_path / "iter_0000002" / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    with pytest.raises(FormatError, match=r"01_001/model_optim_rng\.pt is missing"):
        megatron.open_checkpoint(tmp_path)


def test_without_stages_the_second_number_is_that_of_experts(tmp_path):
    for ep in range(2):
        arrays = {"w": {"fp32": np.ones((2, 2), np.float32)}}
        name = f"mp_rank_00_{ep:03d}"
        stages = {"pipeline_model_parallel_size": 1}
        write_rank(tmp_path, name, arrays, optimizer=False, **stages)
    checkpoint = megatron.open_checkpoint(tmp_path / "iter_0000002")
    assert checkpoint.axes == {"ep": 2}
    assert [each.ranks for each in checkpoint.tensors] == [(("ep", 0),), (("ep", 1),)]


def test_files_of_the_distributed_optimizer_have_weights_alone(megatron_samples):
    checkpoint = opening.open_checkpoint(megatron_samples("mp_rank_pp2_vp2"))
    assert checkpoint.format == "Megatron mp_rank"
    assert checkpoint.axes == {"pp": 2, "vp": 2}
    by_key = stored_values.by_key(checkpoint)
    # Six parameters in each of four chunks, an embedding, a norm and an output.
    assert len(by_key) == 4 * 6 + 3
    for (name, kind, ranks), tensor in by_key.items():
        pp, vp = (number for _, number in ranks)
        array = kv.known("fp32", f"{pp} {vp} {name}", tensor.shape)
        assert kind == "parameter"
        assert_equal(stored_values.read(tensor), array.astype(ml_dtypes.bfloat16))
    assert checkpoint.values["optimizer/optimizer/param_groups/0/step"] == 2
