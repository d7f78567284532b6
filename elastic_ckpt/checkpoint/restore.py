"""Restore: all hosts read one step, the newest one that is readable.

No value is returned, and no component is loaded, before every host has read and
verified all of its part: if one cannot, all hosts read the step before. If a component
of one host cannot be loaded, the restore fails on all hosts.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from absl import logging

from elastic_ckpt.checkpoint import (
    asked_trees,
    component_io,
    foreign_steps,
    shared_step,
    step_errors,
)
from elastic_ckpt.checkpoint.host.answers import (
    CheckpointMetadata,
    HostsFailedError,
    SearchOutcome,
)
from elastic_ckpt.checkpoint.host.reader import HostReader
from elastic_ckpt.checkpoint.host.step_boxes import TreeReading
from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.core import errors, events, metrics, storage_cause
from elastic_ckpt.core.errors import MOST_NAMED
from elastic_ckpt.steps.line import Line
from elastic_ckpt.steps.manifest import Contents
from elastic_ckpt.steps.read_plan import NEARNESS
from elastic_ckpt.steps.step_id import StepId


class Rules(Protocol):
    """Reads the requested trees of another layout than a step has.

    All hosts call it alike; an error is raised on all of them.
    """

    def readings(
        self,
        checkpoint: CheckpointMetadata,
        contents: Contents,
        trees: Mapping[str, Any],
    ) -> Mapping[str, TreeReading]:
        """How to read those of the trees that are of another layout, by name.

        Args:
          checkpoint: the step.
          contents: of the step, which is open.
          trees: that are requested, by name.

        Raises:
          ConfigError: if the rules do not fit.
        """
        ...

    def of_orbax(
        self, checkpoint: CheckpointMetadata, trees: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Reads those that differ from a step that Orbax alone saved, by name.

        Raises:
          CheckpointError: if a part cannot be read.
          ConfigError: if the rules do not fit.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Wanted:
    # The requested trees and components, by name, and how trees may differ.
    trees: Mapping[str, Any]
    stateful: Mapping[str, Any]
    partial: bool
    rules: Rules | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Read:
    # The requested trees of the saved layout, the bytes read by nearness of their
    # source, the directories of the components' files, and all components of the step.
    asked: asked_trees.AskedTrees
    num_bytes: dict[str, int]
    directories: dict[str, str]
    components: frozenset[str]


class Restored(NamedTuple):
    """A step that was restored.

    Attributes:
      search: the outcome of the search for it.
      components: that it has, whether they were requested or not; none if Orbax alone
        saved it.
      parts: what was requested, by name.
    """

    search: SearchOutcome
    components: frozenset[str]
    parts: dict[str, Any]


def find(
    hosts: Hosts,
    step: int | CheckpointMetadata | None,
    *,
    emit: events.Emit,
    without: Sequence[StepId] = (),
    own_line: Line | None = None,
    is_shared: bool = False,
) -> SearchOutcome:
    """Looks for the newest complete step, or for a certain one.

    Args:
      hosts: of the world.
      step: None for the newest.
      emit: called when newer steps are passed over, and for peers that refuse.
      without: steps and saves that proved to be unreadable.
      own_line: the line that the caller has saved to.
      is_shared: whether hosts will read the step.

    Raises:
      StepNotFoundError: if no tier has a certain step.
      CheckpointError: if a certain step is not complete, there may be one in storage
        that is out of reach, or a newer program has saved the newest one (see
        `tiers.find`).
    """
    number, save = None, ""
    if step is not None:
        number = step_errors.step_number(step)
        save = getattr(step, "save", "")
    outcome = shared_step.find(
        hosts,
        number,
        save=save,
        without=tuple(without),
        own_line=own_line,
        is_shared=is_shared,
    )
    for passed_over, why in outcome.passed_over:
        emit("step_passed_over", step=passed_over, why=why)
    if outcome.refusal is not None:
        raise errors.CheckpointError(outcome.refusal)
    if number is not None and outcome.missing is not None:
        raise step_errors.StepNotFoundError(outcome.missing)
    newest = 0 if outcome.checkpoint is None else outcome.checkpoint.step
    for why in outcome.refusing:
        logging.warning("%s", why)
        _degraded(emit, "peer", newest, why)
    if outcome.out_of_reach is not None:
        if outcome.checkpoint is None:
            raise errors.CheckpointError(
                f"no step is complete in RAM, and {outcome.out_of_reach}"
            )
        _degraded(emit, "persistent", newest, outcome.out_of_reach)
    return outcome


def restore(
    hosts: Hosts,
    step: int | CheckpointMetadata | None,
    wanted: Mapping[str, Any],
    *,
    partial: bool,
    emit: events.Emit,
    rules: Rules | None = None,
) -> Restored:
    """Restores a step.

    Args:
      hosts: of the world.
      step: None takes the newest complete one; if it proves to be unreadable, the one
        before.
      wanted: by name, abstract trees and components.
      partial: whether trees may lack leaves that were saved.
      emit: called with the sources of the values, and with problems.
      rules: read trees of another layout; None if no tree may differ.

    Raises:
      CheckpointError: if there is no such step, it is of another model, or no good copy
        of a part of it is left.
      ConfigError: if the rules do not fit.
    """
    began_secs = time.monotonic()
    trees, stateful = component_io.split(wanted)
    requested = _Wanted(trees=trees, stateful=stateful, partial=partial, rules=rules)
    search, read = _read_newest(hosts, step, requested, emit)
    checkpoint = search.checkpoint
    assert checkpoint is not None
    if read is None:
        restored = _restore_foreign(checkpoint, wanted, requested, emit)
        metrics.CHECKPOINT_LOAD.record(time.monotonic() - began_secs)
        return Restored(search, frozenset(), restored)
    bad = _repair(hosts)
    _load_components(hosts, stateful, read.directories)
    made = hosts.arrays(read.asked.read)
    parts = {**made, **read.asked.filled(made), **stateful}
    restored = {name: parts[name] for name in wanted}
    hosts.all(HostReader.close_step)
    metrics.CHECKPOINT_LOAD.record(time.monotonic() - began_secs)
    if hosts.own == 0:
        _record(read.num_bytes, bad)
    emit("restored_from", step=checkpoint.step, **read.num_bytes, **bad)
    return Restored(search, read.components, restored)


def _load_components(
    hosts: Hosts, stateful: Mapping[str, Any], directories: Mapping[str, str]
) -> None:
    own: Exception | None = None
    problem: str | None = None
    for name, component in stateful.items():
        try:
            component_io.load(component, directories[name], name=name)
        except Exception as error:
            own, problem = error, f"{name!r} was not loaded: {error!r}"
            break
    # No host waits for one that has stopped.
    problems = hosts.share("components_loaded", problem)
    failed = {n: each for n, each in enumerate(problems) if each is not None}
    if failed:
        hosts.all(HostReader.close_step)
        raise own or HostsFailedError(failed)


def _record(read_bytes: Mapping[str, int], bad: Mapping[str, int]) -> None:
    # One host records for all.
    for near, metric in metrics.CHECKPOINT_READ.items():
        metric.record(read_bytes[f"{near}_bytes"])
    metrics.CHECKPOINT_BAD_COPIES.record(bad["bad_copies"])
    metrics.CHECKPOINT_REPAIRED.record(bad["repaired"])


def _repair(hosts: Hosts) -> dict[str, int]:
    # The numbers of bad copies that were read, and of those that were repaired.
    answers = hosts.all(HostReader.bad_copies)
    bad = tuple(copy for copies in answers for copy in copies)
    for each in bad:
        logging.warning(
            "host %s, %s tier: %s %s", each.host, each.tier, each.name, each.why
        )
    repaired = hosts.all(HostReader.repair, bad) if bad else []
    return {"bad_copies": len(bad), "repaired": sum(map(len, repaired))}


def _read_newest(
    hosts: Hosts,
    step: int | CheckpointMetadata | None,
    requested: _Wanted,
    emit: events.Emit,
) -> tuple[SearchOutcome, _Read | None]:
    # Returns the result of `_read`, or None for a step that Orbax alone saved.
    without: list[StepId] = []
    reasons: dict[int, str] = {}

    def noted(name: str, **fields: Any) -> None:
        if name == "step_passed_over":
            reasons.setdefault(fields["step"], fields["why"])
        emit(name, **fields)

    while True:
        search = find(hosts, step, without=without, emit=noted, is_shared=True)
        checkpoint = search.checkpoint
        if checkpoint is None and search.missing is not None:
            raise step_errors.StepNotFoundError(search.missing)
        if checkpoint is None:
            listed = "; ".join(list(reasons.values())[:MOST_NAMED])
            if not listed:
                raise errors.CheckpointError(
                    "no step is complete in any tier; test `checkpointer.latest is not"
                    " None` before you load"
                )
            raise errors.CheckpointError(
                f"no step is complete in any tier: {listed}; bring back a host that has"
                " the missing parts, or begin a new run in another directory"
            )
        if not checkpoint.save:
            return search, None
        try:
            return search, _read(
                hosts, checkpoint, requested, is_shared=search.is_shared
            )
        except HostsFailedError as error:
            # All drivers have this error; hosts may hold what they have read.
            hosts.all(HostReader.close_step)
            if step is not None:
                raise
            without.append(checkpoint.step_id)
            noted("step_passed_over", step=checkpoint.step, why=str(error))


def _read(
    hosts: Hosts,
    checkpoint: CheckpointMetadata,
    requested: _Wanted,
    *,
    is_shared: bool,
) -> _Read:
    shared_step.open_step(hosts, checkpoint, is_shared=is_shared)
    contents = hosts.opened()
    others: Mapping[str, TreeReading] = {}
    if requested.rules is not None:
        others = requested.rules.readings(checkpoint, contents, requested.trees)
    asked = asked_trees.resolve(
        {name: tree for name, tree in requested.trees.items() if name not in others},
        contents,
        step=checkpoint.step,
        partial=requested.partial,
    )
    stateful = sorted(requested.stateful)
    try:
        read_here = hosts.check(asked.read, stateful, others)
    except HostsFailedError as error:
        # An older step would not have it either: the request is wrong.
        raise errors.CheckpointError(next(iter(error.of_host.values()))) from None
    if is_shared:
        shared_step.deal(hosts, checkpoint, stateful)
    answers = hosts.all(HostReader.read)
    directories = {
        name: hosts.all(HostReader.materialise, name)[hosts.own] for name in stateful
    }
    num_bytes = {
        f"{near}_bytes": sum(read_bytes.get(near, 0) for read_bytes in answers)
        for near in NEARNESS
    }
    num_bytes["persistent_bytes"] += read_here
    return _Read(
        asked=asked,
        num_bytes=num_bytes,
        directories=directories,
        components=frozenset(contents.components),
    )


def _restore_foreign(
    checkpoint: CheckpointMetadata,
    wanted: Mapping[str, Any],
    requested: _Wanted,
    emit: events.Emit,
) -> dict[str, Any]:
    # Steps that Orbax alone saved have no digests.
    assert checkpoint.path is not None
    why = "plain Orbax saved it, and its values cannot be verified"
    _degraded(emit, "persistent", checkpoint.step, why)
    others: Mapping[str, Any] = {}
    if requested.rules is not None:
        others = requested.rules.of_orbax(checkpoint, requested.trees)
    rest = {name: each for name, each in wanted.items() if name not in others}
    parts = {
        **others,
        **foreign_steps.load(checkpoint.path, rest, partial=requested.partial),
    }
    trees, _ = component_io.split(parts)
    num_bytes = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(trees))
    read_bytes = dict.fromkeys((f"{near}_bytes" for near in NEARNESS), 0)
    read_bytes["persistent_bytes"] = num_bytes
    emit("restored_from", step=checkpoint.step, **read_bytes, bad_copies=0, repaired=0)
    return {name: parts[name] for name in wanted}


def _degraded(emit: events.Emit, tier: str, step: int, why: str) -> None:
    cause = storage_cause.of_message(why).name
    emit("degraded", tier=tier, step=step, cause=cause, why=why)
