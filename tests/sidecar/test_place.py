"""The same lines in every kind of job."""

import types

import jax
import numpy as np
from elastic_ckpt_sidecar import RemoteIterator
from etils import epath

import elastic_ckpt as ec
from elastic_ckpt.core import topology
from elastic_ckpt.data import iterator, prefetch
from tests import iterator_contract
from tests.sidecar import held_pipeline

PLACES = {False: iterator.Batches, True: RemoteIterator}


def mesh_of(*hosts):
    """A mesh of a device of each of these hosts."""
    devices = np.array([types.SimpleNamespace(process_index=host) for host in hosts])
    return types.SimpleNamespace(devices=devices)


def test_a_single_controller_has_the_devices_of_other_hosts_or_is_pathways(monkeypatch):
    for num_hosts, hosts, is_single in (
        (1, (0, 0), False),
        (2, (0, 1), False),
        # One process that controls the devices of two hosts, or of another one.
        (1, (0, 1), True),
        (1, (3, 3), True),
    ):
        monkeypatch.setattr(topology, "num_hosts", lambda number=num_hosts: number)
        assert topology.is_single_controller(mesh_of(*hosts)) is is_single
    for platforms in ("proxy", "proxy,cpu"):
        config = types.SimpleNamespace(jax_platforms=platforms)
        monkeypatch.setattr(topology.jax, "config", config)
        assert topology.is_single_controller(mesh_of(0))


def users_lines(directory):
    """The lines that a user writes, and the batches that they yield."""
    mesh = topology.mesh_of(topology.present(2))
    batches = ec.batches(
        held_pipeline.data(),
        mesh=mesh,
        global_batch_size=8,
        read_ahead=prefetch.ReadAhead(batches=1),
    )
    delivered = [next(batches)]
    iterator_contract.run(batches.save(iterator_contract.Created(directory)))
    delivered += [next(batches) for _ in range(2)]
    batches.reset()
    delivered.append(next(batches))
    iterator_contract.run(batches.load(epath.Path(directory)))
    delivered += [next(batches) for _ in range(2)]
    batches.resize(16)
    delivered.append(next(batches))
    batches.close()
    return type(batches), [jax.device_get(batch) for batch in delivered]


def test_the_same_lines_give_the_same_bytes_and_files_in_either_place(
    monkeypatch, tmp_path, valve
):
    del valve
    batches, files = [], []
    for single in PLACES:
        # By whose devices the mesh has.
        monkeypatch.setattr(
            topology, "is_single_controller", lambda _, single=single: single
        )
        directory = tmp_path / str(single)
        directory.mkdir()
        chosen, delivered = users_lines(directory)
        assert chosen is PLACES[single]
        numbers = [held_pipeline.number(batch) for batch in delivered[:-1]]
        assert numbers == [0, 1, 2, 0, 1, 2]
        batches.append(delivered)
        files.append({p.name: p.read_bytes() for p in directory.iterdir()})
    for one, other in zip(*batches, strict=True):
        assert one.keys() == other.keys()
        for name, feature in one.items():
            np.testing.assert_array_equal(feature, other[name], strict=True)
    assert files[0] == files[1]
    assert sorted(files[0]) == ["data_state.json", "shards-00000-00007.json.gz"]
