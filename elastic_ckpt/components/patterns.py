"""The sharing patterns, each a component that wraps a state.

| pattern | states | written by | loaded by |
|---|---|---|---|
| `Global` | one | host 0 | all hosts |
| `Replicated` | one, which is equal on all hosts | host 0 | all hosts |
| `PerRank` | one for each host | each host | the host with its number |
| `PerNode` | one for each node (machine) | the first host on it | the hosts on it |
| `PerGroup` | one for each group along mesh axes | its first host | its hosts |

States are found by their numbers or coordinates: a host that has another number than
before loads the state of its place in the world or mesh, not the file that it wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from jax.sharding import Mesh

from elastic_ckpt.components import nodes, resize, sharing
from elastic_ckpt.components.component import Component
from elastic_ckpt.components.sharing import Sharing
from elastic_ckpt.components.validation import Level, check_level
from elastic_ckpt.core import errors, topology


class Global(Component):
    """One state of the run, such as a schedule; host 0 writes it, and all load it."""

    pattern: ClassVar[str] = sharing.GLOBAL

    def sharing(self) -> Sharing:
        """See `Component.sharing`."""
        return sharing.of_all(self.pattern, host=topology.this_host())


class Replicated(Global):
    """A state that all hosts compute alike; host 0 writes it, and all load it.

    As `Global`, but a difference between hosts is a fault.

    Args:
      state: see `Component`.
      validation: a level of `validate` at which our checkpointer compares the state of
        all hosts at each save: `"quick"`, `"tensor"`, or `"full"`. A difference is an
        event (`replicas_differ`), and the step is saved all the same.
      on_resize: see `Component`.
      required: see `Component`.

    Raises:
      ConfigError: if there is no such level.
    """

    pattern: ClassVar[str] = sharing.REPLICATED

    def __init__(
        self,
        state: Any,
        *,
        validation: Level = "none",
        on_resize: resize.Rule = resize.ERROR,
        required: bool = True,
    ) -> None:
        check_level(validation)
        super().__init__(state, on_resize=on_resize, required=required)
        self.validation: Level = validation

    @property
    def is_compared(self) -> bool:
        """Whether it was made with a level, in a world of several hosts."""
        return self.validation != "none" and topology.num_hosts() > 1


class PerRank(Component):
    """A state for each host (process), such as a host's own counters."""

    pattern: ClassVar[str] = sharing.PER_RANK

    def sharing(self) -> Sharing:
        """See `Component.sharing`."""
        return sharing.per_rank(
            host=topology.this_host(), num_hosts=topology.num_hosts()
        )


class PerNode(Component):
    """A state for each node, such as a cache; the first host on a node writes it.

    Args:
      state: see `Component`.
      processes_per_node: how many consecutive hosts are on a node. Without it the hosts
        publish the ids of their machines; all of them need to make the component.
      on_resize: see `Component`.
      required: see `Component`.
    """

    pattern: ClassVar[str] = sharing.PER_NODE

    def __init__(
        self,
        state: Any,
        *,
        processes_per_node: int | None = None,
        on_resize: resize.Rule = resize.ERROR,
        required: bool = True,
    ) -> None:
        super().__init__(state, on_resize=on_resize, required=required)
        self._nodes = nodes.Nodes(processes_per_node)

    def sharing(self) -> Sharing:
        """See `Component.sharing`."""
        return sharing.per_node(self._nodes.of_all_hosts(), host=topology.this_host())


class PerGroup(Component):
    """A state for each group of hosts along mesh axes; its first host writes it.

    Devices that differ only in their places on these axes share a state, as they share
    the result of `jax.lax.psum` over them: on a mesh of `data` and `model`, the state
    of `PerGroup(state, "data", mesh=mesh)` belongs to one place on `model`.

    Args:
      state: see `Component`.
      axis: the name of an axis, or several.
      mesh: in which each host has devices of one group.
      on_resize: see `Component`. Axes of size 1 count as absent.
      required: see `Component`.

    Raises:
      ConfigError: if the mesh has no such axis, or this host is in several groups.
    """

    pattern: ClassVar[str] = sharing.PER_GROUP

    def __init__(
        self,
        state: Any,
        axis: str | tuple[str, ...],
        *,
        mesh: Mesh,
        on_resize: resize.Rule = resize.ERROR,
        required: bool = True,
    ) -> None:
        super().__init__(state, on_resize=on_resize, required=required)
        self._sharing = _group(axis, mesh)

    def sharing(self) -> Sharing:
        """See `Component.sharing`."""
        return self._sharing


class Computed(Component):
    """A state whose pattern is computed at each save and load.

    For example, data has one global state with a central loader, and otherwise a state
    for each host.

    Args:
      state: see `Component`.
      pattern: returns one of the classes of this module, or its name such as
        `"per_rank"`; the same on all hosts.
      axis: for `PerGroup`; see there.
      mesh: for `PerGroup`; see there.
      on_resize: see `Component`; another pattern than before counts as a resize.
      required: see `Component`.
    """

    def __init__(
        self,
        state: Any,
        pattern: Callable[[], type[Component] | str],
        *,
        axis: str | tuple[str, ...] = (),
        mesh: Mesh | None = None,
        on_resize: resize.Rule = resize.ERROR,
        required: bool = True,
    ) -> None:
        super().__init__(state, on_resize=on_resize, required=required)
        self._pattern = pattern
        self._axis = axis
        self._mesh = mesh
        self._nodes = nodes.Nodes(None)

    def sharing(self) -> Sharing:
        """See `Component.sharing`.

        Raises:
          ConfigError: if the function returns something else, or there is no mesh for
            groups.
        """
        returned = self._pattern()
        name = getattr(returned, "pattern", returned)
        host, num_hosts = topology.this_host(), topology.num_hosts()
        if name in (sharing.GLOBAL, sharing.REPLICATED):
            return sharing.of_all(name, host=host)
        if name == sharing.PER_RANK:
            return sharing.per_rank(host=host, num_hosts=num_hosts)
        if name == sharing.PER_NODE:
            return sharing.per_node(self._nodes.of_all_hosts(), host=host)
        if name == sharing.PER_GROUP and self._mesh is not None:
            return _group(self._axis, self._mesh)
        raise errors.ConfigError(
            f"the function of a computed pattern returned {returned!r}; return one of"
            f" {sharing.PATTERNS} or its class, and for per_group give axis and mesh"
        )


def _group(axis: str | tuple[str, ...], mesh: Mesh) -> Sharing:
    hosts = np.vectorize(lambda device: device.process_index, otypes=[int])
    return sharing.per_group(
        hosts(mesh.devices),
        mesh.axis_names,
        (axis,) if isinstance(axis, str) else axis,
        host=topology.this_host(),
    )
