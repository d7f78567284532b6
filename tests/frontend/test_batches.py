"""Any mesh, any spec: in one process whose devices are those of the mesh."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import elastic_ckpt as ec
from elastic_ckpt.core import errors
from elastic_ckpt.data import sharded_data
from tests import pipelines, worlds

P = PartitionSpec
SIZE = 8
COLOCATED = pytest.mark.parametrize("colocated", [False, True])


def mesh_of(**axes):
    devices = np.array(jax.devices()[: np.prod(list(axes.values()))])
    return Mesh(devices.reshape(tuple(axes.values())), tuple(axes))


def packed():
    return sharded_data.sharded(
        lambda shard: pipelines.packed(shard, 12), num_shards=12, pipeline="packed"
    )


def first_batch(data, mesh, spec=None, size=SIZE, colocated=False):
    batches = ec.batches(
        data, mesh=mesh, spec=spec, global_batch_size=size, colocated=colocated
    )
    try:
        return next(batches)
    finally:
        batches.close()


@COLOCATED
@pytest.mark.parametrize(
    ("size", "axes", "spec", "of_rows", "of_tokens"),
    [
        (4, {"data": 2, "tensor": 4}, P("data"), P("data"), P("data")),
        (
            8,
            {"data": 2, "sequence": 2, "tensor": 2},
            P("data", "sequence"),
            P("data"),
            P("data", "sequence"),
        ),
        (
            12,
            {"data": 2, "fsdp": 2, "sequence": 2},
            P(("data", "fsdp"), "sequence"),
            P(("data", "fsdp")),
            P(("data", "fsdp"), "sequence"),
        ),
        (3, {"a": 2, "b": 2}, P(), P(), P()),
    ],
)
def test_rows_and_sequences_lie_as_the_spec_has_them(
    size, axes, spec, of_rows, of_tokens, colocated
):
    expected = worlds.World(packed(), 1, size).batch()
    batch = first_batch(packed(), mesh_of(**axes), spec, size, colocated)
    assert batch.keys() == expected.keys()
    for name, feature in batch.items():
        assert feature.sharding.spec == (of_rows if name == "example_id" else of_tokens)
        np.testing.assert_array_equal(feature, expected[name])
        for shard in feature.addressable_shards:
            np.testing.assert_array_equal(shard.data, expected[name][shard.index])


@pytest.mark.parametrize(
    ("axes", "rows"),
    [
        ({"anything": 8}, "anything"),
        ({"tensor": 2, "fsdp": 2, "data": 2}, ("fsdp", "data")),
    ],
)
def test_without_a_spec_the_axes_named_for_rows_shard_them(axes, rows):
    batch = first_batch(packed(), mesh_of(**axes))
    assert {feature.sharding.spec for feature in batch.values()} == {P(rows)}


@COLOCATED
@pytest.mark.parametrize(
    ("axes", "spec", "size", "message"),
    [
        (
            {"a": 2, "b": 4},
            None,
            8,
            r"no mesh axis \(a=2, b=4\) has one of the names \['batch', .*; list the"
            r" axes that shard the rows of a batch, as in spec=PartitionSpec\('a'\)",
        ),
        (
            {"data": 2, "tensor": 4},
            P("data", "sequence"),
            8,
            r"does not match the mesh \(data=2, tensor=4\); use only mesh axes, each",
        ),
        ({"data": 2, "tensor": 4}, P("data", "data"), 8, "each at most once"),
        (
            {"data": 2, "sequence": 4},
            P("data", "sequence"),
            8,
            r"dim 1 of feature 'tokens\w*', of shape \[8, 10\], cannot be"
            r" divided evenly among the 4 shards of .* on this mesh",
        ),
    ],
)
def test_what_does_not_fit_is_named_before_the_first_step(
    colocated, axes, spec, size, message
):
    with pytest.raises(errors.ConfigError, match=message):
        first_batch(packed(), mesh_of(**axes), spec, size, colocated)


@COLOCATED
def test_closed_batches_yield_nothing(colocated):
    batches = ec.batches(
        packed(), mesh=mesh_of(data=2), global_batch_size=8, colocated=colocated
    )
    next(batches)
    batches.close()
    with pytest.raises(
        errors.DataError, match="this iterator was closed; create a new"
    ):
        next(batches)
