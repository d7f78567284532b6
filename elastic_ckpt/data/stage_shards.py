"""The pipeline of a shard in a run of stages, each of which has a pipeline of its own.

A shard goes on in another stage from the cursor that it has. If the steps after the
mixture are the same in both, the cursor is the state of either pipeline, as it is when
weights or datasets change at a resume. If they are not, as with another length of rows,
the old steps are emptied: their input ends where they have read to, so that they yield
what they hold, and the documents in these rows come next in the new pipeline. Each is
thus trained on once, on any number of hosts.

The cursor of a stage after the first is `{"stage": n, "of": state}`. Until the last
document that came over is used up, the state of the new pipeline's input is `{"held":
{"stage": m, "cursor": cursor in stage m}, "taken": k, "parent": state}`: the old steps
are emptied again when it is loaded, and k documents skipped.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import grain
import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.data import blocks, cursors, shard_steps, shuffling
from elastic_ckpt.data.lm import chat, language, packing

_STAGE, _OF = "stage", "of"
_TAKEN, _PARENT, _CURSOR = "taken", "parent", "cursor"
# Of the state of a packer in the middle of the rows that it makes together.
_NEXT_ROW = "next_row"

Documents = list[np.ndarray]


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

    def changes_steps(self, stage: int, other: int) -> bool:
        """Whether the steps after the mixture differ between two stages.

        Raises:
          ConfigError: if they do, and what the steps hold cannot be handed over.
        """
        pair = min(stage, other), max(stage, other)
        if pair not in self._changes:
            self._changes[pair] = self._compared(*pair)
        return self._changes[pair]

    @functools.cached_property
    def _changes(self) -> dict[tuple[int, int], bool]:
        return {}

    def _compared(self, stage: int, other: int) -> bool:
        one, two = (_Pipeline(self.make_shards[n](0)) for n in (stage, other))
        if _same(one.steps, two.steps):
            return False
        for number, pipeline in ((stage, one), (other, two)):
            problem = pipeline.problem()
            if problem:
                raise errors.ConfigError(
                    f"stages {stage} and {other} have other steps after the mixture,"
                    f" and stage {number} {problem}; give all stages the same steps,"
                    " or make rows as ec.data.lm does: Examples, then WindowShuffle"
                    " if you like, then packed, and functions of single rows"
                )
        if not _same(one.before_examples(), two.before_examples()):
            raise errors.ConfigError(
                f"stages {stage} and {other} have other steps before ec.data.lm"
                ".Examples; give them the same"
            )
        return True


class _Pipeline:
    """The steps of a shard in one stage.

    Attributes:
      made: the whole pipeline.
      steps: all but the mixture, or what else it begins with, first to last.
    """

    def __init__(self, made: grain.IterDataset) -> None:
        self.made = made
        self.steps = shard_steps.chain(made)[1:]
        kinds = [type(step) for step in self.steps]
        self._first = (
            kinds.index(language.Examples) if language.Examples in kinds else None
        )

    def before_examples(self) -> list[grain.IterDataset]:
        """The steps before `Examples`."""
        return self.steps[: self._first]

    def problem(self) -> str:
        """Why the documents that steps hold cannot be found; empty if they can."""
        if self._first is None:
            return "has no ec.data.lm.Examples"
        number = self._number_of_rows()
        if number is None:
            return "makes its rows by other steps than those of ec.data.lm"
        after = [step for step in self.steps[number + 1 :] if not _is_of_rows(step)]
        return f"has {after[0]} after its rows" if after else ""

    def rows(self) -> grain.IterDataset:
        """The step that makes rows of examples."""
        number = self._number_of_rows()
        assert number is not None
        return self.steps[number]

    def documents(self) -> grain.IterDataset | None:
        """What `Examples` reads; None without them."""
        if self._first is None:
            return None
        (documents,) = shard_steps.parents(self.steps[self._first])
        return documents

    def reading(self, documents: grain.IterDataset) -> _Pipeline:
        """The same, whose `Examples` read from another dataset."""
        assert self._first is not None
        copies: dict[int, grain.IterDataset] = {}
        parent = documents
        # A user's make_shard may return the same datasets again.
        for step in self.steps[self._first :]:
            made = copy.copy(step)
            made._parents = (parent,)
            for name, value in vars(step).items():
                if id(value) in copies:
                    setattr(made, name, copies[id(value)])
            copies[id(step)] = parent = made
        return _Pipeline(parent)

    def _number_of_rows(self) -> int | None:
        assert self._first is not None
        for number, step in enumerate(self.steps):
            if number <= self._first:
                continue
            if isinstance(step, language.Padded | language.MaxTextRows):
                return number
            is_packer = (
                isinstance(step, packing.ConcatThenSplit)
                or type(step).__name__ in shard_steps.PACKERS
            )
            if isinstance(step, shuffling.WindowShuffle) or is_packer:
                continue
            # A thread would read on while these steps are emptied.
            if not _passes_on(step) or "Prefetch" in type(step).__name__:
                return None
        return None


_passes_on = shard_steps.passes_on
# The datasets of Grain that apply a function, and have the state of their parent.
_FUNCTIONS = ("FilterIterDataset", "MapIterDataset")


def _is_of_rows(step: grain.IterDataset) -> bool:
    # Whether a step after the rows has their state.
    return (
        _passes_on(step)
        or isinstance(step, chat.MaskedTargets)
        or type(step).__name__ in _FUNCTIONS
    )


def _same(ones: list[grain.IterDataset], others: list[grain.IterDataset]) -> bool:
    # Whether the states of some steps are those of others.
    ones, others = (
        [step for step in steps if not _passes_on(step)] for steps in (ones, others)
    )
    return len(ones) == len(others) and all(map(_same_step, ones, others))


def _same_step(one: grain.IterDataset, other: grain.IterDataset) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, language.Examples):
        assert isinstance(other, language.Examples)
        return (one.length, one.truncate) == (other.length, other.truncate)
    is_ours = type(one).__module__.startswith("elastic_ckpt.")
    if is_ours or type(one).__name__ in _FUNCTIONS or shard_steps.is_described(one):
        return shard_steps.description(one) == shard_steps.description(other)
    return shard_steps.are_alike(one, other)


class _StagedRows(grain.IterDataset):
    """The rows of a shard in the stage of `staged`."""

    passes_on = True

    def __init__(self, staged: StagedShards, shard: int) -> None:
        pipeline = _pipeline(staged, staged.stage, shard)
        super().__init__(pipeline.made)
        self.staged, self.shard, self.pipeline = staged, shard, pipeline

    def __iter__(self) -> grain.DatasetIterator:
        return _StagedRowsIterator(self, iter(self._parent))


class _StagedRowsIterator(grain.DatasetIterator):
    def __init__(self, dataset: _StagedRows, rows: grain.DatasetIterator) -> None:
        super().__init__()
        self._dataset = dataset
        self._stage = dataset.staged.stage
        self._use(rows)

    def __next__(self) -> Any:
        return next(self._rows)

    def get_state(self) -> Any:
        return _of_stage(self._stage, self._rows.get_state())

    def set_state(self, state: Any) -> None:
        stage, state = _stage_of(state)
        staged = self._dataset.staged
        if stage >= len(staged.make_shards):
            raise errors.DataError(
                f"a logical shard is in stage {stage} of a run, and the data has"
                f" {len(staged.make_shards)} stages; declare the stages that have begun"
            )
        if stage == self._stage or not staged.changes_steps(stage, self._stage):
            self._rows.set_state(state)
            return
        held, documents, parent = _held(staged, stage, self._dataset.shard, state)
        continued = self._dataset.pipeline.documents()
        assert isinstance(continued, _Continued)
        self._rows.close()
        continued.begin(held, documents, parent)
        self._use(iter(self._dataset.pipeline.made))

    def close(self) -> None:
        self._rows.close()

    def _use(self, rows: grain.DatasetIterator) -> None:
        self._rows = rows
        mark = getattr(rows, "mark", None)
        if mark is not None:
            self.mark = lambda: _marked(self._stage, mark())
        else:
            vars(self).pop("mark", None)


def _marked(stage: int, make: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: _of_stage(stage, make())


def oldest(cursor: cursors.Cursor) -> cursors.Cursor:
    """The cursor, of any stage, from which documents are read again."""
    held = (
        each[cursors.HELD] for each in cursors.parts(cursor) if cursors.HELD in each
    )
    for each in held:
        return oldest(each[_CURSOR])
    return cursor


def _of_stage(stage: int, state: Any) -> Any:
    # The first stage has the states of a run without stages.
    return {_STAGE: stage, _OF: state} if stage else state


def _stage_of(state: Any) -> tuple[int, Any]:
    if isinstance(state, dict) and state.keys() == {_STAGE, _OF}:
        return state[_STAGE], state[_OF]
    return 0, state


def _pipeline(staged: StagedShards, stage: int, shard: int) -> _Pipeline:
    # The pipeline of a shard in a stage, with what other stages hold as its input.
    pipeline = _Pipeline(staged.make_shards[stage](shard))
    documents = pipeline.documents()
    if documents is None:
        return pipeline
    return pipeline.reading(_Continued(documents, staged, shard))


def _held(
    staged: StagedShards, stage: int, shard: int, state: Any
) -> tuple[Any, Documents, Any]:
    """The documents that the steps of a stage hold at a state.

    Returns:
      Their origin, for cursors; the documents, each int32 `[tokens]`; and the state of
      the mixture after them.
    """
    pipeline = _pipeline(staged, stage, shard)
    documents = pipeline.documents()
    assert isinstance(documents, _Continued)
    cut = _Cut(documents)
    pipeline = pipeline.reading(cut)
    rows = _opened(pipeline, state)
    if isinstance(state, dict) and state.get(_NEXT_ROW):
        # Grain's packers read again what they hold when the next row is due.
        next(rows)
        num_read = cut.opened.num_read
        rows.close()
        rows = _opened(pipeline, state)
    else:
        num_read = cut.opened.num_read
    cut.opened.limit = num_read
    found = [document for row in rows for document in documents_of(row)]
    # What it has not read of documents that came over to it follows.
    _, others, taken, after = documents.held(cut.opened.get_state())
    found += others[taken:]
    rows.close()
    return {_STAGE: stage, _CURSOR: state}, found, after


def _opened(pipeline: _Pipeline, state: Any) -> grain.DatasetIterator:
    rows = iter(pipeline.rows())
    rows.set_state(copy.deepcopy(state))
    return rows


def documents_of(row: dict[str, np.ndarray]) -> Documents:
    """The documents, or parts of some, of which a row is made."""
    inputs, targets = row["inputs"], row["targets"]
    segments = row["inputs_segmentation"]
    found = []
    for segment in range(1, int(segments.max(initial=0)) + 1):
        (places,) = np.nonzero(segments == segment)
        first, end = int(places[0]), int(places[-1]) + 1
        found.append(np.concatenate([inputs[first : first + 1], targets[first:end]]))
    return found


class _Cut(grain.IterDataset):
    """Documents, which end after as many as `opened.limit`."""

    passes_on = True
    opened: _CutIterator

    def __iter__(self) -> grain.DatasetIterator:
        self.opened = _CutIterator(iter(self._parent))
        return self.opened


class _CutIterator(grain.DatasetIterator):
    def __init__(self, documents: grain.DatasetIterator) -> None:
        super().__init__(documents)
        self._documents = documents
        self.num_read = 0
        self.limit: int | None = None

    def __next__(self) -> Any:
        if self.limit is not None and self.num_read >= self.limit:
            raise StopIteration
        document = next(self._documents)
        self.num_read += 1
        return document

    def get_state(self) -> Any:
        return self._documents.get_state()

    def set_state(self, state: Any) -> None:
        self._documents.set_state(state)
        self.num_read = 0


class _Continued(grain.IterDataset):
    """First the documents that another stage holds, if any, then those of the parent.

    Args:
      parent: the documents of the stage.
      staged: all stages.
      shard: the number of the shard.
    """

    passes_on = True

    def __init__(
        self, parent: grain.IterDataset, staged: StagedShards, shard: int
    ) -> None:
        super().__init__(parent)
        self._staged, self._shard = staged, shard
        # The state to begin with.
        self.start: Any = None
        # The documents that were found last, and their origin.
        self._found: tuple[Any, Documents] = (None, [])

    def __iter__(self) -> grain.DatasetIterator:
        return _ContinuedIterator(self, iter(self._parent))

    def blocks(self) -> blocks.Blocks | None:
        """The same in blocks, if the parent has blocks."""
        parent = blocks.of(self._parent)
        return None if parent is None else _ContinuedBlocks(self, parent)

    def begin(self, held: Any, documents: Documents, parent: Any) -> None:
        """Has iterators begin with what `_held` returned."""
        self.start = parent
        if documents:
            self.start = {cursors.HELD: held, _TAKEN: 0, _PARENT: parent}
            self._found = held, documents

    def held(self, state: Any) -> tuple[Any, Documents, int, Any]:
        """The origin and the documents of a state, how many are taken, and the rest."""
        if not (isinstance(state, dict) and cursors.HELD in state):
            return None, [], 0, state
        held = state[cursors.HELD]
        if self._found[0] != held:
            stage, cursor = held[_STAGE], held[_CURSOR]
            self._found = _held(self._staged, stage, self._shard, cursor)[:2]
        return held, self._found[1], state[_TAKEN], state[_PARENT]


class _ContinuedIterator(grain.DatasetIterator):
    def __init__(self, dataset: _Continued, parent: grain.DatasetIterator) -> None:
        super().__init__(parent)
        self._dataset = dataset
        self._held: Any = None
        self._documents: Documents = []
        self._taken = 0
        if dataset.start is not None:
            self.set_state(dataset.start)

    def __next__(self) -> Any:
        if self._taken == len(self._documents):
            return next(self._parent)
        self._taken += 1
        return self._documents[self._taken - 1]

    def get_state(self) -> Any:
        parent = self._parent.get_state()
        if self._taken == len(self._documents):
            return parent
        return {cursors.HELD: self._held, _TAKEN: self._taken, _PARENT: parent}

    def set_state(self, state: Any) -> None:
        held, documents, taken, parent = self._dataset.held(state)
        self._held, self._documents, self._taken = held, documents, taken
        self._parent.set_state(parent)


class _ContinuedBlocks:
    def __init__(self, dataset: _Continued, parent: blocks.Blocks) -> None:
        self._dataset, self._parent = dataset, parent
        self._documents: Documents = []
        self._taken = 0
        self._places = _HeldPlaces(held=None, num_documents=0, parent=None)
        if dataset.start is not None:
            self.set_state(dataset.start)

    def read(self, at_most: int) -> blocks.Block:
        if self._taken == len(self._documents):
            block = self._parent.read(at_most)
            if self._places.first is None:
                self._places.first = block.place(0)
            return block
        documents = self._documents[self._taken :]
        length = np.array([len(document) for document in documents], np.int64)
        place = blocks.Place(self._places, self._taken)
        self._taken = len(self._documents)
        return blocks.Block(
            values=np.concatenate(documents),
            start=np.cumsum(length) - length,
            length=length,
            runs=((0, place),),
        )

    def end(self) -> blocks.Place:
        return self._parent.end()

    def get_state(self) -> Any:
        parent = self._parent.get_state()
        if self._taken == len(self._documents):
            return parent
        held = self._places.held
        return {cursors.HELD: held, _TAKEN: self._taken, _PARENT: parent}

    def set_state(self, state: Any) -> None:
        held, documents, taken, parent = self._dataset.held(state)
        self._documents, self._taken = documents, taken
        self._parent.set_state(parent)
        self._places = _HeldPlaces(
            held=held, num_documents=len(documents), parent=parent
        )

    def close(self) -> None:
        self._parent.close()


@dataclasses.dataclass(slots=True, kw_only=True)
class _HeldPlaces:
    """The states before each document that another stage holds.

    Attributes:
      held: their origin.
      num_documents: of all that it holds.
      parent: the state of the documents after them.
      first: the place of the first document after them, once it was read.
    """

    held: Any
    num_documents: int
    parent: Any
    first: blocks.Place | None = None

    def state(self, number: int, read: blocks.Place) -> Any:
        """See `Places`."""
        parent = self.parent
        if self.first is not None and read.of is not self:
            parent = self.first.state(read)
        if number == self.num_documents:
            return parent
        return {cursors.HELD: self.held, _TAKEN: number, _PARENT: parent}

    def read(self, number: int) -> blocks.Place:
        """See `Places`; no buffer is below."""
        return blocks.Place(self, number)
