import numpy as np
import pytest
from elastic_ckpt_sidecar import messages

from elastic_ckpt.core import topology


@pytest.fixture
def sharding():
    return topology.batch_sharding(topology.mesh_of(topology.present(2)))


def test_messages_of_any_length_arrive_and_have_few_lengths(sharding):
    lengths = set()
    for length in (0, 1, 490, 511, 512, 513, 5000):
        content = {"ticket": 3, "directory": "ü" * length}
        sent = messages.encode(content, sharding)
        assert len(sent.sharding.device_set) == 8
        assert messages.decode(sent) == content
        lengths.add(sent.shape[1])
    assert lengths == {512, 4096, 32768}


def test_answers_come_in_the_order_of_the_mesh(sharding):
    call = messages.encode({}, sharding)
    answer = messages.reply(call, lambda device: np.array([device.id, 7]))
    ids = [[device.id, 7] for device in sharding.mesh.devices.flat]
    assert messages.rows(answer).tolist() == ids
    assert messages.rows(messages.on_each(call, 3)).tolist() == [3] * 8
