"""What the tests of the sidecar iterate over, and the hosts that they have."""

import threading

import pytest
from elastic_ckpt_sidecar import RemoteIterator

from elastic_ckpt.core import topology
from tests import formats, iterator_contract
from tests.sidecar import held_pipeline, simulated_hosts
from tests.tiers import served


@pytest.fixture(scope="session")
def parts(tmp_path_factory):
    """The datasets of `tests.formats`, as ArrayRecord files."""
    directory = tmp_path_factory.mktemp("formats")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        yield formats.write(directory, "arrayrecord")


@pytest.fixture
def machines():
    with simulated_hosts.Machines() as simulated:
        yield simulated


@pytest.fixture
def threads():
    """Returns the threads of ours, and of executors of ours."""
    names = ("elastic_ckpt-background", "ThreadPoolExecutor")
    return lambda: {t for t in threading.enumerate() if t.name.startswith(names)}


@pytest.fixture
def valve(threads):
    """That of the pipeline which tests hold up, open."""
    before = threads()
    held_pipeline.VALVE.reset()
    yield held_pipeline.VALVE
    held_pipeline.VALVE.open()
    # No thread is left, to read in the next test.
    served.until(lambda: threads() <= before)


@pytest.fixture
def remote(valve):
    """Makes a `RemoteIterator`, closed at the end, before the threads are counted."""
    del valve
    made = []

    def make(data, *, size=iterator_contract.GLOBAL_BATCH_SIZE, **more):
        mesh = topology.mesh_of(topology.present(2))
        made.append(RemoteIterator(data, mesh=mesh, global_batch_size=size, **more))
        return made[-1]

    yield make
    for batches in made:
        batches.close()
