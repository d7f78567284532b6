import pytest

from elastic_ckpt.core import errors, topology
from elastic_ckpt.data import data_keys
from elastic_ckpt.training import batch_size

WORLD = topology.Topology(hosts=4, slices=2, devices=8)


def test_a_given_global_batch_size_holds_on_any_world():
    data = data_keys.DataKeys(global_batch_size=16, per_device_batch_size=5.0)
    assert batch_size.global_batch_size(data, WORLD) == 16


def test_the_batch_grows_with_the_devices_otherwise():
    assert (
        batch_size.global_batch_size(
            data_keys.DataKeys(per_device_batch_size=3.0), WORLD
        )
        == 24
    )


RAMP = {
    "enable_rampup_batch_size": True,
    "per_device_batch_size": 6.0,
    "per_device_batch_size_start": 2.0,
    "per_device_batch_size_increment": 2.0,
    "global_rampup_samples": 96,
}


def test_without_a_ramp_every_step_has_the_same_batch():
    actual = batch_size.schedule(data_keys.DataKeys(global_batch_size=16), WORLD)
    assert [actual.at(step) for step in (0, 1, 1000)] == [16, 16, 16]


def test_a_ramp_gives_each_stage_its_share_of_the_rows():
    actual = batch_size.schedule(data_keys.DataKeys(**RAMP), WORLD)
    # 48 rows by 16, 48 by 32 (to the nearest whole step), then the final size.
    assert [actual.at(step) for step in range(8)] == [16, 16, 16, 32, 32, 48, 48, 48]


def test_hosts_that_read_shards_too_often_are_refused_unless_a_key_allows_it():
    keys = {"global_batch_size": 16, "num_logical_shards": 6}
    with pytest.raises(
        errors.ConfigError,
        match=r"4 hosts .* 16 rows .*=6 2 times: choose num_logical_shards=8, .* of 4,",
    ):
        batch_size.schedule(data_keys.DataKeys(**keys), WORLD)
    allowed = data_keys.DataKeys(**keys, max_shard_reads=2.0)
    assert batch_size.schedule(allowed, WORLD).at(0) == 16
    fitting = data_keys.DataKeys(global_batch_size=16, num_logical_shards=8)
    assert batch_size.schedule(fitting, WORLD).at(0) == 16


def test_a_ramp_moves_no_shards_between_hosts():
    keys = {**RAMP, "num_logical_shards": 50, "max_shard_reads": 2.0}
    with pytest.raises(errors.ConfigError, match="4 hosts do not divide"):
        batch_size.schedule(data_keys.DataKeys(**keys), WORLD)
    data = data_keys.DataKeys(**RAMP, num_logical_shards=12)
    assert batch_size.schedule(data, WORLD).at(0) == 16
