import pytest

from elastic_ckpt.core import errors, topology
from elastic_ckpt.data import data_keys
from elastic_ckpt.training import batch_size

WORLD = topology.Topology(hosts=4, slices=2, devices=8)
RAMP = {
    "enable_rampup_batch_size": True,
    "per_device_batch_size": 6.0,
    "per_device_batch_size_start": 2.0,
    "per_device_batch_size_increment": 2.0,
    "global_rampup_samples": 96,
}
SHARDS = {"global_batch_size": 16, "num_logical_shards": 6}


def schedule(**keys):
    return batch_size.schedule(data_keys.DataKeys(**keys), WORLD)


@pytest.mark.parametrize(
    ("keys", "sizes"),
    [
        # A global size holds on any world; that of a device grows with it.
        ({"global_batch_size": 16, "per_device_batch_size": 5.0}, [16] * 8),
        ({"per_device_batch_size": 3.0}, [24] * 8),
        # 48 rows by 16, 48 by 32 (to the nearest whole step), then the final size.
        (RAMP, [16, 16, 16, 32, 32, 48, 48, 48]),
        (RAMP | {"num_logical_shards": 12}, [16, 16, 16, 32, 32, 48, 48, 48]),
        (SHARDS | {"max_shard_reads": 2.0}, [16] * 8),
        (SHARDS | {"num_logical_shards": 8}, [16] * 8),
    ],
)
def test_each_step_has_the_rows_of_its_stage(keys, sizes):
    stages = schedule(**keys)
    assert [batch_size.at(stages, step) for step in range(8)] == sizes


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            SHARDS,
            r"=6 and .* 16 rows, 4 hosts .* 2 times; choose .*=8, .* multiple of 4 or",
        ),
        (
            RAMP | {"num_logical_shards": 50, "max_shard_reads": 2.0},
            "number of hosts, 4, does not divide num_logical_shards=50",
        ),
        ({"per_device_batch_size": 0.3}, "8 devices makes a global batch of 2.4 rows"),
        ({"global_batch_size": 12}, "12 rows cannot be divided evenly among 8 devices"),
    ],
)
def test_batches_that_do_not_divide_are_refused(keys, says):
    with pytest.raises(errors.ConfigError, match=says):
        schedule(**keys)
