"""A component: a named piece of the state of a run, and how hosts share it.

| sharing | states | written by | loaded by |
|---|---|---|---|
| `global` | one | host 0 | all hosts |
| `replicated` | one, which is equal on all hosts | host 0 | all hosts |
| `per_host` | one for each host (process) | each host | the host with its number |
| `per_node` | one for each node (machine) | the first host on it | the hosts on it |
| `per_group` | one for each group along mesh axes | its first host | its hosts |

States are found by their numbers or coordinates: a host that has another number than
before loads the state of its place in the world or mesh, not the file that it wrote.

It wraps a pytree, or an object with `get_state` and `set_state`, or with `state_dict`
and `load_state_dict`, and is a `StatefulCheckpointable` of Orbax: it goes into the same
dict as weights and batches, in our checkpointer and in Orbax's own.

    step = ec.components.Component({"lr": 0.1, "ema": ema}, "global")
    checkpointer.save_checkpointables(40, {"state": weights, "schedule": step})
    checkpointer.load_checkpointables(None, {"state": abstract, "schedule": step})
    step.state["lr"]

Saving and loading contain no collective and no barrier: which host writes which file
follows from host numbers and the mesh alone (`sharing`), so a host that is missing
delays no other.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from absl import logging
from etils import epath
from jax.sharding import Mesh

from elastic_ckpt.checkpoint.components import (
    description,
    encoding,
    nodes,
    resize,
    state_file,
)
from elastic_ckpt.checkpoint.components import sharing as sharing_of
from elastic_ckpt.checkpoint.components.validation import Level, check_level
from elastic_ckpt.core import background, errors, storage, topology

T = TypeVar("T")

# How an object gives and takes its state, in the order in which these are tried.
_METHODS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


class AwaitedDirectory(Protocol):
    """A directory that Orbax is about to create (its `PathAwaitingCreation`)."""

    async def await_creation(self) -> epath.Path:
        """Waits until the directory exists, and returns it."""


class Component:
    """State of a run other than weights and data, with the way in which hosts share it.

        schedule = ec.components.Component({"lr": 0.1}, "global")
        checkpointer.save_checkpointables(40, {"state": state, "schedule": schedule})
        checkpointer.load_checkpointables(40, {"state": like, "schedule": schedule})
        schedule.state["lr"]

    Args:
      state: a pytree, or an object with `get_state` and `set_state`, or with
        `state_dict` and `load_state_dict`. The state may contain arrays of JAX and
        NumPy, random keys, numbers, texts, bytes, None, and dicts, lists, tuples and
        other pytrees of these.
      sharing: which hosts have a state of their own:

        * `"global"`: none; host 0 saves the only state, and all hosts load it
        * `"replicated"`: none; all hosts have the same state, and a difference between
          them is a fault, which `validation` finds
        * `"per_host"`: each host
        * `"per_node"`: each machine, whose hosts share it
        * `"per_group"`: each group of devices along `axis` of `mesh`

        A function that returns one of these, the same on all hosts, is called at each
        save and load.
      axis: for `"per_group"`, the name of a mesh axis, or several. Devices that differ
        only in their places on these axes share a state, as they share the result of
        `jax.lax.psum` over them: on a mesh of `data` and `model`, the state of
        `axis="data"` belongs to one place on `model`. Axes of size 1 are ignored.
      mesh: for `"per_group"`, the mesh; each host has devices of one group only.
      processes_per_node: for `"per_node"`, how many consecutive hosts are on a machine.
        Without it the hosts tell each other the ids of their machines, for which all of
        them need to make the component.
      validation: for `"replicated"`, the level of `validate` at which the states of all
        hosts are compared when they are saved: `"quick"`, `"tensor"` or `"full"`. A
        difference is reported by the event `replicas_differ`; the step is saved all the
        same. Only `ec.Checkpointer` compares.
      on_resize: what to load if the saved states are those of another number of hosts,
        machines or groups, or of another sharing:

        * `"error"`: nothing; the error lists these choices
        * `"reset"`: the state that the component was made with
        * `"from_first"`: the first of the saved states, on every host
        * a function `(old_states, new_count) -> new_states`, with lists in the order of
          hosts, machines or groups; all hosts call it with the same arguments
      required: whether a step without this component is an error. An optional component
        that raises when it is saved is left out of the step, with a warning in the log;
        `ec.Checkpointer` leaves it out on all hosts, and emits an event.

    Attributes:
      state: the object, or the pytree, which is saved next, or was loaded last.
      sharing: as given.
      on_resize: as given.
      required: as given.
      validation: as given.
      save_problem: why the last save left it out; None if it did not.
      save_timeout_secs: how long `ec.Checkpointer` waits for it in a save, at most 240;
        then the save of the step fails. A load waits as long, and then fails on all
        hosts.

    Raises:
      ConfigError: if there is no such sharing, rule or level; if the mesh has no such
        axis, or this host is in several groups.
    """

    save_timeout_secs: float = 240.0

    def __init__(
        self,
        state: Any,
        sharing: sharing_of.Pattern | Callable[[], sharing_of.Pattern] = "global",
        *,
        axis: str | tuple[str, ...] = (),
        mesh: Mesh | None = None,
        processes_per_node: int | None = None,
        validation: Level = "none",
        on_resize: resize.Rule = resize.ERROR,
        required: bool = True,
    ) -> None:
        resize.check(on_resize)
        check_level(validation)
        self.state = state
        self.on_resize = on_resize
        self.required = required
        self.validation: Level = validation
        self.save_problem: str | None = None
        # The state of the last save, until it was compared with those of other hosts.
        self.taken: encoding.Encoded | None = None
        self.sharing = sharing
        _check_given(sharing, axis, mesh, processes_per_node, validation)
        self._nodes = self._group = None
        if callable(sharing) or sharing == sharing_of.PER_NODE:
            self._nodes = nodes.Nodes(processes_per_node)
        if mesh is not None:
            self._group = _group(axis, mesh)
        # Only this rule needs it.
        is_reset = on_resize == resize.RESET
        self._initial = encoding.encode(self.get()) if is_reset else None

    @property
    def is_compared(self) -> bool:
        """Whether `ec.Checkpointer` compares the states of all hosts in a save."""
        return self.validation != "none" and topology.num_hosts() > 1

    def present(self) -> sharing_of.Sharing:
        """The names of the states that the hosts have now, and which is this host's.

        Raises:
          ConfigError: if `sharing` is a function, and returns no sharing.
        """
        given = self.sharing
        name = given() if callable(given) else given
        host, num_hosts = topology.this_host(), topology.num_hosts()
        if name in (sharing_of.GLOBAL, sharing_of.REPLICATED):
            return sharing_of.of_all(name, host=host)
        if name == sharing_of.PER_HOST:
            return sharing_of.per_host(host=host, num_hosts=num_hosts)
        if name == sharing_of.PER_NODE and self._nodes is not None:
            return sharing_of.per_node(self._nodes.of_all_hosts(), host=host)
        if name == sharing_of.PER_GROUP and self._group is not None:
            return self._group
        raise errors.ConfigError(
            f"the function sharing= of a component returned {name!r}; return one of"
            f" {sharing_of.PATTERNS}, and for per_group give axis and mesh"
        )

    def get(self) -> Any:
        """The values to save: the pytree, or the object's state."""
        methods = _methods(self.state)
        return self.state if methods is None else methods[0]()

    def put(self, values: Any) -> None:
        """Sets the pytree or the object to values that `get` has returned."""
        methods = _methods(self.state)
        if methods is None:
            self.state = values
        else:
            methods[1](values)

    async def save(self, directory: AwaitedDirectory) -> Awaitable[None]:
        """Captures the state; the awaitable writes it into Orbax's directory."""
        files: dict[str, Callable[[epath.Path], None]] = {}
        self.save_problem, self.taken = None, None
        try:
            files = self._files()
        except Exception as error:
            if self.required:
                raise
            logging.warning("an optional component is not saved: %r", error)
            self.save_problem = repr(error)

        async def write() -> None:
            path = await directory.await_creation()
            if self.save_problem is None:
                await _in_thread(lambda: _write(path, files))

        return write()

    async def load(self, directory: epath.Path) -> Awaitable[None]:
        """Loads the state in `directory`; it is set when the awaitable is returned.

        Otherwise Orbax would wrap an error in one about another handler.
        """
        self.put(await _in_thread(lambda: self.read(directory)))
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def read(self, directory: epath.PathLike) -> Any:
        """Reads the values for this host that are saved in `directory`.

        Raises:
          CheckpointError: if they cannot be read, or the hosts have other states than
            were saved and `on_resize` is `"error"`.
        """
        path = epath.Path(directory)
        saved = description.read(path)

        def read(number: int) -> Any:
            encoded = state_file.read(
                description.state_path(path, saved.states[number])
            )
            return encoding.decode(encoded, self.get(), is_last=True)

        return self.of_states(path.name, saved.pattern, saved.states, read=read)

    def of_states(
        self,
        name: str,
        pattern: str,
        states: Sequence[str],
        *,
        read: Callable[[int], Any],
    ) -> Any:
        """Chooses the values for this host from saved states, of any program.

        Args:
          name: the name of the component, for messages.
          pattern: the sharing under which they were saved, for messages.
          states: the names of the saved states, in order; if the hosts have others now,
            `on_resize` decides.
          read: reads the values of the state at an index of `states`.

        Raises:
          CheckpointError: as `read`.
        """
        now = self.present()
        place = resize.place_of_same(states, now.names, now.own)
        if place is None and self.on_resize == resize.ERROR:
            raise resize.refused(name, pattern, states, now.names)
        try:
            if place is not None:
                return read(place)
            old = [read(n) for n in resize.needed(self.on_resize, len(states))]
            initial = self._initial and encoding.decode(self._initial, self.get())
            return resize.new_state(
                self.on_resize,
                old,
                initial=initial,
                new_count=len(now.names),
                own=now.own,
            )
        except errors.CheckpointError as error:
            raise errors.CheckpointError(f"component {name!r}: {error}") from None

    def _files(self) -> dict[str, Callable[[epath.Path], None]]:
        # The files that this host writes, by name.
        sharing = self.present()
        # On all hosts: a user's object may ask all of them for its state.
        values = self.get()
        files: dict[str, Callable[[epath.Path], None]] = {}
        if sharing.is_writer or self.is_compared:
            encoded = encoding.encode(values)
            self.taken = encoded if self.is_compared else None
            if sharing.is_writer:
                path = description.state_path(epath.Path(), sharing.name)
                write = functools.partial(state_file.write, encoded=encoded)
                files[path.name] = write
        if topology.this_host() == 0:
            saved = description.Description(
                pattern=sharing.pattern,
                axes=sharing.axes,
                states=sharing.names,
                hosts=topology.num_hosts(),
                kind=encoding.type_name(self.state),
                on_resize=resize.name_of(self.on_resize),
                required=self.required,
            )
            content = description.to_bytes(saved)
            files[description.FILE] = functools.partial(
                storage.write_atomic, content=content
            )
        return files


