"""Sharing: how many states a component has, and which of them is this host's.

Pure functions of host numbers and of the mesh. A state has a logical name, which is
that of its file. The first host that has a state writes it, alone and without asking
any other.
"""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Sequence
from typing import Literal

import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.core.errors import first_of

GLOBAL = "global"
REPLICATED = "replicated"
PER_HOST = "per_host"
PER_NODE = "per_node"
PER_GROUP = "per_group"
# Of the names of states, of which there may be several.
_PREFIXES = {PER_HOST: "rank", PER_NODE: "node"}
Pattern = Literal["global", "replicated", "per_host", "per_node", "per_group"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharing:
    """The states of a component in a world, as one host has them.

    Attributes:
      pattern: see `Pattern`.
      names: of all states, in their order: by host, or by coordinates of the mesh.
      own: the place in `names` of this host's state.
      is_writer: whether this host is the first that has it.
      axes: of a group.
    """

    pattern: str
    names: tuple[str, ...]
    own: int
    is_writer: bool
    axes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of this host's state."""
        return self.names[self.own]


def of_nodes(pattern: str, nodes: Sequence[object], *, host: int) -> Sharing:
    """A state for each node, numbered by the first host on it.

    Args:
      pattern: any but PER_GROUP. A node is all hosts, a host, or a machine.
      nodes: of each host, the node that it is on.
      host: this one.
    """
    first = {node: nodes.index(node) for node in nodes}
    order = sorted(first.values())
    own = first[nodes[host]]
    prefix = _PREFIXES.get(pattern)
    numbered = tuple(f"{prefix}-{number:05d}" for number in range(len(order)))
    return Sharing(
        pattern=pattern,
        names=numbered if prefix else ("global",),
        own=order.index(own),
        is_writer=own == host,
    )


def per_group(
    mesh_hosts: np.ndarray,
    axis_names: Sequence[str],
    axes: Sequence[str],
    *,
    host: int,
) -> Sharing:
    """A state for each group of hosts along some axes of a mesh.

    Args:
      mesh_hosts: of each device of the mesh, its host.
      axis_names: of the mesh.
      axes: devices that differ only in these share a state, as they share the result of
        `jax.lax.psum` over them.
      host: this one.

    Raises:
      ConfigError: if the mesh has no such axis, or this host is in no group or several.
    """
    unknown = [axis for axis in axes if axis not in axis_names]
    if unknown or not axes or len(set(axes)) < len(axes):
        raise errors.ConfigError(
            f"per_group with axis={tuple(axes)!r} does not fit the mesh with the axes"
            f" {tuple(axis_names)}; name axes of the mesh, each once"
        )
    others = [
        number
        for number, axis in enumerate(axis_names)
        if axis not in axes and mesh_hosts.shape[number] > 1
    ]
    of_groups = np.moveaxis(mesh_hosts, others, range(len(others)))
    names, groups = [], []
    for place in np.ndindex(of_groups.shape[: len(others)]):
        named = [(axis_names[n], i) for n, i in zip(others, place, strict=True)]
        parts = [f"{urllib.parse.quote(axis, safe='')}-{i}" for axis, i in named]
        names.append("-".join(["group", *parts]))
        if host in of_groups[place]:
            groups.append((len(names) - 1, int(of_groups[place].min()) == host))
    if len(groups) != 1:
        raise errors.ConfigError(
            f"the devices of host {host} are in {len(groups)} groups of"
            f" axis={tuple(axes)!r} ({first_of(names[n] for n, _ in groups)}), and a"
            f" host has one state: share it over another axis of {tuple(axis_names)},"
            " too, or make the mesh from devices of every host, those of each in one"
            " group"
        )
    ((own, is_writer),) = groups
    return Sharing(
        pattern=PER_GROUP,
        names=tuple(names),
        own=own,
        is_writer=is_writer,
        axes=tuple(axes),
    )
