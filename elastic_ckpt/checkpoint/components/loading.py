"""Loads the components of a step, strictly or not, with a summary.

A strict load compares its outcome on all hosts: if one host cannot load a component,
the load fails on all of them, with the same error.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

from absl import logging
from etils import epath
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint.components.component import Component
from elastic_ckpt.core import allgather, background, errors

# For a component that declares no limit, and the longest one. A checkpointer that waits
# for all components of a host waits longer.
_MOST_SECS = 240.0
# How long hosts wait for each other at the end of a load.
_PATIENCE_SECS = 600.0
_MOST_CHARACTERS = 2000


class Source(Protocol):
    """A checkpointer: ours, or Orbax's `training.Checkpointer`."""

    @property
    def latest(self) -> Any:
        """The newest step, or None."""
        ...

    def checkpointables_metadata(self, step: Any = None) -> Any:
        """The contents of a step, by checkpointable."""
        ...

    def load_checkpointables(
        self, step: Any = None, abstract_checkpointables: Any = None
    ) -> dict[str, Any]:
        """Restores checkpointables."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """What `load` has loaded, and what it has not.

    Attributes:
      step: the training step.
      loaded: the components and trees that were loaded, by name.
      skipped: why others were left as they are, by name.
      failed: why others could not be loaded, by name.
    """

    step: int
    loaded: Mapping[str, Any]
    skipped: Mapping[str, str]
    failed: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"step {self.step}: loaded {', '.join(self.loaded) or 'nothing'}"]
        for kind in ("skipped", "failed"):
            lines += [f"{kind} {n}: {why}" for n, why in getattr(self, kind).items()]
        return "\n".join(lines)


def named(components: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a dict of components, in which no name may occur twice.

    Args:
      components: a mapping, or pairs of a name and a component.

    Raises:
      ConfigError: if names occur twice; it lists them all.
    """
    if isinstance(components, Mapping):
        return dict(components)
    pairs = list(components)
    counts = collections.Counter(name for name, _ in pairs)
    doubled = sorted(name for name, count in counts.items() if count > 1)
    if doubled:
        raise errors.ConfigError(
            f"several components are called {doubled}; give each another name"
        )
    return dict(pairs)


def load(
    checkpointer: Source,
    components: Mapping[str, Any] | Iterable[tuple[str, Any]],
    step: Any = None,
    *,
    strict: bool = True,
    ignore: Collection[str] = (),
) -> Summary:
    """Loads components, and trees beside them, from a step: all of them or none.

    Components are set after all of them were read, so that a strict call that fails
    leaves them, on all hosts, as they were. Objects of other classes, such as batches,
    are loaded last, in their order. Every process calls it.

    Args:
      checkpointer: ours or Orbax's.
      components: components by name, or pairs of a name and a component; also abstract
        trees and other checkpointables, as `load_checkpointables` takes them.
      step: the number of the step; None takes the newest.
      strict: whether it is an error if a required component is missing or cannot be
        loaded on any host, or if the step has a component that is not requested.
        Otherwise the summary of that host lists it.
      ignore: names of components of the step that need not be requested.

    Raises:
      ConfigError: if a name occurs twice.
      CheckpointError: if there is no such step, a tree cannot be restored, or `strict`
        is violated; raised on all hosts, with all names and the hosts that differ.
      RunError: if a host did not finish its load in time.
    """
    wanted = named(components)
    held = checkpointer.checkpointables_metadata(step)
    there = {name: each for name, each in wanted.items() if name in held.metadata}
    readers: dict[str, _Reader] = {}
    # Objects that set themselves when they are read.
    direct: dict[str, _Reader] = {}
    for name, each in there.items():
        if isinstance(each, ocp.StatefulCheckpointable):
            of_kind = readers if isinstance(each, Component) else direct
            of_kind[name] = _Reader(each)
    unknown = [
        name
        for name, tree in held.metadata.items()
        if tree is None and name not in wanted and name not in ignore
    ]
    skipped = dict.fromkeys(unknown, "the step has it, and it was not asked for")
    failed: dict[str, str] = {}
    for name in [name for name in wanted if name not in there]:
        why = f"step {held.step} has no such part; it has {sorted(held.metadata)}"
        (failed if _is_required(wanted[name]) else skipped)[name] = why
    if strict:
        # Before anything is read.
        _check(held.step, failed, unknown)
    first = {n: readers.get(n, each) for n, each in there.items() if n not in direct}
    loaded = checkpointer.load_checkpointables(step, first) if first else {}
    # Ours may have gone back to an earlier step.
    reached = checkpointer.latest if first and step is None else held
    reached_step = reached.step if strict else None
    _problems(readers, reached_step)
    for each in readers.values():
        each.finish(can_undo=strict)
    try:
        failed |= _problems(readers, reached_step)
        if direct:
            at = reached.step if first and step is None else step
            checkpointer.load_checkpointables(at, direct)
            failed |= _problems(direct, reached_step)
            # Of these alone it may be an earlier step still.
            reached = checkpointer.latest if step is None else held
    except Exception:
        for name, each in readers.items():
            try:
                each.undo()
            except Exception:
                logging.exception("component %r has not its values from before", name)
        raise
    restored = {
        name: each if name in readers or name in direct else loaded[name]
        for name, each in there.items()
        if name not in failed
    }
    return Summary(step=reached.step, loaded=restored, skipped=skipped, failed=failed)


