"""Hosts that load safetensors through a layout, and count the bytes that they read."""

import functools
import json
import pathlib

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt import universal
from elastic_ckpt.config import schema
from elastic_ckpt.core import topology
from elastic_ckpt.elastic import multicontroller, supervisor
from elastic_ckpt.universal.reading import byte_source
from tests.universal import safetensors_files

LAYERS, OUT, EMBED = 3, 512, 256
LAYOUT = """
version: 1
rules:
  - from: {"layers.{layer}.weight": "out embed"}
    to: {"w": "embed layer out"}
  - from: {"norm.weight": "embed"}
    to: {"norm": "embed"}
"""


def values(name, *shape):
    """The bits of a tensor, the same in all processes."""
    seed = [*name.encode()]
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def write(path):
    """Writes the checkpoint and the layout into a directory."""
    tensors = {
        f"layers.{layer}.weight": values(f"w{layer}", OUT, EMBED)
        for layer in range(LAYERS)
    } | {"norm.weight": values("norm", EMBED)}
    safetensors_files.write(path / "model.safetensors", tensors)
    (path / "layout.yml").write_text(LAYOUT)


def load(mesh, path, spec):
    """Loads the tree and compares the parts of this host with the values."""
    reads = []
    read_into = byte_source.LocalFiles.read_into

    def counting(self, file, start, parts):
        reads.append((start, start + sum(part.nbytes for part in parts)))
        return read_into(self, file, start, parts)

    byte_source.LocalFiles.read_into = counting
    abstract = {
        "w": jax.ShapeDtypeStruct(
            (EMBED, LAYERS, OUT), np.float32, sharding=NamedSharding(mesh, spec)
        ),
        "norm": jax.ShapeDtypeStruct(
            (EMBED,), np.float32, sharding=NamedSharding(mesh, PartitionSpec())
        ),
    }
    state = universal.load(path, abstract, layout=path / "layout.yml")
    whole = np.stack([values(f"w{layer}", OUT, EMBED).T for layer in range(LAYERS)], 1)
    for leaf, expected in ((state["w"], whole), (state["norm"], values("norm", EMBED))):
        for shard in leaf.addressable_shards:
            part = np.ascontiguousarray(expected[shard.index])
            assert np.asarray(shard.data).tobytes() == part.tobytes()
    (path / f"reads-{topology.this_host()}.json").write_text(json.dumps(reads))


def host(place, emit, *, path, spec):
    """A host that joins its world and loads."""
    del emit
    multicontroller.configure(schema.WorldSection())
    with multicontroller.joined(place):
        load(topology.mesh_of(topology.present(1)), pathlib.Path(path), spec)


def run(path, *, num_hosts, spec, logs):
    """Runs hosts on this machine; the ranges that each of them has read."""
    supervisor.HostProcesses(
        functools.partial(host, path=str(path), spec=spec),
        num_hosts=num_hosts,
        log_directory=logs,
        emit=_discard,
    ).run()
    return [
        json.loads((path / f"reads-{number}.json").read_text())
        for number in range(num_hosts)
    ]


def _discard(name, **fields):
    del name, fields
