"""Megatron's checkpoints: every value is bit-equal at the place that is reported.

`write_megatron.py` wrote the samples, with Megatron-core. Its writer of one file for
each rank is outside of that package: these tests write such files as that writer does.
"""

import argparse
import shutil
import sys

import ml_dtypes
import numpy as np
import pytest

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats import megatron
from elastic_ckpt.universal.formats.format_error import FormatError
from tests.universal.formats import known_values as kv
from tests.universal.formats import stored_values, torch_files

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
        assert stored_values.read(tensor).tobytes() == array.tobytes(), (name, kind)
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
    """The file of a rank, as Megatron's training loop writes it."""
    entries = {}

    def tensor(array):
        kind = {2: "BFloat16Storage", 4: "FloatStorage"}[array.dtype.itemsize]
        key = str(len(entries))
        entries[f"data/{key}"] = array.tobytes()
        strides = [stride // array.itemsize for stride in array.strides]
        place = {"kind": kind, "key": key, "elements": array.size}
        return torch_files.tensor(array.shape, tuple(strides), **place)

    content = {
        "args": argparse.Namespace(**arguments),
        "checkpoint_version": 3.0,
        "iteration": 2,
        "model": {},
    }
    for name, array in arrays.items():
        # Names of chunks of interleaved stages begin with them.
        chunk, _, rest = name.rpartition("/")
        weight = tensor(array["fp32"].astype(ml_dtypes.bfloat16))
        content.setdefault(chunk or "model", {})[rest] = weight
    if optimizer:
        matrices = [name for name in arrays if arrays[name]["fp32"].ndim > 1]
        groups = [matrices, [name for name in arrays if name not in matrices]]
        numbers = {name: n for n, name in enumerate([*groups[0], *groups[1]])}
        state = {
            numbers[name]: {
                key: tensor(arrays[name][key]) for key in ("exp_avg", "exp_avg_sq")
            }
            for name in numbers
        }
        param_groups = [{"params": [numbers[n] for n in group]} for group in groups]
        content["optimizer"] = {
            "optimizer": {"state": state, "param_groups": param_groups},
            "fp32_from_fp16_params": [
                [tensor(arrays[name]["fp32"]) for name in group] for group in groups
            ],
        }
    path = folder / "iter_0000002" / rank / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    torch_files.write(path, content, entries=entries)


def values_of_rank(tp, pp):
    names = {"decoder.layers.0.mlp.linear_fc2.weight": (8, 6)}
    names |= {"decoder.layers.0.input_layernorm.weight": (8,)}
    if pp == 0:
        names |= {"embedding.word_embeddings.weight": (8, 8)}
    return {
        name: {
            key: kv.known(key, f"{name} {tp} {pp}", names[name]) for key in kv.STATES
        }
        for name in names
    }


@pytest.fixture
def ranks(tmp_path):
    for tp in range(2):
        for pp in range(2):
            arrays = values_of_rank(tp, pp)
            write_rank(tmp_path, f"mp_rank_{tp:02d}_{pp:03d}", arrays)
    (tmp_path / megatron.LATEST).write_text("2")
    return tmp_path


def test_files_of_ranks_are_read_bit_equal(ranks):
    checkpoint = opening.open_checkpoint(ranks)
    assert checkpoint.format == "Megatron mp_rank"
    assert checkpoint.axes == {"tp": 2, "pp": 2}
    by_key = stored_values.by_key(checkpoint)
    expected = {}
    for tp in range(2):
        for pp in range(2):
            for name, arrays in values_of_rank(tp, pp).items():
                place = (("tp", tp), ("pp", pp))
                weights = arrays["fp32"].astype(ml_dtypes.bfloat16)
                expected[name, "parameter", place] = weights
                for kind, key in STATE_OF.items():
                    expected[name, kind, place] = arrays[key]
    assert set(by_key) == set(expected)
    for key, array in expected.items():
        assert stored_values.read(by_key[key]).tobytes() == array.tobytes(), key
    assert checkpoint.values["checkpoint_version"] == 3.0


def test_chunks_of_interleaved_stages_have_states_of_their_own(tmp_path):
    names = {"norm": (8,), "fc": (8, 4)}
    arrays = {
        f"model{chunk}/{name}": {
            key: kv.known(key, f"{chunk} {name}", shape) for key in kv.STATES
        }
        for chunk in (0, 1)
        for name, shape in names.items()
    }
    write_rank(tmp_path, "mp_rank_00", arrays)
    checkpoint = megatron.open_checkpoint(tmp_path / "iter_0000002")
    assert checkpoint.axes == {"vp": 2}
    by_key = stored_values.by_key(checkpoint)
    for chunk in (0, 1):
        for name in names:
            for kind, key in STATE_OF.items():
                array = arrays[f"model{chunk}/{name}"][key]
                tensor = by_key.pop((name, kind, (("vp", chunk),)))
                assert stored_values.read(tensor).tobytes() == array.tobytes()
    assert {kind for _, kind, _ in by_key} == {"parameter"}


def test_a_missing_rank_is_named(ranks):
    shutil.rmtree(ranks / "iter_0000002" / "mp_rank_01_000")
    with pytest.raises(FormatError, match="files of 3 ranks"):
        megatron.open_checkpoint(ranks)
    (ranks / "iter_0000002" / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    with pytest.raises(FormatError, match=r"01_001/model_optim_rng\.pt is missing"):
        megatron.open_checkpoint(ranks)


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
        read = stored_values.read(tensor)
        assert read.tobytes() == array.astype(ml_dtypes.bfloat16).tobytes(), name
    assert checkpoint.values["optimizer/optimizer/param_groups/0/step"] == 2
