"""Hosts of a new run read their parts of the initial weights alone, and once."""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt import universal
from elastic_ckpt.core import errors, topology
from elastic_ckpt.elastic import host as host_process
from elastic_ckpt.training import schema, trainer
from elastic_ckpt.universal.reading.sources import Sources
from elastic_ckpt.universal.rules.layout import Layout
from tests import host_worlds
from tests.universal import safetensors_files

SHAPE = (512, 256)
NORM = (256,)
NORM_RULE = {"from": {"model.norm": "a"}, "to": {"params/norm": "a"}}
NORM_BYTES = 4 * NORM[0]
MATRICES_BYTES = 2 * 4 * SHAPE[0] * SHAPE[1]


def weights():
    """The weights, the same in all processes."""
    shapes = {"up": SHAPE, "down": SHAPE, "norm": NORM}
    return {
        name: np.random.default_rng([*name.encode()]).random(shape, np.float32)
        for name, shape in shapes.items()
    }


def write(path):
    """Writes a checkpoint with twice as many values besides; returns the keys."""
    tensors = {f"model.{name}": array for name, array in weights().items()}
    others = {f"optimizer.{name}": array for name, array in weights().items()}
    safetensors_files.write(path / "model.safetensors", {**others, **tensors})
    rules = [
        {
            "from": {f"model.{name}": "a b"[: 2 * array.ndim - 1]},
            "to": {f"params/{name}": "a b"[: 2 * array.ndim - 1]},
        }
        for name, array in weights().items()
    ]
    layout = {"version": 1, "rules": rules, "drop": ["optimizer.*"]}
    (path / "layout.yml").write_text(json.dumps(layout))
    return {
        "path": str(path / "model.safetensors"),
        "layout": str(path / "layout.yml"),
    }


def counted(reads):
    """Notes the file and the range of each read of files."""
    read_into = Sources.read_into

    def counting(self, file, start, memory):
        reads.append((file, start, start + memory.nbytes))
        return read_into(self, file, start, memory)

    Sources.read_into = counting


def load(mesh, keys, path):
    """Loads the weights as a run does, and compares the parts of this host."""
    reads = []
    counted(reads)
    expected = weights()
    sharded = {name: PartitionSpec(("slice", "fsdp")) for name in ("up", "down")}
    abstract = {
        name: jax.ShapeDtypeStruct(
            array.shape,
            array.dtype,
            sharding=NamedSharding(mesh, sharded.get(name, PartitionSpec())),
        )
        for name, array in expected.items()
    }
    section = schema.ModelSection(
        init_from=keys["path"], init_from_layout=keys["layout"]
    )
    params = trainer.initial_weights(section, abstract, _discard)
    for name, leaf in params.items():
        for shard in leaf.addressable_shards:
            part = expected[name][shard.index]
            assert np.asarray(shard.data).tobytes() == part.tobytes()
    file = pathlib.Path(path, f"reads-{topology.this_host()}.json")
    file.write_text(json.dumps(reads))


def host(place, emit, *, keys, path):
    """A host that joins its world and loads."""
    del emit
    host_process.configure(schema.WorldSection())
    with host_process.joined(place):
        load(topology.mesh_of(topology.present(1)), keys, path)


def load_or_note(place, emit, *, keys, path):
    """A host that loads, where the second one has no checkpoint; notes the error."""
    del emit
    host_process.configure(schema.WorldSection())
    with host_process.joined(place):
        own = topology.this_host()
        sharding = NamedSharding(topology.mesh_of(topology.present(1)), PartitionSpec())
        leaf = jax.ShapeDtypeStruct(NORM, np.float32, sharding=sharding)
        source = keys["path"] if own == 0 else f"{path}/absent"
        layout = Layout.from_dict(
            {"rules": [NORM_RULE], "drop": ["optimizer.*", "*.up", "*.down"]}
        )
        try:
            universal.load(source, {"params": {"norm": leaf}}, layout=layout)
        except errors.ElasticCkptError as error:
            pathlib.Path(path, f"error-{own}").write_text(str(error))


@pytest.mark.slow
def test_all_hosts_raise_if_one_cannot_open_the_checkpoint(tmp_path):
    host_worlds.run(
        functools.partial(load_or_note, keys=write(tmp_path), path=str(tmp_path)),
        num_hosts=2,
        log_directory=tmp_path / "logs",
        emit=_discard,
    )
    first, second = ((tmp_path / f"error-{number}").read_text() for number in (0, 1))
    assert "absent" in second
    assert "host 1" in first
    assert second in first


@pytest.mark.slow
def test_each_host_reads_its_part_of_the_weights_alone_and_once(tmp_path):
    num_hosts = 2
    host_worlds.run(
        functools.partial(host, keys=write(tmp_path), path=str(tmp_path)),
        num_hosts=num_hosts,
        log_directory=tmp_path / "logs",
        emit=_discard,
    )
    reads = [
        json.loads((tmp_path / f"reads-{number}.json").read_text())
        for number in range(num_hosts)
    ]
    for ranges in reads:
        num_bytes = sum(stop - start for _, start, stop in ranges)
        assert num_bytes == MATRICES_BYTES // num_hosts + NORM_BYTES
    # All hosts hold the vector; nothing else is read by two.
    shared = {tuple(each) for each in reads[0]} & {tuple(each) for each in reads[1]}
    assert sum(stop - start for _, start, stop in shared) == NORM_BYTES


def _discard(name, **fields):
    del name, fields
