"""Whole loads: a checkpoint of another program, a layout of rules, a sharded tree."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt import universal
from elastic_ckpt.core import errors
from elastic_ckpt.universal.formats import opened
from elastic_ckpt.universal.reading import restored_tree
from elastic_ckpt.universal.rules import matching
from elastic_ckpt.universal.rules.layout import Layout
from tests.universal import safetensors_files
from tests.universal.reading.test_restored_tree import Files, read_tree

MESH = jax.make_mesh((4, 2), ("data", "model"))


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def abstract(shape, *spec):
    sharding = NamedSharding(MESH, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)


def test_layers_are_stacked_split_transposed_and_padded(tmp_path):
    tensors = {}
    for layer in range(3):
        tensors[f"layers.{layer}.qkv.weight"] = numbers(2 * 6 * 5, 8, seed=layer)
        tensors[f"layers.{layer}.norm.weight"] = numbers(8, seed=10 + layer)
    tensors["embedding.weight"] = numbers(7, 8, seed=20)
    safetensors_files.write(tmp_path / "model.safetensors", tensors)
    layout = tmp_path / "layout.yml"
    layout.write_text(
        """
version: 1
sizes: {kv: 2, q: 4, k: 1, v: 1, d: 5}
rules:
  - from: {"layers.{layer}.qkv.weight": "(kv (q + k + v) d) embed"}
    to:
      "params/layers/query": "embed layer (kv q) d"
      "params/layers/key": "embed layer (kv k) d"
      "params/layers/value": "embed layer (kv v) d"
  - from: {"layers.{layer}.norm.weight": "embed"}
    to: {"params/layers/norm": "layer embed"}
  - from: {"embedding.weight": "vocab embed"}
    to: {"params/embedding": "(vocab + pad) embed"}
    pad: {pad: 0}
"""
    )
    tree = {
        "params": {
            "layers": {
                "query": abstract((8, 3, 8, 5), "data", None, "model"),
                "key": abstract((8, 3, 2, 5), None, None, "model"),
                "value": abstract((8, 3, 2, 5), ("data", "model")),
                "norm": abstract((3, 8), None, "data"),
            },
            "embedding": abstract((8, 8), "data", "model"),
        }
    }
    state = universal.load(tmp_path, tree, layout=layout)
    qkv = np.stack(
        [tensors[f"layers.{layer}.qkv.weight"] for layer in range(3)]
    ).reshape(3, 2, 6, 5, 8)
    layers = state["params"]["layers"]
    for name, part in (
        ("query", slice(4)),
        ("key", slice(4, 5)),
        ("value", slice(5, 6)),
    ):
        heads = qkv[:, :, part].transpose(4, 0, 1, 2, 3)
        expected = heads.reshape(8, 3, -1, 5)
        assert np.asarray(layers[name]).tobytes() == expected.tobytes()
        assert layers[name].sharding == tree["params"]["layers"][name].sharding
    norm = np.stack([tensors[f"layers.{layer}.norm.weight"] for layer in range(3)])
    assert np.asarray(layers["norm"]).tobytes() == norm.tobytes()
    padded = np.concatenate([tensors["embedding.weight"], np.zeros((1, 8), np.float32)])
    embedding = np.asarray(state["params"]["embedding"])
    assert embedding.tobytes() == padded.tobytes()


REPLICATED = """
version: 1
rules:
  - from: {"norm": {dims: "embed", replicated: [tp]}}
    to: {"norm": "embed"}
  - from: {"w": "(heads@tp d) embed"}
    to: {"w": "embed heads d"}
    sizes: {d: 2}
"""


@pytest.mark.parametrize("equal", [True, False])
def test_replicated_tensors_of_ranks_are_compared(tmp_path, equal):
    files = Files(tmp_path)
    for rank in range(2):
        norm = numbers(5)
        if rank and not equal:
            norm[3] += 1
        files.add(norm, name="norm", ranks=(("tp", rank),))
        files.add(numbers(6, 5, seed=rank), name="w", ranks=(("tp", rank),))
    tree = {"norm": abstract((5,)), "w": abstract((5, 6, 2), None, "model")}
    layout = Layout.parse(REPLICATED, file="layout.yml")
    targets = {
        leaf.tensor.name: leaf.tensor for leaf in restored_tree.target_leaves(tree)
    }
    checkpoint = opened.OpenedCheckpoint(
        format="ranks", tensors=files.tensors, axes={"tp": 2}
    )
    matched = matching.moves(layout, checkpoint.tensors, checkpoint.axes, targets)
    if not equal:
        with pytest.raises(errors.CheckpointError, match=r"rank tp 1 differ at \[3\]"):
            read_tree(checkpoint, matched.moves, matched.fills, tree)
        return
    state = read_tree(checkpoint, matched.moves, matched.fills, tree)
    assert np.asarray(state["norm"]).tobytes() == numbers(5).tobytes()
    whole = np.concatenate([numbers(6, 5), numbers(6, 5, seed=1)])
    expected = whole.T.reshape(5, 6, 2)
    assert np.asarray(state["w"]).tobytes() == expected.tobytes()
