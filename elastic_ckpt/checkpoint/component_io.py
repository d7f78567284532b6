"""Components: the parts of a step that write their own files, such as the data state.

A component is a `StatefulCheckpointable` of Orbax: `save` takes its state at once and
writes it later, `load` reads it from a directory. Each host may write some of the
files, under logical names; hosts that write files of one name must write the same
bytes.

A component that does not return in time fails its step or the restore, as one that
raises does. Its thread is abandoned. The limit is the attribute `save_timeout_secs` of
the component, at most `SAVE_TIMEOUT_SECS`; without it a load may take
`LOAD_TIMEOUT_SECS`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent import futures
from typing import Any, TypeVar

from etils import epath
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint.components.component import Component
from elastic_ckpt.core import background, errors

T = TypeVar("T")

# For taking the states of all components, and again for writing them. Both together
# take less time than other hosts wait for this one (`core.calls.BRIEF_SECS`).
SAVE_TIMEOUT_SECS = 240.0
# For a component that declares no limit, and has to read its way to a position: less
# than other hosts wait for this one.
LOAD_TIMEOUT_SECS = 540.0
# How often deadlines are looked at; a coroutine that was cancelled ends meanwhile.
_LOOK_SECS = 0.5


@dataclasses.dataclass(frozen=True)
class Created:
    """An existing directory, in the form in which Orbax passes one to a component."""

    path: epath.Path

    def __truediv__(self, other: epath.PathLike) -> Created:
        return Created(self.path / other)

    async def await_creation(self) -> epath.Path:
        """The directory; returns at once."""
        return self.path


def split(
    checkpointables: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, ocp.StatefulCheckpointable]]:
    """The pytrees and the components among some checkpointables.

    Raises:
      CheckpointError: if they are not given by name.
    """
    check_named(checkpointables, "save_checkpointables", "save(step, tree) saves")
    stateful = {
        name: value
        for name, value in checkpointables.items()
        if isinstance(value, ocp.StatefulCheckpointable)
    }
    trees = {
        name: value for name, value in checkpointables.items() if name not in stateful
    }
    return trees, stateful


def check_named(checkpointables: Any, verb: str, alone: str) -> None:
    """Raises a CheckpointError if `checkpointables` are not a mapping by name.

    Args:
      checkpointables: what a user passed.
      verb: to which method.
      alone: the call for one pytree, and its verb.
    """
    if not isinstance(checkpointables, Mapping):
        found = f"a {type(checkpointables).__name__}"
    elif not all(isinstance(name, str) for name in checkpointables):
        found = f"a mapping with the keys {list(checkpointables)[:8]!r}"
    else:
        return
    raise errors.CheckpointError(
        f'{verb} takes a mapping of names to pytrees and components, as in {{"state":'
        f' tree, "data": batches}}, and got {found}; {alone} one pytree'
    )


def optional(
    components: Mapping[str, ocp.StatefulCheckpointable],
) -> dict[str, Component]:
    """The components without which a step may be saved."""
    return {
        name: component
        for name, component in components.items()
        if isinstance(component, Component) and not component.required
    }


def kinds(components: Mapping[str, ocp.StatefulCheckpointable]) -> dict[str, str]:
    """What the components are, in words that hosts compare."""
    return {name: _kind(component) for name, component in components.items()}


def begin_save(
    components: Mapping[str, ocp.StatefulCheckpointable],
    directory: Callable[[str], epath.Path],
) -> Callable[[], None]:
    """Takes the state of all components now.

    Args:
      components: by name.
      directory: makes the directory of the component with a name.

    Returns:
      The writer of the states, to be called once, on any thread.

    Raises:
      TimeoutError: if a component has not returned in time, here or in the writer.
      Exception: as a component's `save`; then no component writes its state.
    """
    if not components:
        # Saves the caller the time to start a thread and an event loop.
        return lambda: None

    async def begin(deadlines: dict[str, float]) -> dict[str, Awaitable[None]]:
        begun: dict[str, Awaitable[None]] = {}
        try:
            for name, component in components.items():
                taking = component.save(Created(directory(name)))
                limit_secs = _limit_secs(component)
                begun[name] = await _limited(taking, name, limit_secs, deadlines)
        except BaseException:
            for each in begun.values():
                if inspect.iscoroutine(each):
                    each.close()
            raise
        return begun

    async def finish(deadlines: dict[str, float]) -> None:
        await asyncio.gather(
            *(
                _limited(writing, name, _limit_secs(components[name]), deadlines)
                for name, writing in begun.items()
            )
        )

    begun = _run_in_time(begin, "saved", SAVE_TIMEOUT_SECS)
    return lambda: _run_in_time(finish, "saved", SAVE_TIMEOUT_SECS)


def fail_later(
    begin: Callable[[], Callable[[], None]],
) -> tuple[Callable[[], None], Exception | None]:
    """Calls `begin`; an error of one host is raised when all hosts write the step.

    Otherwise the other hosts would wait for this one.

    Args:
      begin: takes the state of the step now, and returns the writer of it.

    Returns:
      The writer, which raises the error if there was one; and that error, if the caller
      has to raise it: storage that is full fails the step alone.
    """
    try:
        return begin(), None
    except OSError as error:
        return functools.partial(_raise, error), None
    except Exception as error:
        return functools.partial(_raise, error), error


def load(
    component: ocp.StatefulCheckpointable,
    directory: epath.PathLike,
    *,
    name: str | None = None,
) -> None:
    """Moves a component to the state in `directory`.

    Args:
      component: the component.
      directory: of its files.
      name: of the component; by default that of the directory.

    Raises:
      TimeoutError: if it has not returned in time.
      Exception: as its `load`.
    """
    path = epath.Path(directory)

    async def read() -> None:
        await (await component.load(path))

    async def limited(deadlines: dict[str, float]) -> None:
        limit_secs = _limit_secs(component, LOAD_TIMEOUT_SECS)
        await _limited(read(), name or path.name, limit_secs, deadlines)

    _run_in_time(limited, "loaded", LOAD_TIMEOUT_SECS)


def numbered(
    names: Sequence[Mapping[str, Sequence[str]]],
) -> dict[str, dict[str, int]]:
    """The files of each component that all hosts together wrote, numbered as its parts.

    Args:
      names: for each host, by component, the names of the files that it wrote.

    Returns:
      By component and file name, the number of the part, the same on all hosts.
    """
    together: dict[str, set[str]] = {}
    for of_host in names:
        for component, files in of_host.items():
            together.setdefault(component, set()).update(files)
    return {
        component: {file: number for number, file in enumerate(sorted(files))}
        for component, files in sorted(together.items())
    }


def _kind(component: ocp.StatefulCheckpointable) -> str:
    if not isinstance(component, Component):
        return "component"
    kind = "component" if component.required else "optional component"
    # What a function returns is known when the state is taken.
    sharing = "computed" if callable(component.sharing) else component.sharing
    compared = ", compared between hosts" if component.is_compared else ""
    return f"{kind}, {sharing}{compared}"


def _raise(error: Exception) -> None:
    raise error


def _limit_secs(
    component: ocp.StatefulCheckpointable, most_secs: float = SAVE_TIMEOUT_SECS
) -> float:
    declared_secs = getattr(component, "save_timeout_secs", most_secs)
    return min(declared_secs, most_secs)


async def _limited(
    work: Awaitable[T],
    name: str,
    limit_secs: float,
    deadlines: dict[str, float],
) -> T:
    # Until it is done, `deadlines` has its time limit on the monotonic clock.
    deadlines[name] = time.monotonic() + limit_secs
    async with asyncio.timeout(limit_secs):
        result = await work
    if time.monotonic() > deadlines[name]:
        # It blocked the event loop, and the step was given up meanwhile.
        if inspect.iscoroutine(result):
            result.close()
        raise TimeoutError
    del deadlines[name]
    return result


def _run_in_time(
    work: Callable[[dict[str, float]], Coroutine[Any, Any, T]],
    done: str,
    most_secs: float,
) -> T:
    deadlines: dict[str, float] = {}
    doing = background.in_thread(lambda: asyncio.run(work(deadlines)), name="component")
    # A call that blocks the event loop is not cancelled: its thread is abandoned.
    while not futures.wait([doing], timeout=_LOOK_SECS).done:
        if _late(deadlines, time.monotonic() - _LOOK_SECS):
            break
    late = _late(deadlines, time.monotonic())
    if not late:
        return doing.result()
    raise TimeoutError(
        f"the components {late} were not {done} in time; see what they wait for, or set"
        f" their save_timeout_secs (at most {most_secs:g})"
    )


def _late(deadlines: Mapping[str, float], now_secs: float) -> list[str]:
    return sorted(name for name, secs in dict(deadlines).items() if secs <= now_secs)
