"""Rows over some axes of a mesh under a single controller: the batches of one host."""

import jax
import numpy as np
import pytest
from elastic_ckpt_sidecar import RemoteIterator
from etils import epath
from jax.sharding import Mesh

import elastic_ckpt as ec
from elastic_ckpt.core import topology
from tests import iterator_contract
from tests.processes import test_shared_rows
from tests.processes.test_shared_rows import BATCHES_A_WORLD, SEQUENCE, TENSOR


def batches_on(data, layout):
    """The batches of `data` on the mesh of a layout, where `ec.batches` puts them."""
    grid = np.array(jax.devices()).reshape(tuple(layout.mesh.values()))
    return ec.batches(
        data,
        mesh=Mesh(grid, tuple(layout.mesh)),
        spec=layout.spec,
        global_batch_size=layout.size,
    )


def check(batch, expected, layout):
    """Fails unless each device holds its part of the batch, with the same bits."""
    assert batch.keys() == expected.keys()
    for name, feature in batch.items():
        assert feature.dtype == expected[name].dtype
        for shard in feature.addressable_shards:
            assert shard.data.shape == layout.parts_of(feature.shape)
            part = expected[name][shard.index]
            assert np.asarray(shard.data).tobytes() == part.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["packed", "positional"])
def test_a_run_resumed_on_another_mesh_has_the_batches_of_one_host(
    monkeypatch, tmp_path, corpus, engine
):
    layouts = (TENSOR, SEQUENCE)
    monkeypatch.setattr(topology, "is_single_controller", lambda _: True)
    data = test_shared_rows.engines(corpus)[engine]
    sizes = [layout.size for layout in layouts]
    expected = iter(test_shared_rows.batches_of_one_host(data, sizes))
    for number, layout in enumerate(layouts):
        batches = batches_on(data, layout)
        assert isinstance(batches, RemoteIterator)
        if number:
            iterator_contract.run(batches.load(epath.Path(tmp_path)))
        for _ in range(BATCHES_A_WORLD):
            check(next(batches), next(expected), layout)
        iterator_contract.run(batches.save(iterator_contract.Created(tmp_path)))
        batches.close()
