"""Loads the components of a step, strictly or not, with a summary.

Every component is read and decoded, and the hosts compare the outcome, before any is
set. So if one host cannot read a component, a strict load fails on all of them, with
the same error, and nothing has changed.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Awaitable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from etils import epath
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import component_io
from elastic_ckpt.checkpoint.components.component import Component
from elastic_ckpt.core import allgather, errors

if TYPE_CHECKING:
    from elastic_ckpt.checkpoint.checkpointer import HostsCheckpointer

# How long hosts wait for each other at the end of a load.
_PATIENCE_SECS = 600.0
_MOST_CHARACTERS = 2000


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
    checkpointer: HostsCheckpointer | ocp.training.Checkpointer,
    components: Mapping[str, Any] | Iterable[tuple[str, Any]],
    step: Any = None,
    *,
    strict: bool = True,
    ignore: Collection[str] = (),
) -> Summary:
    """Loads components, and trees beside them, from a step: all of them or none.

    Components are set once all of them were read on all hosts. Objects of other
    classes, such as batches, set themselves, and are loaded just before. Every process
    calls it.

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
    stateful = {
        name: _Read(each)
        for name, each in there.items()
        if isinstance(each, ocp.StatefulCheckpointable)
    }
    # They set themselves.
    others = {n: e for n, e in stateful.items() if not isinstance(there[n], Component)}
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

    def check(unknown: Collection[str] = ()) -> None:
        failed.update({n: e.problem for n, e in stateful.items() if e.problem})
        if strict:
            required = {n: w for n, w in failed.items() if _is_required(wanted[n])}
            _check(held.step, required, unknown)

    check(unknown)
    first = {n: stateful.get(n, each) for n, each in there.items() if n not in others}
    loaded = checkpointer.load_checkpointables(step, first) if first else {}
    if step is None and first:
        # Ours may have gone back to an earlier step.
        held = checkpointer.latest or held
    check()
    if others:
        checkpointer.load_checkpointables(held.step, others)
        check()
    for name, each in stateful.items():
        if name not in others and each.problem is None:
            each.component.put(each.values)
        loaded[name] = each.component
    return Summary(
        step=held.step,
        loaded={name: loaded[name] for name in there if name not in failed},
        skipped=skipped,
        failed=failed,
    )


def _is_required(value: Any) -> bool:
    return not isinstance(value, Component) or value.required


def _check(step: int, failed: Mapping[str, str], unknown: Collection[str]) -> None:
    # Raises an error with the problems of all hosts.
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
            each
            if len(on) == len(of_hosts)
            else f"host{'s' * (len(on) > 1)} {errors.first_of(map(str, on))}: {each}"
            for each, on in hosts.items()
        )
        raise errors.CheckpointError(
            f"step {step}: {'; '.join(listed)}; or load what there is with strict=False"
        )


class _Read:
    # Reads a component without setting it, or has another object set itself, and keeps
    # an error: the other parts are read all the same.

    def __init__(self, component: Any) -> None:
        self.component = component
        self.problem: str | None = None
        self.values: Any = None

    async def save(self, directory: Any) -> Awaitable[None]:
        """Never called; Orbax recognizes a checkpointable by this method too."""
        raise NotImplementedError

    async def load(self, directory: epath.Path) -> Awaitable[None]:
        """Reads the component in `directory`."""
        self.problem = None
        try:
            if isinstance(self.component, Component):
                self.values = self.component.read(directory)
            else:
                # A checkpointer waits longer for all components of a host.
                limit_secs = component_io.SAVE_TIMEOUT_SECS
                component_io.load(self.component, directory, limit_secs=limit_secs)
        except (errors.ElasticCkptError, TimeoutError) as error:
            self.problem = str(error)
        except Exception as error:
            self.problem = repr(error)
        return asyncio.sleep(0)
