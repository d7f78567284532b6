"""A component: a named piece of a run's state, and how hosts share it.

| sharing | states | written by | loaded by |
|---|---|---|---|
| `global` | one | host 0 | all hosts |
| `replicated` | one, identical on all hosts | host 0 | all hosts |
| `per_host` | one for each host (process) | each host | the host with its index |
| `per_node` | one for each node (machine) | the first host on it | the hosts on it |
| `per_group` | one for each group along mesh axes | its first host | its hosts |

States are found by index or coordinates: a host whose index has changed loads the state
for its new place in the world or mesh, not the file that it wrote.

A component wraps a pytree, or an object with `get_state` and `set_state`, or with
`state_dict` and `load_state_dict`. It is an Orbax `StatefulCheckpointable` and goes
into the same dict as weights and batches, in this library's checkpointer and in Orbax's
own.

    step = ec.components.Component({"lr": 0.1, "ema": ema}, "global")
    checkpointer.save_checkpointables(40, {"state": weights, "schedule": step})
    checkpointer.load_checkpointables(None, {"state": abstract, "schedule": step})
    step.state["lr"]

Saving and loading do not need collectives or barriers: which host writes which file
depends only on host indices and the mesh, so a missing host does not delay the others.
(The exception is the first use of `per_node` without `processes_per_node`, when hosts
exchange their machine IDs.)
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import urllib.parse
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np
from absl import logging
from etils import epath
from jax.sharding import Mesh
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint.components import encoding
from elastic_ckpt.checkpoint.components.validation import Level, check_level
from elastic_ckpt.core import (
    allgather,
    checked_json,
    codec,
    errors,
    process,
    storage,
    topology,
)

GLOBAL = "global"
REPLICATED = "replicated"
PER_HOST = "per_host"
PER_NODE = "per_node"
PER_GROUP = "per_group"
# Name prefixes of numbered states.
_PREFIXES = {PER_HOST: "rank", PER_NODE: "node"}
Pattern = Literal["global", "replicated", "per_host", "per_node", "per_group"]


FILE = "component.json"
VERSION = 1
_WHAT = "description of a component"
ERROR, RESET, FROM_FIRST = "error", "reset", "from_first"
# A rule's name, or a function from the old states and the number of new states to the
# new states.
Rule = str | Callable[[list[Any], int], Sequence[Any]]
_CHOICES = (
    "choose on_resize='reset' (use the initial state), 'from_first' (use the first"
    " old state everywhere), or a function (old_states, new_count) -> new states"
)
# How long hosts wait for each other's machine IDs.
_PATIENCE_SECS = 60.0

# The methods that get and set an object's state, in order of preference.
_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))
# The options for each sharing, and for a sharing function, whose states are not
# compared.
_TAKES = {
    GLOBAL: (),
    REPLICATED: ("validation",),
    PER_HOST: (),
    PER_NODE: ("processes_per_node",),
    PER_GROUP: ("axis", "mesh"),
}
_OF_FUNCTION = ("axis", "mesh", "processes_per_node")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """The content of `component.json`, which host 0 writes next to the states.

    Attributes:
      pattern: the sharing with which the component was saved.
      axes: the mesh axes that the hosts of a group share.
      states: the names of all states, in order; their files are `<name>.npz`.
      hosts: the number of hosts that saved the component.
      kind: the class of the state; used only in messages.
      on_resize: the declared rule; used only in messages.
      required: whether the component was declared as required; used only in messages.
    """

    pattern: str
    axes: tuple[str, ...]
    states: tuple[str, ...]
    hosts: int
    kind: str
    on_resize: str
    required: bool

    def to_bytes(self) -> bytes:
        """Encodes the description for the file."""
        return checked_json.to_bytes(dict(vars(self)), version=VERSION)

    @classmethod
    def read(cls, directory: epath.Path) -> Description:
        """Reads the description from a component directory.

        Raises:
          CheckpointError: if the file is missing or unreadable; the message names it.
        """
        return encoding.read(
            directory / FILE,
            lambda file: codec.decode(
                cls,
                checked_json.parse(file.read(), what=_WHAT, version=VERSION),
                name=_WHAT,
            ),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharing:
    """A component's states in a world, from one host's view.

    Attributes:
      pattern: see `Pattern`.
      names: the names of all states, ordered by host or by mesh coordinates.
      own: the index of this host's state in `names`.
      is_writer: whether this host writes its state: the first of the hosts that share
        it does.
      axes: the mesh axes that the hosts of a group share.
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


