"""What real programs wrote is read bit-equal, and loads whole and cut by a mesh.

The golden files have the format, the values and a digest of each sample. The expected
tensors are those that the writers (`write_*.py`) saved.
"""

import collections
import functools
import json
import sys

import jax
import numpy as np
import pytest
from flax import traverse_util

from elastic_ckpt import universal
from elastic_ckpt.universal import opening
from tests.universal.formats import known_values as kv
from tests.universal.formats import stored_values
from tests.universal.formats.stored_values import DATA, GOLDEN, assert_equal
from tests.universal.rules import relayout

DCP, WEIGHTS = np.load(DATA / "dcp.npz"), np.load(DATA / "weights" / "expected.npz")
TYPES = np.load(GOLDEN / "forgather" / "values.npz")
DEEPSPEED = [
    *("zero0_dp2", "zero0_bf16_dp2", "zero1_dp2", "zero2_dp4", "zero3_dp2"),
    *("zero3_dp4", "zero1_pp2_dp2", "zero1_tp2_pp2_dp2", "zero1_ep2_dp4", "zero1_tp4"),
    *("zero3_tp2_dp2", "zero1_tp2_ep2_dp2", "zero3_muon_dp2"),
]
SAMPLES = [
    *(f"deepspeed/{name}" for name in DEEPSPEED),
    *("megatron/torch_dist_tp2_pp2", "megatron/torch_dist_ep2"),
    *("megatron/mp_rank_pp2_vp2", "dcp", "dcp_saves/async", "dcp_saves/no_dist"),
    *("weights/single", "weights/sharded", "weights/no_crc.pt", "weights/lazy.pt"),
    *("weights/training.pt", "orbax", "forgather/single", "forgather/types.pt"),
]
WITHOUT_AXES = [n for n in SAMPLES if "_tp" not in n or "torch_dist" in n]
WITHOUT_AXES.remove("megatron/mp_rank_pp2_vp2")
MESH = jax.make_mesh((2,), ("data",))


def saved(name, tensor, tp):
    """What the writer of a sample saved as a tensor; None if nothing else has it."""
    program, ranks = name.partition("/")[0], dict(tensor.ranks)
    if program == "dcp_saves":
        return relayout.numbered(*tensor.shape)
    if program == "dcp":
        state = {**kv.OF_KIND, "step": "step"}[tensor.kind]
        of_state = f"optim.state.{tensor.name.removeprefix('model.')}.{state}"
        return DCP[tensor.name if tensor.kind == "parameter" else of_state]
    if program == "forgather":
        return TYPES.get(tensor.name.replace("tensors.", "types/"))
    if program not in ("deepspeed", "megatron"):
        return WEIGHTS.get(tensor.name)
    if tensor.kind == "step":
        # This optimizer makes one step more, to create its states.
        return np.full(tensor.shape, 2 + ("zero0_bf16" in name))
    if tensor.kind == "buffer":
        return np.arange(3)
    place = f"{ranks['pp']} {ranks['vp']} " if "vp" in ranks else ""
    shape = kv.full_shape(tensor.name, tensor.shape)
    state = kv.OF_KIND[tensor.kind]
    return kv.of_rank(state, place + tensor.name, shape, ranks.get("tp", 0), tp)


def record(checkpoint, arrays):
    """What is in the golden file of a sample."""
    kinds = collections.Counter(f"{t.kind} {t.dtype}" for t in checkpoint.tensors)
    return {
        "format": checkpoint.format,
        "axes": dict(checkpoint.axes),
        "tensors": dict(kinds),
        "values": {path: repr(value) for path, value in checkpoint.values.items()},
        "files without checksums": len(stored_values.without_checksums(checkpoint)),
        "digest": relayout.digest({repr(key): each for key, each in arrays.items()}),
    }


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_is_read_bit_equal(name, sample, golden):
    checkpoint = opening.open_checkpoint(sample(name))
    by_key = stored_values.by_key(checkpoint)
    arrays = {key: stored_values.read(tensor) for key, tensor in by_key.items()}
    for key, tensor in by_key.items():
        values = saved(name, tensor, checkpoint.axes.get("tp", 1))
        if values is not None:
            is_bits = values.dtype == np.int16 and tensor.dtype.itemsize == 2
            convert = values.view if is_bits else values.astype
            assert_equal(arrays[key], convert(tensor.dtype))
    text = json.dumps(record(checkpoint, arrays), indent=1, sort_keys=True)
    golden(f"samples/{name.replace('/', '_')}.json", text + "\n")
    assert "torch" not in sys.modules


def abstract(axis, tensor):
    """The tensor, with its first dim of an even size cut by an axis of the mesh."""
    even = [dim for dim, size in enumerate(tensor.shape) if size % 2 == 0]
    spec = jax.P(*[None] * even[0], axis) if even and axis else jax.P()
    sharding = jax.NamedSharding(MESH, spec)
    return jax.ShapeDtypeStruct(tensor.shape, tensor.dtype, sharding=sharding)


@pytest.mark.parametrize("name", WITHOUT_AXES)
def test_a_sample_loads_whole_and_cut_by_a_mesh(name, sample):
    tensors = opening.open_checkpoint(sample(name)).tensors
    kinds = {each.kind for each in tensors}
    paths = {f"{t.kind}/{t.name}" if len(kinds) > 1 else t.name: t for t in tensors}
    held = traverse_util.unflatten_dict(paths, sep="/")
    for axis in (None, "data"):
        tree = jax.tree.map(functools.partial(abstract, axis), held)
        loaded = universal.load(sample(name), tree)
        leaves = map(jax.tree.leaves, (held, tree, loaded))
        for tensor, asked, made in zip(*leaves, strict=True):
            assert made.sharding == asked.sharding
            # JAX has float32 in place of float64.
            values = stored_values.read(tensor).astype(made.dtype)
            assert_equal(np.asarray(made), values)
