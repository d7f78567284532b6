import contextlib

import pytest
from elastic_ckpt_sidecar import worker

from elastic_ckpt.core import errors, topology
from elastic_ckpt.data import iterator
from tests.iterator_contract import ids


@pytest.fixture
def host(data):
    """The data of a host, as the head calls it."""
    sharding = topology.batch_sharding(topology.mesh_of(topology.present(2)))
    rows = iterator.HostIterator(data, sharding=sharding, global_batch_size=16)
    with contextlib.closing(worker.HostData(rows)) as made:
        yield made


def test_a_host_goes_back_unless_it_has_gone_elsewhere(host):
    first, *others = (ids(host.next()) for _ in range(3))
    host.rewind(1)
    assert [ids(host.next()) for _ in range(2)] == others
    host.reset(9)
    host.rewind(9)
    assert ids(host.next()) == first
    with pytest.raises(errors.DataError, match="no longer at the same batch"):
        host.rewind(3)


def test_states_are_kept_of_the_last_batches_and_saves_and_of_no_older_one(
    host, tmp_path
):
    for _ in range(5):
        host.next()
    for ticket in range(20):
        host.take(ticket, 5 - worker.HEAD_AHEAD + ticket % 2, None, ())
    with pytest.raises(errors.DataError, match="no longer at the same batch"):
        host.take(20, 5 - worker.HEAD_AHEAD - 2, None, ())
    host.write(19, str(tmp_path))
    assert (tmp_path / "data_state.json").exists()
    with pytest.raises(KeyError):
        host.write(0, str(tmp_path))