class Component:
    """A run's state other than weights and data, and how hosts share it.

        schedule = ec.components.Component({"lr": 0.1}, "global")
        checkpointer.save_checkpointables(40, {"state": state, "schedule": schedule})
        checkpointer.load_checkpointables(40, {"state": like, "schedule": schedule})
        schedule.state["lr"]

    Args:
      state: a pytree, or an object with `get_state` and `set_state`, or with
        `state_dict` and `load_state_dict`. The state may contain JAX and NumPy arrays,
        random keys, numbers, strings, bytes, None, and dicts, lists, tuples and other
        pytrees of these. A list, which may grow, contains no other pytrees, such as
        named tuples: a load builds them from those at the same place in the state that
        it replaces.
      sharing: which hosts have their own state:

        * `"global"`: none; host 0 saves the only state, and all hosts load it
        * `"replicated"`: none; all hosts have the same state, and a difference between
          them is a fault, which `validation` finds
        * `"per_host"`: each host
        * `"per_node"`: each machine, whose hosts share its state
        * `"per_group"`: each group of devices along `axis` of `mesh`

        Or a function that returns one of these, called at each save and load; it must
        return the same value on all hosts.
      axis: for `"per_group"`, the name of a mesh axis, or a tuple of names. Devices
        that differ only in their positions on these axes share a state, just as they
        share the result of `jax.lax.psum` over them: on a mesh of `data` and `model`,
        `axis="data"` creates one state for each position on `model`. Axes of size 1
        are ignored.
      mesh: for `"per_group"`, the mesh; all devices of a host must be in one group.
      processes_per_node: for `"per_node"`, the number of consecutive hosts on each
        machine. Without it, the hosts exchange their machine IDs, so all hosts must
        create the component.
      validation: for `"replicated"`, the level of `validate` at which a save compares
        all hosts' states: `"quick"`, `"tensor"` or `"full"`. The `replicas_differ`
        event reports a difference, but the step is saved. Only `ec.Checkpointer`
        compares states.
      on_resize: what to load if the number of hosts, machines or groups, or the
        sharing, has changed since the save:

        * `"error"`: nothing; the error lists these choices
        * `"reset"`: the state that the component was created with
        * `"from_first"`: the first of the saved states, on every host
        * a function `(old_states, new_count) -> new_states`, with lists ordered by
          host, machine or group; all hosts call it with the same arguments
      required: whether a step without this component is an error. If an optional
        component raises an error in a save, the step omits the component and a warning
        is logged; `ec.Checkpointer` omits it on all hosts and emits an event.

    Attributes:
      state: the object, or the pytree that was loaded last or will be saved next.
      sharing: see above.
      on_resize: see above.
      required: see above.
      validation: see above.
      save_problem: why the last save omitted the component; None if it did not.
      save_timeout_secs: the time, in seconds, that `ec.Checkpointer` allows the
        component in a save, at most 240; a component that takes longer fails the save.
        The same limit applies to a load, which then fails on all hosts.

    Raises:
      ConfigError: if the sharing, rule, level or mesh axis does not exist, or this
        host's devices are not all in one group.
    """

    save_timeout_secs: float = 240.0

    def __init__(
        self,
        state: Any,
        sharing: Pattern | Callable[[], Pattern] = "global",
        *,
        axis: str | tuple[str, ...] = (),
        mesh: Mesh | None = None,
        processes_per_node: int | None = None,
        validation: Level = "none",
        on_resize: Rule = ERROR,
        required: bool = True,
    ) -> None:
        if not callable(on_resize) and on_resize not in (ERROR, RESET, FROM_FIRST):
            raise errors.ConfigError(
                f"on_resize={on_resize!r} is not a known rule; omit it for the default"
                f" ('error'), or {_CHOICES}"
            )
        check_level(validation)
        self.state = state
        self.on_resize = on_resize
        self.required = required
        self.validation: Level = validation
        self.save_problem: str | None = None
        # The last save's state, until it is compared with other hosts' states.
        self.taken: Any = None
        self.sharing = sharing
        _check_given(
            sharing,
            axis=axis,
            mesh=mesh,
            processes_per_node=processes_per_node,
            validation=validation,
        )
        self._processes_per_node = processes_per_node
        self._group = None
        if mesh is not None:
            hosts_of = np.vectorize(lambda each: each.process_index, otypes=[int])
            self._group = per_group(
                hosts_of(mesh.devices),
                mesh.axis_names,
                (axis,) if isinstance(axis, str) else axis,
                host=topology.this_host(),
            )
        is_reset = on_resize == RESET
        self._initial: Any = encoding.encode(self.get()) if is_reset else None

    @property
    def is_compared(self) -> bool:
        """Whether `ec.Checkpointer` compares the states of all hosts in a save."""
        return self.validation != "none" and topology.num_hosts() > 1

    def __str__(self) -> str:
        # Hosts compare this text.
        kind = "component" if self.required else "optional component"
        # A function's result is known only when the state is captured.
        sharing = "computed" if callable(self.sharing) else self.sharing
        compared = ", compared between hosts" if self.is_compared else ""
        return f"{kind}, {sharing}{compared}"

    def present(self) -> Sharing:
        """The current world's states, and which of them is this host's.

        Raises:
          ConfigError: if `sharing` is a function that returns an unknown sharing.
        """
        given, each = self.sharing, self._processes_per_node
        pattern = given() if callable(given) else given
        num_hosts = topology.num_hosts()
        everywhere = [0] * num_hosts
        nodes: Sequence[object] | None = {
            GLOBAL: everywhere,
            REPLICATED: everywhere,
            PER_HOST: range(num_hosts),
        }.get(pattern)
        if pattern == PER_GROUP and self._group is not None:
            return self._group
        if pattern == PER_NODE:
            nodes = _nodes() if each is None else [n // each for n in range(num_hosts)]
        if nodes is None:
            raise errors.ConfigError(
                f"a component's sharing= function returned {pattern!r}; it must return"
                f" one of {[*_TAKES]}. For 'per_group', also pass axis and mesh to the"
                " component"
            )
        return of_nodes(pattern, nodes, host=topology.this_host())

    def get(self) -> Any:
        """Returns the values to save: the pytree, or the object's state."""
        return self._methods()[0]()

    def put(self, values: Any) -> None:
        """Sets the pytree or the object to values that `get` returned."""
        self._methods()[1](values)

    def _methods(self) -> tuple[Callable[[], Any], Callable[[Any], object]]:
        for names in _METHODS:
            get, put = (getattr(self.state, name, None) for name in names)
            if callable(get) and callable(put):
                return get, put
        return lambda: self.state, functools.partial(setattr, self, "state")

    async def save(self, directory: ocp.path.PathAwaitingCreation) -> Awaitable[None]:
        """Captures the state; the awaitable writes it into Orbax's directory."""
        writes: list[Callable[[epath.Path], None]] = []
        self.save_problem, self.taken = None, None
        try:
            writes = self._take()
        except Exception as error:
            if self.required:
                raise
            logging.warning("an optional component is not saved: %r", error)
            self.save_problem = repr(error)

        async def write() -> None:
            path = await directory.await_creation()
            # Releases each state once it is written. Stops if any host had a problem.
            while writes and self.save_problem is None:
                writes.pop()(path)

        return write()

    async def load(self, directory: epath.Path) -> Awaitable[None]:
        """Loads the state in `directory` before returning the awaitable.

        Orbax would wrap an error from the awaitable in one about a different handler.
        """
        self.put(self.read(directory))
        return asyncio.sleep(0)

    def read(self, directory: epath.PathLike) -> Any:
        """Reads this host's values from `directory`.

        Raises:
          CheckpointError: if the values cannot be read, or the hosts' states differ
            from the saved ones and `on_resize` is `"error"`.
        """
        path = epath.Path(directory)
        saved = Description.read(path)
        return self.of_states(
            path.name,
            saved.pattern,
            saved.states,
            read=lambda number: encoding.decode(
                encoding.read(path / f"{saved.states[number]}.npz"), self.get()
            ),
        )

    def of_states(
        self,
        name: str,
        pattern: str,
        states: Sequence[str],
        *,
        read: Callable[[int], Any],
    ) -> Any:
        """Chooses this host's values from states that any program has saved.

        Args:
          name: the component name, used in error messages.
          pattern: the saved sharing, used in error messages.
          states: the names of the saved states, in order; if the hosts now have
            different states, `on_resize` determines the result.
          read: a function that takes an index of `states` and reads that state.

        Raises:
          CheckpointError: see `read`.
        """
        now = self.present()
        rule, count = self.on_resize, len(now.names)
        try:
            if sorted(states) == sorted(now.names):
                return read(states.index(now.name))
            # All hosts share a single state, regardless of the pattern.
            if len(states) == count == 1 or rule == FROM_FIRST:
                return read(0)
            if rule == RESET:
                return encoding.decode(copy.deepcopy(self._initial), self.get())
            if not callable(rule):
                raise errors.CheckpointError(
                    f"it was saved as {pattern!r} with {len(states)} states"
                    f" ({errors.first_of(states)}), but this world needs {count}"
                    f" ({errors.first_of(now.names)}); {_CHOICES}"
                )
            new = rule([read(n) for n in range(len(states))], count)
            if len(new) != count:
                raise errors.CheckpointError(
                    f"the on_resize= function returned {len(new)} states, but {count}"
                    " are needed; it must return a list with one state for each host,"
                    " machine or group"
                )
            return new[now.own]
        except errors.CheckpointError as error:
            raise errors.CheckpointError(f"component {name!r}: {error}") from None

    def _take(self) -> list[Callable[[epath.Path], None]]:
        # Captures the state and returns functions that write this host's files.
        sharing = self.present()
        # All hosts get the state: a user's object may need collectives for that.
        values = self.get()
        writes: list[Callable[[epath.Path], None]] = []
        if sharing.is_writer or self.is_compared:
            encoded = encoding.encode(values)
            if self.is_compared:
                self.taken = jax.tree.map(encoding.on_host, values)
            if sharing.is_writer:
                file = f"{sharing.name}.npz"
                writes.append(lambda path: encoding.write(path / file, encoded))
        if topology.this_host() == 0:
            rule: Any = self.on_resize
            if not isinstance(rule, str):
                # A partial function has only a class name.
                name = getattr(rule, "__qualname__", type(rule).__qualname__)
                rule = f"{rule.__module__}.{name}"
            content = Description(
                pattern=sharing.pattern,
                axes=sharing.axes,
                states=sharing.names,
                hosts=topology.num_hosts(),
                kind=encoding.type_name(self.state),
                on_resize=rule,
                required=self.required,
            ).to_bytes()
            writes.append(lambda path: storage.write_atomic(path / FILE, content))
        return writes


def _check_given(sharing: Any, **options: Any) -> None:
    given = {n: each for n, each in options.items() if each not in ((), None, "none")}
    takes = _OF_FUNCTION if callable(sharing) else _TAKES.get(sharing)
    if takes is None:
        raise errors.ConfigError(
            f"sharing={sharing!r} is not a component sharing; pass one of"
            f" {[*_TAKES]}, or a function that returns one of them"
        )
    needs_mesh = "axis" in given or sharing == PER_GROUP
    is_whole = "mesh" in given or not needs_mesh
    if (
        given.keys() - {*takes}
        or given.get("processes_per_node", 1) < 1
        or not is_whole
    ):
        raise errors.ConfigError(
            f"a component with sharing={sharing!r} accepts only the options"
            f" {[*takes]} (axis requires mesh, and processes_per_node must be at least"
            f" 1), but it got {given}"
        )


@functools.cache
def _nodes() -> tuple[str, ...]:
    # Each host's machine, exchanged once.
    own, gather = process.this(), allgather.shared().gather
    node = own.boot_id or own.host
    return tuple(gather("nodes", node, timeout_secs=_PATIENCE_SECS))


def of_nodes(pattern: str, nodes: Sequence[object], *, host: int) -> Sharing:
    """One state per node, ordered by each node's first host.

    Args:
      pattern: any pattern except PER_GROUP. Depending on it, a node is all hosts, one
        host, or one machine.
      nodes: the node of each host.
      host: the index of this host.
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
    """One state per group of hosts along some mesh axes.

    Args:
      mesh_hosts: the host index of each device in the mesh.
      axis_names: the mesh axes.
      axes: the axes along which devices share a state, just as they share the result of
        `jax.lax.psum` over them.
      host: the index of this host.

    Raises:
      ConfigError: if the mesh lacks an axis, or this host is not in exactly one group.
    """
    unknown = [axis for axis in axes if axis not in axis_names]
    if unknown or not axes or len(set(axes)) < len(axes):
        raise errors.ConfigError(
            f"axis={tuple(axes)!r} of a per_group component does not match the mesh"
            f" axes {tuple(axis_names)}; list one or more mesh axes, each once"
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
            f" axis={tuple(axes)!r} ({errors.first_of(names[n] for n, _ in groups)}),"
            " but they must be in exactly one, because a host has one state. Either"
            f" share the state along a different axis of {tuple(axis_names)}, or"
            " create a mesh of all hosts' devices in which each host's devices are in"
            " one group"
        )
    ((own, is_writer),) = groups
    return Sharing(
        pattern=PER_GROUP,
        names=tuple(names),
        own=own,
        is_writer=is_writer,
        axes=tuple(axes),
    )
