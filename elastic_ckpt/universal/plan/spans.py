"""Joins copies that are near each other in a file into spans, each of one request.

Glossary: c copies, s spans.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from elastic_ckpt.universal.plan import strided_runs
from elastic_ckpt.universal.plan.piece_table import Pieces
from elastic_ckpt.universal.plan.strided_runs import Form, Limits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """Ranges of bytes to read, and the copies out of each.

    Attributes:
      file: the number of the file, int64 `[s]`.
      start: of the range, int64 `[s]`.
      stop: of the range, int64 `[s]`.
      first_copy: the copies of span i are `first_copy[i]` to `first_copy[i + 1]`, int64
        `[s + 1]`.
      forms: of the copies.
      form: of each copy, by number, int64 `[c]`.
      tensor: the stored tensor that it is from, int64 `[c]`.
      source: its first byte in the file, int64 `[c]`.
      buffer: that it goes to, int64 `[c]`.
      element: its first element there, int64 `[c]`.
    """

    file: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    first_copy: np.ndarray
    forms: Sequence[Form]
    form: np.ndarray
    tensor: np.ndarray
    source: np.ndarray
    buffer: np.ndarray
    element: np.ndarray

    def __len__(self) -> int:
        return len(self.file)


def spans(pieces: Pieces, limits: Callable[[str], Limits]) -> Spans:
    """The spans of pieces, in the order in which buffers are to be filled.

    Args:
      pieces: of a host.
      limits: of the requests to a file.
    """
    of_file = [limits(file) for file in pieces.files]
    copies = _copies(pieces, of_file)
    forms, form, row, source, element = copies
    file = pieces.file[row]
    extents = np.array([each.extent for each in forms], np.int64)
    order = np.lexsort((source, file))
    from_bytes = np.array([each.alone_bytes for each in of_file], np.int64)[file]
    plain = np.array([each.contiguous for each in forms], bool)[form]
    alone = (plain & (extents[form] >= from_bytes))[order]
    number = _joined(
        file[order], source[order], (source + extents[form])[order], alone, of_file
    )
    filled_in = np.array([buffer.order for buffer in pieces.buffers], np.int64)
    firsts = np.flatnonzero(np.diff(number, prepend=-1))
    buffer = pieces.buffer[row]
    if len(firsts):
        due = np.minimum.reduceat(filled_in[buffer[order]], firsts)
    else:
        due = np.empty(0, np.int64)
    # Spans in the order of their buffers, the copies of a span in that of the file.
    turn = np.argsort(due, kind="stable")
    place = np.empty_like(turn)
    place[turn] = np.arange(len(turn))
    order = order[np.argsort(place[number], kind="stable")]
    sizes = np.diff(firsts, append=len(number))[turn]
    first_copy = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    begins = first_copy[:-1]
    stops = (source + extents[form])[order]
    return Spans(
        file=file[order][begins],
        start=source[order][begins],
        stop=np.maximum.reduceat(stops, begins) if len(begins) else begins,
        first_copy=first_copy,
        forms=forms,
        form=form[order],
        tensor=pieces.tensor[row][order],
        source=source[order],
        buffer=buffer[order],
        element=element[order],
    )


def _copies(
    pieces: Pieces, of_file: Sequence[Limits]
) -> tuple[list[Form], np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    # Divides pieces by their limits: the forms of copies, the form of each copy, its
    # piece, and its places in the file and in the buffer.
    kinds = list(dict.fromkeys(of_file))
    kind_of_file = np.array([kinds.index(each) for each in of_file], np.int64)
    kind = kind_of_file[pieces.file] if len(of_file) else pieces.file
    key = pieces.form * max(1, len(kinds)) + kind
    order = np.argsort(key, kind="stable")
    firsts = np.flatnonzero(np.diff(key[order], prepend=-1))
    numbers: dict[Form, int] = {}
    columns: list[list[np.ndarray]] = [[], [], [], []]
    for rows in np.split(order, firsts[1:]) if len(order) else []:
        form = pieces.forms[pieces.form[rows[0]]]
        parts = strided_runs.parts(form, kinds[kind[rows[0]]])
        each = [numbers.setdefault(part, len(numbers)) for part in parts.forms]
        columns[0].append(np.tile(np.array(each)[parts.form], len(rows)))
        columns[1].append(np.repeat(rows, len(parts.form)))
        columns[2].append(np.add.outer(pieces.source[rows], parts.source).ravel())
        columns[3].append(np.add.outer(pieces.element[rows], parts.buffer).ravel())
    nothing = np.empty(0, np.int64)
    form, row, source, element = (
        np.concatenate([nothing, *column]) for column in columns
    )
    return list(numbers), form, row, source, element


def _joined(
    file: np.ndarray,
    start: np.ndarray,
    stop: np.ndarray,
    alone: np.ndarray,
    of_file: Sequence[Limits],
) -> np.ndarray:
    # The number of each copy's span; copies are ordered by file and start.
    numbers = []
    number, span_file, span_start, span_stop = -1, -1, 0, 0
    limits = Limits(gap_bytes=0, span_bytes=0)
    columns = (column.tolist() for column in (file, start, stop, alone))
    for copy_file, first, after, single in zip(*columns, strict=True):
        if (
            copy_file != span_file
            or single
            or first - span_stop > limits.gap_bytes
            or first >= span_start + limits.span_bytes
        ):
            number += 1
            span_file, span_start, span_stop = copy_file, first, after
            limits = of_file[copy_file]
            if single:
                # The next copy begins another span.
                span_file = -1
        elif after > span_stop:
            span_stop = after
        numbers.append(number)
    return np.array(numbers, np.int64)
