"""Several hosts load a step of another layout; the layout of one of them is wrong."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.core import errors, topology
from elastic_ckpt.universal.rules.layout import Layout
from tests.multiprocess import machines, tier_worlds

FAILS = 1
LAYOUT = """
version: 1
rules:
  - from: {"w": "x y"}
    to: {"matrix": "y x"}
  - from: {"m": "a b c"}
    to: {"m": "b (c a)"}
  - from: {"b": "dim"}
    to: {"vectors/b": "dim"}
drop: ["scale"]
"""


def load_through_rules(checkpointer, mesh):
    """Saves a step, and loads it transposed, beside its data."""
    tier_worlds.save(checkpointer, mesh, steps=[1], sharded=True)
    sharding = NamedSharding(mesh, PartitionSpec(("slice", "fsdp")))
    expected = {
        "matrix": tier_worlds.values("w", 1).T,
        "m": tier_worlds.values("m", 1).transpose(1, 2, 0).reshape(10, 96),
        "vectors": {"b": tier_worlds.values("b", 1)},
    }
    abstract = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),
        expected,
    )
    layout = Layout.parse(LAYOUT)
    is_here = topology.this_host() == FAILS
    data = tier_worlds.Counter()
    wanted = {"state": abstract, "data": data}
    wrong = dataclasses.replace(layout, drop=()) if is_here else layout
    with pytest.raises(errors.ElasticCkptError, match="scale") as raised:
        checkpointer.load_checkpointables(1, wanted, layout=wrong)
    assert is_here or f"host {FAILS}: " in str(raised.value)
    assert data.step == 0
    loaded = checkpointer.load_checkpointables(1, wanted, layout=layout)
    assert data.step == 1
    for array, whole in zip(
        jax.tree.leaves(loaded["state"]), jax.tree.leaves(expected), strict=True
    ):
        assert array.sharding == sharding
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == whole[shard.index].tobytes()


@pytest.mark.slow(minutes=0.3)
def test_a_layout_that_is_wrong_on_one_host_fails_the_load_on_all(tmp_path):
    with machines.Machines() as ram:
        ram.start_agents(range(2))
        tier_worlds.run(
            load_through_rules,
            num_hosts=2,
            directories=[ram.directory(number) for number in range(2)],
            logs=tmp_path / "logs",
            persistent=str(tmp_path / "steps"),
        )
