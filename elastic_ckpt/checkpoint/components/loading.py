"""Loads a step's components, strictly or not, and summarizes the outcome.

Every component is read and decoded, and the hosts exchange any errors, before any
component is set. So if one host cannot read a component, a strict load fails on all
hosts with the same error and changes nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any

from etils import epath
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import component_io
from elastic_ckpt.checkpoint.components.component import Component
from elastic_ckpt.core import allgather, errors

# How long hosts wait for each other at the end of a load.
_PATIENCE_SECS = 600.0
_MOST_CHARACTERS = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """The components that `load` loaded, skipped or could not load.

    Attributes:
      step: the training step.
      loaded: the loaded components and trees, keyed by name.
      skipped: why components were skipped, keyed by name.
      failed: why components could not be loaded, keyed by name.
    """

    step: int
    loaded: Mapping[str, Any]
    skipped: Mapping[str, str]
    failed: Mapping[str, str]

    def __str__(self) -> str:
        why = [
            f"{kind} {name}: {why}"
            for kind in ("skipped", "failed")
            for name, why in getattr(self, kind).items()
        ]
        first = f"step {self.step}: loaded {', '.join(self.loaded) or 'nothing'}"
        return "\n".join([first, *why])


def named(components: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a dict of components.

    Raises:
      ConfigError: if a name occurs more than once; the message lists all such names.
    """
    given: Any = components.items() if isinstance(components, Mapping) else components
    pairs = list(given)
    names = [name for name, _ in pairs]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise errors.ConfigError(
            f"the names {doubled} are used for more than one component; choose a"
            " different name for each component"
        )
    return dict(pairs)


def load(
    checkpointer: Any,
    components: Mapping[str, Any] | Iterable[tuple[str, Any]],
    step: Any = None,
    *,
    strict: bool = True,
    ignore: Collection[str] = (),
) -> Summary:
    """Loads components, and any trees requested with them, from a step: all or none.

    Components are set only after all of them have been read on all hosts. Objects of
    other classes, such as batches, set themselves as they are read. Every process must
    call this.

    Args:
      checkpointer: this library's checkpointer or Orbax's.
      components: components by name, or pairs of a name and a component; also abstract
        trees and other checkpointables, as in `load_checkpointables`.
      step: the step number; None means the newest step.
      strict: whether to raise an error if a required component is missing or cannot be
        loaded on any host, or if the step has a component that is not requested.
        If False, only the summary on the affected host lists the component.
      ignore: names of components in the step that need not be requested.

    Raises:
      ConfigError: if a name occurs twice.
      CheckpointError: if there is no such step, a tree cannot be restored, or `strict`
        is set and a component is missing, unreadable or not requested; raised on all
        hosts, and the message lists the components and hosts.
      RunError: if a host does not finish its load in time.
    """
    wanted = named(components)
    held = checkpointer.checkpointables_metadata(step)
    there = {name: each for name, each in wanted.items() if name in held.metadata}
    stateful = {
        name: _Read(
            each.read
            if isinstance(each, Component)
            # A checkpointer waits longer than this for all of a host's components.
            else functools.partial(
                component_io.load, each, limit_secs=component_io.SAVE_TIMEOUT_SECS
            )
        )
        for name, each in there.items()
        if isinstance(each, ocp.StatefulCheckpointable)
    }
    skipped = {
        name: "the step contains it; request it, or list it in ignore="
        for name, tree in held.metadata.items()
        if tree is None and name not in wanted and name not in ignore
    }
    unknown = [f"{name!r} was not requested: {why}" for name, why in skipped.items()]
    failed: dict[str, str] = {}
    for name in [name for name in wanted if name not in there]:
        why = (
            f"step {held.step} has no checkpointable with this name; its"
            f" checkpointables are {sorted(held.metadata)}"
        )
        (failed if getattr(wanted[name], "required", True) else skipped)[name] = why

    def check() -> None:
        # Raises an error that lists all hosts' problems.
        failed.update({n: each.problem for n, each in stateful.items() if each.problem})
        problems = [
            f"{name!r} cannot be loaded: {why}"
            for name, why in failed.items()
            if getattr(wanted[name], "required", True)
        ]
        sent = "; ".join([*problems, *unknown])[:_MOST_CHARACTERS] if strict else ""
        of_hosts = allgather.shared().gather("load", sent, timeout_secs=_PATIENCE_SECS)
        of_host = {host: each for host, each in enumerate(of_hosts) if each}
        if of_host:
            raise errors.CheckpointError(
                f"step {held.step}: {errors.HostsFailedError(of_host)}; to load only"
                " what can be loaded, pass strict=False"
            )

    check()
    first = {**there, **stateful}
    loaded = checkpointer.load_checkpointables(step, first) if first else {}
    if step is None:
        # This library's checkpointer may have fallen back to an earlier step.
        held = checkpointer.latest or held
    check()
    for name, each in stateful.items():
        if isinstance(there[name], Component) and each.problem is None:
            there[name].put(each.values)
    return Summary(
        step=held.step,
        loaded={
            name: there[name] if name in stateful else loaded[name]
            for name in there
            if name not in failed
        },
        skipped=skipped,
        failed=failed,
    )


@dataclasses.dataclass(eq=False)
class _Read:
    # Reads a component without setting it; any other object sets itself. An error is
    # stored, so that the other components are still read.

    read: Callable[[epath.Path], Any]
    problem: str | None = None
    values: Any = None

    async def save(self, directory: Any) -> Awaitable[None]:
        """Never called; Orbax requires this method in a checkpointable."""
        raise NotImplementedError

    async def load(self, directory: epath.Path) -> Awaitable[None]:
        """Reads the component in `directory`."""
        self.problem = None
        try:
            self.values = self.read(directory)
        except Exception as error:
            is_told = isinstance(error, errors.ElasticCkptError | TimeoutError)
            self.problem = str(error) if is_told else repr(error)
        return asyncio.sleep(0)
