"""Components: checkpointables that write their own files, such as the data state.

A component is an Orbax `StatefulCheckpointable`: `save` captures its state immediately
and writes it later, and `load` reads it from a directory. Each host may write some of
the files, under logical names; hosts that write a file with the same name must write
the same bytes.

A component that does not return in time fails the save or the restore, just like a
component that raises an error, and its thread is abandoned. The limit is the
component's attribute `save_timeout_secs`, at most `SAVE_TIMEOUT_SECS`; without the
attribute, a load may take `LOAD_TIMEOUT_SECS`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent import futures
from typing import Any, TypeVar

from etils import epath
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.core import background, errors

T = TypeVar("T")

# The limit for capturing all components' states, and again for writing them. Twice this
# limit is shorter than other hosts wait for this one (`core.calls.BRIEF_SECS`).
SAVE_TIMEOUT_SECS = 240.0
# The limit for loading a component that does not declare one and may have to read its
# way to a position: shorter than other hosts wait for this one.
LOAD_TIMEOUT_SECS = 540.0
# How long a canceled coroutine may take to finish.
_GRACE_SECS = 0.5


@dataclasses.dataclass(frozen=True)
class Created:
    """An existing directory, in the form that Orbax passes to a component."""

    path: epath.Path

    def __truediv__(self, other: epath.PathLike) -> Created:
        return Created(self.path / other)

    async def await_creation(self) -> epath.Path:
        """Returns the directory immediately."""
        return self.path


def split(
    checkpointables: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, ocp.StatefulCheckpointable]]:
    """Splits checkpointables into pytrees and components.

    Raises:
      CheckpointError: if the checkpointables are not a mapping with string keys.
    """
    is_mapping = isinstance(checkpointables, Mapping)
    if not is_mapping or not all(isinstance(name, str) for name in checkpointables):
        keys = f" with the keys {[*checkpointables][:8]}" if is_mapping else ""
        raise errors.CheckpointError(
            'pass checkpointables as a mapping from names to values, as in {"'
            'state": tree, "data": batches}, not'
            f" {type(checkpointables).__name__}{keys}; for a single pytree, use `save`"
            " and `load`"
        )
    stateful = {
        name: value
        for name, value in checkpointables.items()
        if isinstance(value, ocp.StatefulCheckpointable)
    }
    trees = {
        name: value for name, value in checkpointables.items() if name not in stateful
    }
    return trees, stateful


def begin_save(
    components: Mapping[str, ocp.StatefulCheckpointable],
    directory: Callable[[str], epath.Path],
) -> Callable[[], Any]:
    """Captures the state of all components now.

    Args:
      components: the components, keyed by name.
      directory: a function that takes a component name and creates its directory.

    Returns:
      A function that writes the states; it must be called once, from any thread.

    Raises:
      TimeoutError: if a component does not return in time, here or in the returned
        function.
      Exception: the error of a component's `save`; in that case, no component writes
        its state.
    """
    begun: dict[str, Awaitable[None]] = {}
    try:
        for name, component in components.items():
            take = functools.partial(component.save, Created(directory(name)))
            begun |= _in_time({name: component}, {name: take}, "saved")
    except BaseException:
        _close(begun.values())
        raise
    writes = {name: functools.partial(begun.pop, name) for name in components}
    return functools.partial(_in_time, components, writes, "saved")


def fail_later(
    begin: Callable[[], Callable[[], Any]],
) -> tuple[Callable[[], Any], Exception | None]:
    """Calls `begin`, and delays any error until all hosts write the step.

    Otherwise, the other hosts would wait for this one.

    Returns:
      The writer, which raises the error, if any; and the error, if the caller must
      raise it too (an OSError, such as for full storage, only fails the step).
    """
    try:
        return begin(), None
    except Exception as error:
        told = None if isinstance(error, OSError) else error
        return functools.partial(_raise, error), told


def load(
    component: ocp.StatefulCheckpointable,
    directory: epath.PathLike,
    *,
    limit_secs: float = LOAD_TIMEOUT_SECS,
) -> None:
    """Loads a component.

    Args:
      component: the component.
      directory: the directory with the component's files; its name is the component's
        name.
      limit_secs: the maximum time for the load, in seconds; the component may declare a
        shorter one.

    Raises:
      TimeoutError: if the component does not return in time.
      Exception: the error of the component's `load`.
    """
    path = epath.Path(directory)

    async def read() -> None:
        await (await component.load(path))

    _in_time({path.name: component}, {path.name: read}, "loaded", limit_secs)


def _close(begun: Iterable[Any]) -> None:
    # Closes coroutines that are never awaited.
    for each in begun:
        if inspect.iscoroutine(each):
            each.close()


def _raise(error: Exception) -> None:
    raise error


class _LateError(Exception):
    """A component did not return in time."""


def _in_time(
    components: Mapping[str, ocp.StatefulCheckpointable],
    calls: Mapping[str, Callable[[], Awaitable[T]]],
    done: str,
    most_secs: float = SAVE_TIMEOUT_SECS,
) -> dict[str, T]:
    # Awaits each component's call in its own thread and returns all results.
    limits = {
        name: min(getattr(each, "save_timeout_secs", most_secs), most_secs)
        for name, each in components.items()
    }

    async def limited(name: str) -> T:
        result: Any = None
        try:
            result = await asyncio.wait_for(calls[name](), limits[name])
        finally:
            # The call was canceled, or blocked the event loop beyond its limit.
            if time.monotonic() > began_secs + limits[name]:
                _close([result])
                raise _LateError
        return result

    began_secs = time.monotonic()
    begun = {
        name: background.in_thread(
            lambda name=name: asyncio.run(limited(name)), name="component"
        )
        for name in components
    }
    # A call that blocks its event loop cannot be canceled, so its thread is abandoned.
    longest_secs = max(limits.values(), default=0.0) + _GRACE_SECS
    futures.wait(begun.values(), timeout=longest_secs)
    late = [
        name
        for name, doing in begun.items()
        if not doing.done() or isinstance(doing.exception(), _LateError)
    ]
    if late:
        raise TimeoutError(
            f"the components {sorted(late)} were not {done} in time; find out what they"
            f" wait for, or raise their save_timeout_secs (to at most {most_secs:g})"
        )
    return {name: doing.result() for name, doing in begun.items()}
