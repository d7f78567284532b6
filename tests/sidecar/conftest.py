"""The data that the tests of the sidecar iterate over."""

import pytest
from elastic_ckpt_sidecar import RemoteIterator

from elastic_ckpt.core import topology
from tests import formats, iterator_contract


@pytest.fixture(scope="session")
def parts(tmp_path_factory):
    """The datasets of `tests.formats`, as ArrayRecord files."""
    directory = tmp_path_factory.mktemp("formats")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        yield formats.write(directory, "arrayrecord")


@pytest.fixture
def remote():
    """Makes a `RemoteIterator`, closed at the end."""
    made = []

    def make(data, *, size=iterator_contract.GLOBAL_BATCH_SIZE, **more):
        mesh = topology.mesh_of(topology.present(2))
        made.append(RemoteIterator(data, mesh=mesh, global_batch_size=size, **more))
        return made[-1]

    yield make
    for batches in made:
        batches.close()
