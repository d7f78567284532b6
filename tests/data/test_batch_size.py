import pytest

from elastic_ckpt.core import errors, topology
from elastic_ckpt.data import batch_size, data_keys

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


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"global_batch_size": 6},
            "6 rows cannot be divided evenly among 8 devices, as JAX requires; set",
        ),
        (
            {"global_batch_size": 12},
            "12 rows cannot be divided evenly among 8 devices, as JAX requires; set",
        ),
        (
            {"per_device_batch_size": 0.3},
            "0.3 on 8 devices makes .* of 2.4 rows; choose",
        ),
        ({"per_device_batch_size": 0.0}, "0.0 on 8 devices makes .* of 0 rows; choose"),
    ],
)
def test_a_batch_that_cannot_be_shared_out_says_what_would_fit(data, message):
    with pytest.raises(errors.ConfigError, match=message):
        batch_size.global_batch_size(data_keys.DataKeys(**data), WORLD)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"per_device_batch_size_increment": 3.0}, "does not reach per_device_batch"),
        ({"per_device_batch_size_increment": 0.0}, "does not reach per_device_batch"),
        ({"per_device_batch_size_start": 8.0}, "does not reach per_device_batch"),
        ({"global_batch_size": 16}, "it does, and set global_batch_size=0"),
    ],
)
def test_a_ramp_that_leads_nowhere_is_refused(changes, message):
    with pytest.raises(errors.ConfigError, match=message):
        batch_size.schedule(data_keys.DataKeys(**RAMP | changes), WORLD)
