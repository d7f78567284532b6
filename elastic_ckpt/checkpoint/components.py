"""Components: the parts of a step that write their own files, such as the data state.

A component is a `StatefulCheckpointable` of Orbax: `save` takes its state at once and
writes it later, `load` reads it from a directory. Each host may write some of the
files, under logical names; hosts that write files of one name must write the same
bytes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent import futures
from typing import Any, TypeVar

from etils import epath
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.core import storage
from elastic_ckpt.manifests.manifest import ComponentFile

T = TypeVar("T")


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
    """The pytrees and the components among some checkpointables."""
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
) -> Callable[[], None]:
    """Takes the state of all components now.

    Args:
      components: by name.
      directory: makes the directory of the component with a name.

    Returns:
      The writer of the states, to be called once, on any thread.

    Raises:
      Exception: as a component's `save`; then no component writes its state.
    """
    if not components:
        # Saves the caller the time to start a thread and an event loop.
        return lambda: None

    async def begin() -> list[Awaitable[None]]:
        begun: list[Awaitable[None]] = []
        try:
            for name, component in components.items():
                begun.append(await component.save(Created(directory(name))))
        except BaseException:
            for each in begun:
                if inspect.iscoroutine(each):
                    each.close()
            raise
        return begun

    async def finish() -> None:
        await asyncio.gather(*begun)

    begun = _run(begin())
    return lambda: _run(finish())


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


def load(component: ocp.StatefulCheckpointable, directory: epath.PathLike) -> None:
    """Moves a component to the state in `directory`."""

    async def read() -> None:
        await (await component.load(epath.Path(directory)))

    _run(read())


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


def materialise(
    files: Sequence[ComponentFile],
    read: Callable[[ComponentFile], bytes],
    directory: epath.PathLike,
) -> None:
    """Writes the files of a component, as `read` gives them, below `directory`."""
    for file in files:
        _, _, name = file.path.partition("/")
        storage.write_atomic(epath.Path(directory) / name, read(file))


def _raise(error: Exception) -> None:
    raise error


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    # On a separate thread: the caller's may run an event loop already (a notebook).
    with futures.ThreadPoolExecutor(1, thread_name_prefix="component") as thread:
        return thread.submit(asyncio.run, coroutine).result()