def _check_given(
    sharing: object,
    axis: object,
    mesh: Mesh | None,
    processes_per_node: int | None,
    validation: Level,
) -> None:
    if not callable(sharing) and sharing not in sharing_of.PATTERNS:
        raise errors.ConfigError(
            f"sharing={sharing!r} of a component: give one of {sharing_of.PATTERNS}, or"
            " a function that returns one"
        )
    for name, is_given, pattern in (
        ("axis and mesh", axis != () or mesh is not None, sharing_of.PER_GROUP),
        ("processes_per_node", processes_per_node is not None, sharing_of.PER_NODE),
        ("validation", validation != "none", sharing_of.REPLICATED),
    ):
        # What a function returns may need any of them, but may not be compared.
        is_open = callable(sharing) and name != "validation"
        if is_given and not is_open and sharing != pattern:
            raise errors.ConfigError(
                f"a component with sharing={sharing!r} takes no {name}, which is for"
                f" {pattern!r}"
            )
    if (sharing == sharing_of.PER_GROUP or axis != ()) and mesh is None:
        raise errors.ConfigError(
            'a component with sharing="per_group" needs axis= and mesh='
        )


def _group(axis: str | tuple[str, ...], mesh: Mesh) -> sharing_of.Sharing:
    hosts = np.vectorize(lambda device: device.process_index, otypes=[int])
    return sharing_of.per_group(
        hosts(mesh.devices),
        mesh.axis_names,
        (axis,) if isinstance(axis, str) else axis,
        host=topology.this_host(),
    )


def _methods(state: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    for names in _METHODS:
        get, put = (getattr(state, name, None) for name in names)
        if callable(get) and callable(put):
            return get, put
    return None


def _write(
    directory: epath.Path, files: dict[str, Callable[[epath.Path], None]]
) -> None:
    # Each state is released once it is written.
    while files:
        name, write = files.popitem()
        write(directory / name)


def _in_thread(call: Callable[[], T]) -> Awaitable[T]:
    # Not asyncio's own threads, for which a program waits at its end.
    return asyncio.wrap_future(background.in_thread(call, name="component"))
