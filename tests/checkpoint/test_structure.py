"""The structure of trees as text, and what manifests of before are read as."""

import collections
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.checkpoint import structure
from elastic_ckpt.core import errors
from elastic_ckpt.steps import manifest

Point = collections.namedtuple("Point", "x y")


def mesh():
    return jax.make_mesh((4, 2), ("a", "b"))


def contents(text, **leaves):
    listed = [
        manifest.Leaf(path=path, shape=shape, dtype=dtype)
        for path, (shape, dtype) in sorted(leaves.items())
    ]
    return manifest.Contents(leaves=tuple(listed), components={}, trees=text)


def test_the_text_of_some_trees():
    over = NamedSharding(mesh(), PartitionSpec("a", None))
    whole = jax.device_put(jnp.ones((4, 4)), over)
    tree = {
        "w": whole,
        "again": whole,
        "here": jnp.ones(1),
        "point": Point([1, 0.5, True], np.ones(2)),
        "key": jax.random.key(0),
        "keys": jax.device_put(
            jax.random.split(jax.random.key(0), 4), over.update(spec=PartitionSpec("a"))
        ),
        "text": "two words",
        "nothing": [None, (), [], {}],
    }
    described = json.loads(structure.to_json({"state": tree, "n": 3}))
    assert described["trees"] == {
        "n": "int",
        "state": {
            "w": "array 0",
            "again": "array 0",
            "here": "array",
            "point": {"x": ["int", "float", "bool"], "y": "numpy"},
            "key": "key threefry2x32",
            "keys": "key threefry2x32 1",
            "text": "text two words",
            "nothing": [None, "()", [], {}],
        },
    }
    first, second = described["shardings"]
    assert (first["partition_spec"], second["partition_spec"]) == (["a", None], ["a"])
    read = structure.saved_trees(
        contents(
            structure.to_json({"state": tree}),
            **{
                "state/w": ((4, 4), "float32"),
                "state/again": ((4, 4), "float32"),
                "state/here": ((1,), "float32"),
                "state/point/y": ((2,), "float64"),
                "state/key": ((2,), "uint32"),
                "state/keys": ((4, 2), "uint32"),
            },
        )
    )["state"]
    assert read["w"] == jax.ShapeDtypeStruct((4, 4), np.float32, sharding=over)
    assert read["keys"].shape == (4,)
    assert read["keys"].sharding.spec == PartitionSpec("a")
    assert read["text"] == "two words"
    assert read["nothing"] == [None, (), [], {}]


def test_a_sharding_over_devices_that_are_gone_is_left_out():
    over = NamedSharding(mesh(), PartitionSpec("a"))
    text = structure.to_json({"w": jax.device_put(jnp.ones(4), over)})
    elsewhere = text.replace('{"id":7}', '{"id":70}')
    leaf = {"w": ((4,), "float32")}
    here = structure.saved_trees(contents(text, **leaf))["w"]
    assert here.sharding == over
    assert structure.saved_trees(contents(elsewhere, **leaf))["w"].sharding is None


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"shardings":[],"trees":[]}',
        '{"shardings":[],"trees":{"w":"array"}}',
        '{"shardings":[{}],"trees":{}}',
        '{"shardings":[],"trees":{"n":"array 3"}}',
        '{"shardings":[],"trees":{"n":"key nonsense"}}',
        '{"shardings":[],"trees":{"n":7}}',
    ],
)
def test_a_text_of_another_kind_is_one_clear_error(text):
    with pytest.raises(errors.CheckpointError, match="trees that cannot be read"):
        structure.saved_trees(contents(text, n=((2,), "uint32")))
