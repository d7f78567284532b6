"""Restore: all hosts read one step, the newest one that is readable.

    find          the newest step that is complete by what hosts and storage have
    open_step     all hosts have the table of the step
    describe      what is in it, without values
    Restorer      checks what is requested, and for trees of another layout, how it is
                  read; lets hosts read and repair; loads components; makes the arrays

No value is returned, and no component is loaded, before every host has read and
verified all of its part: if one cannot, all hosts read the step before. If a component
of one host cannot be loaded, the restore fails on all hosts.

The rules for trees of another layout lie above this room, and come as `Layouts`. A tree
that the step has as it is requested is restored without them.
"""

from __future__ import annotations

import dataclasses
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import orbax.checkpoint as v0
from absl import logging
from etils import epath
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import (
    asked_trees,
    component_io,
    foreign_steps,
    structure,
)
from elastic_ckpt.checkpoint.host import component_files
from elastic_ckpt.checkpoint.host.answers import (
    Candidate,
    CheckpointMetadata,
    Survey,
)
from elastic_ckpt.checkpoint.host.reader import HostReader
from elastic_ckpt.checkpoint.host.step_boxes import StepBoxes, TreeReading
from elastic_ckpt.checkpoint.host.verified_read import BadCopy
from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.core import errors, events, metrics, storage, storage_cause
from elastic_ckpt.steps.manifest import Contents
from elastic_ckpt.steps.read_plan import NEARNESS
from elastic_ckpt.steps.search import Looked, Search
from elastic_ckpt.steps.step import Line, StepId

ValueT = TypeVar("ValueT")


class StepAlreadyExistsError(
    errors.CheckpointError, ocp.training.errors.StepAlreadyExistsError
):
    """The step exists, and the save does not overwrite it."""


class StepNotFoundError(errors.CheckpointError, ocp.training.errors.StepNotFoundError):
    """The step is in no tier."""


def step_number(step: Any) -> int:
    """The number of a step: an integer of any type, or what has one as its `step`.

    Raises:
      CheckpointError: if it is no integer at or above 0.
    """
    number = getattr(step, "step", step)
    try:
        index = -1 if isinstance(number, bool) else operator.index(number)
    except TypeError:
        index = -1
    if index < 0:
        raise errors.CheckpointError(
            f"{number!r} ({type(number).__name__}) is not a step; give an integer of"
            " at least 0"
        )
    return index


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchOutcome:
    """The outcome of a search for a complete step.

    Attributes:
      checkpoint: the step; None if none is complete.
      newest_save: of all steps that there are; empty if there are none.
      missing: that no tier has the step, or any step, a sentence; None if one has.
    """

    checkpoint: CheckpointMetadata | None = None
    newest_save: str = ""
    missing: str | None = None


def find(
    hosts: Hosts,
    step: int | CheckpointMetadata | None,
    *,
    emit: events.Emit,
    without: Sequence[StepId] = (),
    own_line: Line | None = None,
) -> SearchOutcome:
    """Looks for the newest complete step, or for a certain one.

    Args:
      hosts: of the world.
      step: None for the newest.
      emit: called when newer steps are passed over, and for peers that refuse.
      without: steps and saves that proved to be unreadable.
      own_line: the line that the caller has saved to.

    Raises:
      StepNotFoundError: if no tier has a certain step.
      CheckpointError: if a certain step is not complete, there may be one in storage
        that is out of reach, or a later version of elastic_ckpt has saved the newest
        one.
    """
    number = None if step is None else step_number(step)
    hosts.all(HostReader.offer_saves)
    survey = hosts.first(HostReader.survey)

    def look(at: int) -> Looked[Candidate]:
        if hosts.num_hosts > 1:
            hosts.all(HostReader.offer, at)
        examined = hosts.first(HostReader.examine, at)
        return Looked(examined.saves, examined.problems)

    own = [] if own_line is None else [own_line]
    looking = Search(
        survey.steps,
        survey.saves,
        look,
        lines=[*own, *survey.lines],
        without=without,
    )
    # Of the same step, the later save counts.
    foreign = [each for each in survey.foreign if not looking.line.abandons(each)]
    if number is None:
        found = _newest(hosts, looking, foreign, survey, emit)
    else:
        save = getattr(step, "save", "")
        found = _of_step(hosts, looking, foreign, survey, StepId(number, save))
    if hosts.num_hosts > 1:
        # It holds no messages while nothing is read.
        hosts.all(HostReader.close_step)
    outcome = dataclasses.replace(found, newest_save=looking.line.save)
    newest = 0 if outcome.checkpoint is None else outcome.checkpoint.step
    for why in survey.refusing:
        logging.warning("%s", why)
        storage_cause.report(emit, "peer", newest, why)
    if survey.out_of_reach is not None:
        if outcome.checkpoint is None:
            raise errors.CheckpointError(
                f"no step is complete in RAM, and {survey.out_of_reach}"
            )
        storage_cause.report(emit, "persistent", newest, survey.out_of_reach)
    return outcome


