import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.core import errors, topology
from elastic_ckpt.data import iterator, rows
from tests import iterator_contract


class TestBatches(iterator_contract.IteratorContract):
    """In this process."""


def host_iterator(data, spec):
    mesh, _ = topology.make_mesh(2)
    return iterator.HostIterator(
        data, sharding=NamedSharding(mesh, spec), global_batch_size=8
    )


def test_rows_follow_the_sharding_where_an_axis_does_not_shard_them(data):
    expected = next(
        data.host_batches(rows.Placement.in_order(0, num_hosts=1, global_batch_size=8))
    )
    for spec in (PartitionSpec("slice"), PartitionSpec("fsdp"), PartitionSpec()):
        batch = host_iterator(data, spec).next()
        np.testing.assert_array_equal(batch["inputs"], expected["inputs"])
        assert batch["inputs"].sharding.spec == spec


def test_rows_land_on_the_same_devices_every_time(data):
    placements = [
        [
            (shard.device.id, np.asarray(shard.data).tolist())
            for shard in host_iterator(data, PartitionSpec("slice"))
            .next()["example_id"]
            .addressable_shards
        ]
        for _ in range(3)
    ]
    assert placements[0] == placements[1] == placements[2]


class TooFewRows:
    """Data of a user who forgot half of the batch."""

    engine = "positional"

    def identity(self):
        return {}

    def host_batches(self, placement):
        return iter([{"x": np.zeros((len(placement.row_hosts) // 2, 3))}])


def test_an_iterator_that_gives_too_few_rows_is_named():
    with pytest.raises(errors.DataError, match=r"hold 8 of the 8 rows .* gave 4"):
        host_iterator(TooFewRows(), PartitionSpec("slice")).next()


def test_the_devices_of_the_tests_are_there():
    assert len(jax.devices()) == 8
