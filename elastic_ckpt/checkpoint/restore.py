"""Restore: all hosts read the newest readable step.

    find          finds the newest step that is complete in RAM and storage together
    open_step     sends the step's table to all hosts
    describe      describes the step's content, without values
    Restorer      checks the request; makes hosts read and repair; loads components;
                  builds the arrays

Values are returned and components are loaded only after every host has read and
verified all of its parts: if one host cannot, all hosts read the step before it. If a
component cannot be loaded on one host, the restore fails on all hosts.

Trees that were saved in a different layout are read by a `Relayout` function, which the
caller passes.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import orbax.checkpoint as v0
from absl import logging
from etils import epath
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import (
    component_io,
    foreign_steps,
    structure,
)
from elastic_ckpt.checkpoint.host import component_files
from elastic_ckpt.checkpoint.host.answers import (
    Candidate,
    CheckpointMetadata,
    ReadParts,
    SearchableSteps,
)
from elastic_ckpt.checkpoint.host.reader import HostReader
from elastic_ckpt.checkpoint.host.verified_read import OtherTree, VerifiedReader
from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.core import errors, events, metrics, storage, storage_cause
from elastic_ckpt.steps.manifest import Contents
from elastic_ckpt.steps.read_plan import NEARNESS
from elastic_ckpt.steps.search import Looked, Search
from elastic_ckpt.steps.step import Line, StepId

T = TypeVar("T")


class StepAlreadyExistsError(
    errors.CheckpointError, ocp.training.errors.StepAlreadyExistsError
):
    """The step exists, and the save does not overwrite it."""


class StepNotFoundError(errors.CheckpointError, ocp.training.errors.StepNotFoundError):
    """The step is not in any tier."""


def step_number(step: Any) -> int:
    """Returns a step number as an int.

    Args:
      step: an integer of any type, or an object whose `step` is one.

    Raises:
      CheckpointError: if the number is negative or not an integer.
    """
    number = getattr(step, "step", step)
    try:
        index = -1 if isinstance(number, bool) else operator.index(number)
    except TypeError:
        index = -1
    if index < 0:
        raise errors.CheckpointError(
            f"{number!r} ({type(number).__name__}) is not a step number; pass an"
            " integer that is 0 or greater"
        )
    return index


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchOutcome:
    """The outcome of a search for a complete step.

    Attributes:
      checkpoint: the step that was found; None if no step is complete.
      newest_save: the newest save of any step; empty if there are no saves.
      problem: the error that `required` raises if no step was found.
    """

    checkpoint: CheckpointMetadata | None = None
    newest_save: str = ""
    problem: errors.CheckpointError | None = None

    @property
    def required(self) -> CheckpointMetadata:
        """The step that was found.

        Raises:
          CheckpointError: if no step was found.
        """
        if self.checkpoint is None:
            raise self.problem or StepNotFoundError("no step was searched for")
        return self.checkpoint


def find(
    hosts: Hosts,
    step: int | CheckpointMetadata | None,
    *,
    emit: events.Emit,
    without: Mapping[StepId, str] = types.MappingProxyType({}),
    own_line: Line | None = None,
) -> SearchOutcome:
    """Searches for a step, or for the newest complete one.

    Args:
      hosts: the hosts of the world.
      step: the step number; None means the newest complete step.
      emit: a function called with events about skipped steps, peers that refuse
        requests, and unreachable storage.
      without: why steps are unreadable, keyed by step.
      own_line: the line that the caller has saved to.

    Raises:
      StepNotFoundError: if no tier has the requested step.
      CheckpointError: if the requested step is not complete, if no step was found but
        storage is unreachable, or if a later version of elastic_ckpt saved the newest
        step.
    """
    number = None if step is None else step_number(step)
    hosts.all(HostReader.offer_saves)
    survey = hosts.first(HostReader.survey)

    def look(at: int) -> Looked[Candidate]:
        if hosts.num_hosts > 1:
            hosts.all(HostReader.offer, at)
        return Looked(*hosts.first(HostReader.examine, at))

    own = [] if own_line is None else [own_line]
    lines = [*own, *survey.lines]
    looking = Search(survey.saves, look, lines=lines, without=without)
    problem = None
    if number is None:
        found, passed_over = looking.newest()
        for newer, why in passed_over.items():
            emit("step_passed_over", step=newer, why=why)
        if passed_over:
            listed = "; ".join(list(passed_over.values())[: errors.MOST_NAMED])
            problem = errors.CheckpointError(
                f"no step is complete in any tier: {listed}; bring back a host that has"
                " the missing parts, or start a new run in a different directory"
            )
        elif found is None:
            problem = StepNotFoundError(f"{survey.nothing}; save a step first")
    elif not looking.lacks(number):
        found = looking.of_step(number, getattr(step, "save", ""))
    else:
        found = None
        problem = _not_found(number, looking.newest().found, survey)
    for why in survey.refusing:
        logging.warning("%s", why)
        newest = 0 if found is None else found.step_id.step
        storage_cause.report(emit, "peer", newest, why)
    if survey.out_of_reach is not None:
        if found is None:
            named = "no step is" if number is None else f"step {number} is not"
            raise errors.CheckpointError(
                f"{named} complete in RAM, and {survey.out_of_reach}"
            )
        storage_cause.report(
            emit, "persistent", found.step_id.step, survey.out_of_reach
        )
    if number is not None and problem is not None:
        raise problem
    return SearchOutcome(
        checkpoint=None if found is None else found.checkpoint,
        newest_save=looking.line.save,
        problem=problem,
    )


def _not_found(
    step: int, newest: Candidate | None, survey: SearchableSteps
) -> StepNotFoundError:
    if newest is None:
        return StepNotFoundError(f"there is no step {step}: {survey.nothing}")
    instead = newest.step_id.step
    return StepNotFoundError(
        f"step {step} is not in any tier; the newest complete step is {instead};"
        f" restore it with step={instead}"
    )


def describe(hosts: Hosts, checkpoint: CheckpointMetadata) -> CheckpointMetadata:
    """Adds a description of the step's checkpointables.

    Raises:
      HostsFailedError: if the step is no longer complete.
    """
    if checkpoint.save:
        hosts.all(HostReader.open_step, checkpoint.step_id)
        saved = structure.saved_trees(hosts.opened())
        hosts.all(HostReader.close_step)
        described = jax.tree.map(
            lambda leaf: "string" if isinstance(leaf, str) else leaf, saved
        )
        return dataclasses.replace(checkpoint, metadata=described)
    assert checkpoint.path is not None
    times = v0.metadata.get_step_metadata(checkpoint.path)
    return dataclasses.replace(
        checkpoint,
        init_timestamp_nsecs=times.init_timestamp_nsecs,
        metadata=foreign_steps.read_checkpointables(checkpoint.path),
    )


# Matches a user's layout with a saved tree before values are read (implemented by
# `elastic_ckpt.universal.loading`). Takes the step's contents (None if stock Orbax
# saved the step), the tree's name, the requested tree and the layout. Returns a
# function that reads the tree into its shardings, from the open step's boxes or from
# the saved tree's path in persistent storage. Raises a ConfigError if the layout does
# not match.
Relayout = Callable[
    [Contents | None, str, Any, Any], Callable[[VerifiedReader | epath.Path], Any]
]


class Restored(NamedTuple):
    """A restored step.

    Attributes:
      search: the outcome of the search for the step.
      components: the names of all components of the step, requested or not; empty if
        stock Orbax saved the step.
      checkpointables: the restored pytrees and components, keyed by name.
    """

    search: SearchOutcome
    components: frozenset[str]
    checkpointables: dict[str, Any]


class Restorer:
    """Restores pytrees and components of a step; all hosts make the same calls.

    Args:
      hosts: the hosts of the world.
      relayout: a function that reads trees whose saved layout differs; see `Relayout`.
      emit: a function called with events about the values' sources and any problems.
      wanted: the requested abstract trees and components, keyed by name.
      partial: whether the requested trees may omit saved leaves.
      layout: a layout that maps saved leaves to requested leaves; None if the saved
        trees must have the requested leaves.
    """

    def __init__(
        self,
        hosts: Hosts,
        relayout: Relayout,
        emit: events.Emit,
        wanted: Mapping[str, Any],
        *,
        partial: bool,
        layout: Any,
    ) -> None:
        self._hosts, self._relayout, self._emit = hosts, relayout, emit
        self._wanted, self._partial, self._layout = wanted, partial, layout
        self._trees, self._stateful = component_io.split(wanted)

    def restore(
        self,
        step: int | CheckpointMetadata | None,
        newest: SearchOutcome | None = None,
    ) -> Restored:
        """Restores a step.

        Args:
          step: the step number; None means the newest complete step or, if that step
            turns out to be unreadable, the step before it.
          newest: the outcome of the last search for the newest step, if still valid.

        Raises:
          CheckpointError: if there is no such step, the step belongs to a different
            model, or no good copy of one of its parts is left.
          ConfigError: if the layout does not match.
        """
        with metrics.CHECKPOINT_LOAD.timed():
            without: dict[StepId, str] = {}
            while True:
                if newest is None or step is not None or without:
                    newest = find(self._hosts, step, without=without, emit=self._emit)
                search, checkpoint = newest, newest.required
                if not checkpoint.save:
                    return Restored(
                        search, frozenset(), self._restore_foreign(checkpoint)
                    )
                try:
                    components, make = self._read(checkpoint)
                except (
                    errors.CheckpointError,
                    errors.ConfigError,
                    errors.OpenFilesError,
                ) as error:
                    # All drivers get this error; hosts drop the values that they have
                    # read.
                    self._hosts.all(HostReader.close_step)
                    # Any other error is in the request, and an older step cannot help.
                    fits = isinstance(error, errors.HostsFailedError)
                    if not fits or step is not None:
                        raise
                    without[checkpoint.step_id] = str(error)
                    continue
                return Restored(search, components, make())

    def _read(
        self, checkpoint: CheckpointMetadata
    ) -> tuple[frozenset[str], Callable[[], dict[str, Any]]]:
        # Makes all hosts read and verify the requested values. Returns all components
        # of the step, and a function that builds the requested values.
        hosts = self._hosts
        hosts.all(HostReader.open_step, checkpoint.step_id)
        contents = hosts.opened()

        def other(name: str, tree: Any) -> OtherTree:
            read = self._relayout(contents, name, tree, self._layout)
            return functools.partial(self._read_other, checkpoint, name, read)

        saved = structure.saved_trees(contents)
        others = self._of_layout(saved, other)
        rest = {name: each for name, each in self._trees.items() if name not in others}
        asked = structure.resolve(
            rest, saved, what=f"step {checkpoint.step}", partial=self._partial
        )
        stateful = sorted(self._stateful)
        try:
            read_here = hosts.check(asked.read, stateful, others)
        except errors.HostsFailedError as error:
            # The error is in the request, so an older step cannot help.
            raise errors.CheckpointError(next(iter(error.of_host.values()))) from None
        answers = hosts.read(stateful)
        num_bytes = {
            f"{near}_bytes": sum(each.num_bytes.get(near, 0) for each in answers)
            for near in NEARNESS
        }
        num_bytes["persistent_bytes"] += read_here
        made = functools.partial(self._made, checkpoint, asked, num_bytes, answers)
        return frozenset(contents.components), made

    def _made(
        self,
        checkpoint: CheckpointMetadata,
        asked: structure.AskedTrees,
        num_bytes: Mapping[str, int],
        answers: Sequence[ReadParts],
    ) -> dict[str, Any]:
        # Repairs bad copies, then builds the arrays from the values that hosts have
        # read.
        hosts = self._hosts
        bad = tuple(copy for each in answers for copy in each.bad)
        for each in bad:
            logging.warning(
                "host %s, %s tier: %s %s", each.host, each.tier, each.name, each.why
            )
        repaired = hosts.all(HostReader.repair, bad) if bad else []
        fields = {
            **num_bytes,
            "bad_copies": len(bad),
            "repaired": sum(map(len, repaired)),
        }
        directory = answers[hosts.own].directory
        self._on_all("components_loaded", lambda: self._load_components(directory))
        made = hosts.arrays(asked.read)
        restored = {**made, **asked.filled(made), **self._stateful}
        if hosts.own == 0:
            # Only one host records the values.
            for near, metric in metrics.CHECKPOINT_READ.items():
                metric.record(fields[f"{near}_bytes"])
            metrics.CHECKPOINT_BAD_COPIES.record(fields["bad_copies"])
            metrics.CHECKPOINT_REPAIRED.record(fields["repaired"])
        self._emit("restored_from", step=checkpoint.step, **fields)
        return {name: restored[name] for name in self._wanted}

    def _load_components(self, directory: str) -> None:
        is_apart = self._hosts.is_apart
        for name, component in self._stateful.items():
            path = f"{directory}/{name}"
            try:
                if is_apart:
                    files = self._hosts.first(HostReader.files, name)
                    component_files.write(path, files)
                component_io.load(component, path)
            except Exception as error:
                error.add_note(f"{name!r} was not loaded: {error!r}")
                raise
            finally:
                if is_apart:
                    storage.remove(path)

    def _restore_foreign(self, checkpoint: CheckpointMetadata) -> dict[str, Any]:
        # Stock Orbax saved the step, without digests.
        path = checkpoint.path
        assert path is not None
        why = "stock Orbax saved it, so its values cannot be verified"
        storage_cause.report(self._emit, "persistent", checkpoint.step, why)
        others = self._of_layout(
            foreign_steps.read_checkpointables(path),
            lambda name, tree: self._relayout(None, name, tree, self._layout)(
                path / name
            ),
        )
        rest = {name: each for name, each in self._wanted.items() if name not in others}
        loaded = foreign_steps.load(path, rest, partial=self._partial)
        restored = {**others, **loaded}
        trees, _ = component_io.split(restored)
        read_bytes = dict.fromkeys((f"{near}_bytes" for near in NEARNESS), 0) | {
            "persistent_bytes": sum(
                getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(trees)
            )
        }
        self._emit(
            "restored_from",
            step=checkpoint.step,
            **read_bytes,
            bad_copies=0,
            repaired=0,
        )
        return {name: restored[name] for name in self._wanted}

    def _of_layout(
        self, saved: Mapping[str, Any], make: Callable[[str, Any], T]
    ) -> dict[str, T]:
        # The result of `make` for each tree whose saved layout differs, keyed by name.
        if self._layout is None:
            return {}
        return self._on_all(
            "layout",
            lambda: {
                name: make(name, tree)
                for name, tree in self._trees.items()
                if tree is not None
                and name in saved
                and structure.is_other(name, tree, saved)
            },
        )

    def _read_other(
        self,
        checkpoint: CheckpointMetadata,
        name: str,
        read: Callable[[VerifiedReader | epath.Path], Any],
        boxes: VerifiedReader | None,
    ) -> Any:
        # See `verified_read.OtherTree`.
        if boxes is not None:
            return read(boxes)
        if checkpoint.path is None:
            raise errors.CheckpointError(
                f"step {checkpoint.step} was saved in a different layout and is only in"
                " the RAM of other processes; under one controller, only steps in"
                " persistent storage can be read through a layout. Restore the step as"
                " it was saved, then save it with force=True"
            )
        return read(checkpoint.path / name)

    def _on_all(self, name: str, work: Callable[[], T]) -> T:
        # Makes an error fail all hosts, which would otherwise wait. An older step
        # cannot help.
        try:
            result = work()
        except Exception as error:
            notes = getattr(error, "__notes__", [])
            self._hosts.gather(name, "; ".join(notes) or str(error))
            self._hosts.all(HostReader.close_step)
            raise
        problems: list[str | None] = self._hosts.gather(name, None)
        failed = {n: each for n, each in enumerate(problems) if each is not None}
        if failed:
            self._hosts.all(HostReader.close_step)
            raise errors.CheckpointError(str(errors.HostsFailedError(failed)))
        return result
