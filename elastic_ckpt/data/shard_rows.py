"""Reads the rows of some logical shards, batch by batch, in the current process.

A cursor is a restart point in a shard: the number of rows yielded so far and the
pipeline's state at that point. A shard can continue from any earlier cursor: it
recreates the rows in between and drops them. Cursors are therefore recorded only where
a pipeline begins a chapter, or after each batch if the pipeline has no chapters.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import grain
import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.data import (
    cursors,
    elastic_data,
    mixing,
    records,
    rows,
    shard_steps,
)
from elastic_ckpt.data.lm import rows as lm_rows

Rows = dict[str, np.ndarray]

# Keys that mark values that JSON lacks; see `FORMAT.md`.
_MARKS = {"()", "{}", "b''", "array()"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loaded:
    """The rows read for one batch.

    Attributes:
      rows: features of shape `[rows, ...]`; None if the batch needs none of these rows.
      cursors: the cursors recorded since the previous batch, keyed by shard.
    """

    rows: Rows | None
    cursors: cursors.Cursors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """The shards and rows to read.

    Attributes:
      make_shard: the function that builds a shard's pipeline.
      num_shards: S.
      size: B.
      keep: the rows of a batch to return, in ascending order.
      history: the batches before the first.
      start: the cursors of the shards to run; None for a shard at its beginning.
      finite: whether the data ends. If it does, shards that have ended yield rows of
        zeros, for which `mask` is false.
      every: the interval between the batches to return; the others are dropped.
      first: the number of batches to drop before the first.
    """

    make_shard: shard_steps.MakeShard
    num_shards: int
    size: int
    keep: np.ndarray
    history: rows.History
    start: cursors.Cursors
    finite: bool
    every: int = 1
    first: int = 0

    @property
    def number(self) -> int:
        """The index of the first batch in its period; see `data.rows`."""
        return rows.batches_of(self.history, self.size)

    def row_shards(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The shard of each row that is read for a batch, and whether it is kept."""
        shards = rows.batch_shards(self.num_shards, self.size, number)
        runs, keep = np.zeros(self.num_shards, bool), np.zeros(self.size, bool)
        runs[list(self.start)] = keep[self.keep] = True
        mine = runs[shards]
        return shards[mine], keep[mine]


