"""Whole loads: a checkpoint of another program, a layout of rules, a sharded tree."""

from unittest import mock

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt import universal
from elastic_ckpt.universal.reading import engine
from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.rules.rule import Rule, side
from tests.universal import safetensors_files
from tests.universal.reading.test_tree import as_tree
from tests.universal.safetensors_files import bits
from tests.universal.writing import small_model

PAIR = ({"w": "out in"}, {"w_scale_inv": "rows cols"})
MESH = jax.make_mesh((4, 2), ("data", "model"))
REPLICATED_ON = NamedSharding(MESH, PartitionSpec())


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def abstract(shape, *spec):
    sharding = NamedSharding(MESH, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)


def test_layers_are_stacked_split_transposed_and_padded(tmp_path):
    tensors = small_model.tensors(3, 8)
    small_model.write(tmp_path / "model", tensors)
    specs = {
        "embedding": ("data", "model"),
        "norm": (None, "data"),
        "up": (None, "model"),
        "query": ("data", None, "model"),
        "key": (None, None, "model"),
        "value": (("data", "model"),),
    }
    expected = small_model.expected(tensors)
    leaves = {
        path: abstract(array.shape, *specs[path.rpartition("/")[2]])
        for path, array in expected.items()
    }
    layout = tmp_path / "layout.yml"
    state = universal.load(tmp_path / "model", as_tree(leaves), layout=layout)
    assert jax.tree.map(lambda array: array.sharding, state) == as_tree(
        {path: leaf.sharding for path, leaf in leaves.items()}
    )
    loaded = dict(zip(sorted(leaves), jax.tree.leaves(state), strict=True))
    assert bits(loaded) == bits(expected)


QUANTIZED = """
version: 1
rules:
  - from: {"w": "out in"}
    to: {"w": {dims: "in out", dtype: bfloat16}}
drop: ["*scale"]
"""


def test_a_float_of_8_bits_is_not_widened_without_its_scales(tmp_path):
    weight = np.ones((4, 6), ml_dtypes.float8_e4m3fn)
    tensors = {"w": weight, "w_scale": numbers(2, 3)}
    safetensors_files.write(tmp_path / "model.safetensors", tensors)
    layout = Layout.parse(QUANTIZED)
    target = {"w": jax.ShapeDtypeStruct((6, 4), "bfloat16", sharding=REPLICATED_ON)}
    match = "'w' is bfloat16 in the target, and made of float8_e4m3fn without scales"
    with pytest.raises(LayoutError, match=match):
        universal.load(tmp_path, target, layout=layout)
    # The same names, where nothing is quantized.
    tensors["w"] = weight.astype(np.float32)
    safetensors_files.write(tmp_path / "model.safetensors", tensors)
    assert np.all(np.asarray(universal.load(tmp_path, target, layout=layout)["w"]) == 1)


def test_a_quantized_weight_is_loaded_with_its_scales(tmp_path):
    weight = np.arange(24).reshape(4, 6).astype(ml_dtypes.float8_e4m3fn)
    tensors = {"w": weight, "w_scale_inv": numbers(2, 3)}
    safetensors_files.write(tmp_path / "model.safetensors", tensors)
    layout = Layout(rules=[Rule(source=s, target=s) for s in map(side, PAIR)])
    target = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=REPLICATED_ON)
        for name, array in tensors.items()
    }
    with mock.patch.object(engine, "_Room", wraps=engine._Room) as room:
        loaded = universal.load(tmp_path, target, layout=layout, budget_bytes=7)
    assert bits(loaded) == bits(tensors)
    room.assert_called_with(7)
