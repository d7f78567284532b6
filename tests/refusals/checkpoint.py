"""Mistakes with checkpointers, tiers and components."""

import jax
import numpy as np
from jax.sharding import Mesh

import elastic_ckpt as ec
from elastic_ckpt.checkpoint.components import component as components
from elastic_ckpt.checkpoint.components import rng
from elastic_ckpt.checkpoint.components.component import Component
from elastic_ckpt.core import errors
from elastic_ckpt.steps import owners, retention
from tests.refusals import Refusal, row

CUBE = np.arange(8).reshape(2, 2, 2)
AXES = ("data", "model", "pipe")
FAILED = errors.CheckpointError


def mesh(*shape):
    devices = np.array(jax.devices()[: np.prod(shape)])
    return Mesh(devices.reshape(shape), AXES[: len(shape)])


def reader(directory, call):
    """Calls a checkpointer that only reads."""
    stored = ec.Persistent(directory, every=1)
    with ec.Checkpointer([stored]) as checkpointer:
        checkpointer.save(1, {"w": np.ones(2)})
    with ec.Checkpointer([stored], read_only=True) as checkpointer:
        call(checkpointer)


def read(directory):
    with ec.Checkpointer([ec.Persistent(directory)], read_only=True) as checkpointer:
        checkpointer.load()


component, reading = row(Component), row(reader, error=FAILED, writes=True)
group = row(
    lambda axes, hosts=CUBE, host=0: components.per_group(hosts, AXES, axes, host=host)
)

REFUSALS = {
    "peers without RAM": row(ec.Checkpointer)(
        r"tiers contains Peers, Persistent; pass one ec.Local\(directory",
        [ec.Peers(), ec.Persistent("/a", every=1)],
    ),
    "a writer that only reads": reading(
        "opened with read_only=True", lambda c: c.save(2, {"w": np.ones(2)})
    ),
    "a reader that goes back": reading(
        "opened with read_only=True", lambda c: c.load(roll_back=True)
    ),
    "a directory that is not there": Refusal(
        lambda path: read(path / "stepz"), r"no directory .*stepz; save", FAILED
    ),
    "best of none": row(retention.BestN)("BestN", -1),
    "a domain without a name": row(owners.parse_domains)(
        "x='rack=r7;zone': 'zone' does not have the form `kind=name`",
        "rack=r7;zone",
        what="x",
    ),
    "an unknown sharing": component(
        "sharing='per_rank' is not a component sharing; pass one of", {}, "per_rank"
    ),
    "an unknown sharing that is computed": Refusal(
        lambda _: Component({}, lambda: None).present(),
        "a component's sharing= function returned",
    ),
    "validation of a state per host": component(
        r"sharing='per_host' accepts only .* \[\] .* got {'validation': 'quick'}",
        *({}, "per_host"),
        validation="quick",
    ),
    "nodes of no processes": component(
        "must be at least 1", {}, "per_node", processes_per_node=0
    ),
    "a group without a mesh": component(
        r"only the options \['axis', 'mesh'\] .* got {'axis': 'data'}",
        *({}, "per_group"),
        axis="data",
    ),
    "a host in two groups": Refusal(
        lambda _: Component({}, "per_group", axis="data", mesh=mesh(2, 2)),
        "are in 2 groups",
    ),
    "a group that cuts a host": group(
        r"along a different axis of \('data', 'model', 'pipe'\), or",
        ["data"],
        **{"hosts": CUBE // 2, "host": 1},
    ),
    "an unknown axis": group("does not match the mesh", ["rows"]),
    "an axis twice": group("does not match the mesh", ["data", "data"]),
    "a host outside of the mesh": group("host 9 are in 0 groups", ["data"], host=9),
    "an unknown rule": component(
        "on_resize='keep' is not a known rule", 0, on_resize="keep"
    ),
    "a seed that is a text": row(rng.Rng)("one typed key", "7"),
    "a seed of two keys": Refusal(
        lambda _: rng.Rng(jax.random.split(jax.random.key(0))), "one typed key"
    ),
    "an old key": Refusal(lambda _: rng.Rng(jax.random.PRNGKey(0)), "one typed key"),
    "an unknown level": row(ec.components.validate)(
        "none, quick, tensor, full", {}, level="all"
    ),
    "an object that cannot be compared": row(ec.components.validate, error=FAILED)(
        "'a/b' is of type object", {"a": {"b": object()}}
    ),
}
