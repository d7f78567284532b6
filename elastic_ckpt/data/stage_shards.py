"""The pipeline of a shard in a run of stages, each of which has a pipeline of its own.

A shard goes on in another stage from the cursor that it has: the documents that the
rows of the old stage hold come first in those of the new one. Each is thus trained on
once, on any number of hosts. Pipelines without `lm.Rows` have the same steps in all
stages, so that the cursor is the state of each.

The cursor of a stage after the first is `{"stage": n, "of": state}`. A document that
came over has the place `{"held": {"stage": m, "cursor": cursor in stage m}, "taken":
k, "parent": state}`: the old rows are opened there again when it is loaded, and k
documents skipped; those of the stage's own follow from the state.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import grain

from elastic_ckpt.core import errors
from elastic_ckpt.data import cursors, mixing, shard_steps
from elastic_ckpt.data.lm import rows

_STAGE, _OF = "stage", "of"
_TAKEN, _PARENT, _CURSOR = "taken", "parent", "cursor"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagedShards:
    """Makes the pipeline of a shard in one of the stages of a run.

    Attributes:
      make_shards: makes the pipeline of a shard in each stage.
      stage: the number of the stage.
    """

    make_shards: tuple[shard_steps.MakeShard, ...]
    stage: int

    def __call__(self, shard: int) -> grain.IterDataset:
        """The rows of a shard, from the cursor that it has in any stage."""
        return _StagedRows(self, shard)

    def mapped(
        self, function: Callable[[grain.IterDataset], grain.IterDataset]
    ) -> StagedShards:
        """The same stages, with a function applied to the pipeline of each."""

        def made(make_shard: shard_steps.MakeShard, shard: int) -> grain.IterDataset:
            return function(make_shard(shard))

        make_shards = tuple(functools.partial(made, each) for each in self.make_shards)
        return dataclasses.replace(self, make_shards=make_shards)


def check_steps(one: grain.IterDataset, other: grain.IterDataset, where: str) -> None:
    """Checks that a shard can go on from the pipeline of a stage in that of another.

    Args:
      one: the pipeline of a shard in a stage.
      other: in another.
      where: what they are, for errors.

    Raises:
      ConfigError: if what one holds cannot be handed over to the other.
    """
    before, have_rows = [], []
    for made in (one, other):
        steps = shard_steps.chain(made)
        first = _first_rows(steps)
        before.append(steps[1:first])
        have_rows.append(first is not None)
        after = [] if first is None else steps[first + 1 :]
        if not all(map(_is_of_rows, after)):
            raise errors.ConfigError(
                f"{where} have steps after ec.data.lm.Rows that may hold rows; use"
                " functions of single rows alone"
            )
    if have_rows[0] != have_rows[1] or not _same(*before):
        raise errors.ConfigError(
            f"{where} have other steps before their rows, or make them by others than"
            " ec.data.lm.Rows; give all stages the same steps, or make rows so"
        )


def _first_rows(steps: list[Any]) -> int | None:
    found = (n for n, step in enumerate(steps) if isinstance(step, rows.Rows))
    return next(found, None)


def _is_of_rows(step: Any) -> bool:
    # Whether a step after the rows has their state.
    return shard_steps.passes_on(step) or shard_steps.holds_nothing(step)


def _same(ones: list[Any], others: list[Any]) -> bool:
    # Whether the states of some steps are those of others.
    ones, others = (
        [step for step in steps if not shard_steps.passes_on(step)]
        for steps in (ones, others)
    )
    return len(ones) == len(others) and all(map(_same_step, ones, others))


def _same_step(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, shard_steps.Step) or shard_steps.holds_nothing(one):
        return shard_steps.description(one) == shard_steps.description(other)
    return shard_steps.are_alike(one, other)


class _StagedRows(grain.IterDataset):
    """The rows of a shard in the stage of `staged`."""

    passes_on = holds_nothing = True

    def __init__(self, staged: StagedShards, shard: int) -> None:
        self.staged, self.shard = staged, shard
        super().__init__(_continued(staged, staged.stage, shard))

    def __iter__(self) -> grain.DatasetIterator:
        return _StagedRowsIterator(self, iter(self._parent))


class _StagedRowsIterator(grain.DatasetIterator):
    """The rows of a shard, from a state of any stage.

    From a state of a stage with other rows it yields those, until `renew` begins the
    stage with the documents that are in none of them yet.
    """

    def __init__(self, dataset: _StagedRows, own: grain.DatasetIterator) -> None:
        super().__init__(own)
        self._dataset, self._staged = dataset, dataset.staged
        self._own = self._made = own
        self._stage = self._staged.stage
        steps = shard_steps.chain(shard_steps.parents(dataset)[0])
        self._has_rows = _first_rows(steps) is not None
        if isinstance(own, rows.RowsIterator):
            self.unmade, self.made = own.unmade, own.made

    def __next__(self) -> Any:
        return next(self._made)

    def get_state(self) -> Any:
        return _of_stage(self._stage, self._made.get_state())

    def set_state(self, state: Any) -> None:
        stage, of_stage = _stage_of(state)
        staged = self._staged
        if stage >= len(staged.make_shards):
            raise errors.DataError(
                f"a logical shard is in stage {stage} of a run, and the data has"
                f" {len(staged.make_shards)} stages; declare the stages that have begun"
            )
        self._made, self._stage = self._own, staged.stage
        if stage != staged.stage and self._has_rows:
            self._stage = stage
            self._made = iter(_continued(staged, stage, self._dataset.shard))
        self._made.set_state(of_stage)

    def renew(self) -> bool:
        """See `mixing.renew`; also begins the stage."""
        if self._made is not self._own:
            held = {_STAGE: self._stage, _CURSOR: self._made.get_state()}
            self._made.close()
            self._made, self._stage = self._own, self._staged.stage
            begin = rows.begin_from({cursors.HELD: held, _TAKEN: 0})
            self._own.set_state(begin)
        return mixing.renew(self._own)


def oldest(of_stage: Any) -> Any:
    """The state, in any stage, from which documents are read again."""
    state = _stage_of(of_stage)[1]
    if isinstance(state, dict) and cursors.FROM in state:
        place = state[cursors.FROM][0][0]
        if isinstance(place, dict) and cursors.HELD in place:
            return oldest(place[cursors.HELD][_CURSOR])
    return of_stage


def _of_stage(stage: int, state: Any) -> Any:
    # The first stage has the states of a run without stages.
    return {_STAGE: stage, _OF: state} if stage else state


def _stage_of(state: Any) -> tuple[int, Any]:
    if isinstance(state, dict) and state.keys() == {_STAGE, _OF}:
        return state[_STAGE], state[_OF]
    return 0, state


def _continued(staged: StagedShards, stage: int, shard: int) -> grain.IterDataset:
    # The pipeline of a shard in a stage, in whose rows the documents that those of
    # other stages hold can come first.
    made = staged.make_shards[stage](shard)
    steps = shard_steps.chain(made)
    first = _first_rows(steps)
    if first is None:
        return made
    copies: dict[int, Any] = {}
    (documents,) = shard_steps.parents(steps[first])
    parent: grain.IterDataset = _Continued(documents, staged, shard)
    # A user's make_shard may return the same datasets again.
    for step in steps[first:]:
        copied = copy.copy(step)
        copied._parents = (parent,)
        for name, value in vars(step).items():
            if id(value) in copies:
                setattr(copied, name, copies[id(value)])
        copies[id(step)] = parent = copied
    return parent


class _Continued(grain.IterDataset):
    """First the documents that another stage holds, if any, then those of the parent.

    Args:
      parent: the documents of the stage.
      staged: all stages.
      shard: the number of the shard.
    """

    passes_on = holds_nothing = True

    def __init__(
        self, parent: grain.IterDataset, staged: StagedShards, shard: int
    ) -> None:
        super().__init__(parent)
        self.staged, self.shard = staged, shard

    def __iter__(self) -> grain.DatasetIterator:
        return _ContinuedIterator(self, iter(self._parent))


class _ContinuedIterator(shard_steps.Elements):
    def __init__(self, dataset: _Continued, documents: grain.DatasetIterator) -> None:
        super().__init__(documents)
        self._dataset, self._documents = dataset, documents
        self._origin: Any = None
        self._held: list[Any] = []
        self._taken = 0

    def take(self, num_elements: int) -> list[Any]:
        found = self._held[self._taken : self._taken + num_elements]
        self._taken += len(found)
        missing = num_elements - len(found)
        return found + (shard_steps.take(self._documents, missing) if missing else [])

    def get_state(self) -> Any:
        if self._taken < len(self._held):
            place = {cursors.HELD: self._origin, _TAKEN: self._taken}
            return place | {_PARENT: self._documents.get_state()}
        return self._documents.get_state()

    def set_state(self, state: Any) -> None:
        self._held, self._taken = [], 0
        if not (isinstance(state, dict) and cursors.HELD in state):
            self._documents.set_state(state)
            return
        self._origin = state[cursors.HELD]
        staged, shard = self._dataset.staged, self._dataset.shard
        steps = shard_steps.chain(_continued(staged, self._origin[_STAGE], shard))
        number = _first_rows(steps)
        assert number is not None
        old = iter(steps[number])
        assert isinstance(old, rows.RowsIterator)
        old.set_state(self._origin[_CURSOR])
        before = old.documents
        assert isinstance(before, _ContinuedIterator)
        # It may not have read all that came over to it.
        self._held = old.rest() + before._held[before._taken :]
        self._taken = state[_TAKEN]
        after = before._documents.get_state()
        self._documents.set_state(state.get(_PARENT, after))
        old.close()
