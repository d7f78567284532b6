import pytest

from elastic_ckpt.config import schema
from elastic_ckpt.core import errors, topology
from elastic_ckpt.data import batch_size

WORLD = topology.Topology(hosts=4, slices=2, devices=8)


def test_a_given_global_batch_size_holds_on_any_world():
    data = schema.DataSection(global_batch_size=16, per_device_batch_size=5.0)
    assert batch_size.global_batch_size(data, WORLD) == 16


def test_the_batch_grows_with_the_devices_otherwise():
    assert (
        batch_size.global_batch_size(
            schema.DataSection(per_device_batch_size=3.0), WORLD
        )
        == 24
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"global_batch_size": 6}, "6 rows does not divide over 4 hosts; set"),
        ({"global_batch_size": 12}, "12 rows does not divide over 8 devices; set"),
        ({"per_device_batch_size": 0.3}, "0.3 on 8 devices is 2.4 rows; choose"),
        ({"per_device_batch_size": 0.0}, "0.0 on 8 devices is 0 rows; choose"),
    ],
)
def test_a_batch_that_cannot_be_shared_out_says_what_would_fit(data, message):
    with pytest.raises(errors.ConfigError, match=message):
        batch_size.global_batch_size(schema.DataSection(**data), WORLD)
