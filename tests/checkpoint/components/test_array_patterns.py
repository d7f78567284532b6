"""The pattern of an array follows from its sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elastic_ckpt.checkpoint.components import array_patterns


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4, 1), ("data", "model", "one"))


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        (PartitionSpec(), "replicated"),
        (PartitionSpec("one"), "replicated"),
        (PartitionSpec(None, "model"), "per_group(data)"),
        (PartitionSpec("data", "one"), "per_group(model)"),
        (PartitionSpec(("data", "model")), "sharded"),
        (PartitionSpec("model", "data"), "sharded"),
    ],
)
def test_axes_that_do_not_shard_an_array_share_it(mesh, spec, pattern):
    sharding = NamedSharding(mesh, spec)
    abstract = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)
    assert array_patterns.pattern_of(abstract) == pattern


def test_values_without_a_sharding_show_no_pattern():
    assert array_patterns.pattern_of(3) == "undeclared"
    assert array_patterns.pattern_of(jnp.zeros(2)) == "global"


def test_arrays_of_one_host_among_several_are_its_own(monkeypatch):
    monkeypatch.setattr(array_patterns.topology, "num_hosts", lambda: 2)
    assert array_patterns.pattern_of(jnp.zeros(2)) == "per_host"
