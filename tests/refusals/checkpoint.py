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
from tests.refusals import Refusal

CUBE = np.arange(8).reshape(2, 2, 2)
AXES = ("data", "model", "pipe")


def mesh(*shape):
    devices = np.array(jax.devices()[: np.prod(shape)])
    return Mesh(devices.reshape(shape), AXES[: len(shape)])


def component(sharing=None, **options):
    """Makes a component when it is called."""
    return lambda _: Component({}, sharing, **options)


def group(axes, *, hosts=CUBE, host=0):
    return lambda _: components.per_group(hosts, AXES, axes, host=host)


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


READ_ONLY = {"says": "opened with read_only=True", "error": errors.CheckpointError}

REFUSALS = {
    "two RAM tiers": Refusal(
        lambda _: ec.Checkpointer([ec.Local("/a"), ec.Local("/b")]),
        "a list of Local, Local: give ec.Local.*, each once",
    ),
    "peers without RAM": Refusal(
        lambda _: ec.Checkpointer([ec.Peers(), ec.Persistent("/a", every=1)]),
        r"a list of Peers, Persistent: give ec.Local\(directory",
    ),
    "a writer that only reads": Refusal(
        lambda path: reader(path, lambda c: c.save(2, {"w": np.ones(2)})),
        **READ_ONLY,
        writes=True,
    ),
    "a reader that goes back": Refusal(
        lambda path: reader(path, lambda c: c.load(go_back=True)),
        **READ_ONLY,
        writes=True,
    ),
    "a directory that is not there": Refusal(
        lambda path: read(path / "stepz"),
        r"no directory .*stepz; save",
        error=errors.CheckpointError,
    ),
    "best of none": Refusal(lambda _: retention.BestN(-1), "BestN"),
    "a domain without a name": Refusal(
        lambda _: owners.parse_domains("rack=r7;zone", what="x"),
        "x='rack=r7;zone': 'zone' is not `kind=name`",
    ),
    "an unknown sharing": Refusal(
        component("per_rank"), "sharing='per_rank' of a component: give one of"
    ),
    "an unknown sharing that is computed": Refusal(
        lambda _: Component({}, lambda: None).present(),
        "sharing= of a component returned",
    ),
    "validation of a state per host": Refusal(
        component("per_host", validation="quick"),
        r"sharing='per_host' takes \[\] .* given {'validation': 'quick'}",
    ),
    "nodes where there are none": Refusal(
        component("global", processes_per_node=2),
        r"sharing='global' takes \[\]",
    ),
    "nodes of no processes": Refusal(
        component("per_node", processes_per_node=0),
        "processes_per_node from 1 on",
    ),
    "a group without a mesh": Refusal(
        component("per_group", axis="data"),
        r"takes \['axis', 'mesh'\] .* given {'axis': 'data'}",
    ),
    "a host in two groups": Refusal(
        lambda _: Component({}, "per_group", axis="data", mesh=mesh(2, 2)),
        "are in 2 groups",
    ),
    "a group that cuts a host": Refusal(
        group(["data"], hosts=CUBE // 2, host=1),
        r"share it over another axis of \('data', 'model', 'pipe'\), too, or",
    ),
    "an unknown axis": Refusal(group(["rows"]), "does not fit the mesh"),
    "an axis twice": Refusal(group(["data", "data"]), "does not fit the mesh"),
    "a host outside of the mesh": Refusal(
        group(["data"], host=9), "host 9 are in 0 groups"
    ),
    "an unknown rule": Refusal(
        lambda _: Component(0, on_resize="keep"),
        "on_resize='keep' is no rule",
    ),
    "a seed that is a text": Refusal(lambda _: rng.Rng("7"), "one typed key"),
    "a seed of two keys": Refusal(
        lambda _: rng.Rng(jax.random.split(jax.random.key(0))), "one typed key"
    ),
    "an old key": Refusal(lambda _: rng.Rng(jax.random.PRNGKey(0)), "one typed key"),
    "an unknown level": Refusal(
        lambda _: ec.components.validate({}, level="all"), "none, quick, tensor, full"
    ),
    "an object that cannot be compared": Refusal(
        lambda _: ec.components.validate({"a": {"b": object()}}),
        "'a/b' is a object",
        error=errors.CheckpointError,
    ),
}