class ShardRows:
    """Runs the pipelines of a task's shards; opens each when its first row is due."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._number = task.number
        self._skips = task.first
        # The rows that each shard has yielded.
        self._rows = rows.emitted(task.num_shards, task.history).tolist()
        self._opened: dict[int, Any] = {}
        self._ended: set[int] = set()
        self._noted: dict[int, cursors.Cursor] = {}
        # Each pipeline's iterators with chapters, and their chapters at its last
        # cursor.
        self._in_chapters: dict[int, list[Any]] = {}
        self._chapters: dict[int, list[int]] = {}
        # The last row, and a row of zeros with the same shapes.
        self._row: Any = None
        self._zeros: Any = None
        # Makes all rows of a batch in one call if pipelines end in `lm.Rows`.
        self._made: Any = None

    def __next__(self) -> Loaded:
        for _ in range(self._skips):
            self._next_rows()
        self._skips = self._task.every - 1
        kept = self._next_rows()
        noted, self._noted = self._noted, {}
        return Loaded(rows=self._stack(kept) if kept else None, cursors=noted)

    def _next_rows(self) -> list[Any]:
        # The rows of the next batch to return; None for rows of ended shards.
        shards, keep = (array.tolist() for array in self._task.row_shards(self._number))
        self._number += 1
        drawn = [self._next_row(shard) for shard in shards]
        for shard in self._opened.keys() & shards:
            chapters = [each.chapter for each in self._in_chapters[shard]]
            if not chapters or chapters != self._chapters.get(shard):
                self._chapters[shard] = chapters
                self._noted[shard] = cursor_of(self._rows[shard], self._opened[shard])
        return list(itertools.compress(drawn, keep))

    def close(self) -> None:
        """Closes the pipelines."""
        for opened in self._opened.values():
            opened.close()

    def _next_row(self, shard: int) -> Any:
        # The next row of a shard; None if the shard has ended.
        if shard in self._ended:
            return None
        try:
            with records.row_due():
                opened = self._open(shard)
                row = opened.unmade() if hasattr(opened, "made") else next(opened)
        except StopIteration:
            pass
        except Exception as error:
            error.add_note(f"in the pipeline of logical shard {shard}")
            raise
        else:
            self._rows[shard] += 1
            self._row = row
            return row
        if not self._task.finite:
            raise errors.DataError(
                f"logical shard {shard} has ended, but the data is not declared finite;"
                ' repeat its records endlessly in make_shard, or set end="padded"'
            )
        ended = self._opened.pop(shard)
        final = to_json(ended.get_state())
        ended.close()
        self._noted[shard] = {cursors.ROW: self._rows[shard], cursors.ENDED: final}
        self._ended.add(shard)
        return None

    def _open(self, shard: int) -> Any:
        if shard not in self._opened:
            made, start = self._task.make_shard(shard), self._task.start[shard]
            opened: Any = iterator(made, start, self._rows[shard])
            self._opened[shard] = opened
            self._in_chapters[shard] = [
                each
                for each in shard_steps.datasets(opened)
                if hasattr(each, "chapter")
            ]
            self._made = getattr(opened, "made", self._made)
        return self._opened[shard]

    def _stack(self, drawn: list[Any]) -> Rows:
        finite = self._task.finite
        is_unmade = [isinstance(row, lm_rows.Unmade) for row in drawn]
        real = [row is not None for row in drawn]
        if any(is_unmade) and is_unmade == real:
            made = self._made(drawn)
        else:
            made = _stacked([self._alone(row) for row in drawn], finite=finite)
        return made | {elastic_data.MASK: np.array(real)} if finite else made

    def _alone(self, row: Any) -> Any:
        # A row as an example; zeros for None.
        if isinstance(row, lm_rows.Unmade):
            # Other pipelines of the same batch have steps after their rows.
            return {name: each[0] for name, each in self._made([row]).items()}
        if row is None and self._zeros is None:
            example = self._any() if self._row is None else self._alone(self._row)
            self._zeros = {name: zeros_like(leaf) for name, leaf in example.items()}
        return self._zeros if row is None else row

    def _any(self) -> Any:
        # An example of any shard, for its shapes: this host's shards may have none.
        with records.row_due():
            for shard in range(self._task.num_shards):
                for example in self._task.make_shard(shard):
                    return example
        raise errors.DataError(
            f"none of the {self._task.num_shards} logical shards has an example;"
            " check whether a filter or another step drops all examples"
        )


def cursor_of(row: int, opened: grain.DatasetIterator) -> cursors.Cursor:
    """The cursor of a shard after `row` rows."""
    return {cursors.ROW: row, cursors.STATE: to_json(opened.get_state())}


def iterator(made: grain.IterDataset, cursor: Any, row: int) -> grain.DatasetIterator:
    """The iterator of a shard after `row` rows, opened at a cursor at or before them.

    After these rows, mixtures use their current weights. A shard that had ended is
    retried, because it may continue with new weights.

    Raises:
      DataError: if the pipeline does not yield that many rows.
    """
    opened = iter(made)
    if cursor is not None:
        state = from_json(cursors.state_of(cursor))
        mixing.check_weights_of(made, state)
        opened.set_state(state)
    has_ended = cursor is not None and cursors.ENDED in cursor
    missing = 0 if has_ended else row - cursors.row_of(cursor)
    if missing < 0 or sum(1 for _ in itertools.islice(opened, missing)) < missing:
        raise errors.DataError(
            "a logical shard cannot advance from its cursor, at row"
            f" {cursors.row_of(cursor)}, to row {row}, where the data state is;"
            " make_shard must produce the same rows each time, so seed its random"
            " functions; also, load all parts of a state from the same step"
        )
    mixing.renew(opened)
    return opened


def _stacked(examples: list[Any], *, finite: bool) -> Rows:
    if not isinstance(examples[0], Mapping):
        raise errors.DataError(
            f"make_shard yields {type(examples[0]).__name__} as a row; yield dicts"
            " that map feature names to arrays"
        )
    added = {elastic_data.EXAMPLE_ID} | ({elastic_data.MASK} if finite else set())
    if clashing := added & examples[0].keys():
        raise errors.DataError(
            f"make_shard yields features named {sorted(clashing)}, but batches add"
            " features with these names; rename yours in make_shard"
        )
    features = examples[0].keys()
    if all(example.keys() == features for example in examples):
        with contextlib.suppress(ValueError):
            return {name: _stack([e[name] for e in examples]) for name in features}
    for name in {name: None for example in examples for name in example}:
        shapes = {np.shape(e[name]) if name in e else None for e in examples}
        if len(shapes) > 1:
            raise errors.DataError(
                f"the feature {name!r} has different shapes in the rows of a batch,"
                f" {', '.join(sorted(map(str, shapes)))} (None: missing); pad or pack"
                " all rows to the same shape in make_shard"
            )
    return {name: _stack([e[name] for e in examples]) for name in features}


def _stack(leaves: list[Any]) -> np.ndarray:
    return np.stack(
        [leaf if isinstance(leaf, np.ndarray) else array_of(leaf) for leaf in leaves]
    )


def array_of(leaf: Any) -> np.ndarray:
    """A row's feature. Bytes and text stay objects: NumPy would drop trailing NULs."""
    array = np.asarray(leaf)
    return np.array(leaf, object) if array.dtype.kind in "SU" else array


