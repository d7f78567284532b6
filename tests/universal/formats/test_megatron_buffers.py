"""Megatron's distributed optimizer: its buffers are read, or refused.

`write_megatron_ranks.py` wrote the sample: Megatron-core itself the buffers.
"""

import shutil
import struct

import ml_dtypes
import numpy as np
import pytest

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats import megatron
from elastic_ckpt.universal.formats.format_error import FormatError
from tests.universal.formats import known_values as kv
from tests.universal.formats import stored_values, torch_files
from tests.universal.formats.torch_files import Global

SAMPLE = "mp_rank_pp2_vp2"
STATE_OF = {
    "parameter": "fp32",
    "master": "fp32",
    "first_moment": "exp_avg",
    "second_moment": "exp_avg_sq",
}


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    folder = tmp_path_factory.mktemp("megatron")
    return stored_values.unpacked(f"megatron/{SAMPLE}.tar.xz", folder)


def test_states_of_interleaved_stages_are_read_bit_equal(sample):
    checkpoint = opening.open_checkpoint(sample)
    assert checkpoint.format == "Megatron mp_rank"
    assert checkpoint.axes == {"pp": 2, "vp": 2}
    by_key = stored_values.by_key(checkpoint)
    # Six parameters in each of four chunks, an embedding, a norm and an output.
    assert len(by_key) == 4 * (4 * 6 + 3)
    for (name, kind, ranks), tensor in by_key.items():
        pp, vp = (number for _, number in ranks)
        array = kv.known(STATE_OF[kind], f"{pp} {vp} {name}", tensor.shape)
        if kind == "parameter":
            array = array.astype(ml_dtypes.bfloat16)
        read = stored_values.read(tensor)
        assert (read.dtype, read.tobytes()) == (array.dtype, array.tobytes()), name
    assert checkpoint.values["optimizer/optimizer/param_groups/0/step"] == 2


@pytest.mark.parametrize("name", ["distrib_optim.pt", "model_optim_rng.pt"])
def test_a_missing_file_of_a_rank_is_named(sample, tmp_path, name):
    folder = shutil.copytree(sample / "iter_0000002", tmp_path / "x")
    (folder / "mp_rank_00_001" / name).unlink()
    with pytest.raises(FormatError, match=f"mp_rank_00_001.* {name}"):
        megatron.open_checkpoint(folder)


WEIGHTS = {"a": [1.0, 2.0, 3.0], "b": [4.0, 5.0, 6.0]}
KEY = (Global("torch", "bfloat16"), Global("torch", "float32"))


def flat(*, first="b", gap=61, length=67):
    """A buffer of both parameters: by default the last, then the other, aligned."""
    second = "a" if first == "b" else "b"
    values = [*WEIGHTS[first], *[0.0] * gap, *WEIGHTS[second]]
    return (values + [0.0] * length)[:length]


def open_rank(folder, values=None, *, key=KEY, change=lambda content: content):
    """The files of one rank with two parameters, of three elements each."""
    folder = folder / "mp_rank_00"
    folder.mkdir()
    entries = {
        f"data/{name}": np.array(weights, ml_dtypes.bfloat16).tobytes()
        for name, weights in WEIGHTS.items()
    }
    fields = {"kind": "BFloat16Storage", "elements": 3}
    model = {
        name: torch_files.tensor((3,), (1,), key=name, **fields) for name in WEIGHTS
    }
    content = {"model": model, "iteration": 2}
    torch_files.write(folder / "model_optim_rng.pt", content, entries=entries)
    values = flat() if values is None else values
    size = len(values)
    tensors = {
        name: torch_files.tensor((size,), (1,), elements=size)
        for name in ("param", "exp_avg", "exp_avg_sq")
    }
    buffers = {"buckets_coalesced": True, 0: {key: tensors}}
    entries = {"data/0": struct.pack(f"<{size}f", *values)}
    torch_files.write(folder / "distrib_optim.pt", change(buffers), entries=entries)
    return megatron.open_checkpoint(folder.parent).tensors


def test_a_buffer_by_hand_is_read(tmp_path):
    masters = {
        each.name: stored_values.read(each).tolist()
        for each in open_rank(tmp_path)
        if each.kind == "master"
    }
    assert masters == WEIGHTS


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ({"values": flat(first="a")}, "masters where those of a are expected"),
        ({"values": flat(gap=0)}, "masters where those of a are expected"),
        ({"values": flat(gap=0, length=6)}, "cut into buckets"),
        ({"values": flat(length=128)}, "take 67 elements"),
        ({"key": Global("torch", "float16")}, "that are not bfloat16"),
        ({"key": "bfloat16"}, "that are not bfloat16"),
        ({"change": lambda held: {0: held[0]}}, "another layout than Megatron-core"),
        (
            {"change": lambda held: {**held, 1: {}}},
            "has 2 buffers of parameters, and .* has 1 chunks",
        ),
        ({"change": lambda held: [held, held]}, "has several optimizers"),
    ],
)
def test_buffers_whose_order_is_not_certain_are_refused(tmp_path, parts, match):
    with pytest.raises(FormatError, match=match) as error:
        open_rank(tmp_path, **parts)
    assert "distrib_optim.pt" in str(error.value)
    assert "save it as torch_dist" in str(error.value)
