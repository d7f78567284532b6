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
from tests.universal.reading.test_restored_tree import Files, as_tree, read_tree
from tests.universal.safetensors_files import bits
from tests.universal.writing import small_model

MESH = jax.make_mesh((4, 2), ("data", "model"))


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