def zeros_like(leaf: Any) -> Any:
    """A feature of a padding row, in place of `leaf`."""
    return type(leaf)() if isinstance(leaf, bytes | str) else np.zeros_like(leaf)


def with_ids(loaded: Rows, ids: np.ndarray) -> Rows:
    """`loaded` with the feature `example_id`; padding rows have `NO_ID`."""
    numbers = ids.astype(np.uint64)
    if elastic_data.MASK in loaded:
        numbers[~loaded[elastic_data.MASK]] = elastic_data.NO_ID
    return {**loaded, elastic_data.EXAMPLE_ID: elastic_data.split_ids(numbers)}


def to_json(state: Any) -> Any:
    """A Grain state as JSON, which `from_json` converts back."""
    # Grain's states contain NumPy integers, and tuples that its concat-then-split
    # compares with tuples. A user's iterator may have anything in its state.
    if isinstance(state, np.generic):
        state = state.item()
    match state:
        case dict() if set(map(type, state)) <= {str} and not _is_marked(state):
            # Fast path: most values are plain integers.
            return {
                key: value if type(value) is int else to_json(value)
                for key, value in state.items()
            }
        case None | int() | float() | str():
            return state
        case dict():
            return {"{}": [[to_json(key), to_json(state[key])] for key in state]}
        case list():
            return [to_json(value) for value in state]
        case tuple():
            return {"()": [to_json(value) for value in state]}
        case bytes():
            return {"b''": base64.b64encode(state).decode()}
        case np.ndarray() if not state.dtype.hasobject:
            content = base64.b64encode(state.tobytes()).decode()
            return {"array()": [state.dtype.str, list(state.shape), content]}
    raise errors.DataError(
        f"get_state of an iterator in make_shard returns {type(state).__name__},"
        f" {state!r:.60}, which cannot be saved; return only dicts, lists, tuples,"
        " numbers, strings, bytes and NumPy arrays"
    )


def from_json(cursor: Any) -> Any:
    """The inverse of `to_json`."""
    match cursor:
        case dict() if not _is_marked(cursor):
            return {key: from_json(value) for key, value in cursor.items()}
        case list():
            return [from_json(value) for value in cursor]
        case {"()": values}:
            return tuple(from_json(value) for value in values)
        case {"{}": pairs}:
            return {from_json(key): from_json(value) for key, value in pairs}
        case {"b''": content}:
            return base64.b64decode(content)
        case {"array()": [dtype, shape, content]}:
            array = np.frombuffer(base64.b64decode(content), np.dtype(dtype))
            return array.reshape(shape).copy()
    return cursor


def _is_marked(state: dict[Any, Any]) -> bool:
    return len(state) == 1 and not _MARKS.isdisjoint(state)
