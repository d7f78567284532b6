import threading

import pytest
from elastic_ckpt_sidecar import failures, messages, worker

from elastic_ckpt.core import topology
from elastic_ckpt.data import cursors, prefetch


@pytest.fixture
def host(data):
    """A worker as the runtime of its host calls it, and what calls it."""
    sharding = topology.batch_sharding(topology.mesh_of(topology.present(2)))
    made = worker._HostWorker(data, sharding.spec, 16, prefetch.TWO_BATCHES)

    def call(method, **content):
        return getattr(made, method)(messages.encode(content, sharding))

    def take_state(**content):
        return call("take_state", progress=None, left_out=[], **content)

    call.take_state = take_state
    yield call
    call("close")
    made._writer.shutdown()


def written(host, directory, *, ticket):
    """Asks until the host has written."""
    while not host("write_state", ticket=ticket, directory=str(directory)).any():
        pass


def test_a_host_says_that_it_has_written_as_often_as_it_is_asked(
    host, tmp_path, monkeypatch
):
    # The head asks all hosts until the last of them has written.
    may_write, write = threading.Event(), cursors.write

    def late(*arguments):
        assert may_write.wait(600)
        write(*arguments)

    monkeypatch.setattr(cursors, "write", late)
    host.take_state(ticket=0, batches=0)
    assert not host("write_state", ticket=0, directory=str(tmp_path)).any()
    may_write.set()
    written(host, tmp_path, ticket=0)
    for _ in range(2):
        assert host("write_state", ticket=0, directory=str(tmp_path)).all()
    assert (tmp_path / "data_state.json").exists()


def test_states_of_the_last_batches_can_be_kept_and_of_no_older_one(host):
    for _ in range(5):
        host("next")
    for batches in range(5 - worker.HEAD_AHEAD, 6):
        host.take_state(ticket=batches, batches=batches)
    with pytest.raises(failures.WorkerFailure, match="KeyError"):
        host.take_state(ticket=9, batches=5 - worker.HEAD_AHEAD - 2)


def test_the_state_of_a_save_that_was_given_up_is_not_kept_for_ever(host, tmp_path):
    for ticket in range(20):
        host.take_state(ticket=ticket, batches=0)
    written(host, tmp_path, ticket=19)
    with pytest.raises(failures.WorkerFailure, match="KeyError"):
        host("write_state", ticket=0, directory=str(tmp_path))