def _problems(
    readers: Mapping[str, _Reader], strict_step: int | None
) -> dict[str, str]:
    # By name, why components failed; a strict call fails with those of required ones,
    # on all hosts.
    failed = {
        n: each.problem for n, each in readers.items() if each.problem is not None
    }
    if strict_step is not None:
        required = {
            n: why for n, why in failed.items() if _is_required(readers[n].component)
        }
        _check(strict_step, required)
    return failed


def _is_required(value: Any) -> bool:
    return not isinstance(value, Component) or value.required


def _check(step: int, failed: Mapping[str, str], unknown: Collection[str] = ()) -> None:
    problems = [f"{name!r} cannot be loaded: {why}" for name, why in failed.items()]
    if unknown:
        problems.append(
            f"{sorted(unknown)} of the step were not asked for (ask for them, or name"
            " them in ignore=)"
        )
    sent = [each[:_MOST_CHARACTERS] for each in problems]
    of_hosts = allgather.shared().gather("load", sent, timeout_secs=_PATIENCE_SECS)
    hosts: dict[str, list[int]] = {}
    for host, problems_there in enumerate(of_hosts):
        for problem in problems_there:
            hosts.setdefault(problem, []).append(host)
    if hosts:
        listed = (
            each if len(on) == len(of_hosts) else f"{_named(on)}: {each}"
            for each, on in hosts.items()
        )
        raise errors.CheckpointError(
            f"step {step}: {'; '.join(listed)}; or load what there is with strict=False"
        )


def _named(hosts: list[int]) -> str:
    numbers = errors.first_of(map(str, hosts))
    return f"host {numbers}" if len(hosts) == 1 else f"hosts {numbers}"


class _Reader:
    # Reads a component without setting it, and keeps an error: the other components
    # are read all the same.

    def __init__(self, component: ocp.StatefulCheckpointable) -> None:
        self.component = component
        self.problem: str | None = None
        self._values: Any = None
        self._undo: Callable[[], None] | None = None

    async def save(self, directory: Any) -> Awaitable[None]:
        """Never called; Orbax recognizes a checkpointable by this method too."""
        raise NotImplementedError

    async def load(self, directory: epath.Path) -> Awaitable[None]:
        """Reads the component in `directory`."""
        limit_secs = getattr(self.component, "save_timeout_secs", _MOST_SECS)
        limit = asyncio.timeout(min(limit_secs, _MOST_SECS))
        # Not asyncio's threads, for which a program waits at its end.
        reading = background.in_thread(lambda: self._read(directory), name="component")
        try:
            async with limit:
                self._values = await asyncio.wrap_future(reading)
        except Exception as error:
            self._note(error)
            if limit.expired():
                self.problem = (
                    "it was not loaded in time; see what it waits for, or set its"
                    f" save_timeout_secs (at most {_MOST_SECS:g})"
                )
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def _read(self, directory: epath.Path) -> Any:
        if isinstance(self.component, Component):
            return self.component.read(directory)

        async def load() -> None:
            await (await self.component.load(directory))

        return asyncio.run(load())

    def finish(self, *, can_undo: bool) -> None:
        """Sets the component to what was read."""
        assert isinstance(self.component, Component)
        if self.problem is not None:
            return
        try:
            if can_undo:
                self._undo = self.component.undo()
            self.component.put(self._values)
        except Exception as error:
            self._note(error)
        self._values = None

    def undo(self) -> None:
        """Sets the component to its values from before `finish`."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()

    def _note(self, error: Exception) -> None:
        is_ours = isinstance(error, errors.ElasticCkptError)
        self.problem = str(error) if is_ours else repr(error)