def _newest(
    hosts: Hosts,
    looking: Search[Candidate],
    foreign: Sequence[StepId],
    survey: Survey,
    emit: events.Emit,
) -> SearchOutcome:
    outcome = looking.newest()
    for passed_over, why in outcome.passed_over.items():
        emit("step_passed_over", step=passed_over, why=why)
    found = outcome.found
    newest = -1 if found is None else found.step_id.step
    newer = [each for each in foreign if each.step > newest]
    if newer:
        return _foreign(hosts, max(newer))
    if found is not None:
        return SearchOutcome(checkpoint=found.checkpoint)
    if outcome.passed_over or survey.out_of_reach:
        return SearchOutcome()
    return SearchOutcome(missing=f"{_nothing(survey)}; save a step first")


def _of_step(
    hosts: Hosts,
    looking: Search[Candidate],
    foreign: Sequence[StepId],
    survey: Survey,
    wanted: StepId,
) -> SearchOutcome:
    step, save = wanted
    by_orbax = [each for each in survey.foreign if each.step == step and not save]
    if by_orbax and looking.lacks(step):
        return _foreign(hosts, by_orbax[0])
    if looking.lacks(step):
        if survey.out_of_reach is not None:
            raise errors.CheckpointError(
                f"step {step} is not in RAM, and {survey.out_of_reach}"
            )
        found = looking.newest().found
        numbers = [each.step for each in foreign]
        numbers += [] if found is None else [found.step_id.step]
        if not numbers:
            raise StepNotFoundError(f"there is no step {step}: {_nothing(survey)}")
        raise StepNotFoundError(
            f"step {step} is not in any tier of {survey.places}; newest complete step"
            f" is {max(numbers)}: restore it with step={max(numbers)}"
        )
    try:
        found = looking.of_step(step, save)
    except errors.CheckpointError:
        if by_orbax:
            return _foreign(hosts, by_orbax[0])
        raise
    if by_orbax and found.step_id < by_orbax[0]:
        return _foreign(hosts, by_orbax[0])
    return SearchOutcome(checkpoint=found.checkpoint)


def _foreign(hosts: Hosts, step_id: StepId) -> SearchOutcome:
    # A step that Orbax alone saved.
    return SearchOutcome(checkpoint=hosts.first(HostReader.foreign_step, *step_id))


def _nothing(survey: Survey) -> str:
    # Why there is no step, for a message.
    if not survey.is_there:
        return f"there is no directory {survey.places}"
    return f"{survey.places} has no checkpoints yet"


def describe(hosts: Hosts, checkpoint: CheckpointMetadata) -> CheckpointMetadata:
    """The contents of a step, by the names of its checkpointables.

    Args:
      hosts: of the world.
      checkpoint: the step.

    Raises:
      HostsFailedError: if it is not complete any more.
    """
    if not checkpoint.save:
        return _of_orbax(checkpoint)
    hosts.all(HostReader.open_step, checkpoint.step_id)
    contents = hosts.opened()
    hosts.all(HostReader.close_step)
    return _of_contents(checkpoint, contents)


def _of_contents(
    checkpoint: CheckpointMetadata, contents: Contents
) -> CheckpointMetadata:
    trees = structure.saved_trees(contents)
    held = dict.fromkeys(contents.components) | jax.tree.map(_described, trees)
    return dataclasses.replace(checkpoint, metadata=held)


def _of_orbax(checkpoint: CheckpointMetadata) -> CheckpointMetadata:
    assert checkpoint.path is not None
    return dataclasses.replace(
        checkpoint,
        init_timestamp_nsecs=v0.metadata.get_step_metadata(
            checkpoint.path
        ).init_timestamp_nsecs,
        metadata=foreign_steps.read_parts(checkpoint.path),
    )


def _described(leaf: Any) -> Any:
    # Orbax's description of texts.
    return "string" if isinstance(leaf, str) else leaf


