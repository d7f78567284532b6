"""The structure of trees: in the files of Orbax, and as text in manifests."""

import collections
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import orbax_format, structure
from elastic_ckpt.core import errors
from elastic_ckpt.steps import manifest
from tests.checkpoint.test_component_io import Counter

Point = collections.namedtuple("Point", "x y")
Nothing = collections.namedtuple("Nothing", "")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weight: object
    bias: object


class Pair:
    """A custom node without names of its children."""

    def __init__(self, *children):
        self.children = children


jax.tree_util.register_pytree_node(
    Pair, lambda pair: (pair.children, None), lambda _, children: Pair(*children)
)


def sharded(value, *spec):
    mesh = jax.make_mesh((2, 4), ("slice", "fsdp"))
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))


def ones(*shape):
    return jnp.ones(shape)


TREES = {
    "dicts": lambda: {"params": {"w": ones(2, 3), "b": ones(3)}, "3": ones()},
    "lists and tuples": lambda: {"a": [ones(1), (ones(2), [ones(3)])]},
    "named tuples": lambda: Point(x=ones(2), y={"z": [np.ones(2)]}),
    "dataclasses": lambda: {"layers": [Layer(ones(2), np.ones(3))]},
    "custom nodes": lambda: {"pair": Pair(ones(1), np.ones(2))},
    "optimizers": lambda: optax.adamw(1e-3).init({"w": ones(4)}),
    "nothing": lambda: {
        "none": None,
        "empty": [{}, (), [], Nothing(), None],
        "w": ones(1),
    },
    "numpy": lambda: {"a": np.ones((2, 3)), "zero": np.zeros(()), "c": np.ones(2) * 1j},
    "scalars": lambda: {"i": 7, "f": 1.5, "bool": True, "text": "words"},
    "random keys": lambda: {
        "one": jax.random.key(0),
        "some": jax.random.split(jax.random.key(1), 3),
        "rbg": jax.random.key(0, impl="rbg"),
        "over devices": sharded(jax.random.split(jax.random.key(2), 8), "fsdp"),
        "everywhere": sharded(jax.random.split(jax.random.key(3), 2)),
    },
    "shardings": lambda: {
        "both": sharded(ones(8, 8), "slice", "fsdp"),
        "joined": sharded(ones(8, 8), ("slice", "fsdp"), None),
        "replicated": sharded(ones(3)),
        "low": sharded(jnp.ones((4, 4), jnp.bfloat16), None, "fsdp"),
    },
    "an array": lambda: ones(3),
}


def files(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
        and path.name not in ("commit_success.txt", "manifest.ocdbt", "count")
        and path.parent.name != "d"
    }


def without_chunks(files):
    """The files parsed, without times and without what depends on chunks."""
    parsed = {name: json.loads(content) for name, content in files.items()}
    for name, content in parsed.items():
        if name == "_CHECKPOINT_METADATA":
            assert content.pop("init_timestamp_nsecs") > 0
            assert content.pop("commit_timestamp_nsecs") > 0
        for entry in content.get("tree_metadata", {}).values():
            assert entry["value_metadata"].pop("write_shape", []) is not None
        for entry in content.get("array_metadatas", []):
            del entry["array_metadata"]["write_shape"]
            del entry["array_metadata"]["chunk_shape"]
    for content in parsed.values():
        if "array_metadatas" in content:
            content["array_metadatas"].sort(key=json.dumps)
    return parsed


def chunks(trees):
    return {
        orbax_format.leaf_path(name, path): ()
        for name, tree in trees.items()
        for path, _ in jax.tree.leaves_with_path(tree)
    }


@pytest.mark.parametrize("alone", ["named tuples", "an array", None])
def test_the_files_are_those_that_orbax_writes(alone, tmp_path):
    trees = {"state": TREES[alone]()} if alone else {"state": {}, "ema": {"w": ones(2)}}
    if not alone:
        trees["state"] = {name: make() for name, make in TREES.items()}
    notes = {"metrics": {"loss": 1.5}, "custom": {"note": "first"}}
    with ocp.training.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save_checkpointables(
            5,
            {**trees, "data": Counter()},
            metrics=notes["metrics"],
            custom_metadata=notes["custom"],
        )
    notes |= {"init_timestamp_nsecs": 1, "commit_timestamp_nsecs": 2}
    ours = orbax_format.metadata_files(trees, ["data"], chunks=chunks(trees), **notes)
    assert without_chunks(ours) == without_chunks(files(tmp_path / "5"))


def saved_trees(text, path, shape, dtype):
    leaf = manifest.Leaf(path=path, shape=shape, dtype=dtype)
    contents = manifest.Contents(leaves=(leaf,), components={}, trees=text)
    return structure.saved_trees(contents)


def test_the_text_of_some_trees_and_shardings_over_devices_that_are_gone():
    over = NamedSharding(jax.make_mesh((4, 2), ("a", "b")), PartitionSpec("a"))
    array = jax.device_put(jnp.ones(4), over)
    keys = jax.device_put(jax.random.split(jax.random.key(0), 4), over)
    tree = {
        "w": array,
        "again": array,
        "here": [jnp.ones(1), 0.5, True, np.ones(2)],
        "keys": [jax.random.key(0), keys],
        "text": "two words",
        "nothing": [None, (), [], {}],
    }
    described = json.loads(structure.to_json({"state": tree, "n": 3}))
    assert described["trees"] == {
        "n": "int",
        "state": {
            "w": "array 0",
            "again": "array 0",
            "here": ["array", "float", "bool", "numpy"],
            "keys": ["key threefry2x32", "key threefry2x32 0"],
            "text": "text two words",
            "nothing": [None, "()", [], {}],
        },
    }
    assert [each["partition_spec"] for each in described["shardings"]] == [["a"]]
    text = structure.to_json({"w": array})
    assert saved_trees(text, "w", (4,), "float32")["w"].sharding == over
    elsewhere = text.replace('{"id":7}', '{"id":70}')
    assert saved_trees(elsewhere, "w", (4,), "float32")["w"].sharding is None


def test_a_text_of_another_kind_is_one_clear_error():
    for text in (
        "{}",
        '{"shardings":[],"trees":[]}',
        '{"shardings":[],"trees":{"w":"array"}}',
        '{"shardings":[{}],"trees":{}}',
        '{"shardings":[],"trees":{"n":"array 3"}}',
        '{"shardings":[],"trees":{"n":"key nonsense"}}',
        '{"shardings":[],"trees":{"n":7}}',
    ):
        with pytest.raises(errors.CheckpointError, match="trees that cannot be read"):
            saved_trees(text, "n", (2,), "uint32")
