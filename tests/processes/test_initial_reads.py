"""Hosts of a new run read their parts of the initial weights alone, and once."""

import dataclasses
import functools
import json
import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.core import errors, events, topology
from elastic_ckpt.elastic import host as host_process
from elastic_ckpt.training import schema, trainer
from elastic_ckpt.universal.reading.sources import Sources
from tests import host_worlds
from tests.universal import safetensors_files

HOSTS = 2
SHAPES = {"up": (512, 256), "down": (512, 256), "norm": (256,)}
NORM_BYTES = 4 * 256
MATRICES_BYTES = 2 * 4 * 512 * 256


def weights():
    """The weights, the same in all processes."""
    return {
        name: np.random.default_rng([*name.encode()]).random(shape, np.float32)
        for name, shape in SHAPES.items()
    }


def write(path):
    """Writes a checkpoint with twice as many values besides; returns the keys."""
    tensors = {f"model.{name}": array for name, array in weights().items()}
    others = {f"optimizer.{name}": array for name, array in weights().items()}
    safetensors_files.write(path / "model.safetensors", {**others, **tensors})
    dims = {name: "a b"[: 2 * len(shape) - 1] for name, shape in SHAPES.items()}
    rules = [
        {"from": {f"model.{name}": each}, "to": {f"params/{name}": each}}
        for name, each in dims.items()
    ]
    layout = {"version": 1, "rules": rules, "drop": ["optimizer.*"]}
    (path / "layout.yml").write_text(json.dumps(layout))
    return schema.ModelSection(
        init_from=str(path / "model.safetensors"),
        init_from_layout=str(path / "layout.yml"),
    )


def counted(reads):
    """Notes the file and the range of each read of files."""
    read_into = Sources.read_into

    def counting(self, file, start, memory):
        reads.append((file, start, start + memory.nbytes))
        return read_into(self, file, start, memory)

    Sources.read_into = counting


def host(place, emit, *, section, path):
    """A host that loads and compares its parts; then the last one has no checkpoint."""
    del emit
    host_process.configure(schema.WorldSection())
    with host_process.joined(place):
        mesh, expected, reads = topology.mesh_of(topology.present(1)), weights(), []
        counted(reads)
        specs = dict.fromkeys(("up", "down"), PartitionSpec(("slice", "fsdp")))
        abstract = {
            name: jax.ShapeDtypeStruct(
                array.shape,
                array.dtype,
                sharding=NamedSharding(mesh, specs.get(name, PartitionSpec())),
            )
            for name, array in expected.items()
        }
        params = trainer.initial_weights(section, abstract, events.nobody)
        for name, leaf in params.items():
            for shard in leaf.addressable_shards:
                part = expected[name][shard.index]
                assert np.asarray(shard.data).tobytes() == part.tobytes()
        pathlib.Path(path, f"reads-{place.host}.json").write_text(json.dumps(reads))
        if place.host == HOSTS - 1:
            section = dataclasses.replace(section, init_from=f"{path}/absent")
        with pytest.raises(errors.ElasticCkptError) as raised:
            trainer.initial_weights(section, abstract, events.nobody)
        pathlib.Path(path, f"error-{place.host}").write_text(str(raised.value))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """What each host of a world has read, and its error."""
    path = tmp_path_factory.mktemp("weights")
    host_worlds.run(
        functools.partial(host, section=write(path), path=str(path)),
        num_hosts=HOSTS,
        log_directory=path / "logs",
    )
    return [
        (
            json.loads((path / f"reads-{number}.json").read_text()),
            (path / f"error-{number}").read_text(),
        )
        for number in range(HOSTS)
    ]


@pytest.mark.slow
def test_each_host_reads_its_part_of_the_weights_alone_and_once(world):
    for ranges, _ in world:
        num_bytes = sum(stop - start for _, start, stop in ranges)
        assert num_bytes == MATRICES_BYTES // HOSTS + NORM_BYTES
    # All hosts hold the vector; nothing else is read by two.
    shared = set.intersection(*({*map(tuple, ranges)} for ranges, _ in world))
    assert sum(stop - start for _, start, stop in shared) == NORM_BYTES


@pytest.mark.slow
def test_all_hosts_raise_if_one_cannot_open_the_checkpoint(world):
    (_, first), (_, second) = world
    assert "absent" in second
    assert "host 1" in first
    assert second in first