class Layouts(Protocol):
    """Reads trees through layouts, as `elastic_ckpt.universal` does."""

    def match(
        self, contents: Contents, name: str, abstract: Any, *, layout: Any
    ) -> Callable[[StepBoxes], Any]:
        """Matches a layout with a saved tree, before a value is read.

        Args:
          contents: of a step.
          name: of the saved tree.
          abstract: the requested tree.
          layout: as users give it.

        Returns:
          A function that reads the tree into its shardings from the step's boxes.

        Raises:
          ConfigError: if the layout does not fit.
        """
        ...

    def load(self, path: epath.Path, abstract: Any, *, layout: Any) -> Any:
        """Reads a tree into the shardings of an abstract one.

        Args:
          path: of the saved tree, in persistent storage.
          abstract: the requested tree.
          layout: as users give it.
        """
        ...

    def fitting(self, tree: epath.Path | tuple[Contents, str]) -> Sequence[str]:
        """The names of layouts that fit a saved tree, for a message.

        Args:
          tree: its path, or the contents of its step and its name.
        """
        ...


class Restored(NamedTuple):
    """A step that was restored.

    Attributes:
      search: the outcome of the search for it.
      components: that it has, whether they were requested or not; none if Orbax alone
        saved it.
      parts: what was requested, by name.
      num_bytes: of its arrays, that all hosts read, by nearness: `local_bytes` and so
        on.
    """

    search: SearchOutcome
    components: frozenset[str]
    parts: dict[str, Any]
    num_bytes: Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Wanted:
    # The requested trees and components, by name, and how trees may differ.
    trees: Mapping[str, Any]
    stateful: Mapping[str, Any]
    partial: bool
    layout: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Read:
    # The requested trees of the saved layout, the bytes read by nearness of their
    # source, the directories of the components' files, copies that proved to be bad,
    # and all components of the step.
    asked: asked_trees.AskedTrees
    num_bytes: dict[str, int]
    directories: dict[str, str]
    bad: tuple[BadCopy, ...]
    components: frozenset[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restorer:
    """Restores steps; all hosts call it alike.

    Attributes:
      hosts: of the world.
      layouts: read the trees that differ.
      emit: called with the sources of the values, and with problems.
    """

    hosts: Hosts
    layouts: Layouts
    emit: events.Emit

    def restore(
        self,
        step: int | CheckpointMetadata | None,
        wanted: Mapping[str, Any],
        *,
        partial: bool,
        layout: Any,
    ) -> Restored:
        """Restores a step.

        Args:
          step: None takes the newest complete one; if it proves to be unreadable, the
            one before.
          wanted: by name, abstract trees and components.
          partial: whether trees may lack leaves that were saved.
          layout: relates the leaves of saved trees with those of requested ones that
            differ from them; None if no tree may differ.

        Raises:
          CheckpointError: if there is no such step, it is of another model, or no good
            copy of a part of it is left.
          ConfigError: if the layout does not fit.
        """
        began_secs = time.monotonic()
        trees, stateful = component_io.split(wanted)
        requested = _Wanted(
            trees=trees, stateful=stateful, partial=partial, layout=layout
        )
        try:
            restored = self._restore(step, wanted, requested)
        except errors.OtherModelError as error:
            names = [] if layout is not None else self._fitting(step, trees)
            if not names:
                raise
            raise errors.OtherModelError(
                f"{error}. Layouts that ship and fit the names in it:"
                f" {errors.first_of(names)}; give one as `layout`"
            ) from None
        metrics.CHECKPOINT_LOAD.record(time.monotonic() - began_secs)
        return restored

    def _restore(
        self,
        step: int | CheckpointMetadata | None,
        wanted: Mapping[str, Any],
        requested: _Wanted,
    ) -> Restored:
        search, read = self._read_newest(step, requested)
        checkpoint = search.checkpoint
        assert checkpoint is not None
        if read is None:
            parts, num_bytes = self._restore_foreign(checkpoint, wanted, requested)
            return Restored(search, frozenset(), parts, num_bytes)
        bad = self._repair(read.bad)
        self._load_components(requested.stateful, read.directories)
        made = self.hosts.arrays(read.asked.read)
        parts = {**made, **read.asked.filled(made), **requested.stateful}
        self.hosts.all(HostReader.close_step)
        if self.hosts.own == 0:
            _record(read.num_bytes, bad)
        self.emit("restored_from", step=checkpoint.step, **read.num_bytes, **bad)
        parts = {name: parts[name] for name in wanted}
        return Restored(search, read.components, parts, read.num_bytes)

    def _read_newest(
        self,
        step: int | CheckpointMetadata | None,
        requested: _Wanted,
    ) -> tuple[SearchOutcome, _Read | None]:
        # Returns the result of `_read`, or None for a step that Orbax alone saved.
        without: list[StepId] = []
        reasons: dict[int, str] = {}

        def noted(name: str, **fields: Any) -> None:
            if name == "step_passed_over":
                reasons.setdefault(fields["step"], fields["why"])
            self.emit(name, **fields)

        while True:
            search = find(self.hosts, step, without=without, emit=noted)
            checkpoint = search.checkpoint
            if checkpoint is None and search.missing is not None:
                raise StepNotFoundError(search.missing)
            if checkpoint is None:
                listed = "; ".join(list(reasons.values())[: errors.MOST_NAMED])
                if not listed:
                    raise errors.CheckpointError(
                        "no step is complete in any tier; test `checkpointer.latest is"
                        " not None` before you load"
                    )
                raise errors.CheckpointError(
                    f"no step is complete in any tier: {listed}; bring back a host that"
                    " has the missing parts, or begin a new run in another directory"
                )
            if not checkpoint.save:
                return search, None
            try:
                return search, self._read(checkpoint, requested)
            except errors.HostsFailedError as error:
                # All drivers have this error; hosts may hold what they have read.
                self.hosts.all(HostReader.close_step)
                if step is not None:
                    raise
                without.append(checkpoint.step_id)
                noted("step_passed_over", step=checkpoint.step, why=str(error))

    def _read(self, checkpoint: CheckpointMetadata, requested: _Wanted) -> _Read:
        hosts = self.hosts
        hosts.all(HostReader.open_step, checkpoint.step_id)
        contents = hosts.opened()
        others: Mapping[str, TreeReading] = {}
        if requested.layout is not None:
            others = self._readings(checkpoint, contents, requested)
        asked = asked_trees.resolve(
            {
                name: tree
                for name, tree in requested.trees.items()
                if name not in others
            },
            contents,
            step=checkpoint.step,
            partial=requested.partial,
        )
        stateful = sorted(requested.stateful)
        try:
            read_here = hosts.check(asked.read, stateful, others)
        except errors.HostsFailedError as error:
            # An older step would not have it either: the request is wrong.
            raise errors.CheckpointError(next(iter(error.of_host.values()))) from None
        answers = hosts.read()
        made = hosts.all(HostReader.materialise, tuple(stateful))
        directory = made[hosts.own].directory
        num_bytes = {
            f"{near}_bytes": sum(read_bytes.get(near, 0) for read_bytes in answers)
            for near in NEARNESS
        }
        num_bytes["persistent_bytes"] += read_here
        return _Read(
            asked=asked,
            num_bytes=num_bytes,
            directories={name: f"{directory}/{name}" for name in stateful},
            bad=tuple(copy for each in made for copy in each.bad),
            components=frozenset(contents.components),
        )

    def _readings(
        self, checkpoint: CheckpointMetadata, contents: Contents, requested: _Wanted
    ) -> dict[str, _Reading]:
        # How to read those of the trees that are of another layout than the open step.
        saved = _of_contents(checkpoint, contents).metadata
        layout = requested.layout
        return self._on_all(
            lambda: {
                name: _Reading(
                    restorer=self,
                    checkpoint=checkpoint,
                    name=name,
                    abstract=tree,
                    layout=layout,
                    read=self.layouts.match(contents, name, tree, layout=layout),
                )
                for name, tree in _differing(saved, requested.trees).items()
            }
        )

    def _of_orbax(self, path: epath.Path, requested: _Wanted) -> dict[str, Any]:
        # Those of the trees that differ from a step that Orbax alone saved.
        return self._on_all(
            lambda: {
                name: self.layouts.load(path / name, tree, layout=requested.layout)
                for name, tree in _differing(
                    foreign_steps.read_parts(path), requested.trees
                ).items()
            }
        )

    def _on_all(self, work: Callable[[], ValueT]) -> ValueT:
        # No host waits for one that has failed.
        try:
            result = work()
        except Exception as error:
            self.hosts.share("layout", str(error))
            raise
        problems: list[str | None] = self.hosts.share("layout", None)
        failed = {n: each for n, each in enumerate(problems) if each is not None}
        if failed:
            # An older step is no remedy, unlike for a step that cannot be read.
            raise errors.CheckpointError(str(errors.HostsFailedError(failed)))
        return result

    def _repair(self, bad: tuple[BadCopy, ...]) -> dict[str, int]:
        # The numbers of bad copies that were read, and of those that were repaired.
        for each in bad:
            logging.warning(
                "host %s, %s tier: %s %s", each.host, each.tier, each.name, each.why
            )
        repaired = self.hosts.all(HostReader.repair, bad) if bad else []
        return {"bad_copies": len(bad), "repaired": sum(map(len, repaired))}

    def _load_components(
        self, stateful: Mapping[str, Any], directories: Mapping[str, str]
    ) -> None:
        own: Exception | None = None
        problem: str | None = None
        for name, component in stateful.items():
            try:
                if self.hosts.is_apart:
                    files = self.hosts.first(HostReader.files, name)
                    component_files.write(directories[name], files)
                component_io.load(component, directories[name], name=name)
            except Exception as error:
                own, problem = error, f"{name!r} was not loaded: {error!r}"
                break
            finally:
                if self.hosts.is_apart:
                    storage.remove(directories[name])
        # No host waits for one that has stopped.
        problems = self.hosts.share("components_loaded", problem)
        failed = {n: each for n, each in enumerate(problems) if each is not None}
        if failed:
            self.hosts.all(HostReader.close_step)
            raise own or errors.HostsFailedError(failed)

    def _restore_foreign(
        self,
        checkpoint: CheckpointMetadata,
        wanted: Mapping[str, Any],
        requested: _Wanted,
    ) -> tuple[dict[str, Any], Mapping[str, int]]:
        # Steps that Orbax alone saved have no digests.
        assert checkpoint.path is not None
        why = "plain Orbax saved it, and its values cannot be verified"
        storage_cause.report(self.emit, "persistent", checkpoint.step, why)
        others: Mapping[str, Any] = {}
        if requested.layout is not None:
            others = self._of_orbax(checkpoint.path, requested)
        rest = {name: each for name, each in wanted.items() if name not in others}
        parts = {
            **others,
            **foreign_steps.load(checkpoint.path, rest, partial=requested.partial),
        }
        trees, _ = component_io.split(parts)
        num_bytes = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(trees))
        read_bytes = dict.fromkeys((f"{near}_bytes" for near in NEARNESS), 0)
        read_bytes["persistent_bytes"] = num_bytes
        self.emit(
            "restored_from",
            step=checkpoint.step,
            **read_bytes,
            bad_copies=0,
            repaired=0,
        )
        return {name: parts[name] for name in wanted}, read_bytes

    def _fitting(
        self, step: int | CheckpointMetadata | None, trees: Mapping[str, Any]
    ) -> list[str]:
        # The layouts by which a step may be read that was refused.
        checkpoint = find(self.hosts, step, emit=events.nobody).checkpoint
        if checkpoint is None:
            return []
        names: set[str] = set()
        for name in trees:
            # The step that was refused is open, unless Orbax alone saved it.
            if checkpoint.save:
                names.update(self.layouts.fitting((self.hosts.opened(), name)))
            elif checkpoint.path is not None:
                names.update(self.layouts.fitting(checkpoint.path / name))
        return sorted(names)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reading:
    # See `step_boxes.TreeReading`.
    restorer: Restorer
    checkpoint: CheckpointMetadata
    name: str
    abstract: Any
    layout: Any
    read: Callable[[StepBoxes], Any]

    def of_boxes(self, saved: StepBoxes) -> Any:
        return self.read(saved)

    def of_storage(self) -> Any:
        step, path = self.checkpoint.step, self.checkpoint.path
        if path is None:
            raise errors.CheckpointError(
                f"step {step} was saved in another layout and is only in the RAM of"
                " other processes; under one controller a layout can read only steps"
                " in persistent storage. Restore it as it was saved, and save it with"
                " force=True"
            )
        return self.restorer.layouts.load(
            path / self.name, self.abstract, layout=self.layout
        )


def _differing(saved: Mapping[str, Any], trees: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: tree
        for name, tree in trees.items()
        if tree is not None and name in saved and not _is_same(saved[name], tree)
    }


def _is_same(saved: Any, wanted: Any) -> bool:
    try:
        foreign_steps.check_same_tree("the step", saved, wanted)
    except errors.OtherModelError:
        return False
    return True


def _record(read_bytes: Mapping[str, int], bad: Mapping[str, int]) -> None:
    # One host records for all.
    for near, metric in metrics.CHECKPOINT_READ.items():
        metric.record(read_bytes[f"{near}_bytes"])
    metrics.CHECKPOINT_BAD_COPIES.record(bad["bad_copies"])
    metrics.CHECKPOINT_REPAIRED.record(bad["repaired"])
