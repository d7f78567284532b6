"""Files that Megatron's training loop writes for each rank are read bit-equal.

That writer is outside of Megatron-core: these tests write such files as it does.
`test_samples` has what Megatron-core wrote.
"""

import argparse
import itertools
import shutil

import ml_dtypes
import numpy as np
import pytest

from elastic_ckpt.universal import opening
from elastic_ckpt.universal.formats import megatron
from elastic_ckpt.universal.formats.files import FormatError
from tests.universal.formats import known_values as kv
from tests.universal.formats import stored_values, torch_files
from tests.universal.formats.stored_values import assert_equal

STAGES = "pipeline_model_parallel_size"
KINDS = ("parameter", "master", "first_moment", "second_moment")


def write_rank(folder, rank, arrays, **arguments):
    """The file of a rank, as Megatron's training loop writes it.

    Names of chunks of interleaved stages begin with them, `model1/norm`.
    """
    content = {"args": argparse.Namespace(**arguments), "checkpoint_version": 3.0}
    for name, array in arrays.items():
        chunk, _, rest = name.rpartition("/")
        weights = array["fp32"].astype(ml_dtypes.bfloat16)
        content.setdefault(chunk or "model", {})[rest] = weights
    groups = [[n for n in arrays if arrays[n]["fp32"].ndim == dims] for dims in (2, 1)]
    numbers = {name: number for number, name in enumerate(itertools.chain(*groups))}
    state = {
        number: {key: arrays[name][key] for key in kv.STATES[1:]}
        for name, number in numbers.items()
    }
    param_groups = [{"params": [numbers[n] for n in group]} for group in groups]
    content["optimizer"] = {
        "optimizer": {"state": state, "param_groups": param_groups},
        "fp32_from_fp16_params": [[arrays[n]["fp32"] for n in g] for g in groups],
    }
    path = folder / "iter_0000002" / rank / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    torch_files.write(path, content)


def known(name, shape):
    return {key: kv.known(key, name, shape) for key in kv.STATES}


@pytest.fixture
def held(tmp_path):
    """The states of two tensor-parallel ranks of two stages of two chunks; files."""
    held = {}
    for tp, pp in itertools.product(range(2), repeat=2):
        arrays = {}
        for vp in range(2):
            shapes = {"layers.0.fc2.weight": (8, 6), "layers.0.norm.weight": (8,)}
            shapes |= {"embedding.weight": (8, 8)} if pp == 0 else {}
            ranks = ("tp", tp), ("pp", pp), ("vp", vp)
            for name, shape in shapes.items():
                held[name, ranks] = known(f"{name} {ranks}", shape)
                arrays[f"model{vp}/{name}"] = held[name, ranks]
        write_rank(tmp_path, f"mp_rank_{tp:02d}_{pp:03d}", arrays)
    (tmp_path / megatron.LATEST).write_text("2")
    return held


def test_files_of_ranks_are_read_bit_equal(held, tmp_path):
    checkpoint = opening.open_checkpoint(tmp_path)
    assert checkpoint.format == "Megatron mp_rank"
    assert checkpoint.axes == {"tp": 2, "pp": 2, "vp": 2}
    assert checkpoint.values["checkpoint_version"] == 3.0
    assert len(checkpoint.tensors) == len(KINDS) * len(held)
    for (name, kind, ranks), tensor in stored_values.by_key(checkpoint).items():
        values = held[name, ranks][kv.OF_KIND[kind]]
        dtype = ml_dtypes.bfloat16 if kind == "parameter" else np.float32
        assert_equal(stored_values.read(tensor), values.astype(dtype))


@pytest.mark.usefixtures("held")
def test_a_missing_rank_is_named(tmp_path):
    shutil.rmtree(tmp_path / "iter_0000002" / "mp_rank_01_000")
    with pytest.raises(FormatError, match="files of 3 ranks"):
        megatron.open_checkpoint(tmp_path)
    (tmp_path / "iter_0000002" / "mp_rank_01_001" / "model_optim_rng.pt").unlink()
    with pytest.raises(FormatError, match=r"01_001/model_optim_rng\.pt is missing"):
        megatron.open_checkpoint(tmp_path)


def test_without_stages_the_second_number_is_that_of_experts(tmp_path):
    for ep in range(2):
        arrays = {"w": known("w", (2, 2))}
        write_rank(tmp_path, f"mp_rank_00_{ep:03d}", arrays, **{STAGES: 1})
    checkpoint = megatron.open_checkpoint(tmp_path / "iter_0000002")
    assert checkpoint.axes == {"ep": 2}
    assert {each.ranks for each in checkpoint.tensors} == {(("ep", 0),), (("ep", 1),)}
