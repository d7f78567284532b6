"""The requests of a plan: copies that are near each other in a file are one span.

Copies of the same form differ in their place alone. A checkpoint of 1e6 tensors has few
forms, so that a form is divided into parts that are read at once only once.

Glossary: c copies, s spans.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from elastic_ckpt.universal.plan.pieces import Pieces


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A strided copy without its place.

    Attributes:
      sizes: of its dims, more than 1 each; the last advances least in the buffer.
      source_strides: bytes from an element to the next in the file, by dim.
      buffer_strides: elements from one to the next in the buffer, by dim.
      dtype: of the elements in the file.
      scale: factor of the values.
      shift: added after scaling.
      view: of the stored tensor, see `StoredTensor`.
    """

    sizes: tuple[int, ...]
    source_strides: tuple[int, ...]
    buffer_strides: tuple[int, ...]
    dtype: np.dtype
    scale: float = 1.0
    shift: float = 0.0
    view: str = ""

    @property
    def volume(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    @property
    def extent(self) -> int:
        """Bytes in the file from the start of the first element to the last's end."""
        steps = zip(self.sizes, self.source_strides, strict=True)
        return sum((n - 1) * stride for n, stride in steps) + self.dtype.itemsize

    @property
    def contiguous(self) -> bool:
        """Whether the bytes of the file are those of the buffer, without change."""
        return (
            len(self.sizes) <= 1
            and self.source_strides == (self.dtype.itemsize,) * len(self.sizes)
            and self.buffer_strides == (1,) * len(self.sizes)
            and self.scale == 1
            and self.shift == 0
            and not self.view
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a request, by the kind of storage.

    Attributes:
      gap_bytes: fewer bytes that are not needed are read along, since another
        request costs more.
      span_bytes: the most bytes of a request, unless a single row has more.
      alone_bytes: a copy without change gets a separate request from this size on, and
        is read straight into its buffer.
    """

    gap_bytes: int
    span_bytes: int
    alone_bytes: int = 2**18


def normalized(form: Form) -> Form:
    """The same copy in the fewest dims, in the order of the buffer."""
    dims = [
        dim
        for dim in zip(
            form.sizes, form.source_strides, form.buffer_strides, strict=True
        )
        if dim[0] > 1
    ]
    dims.sort(key=lambda dim: (-dim[2], -dim[1]))
    joined: list[tuple[int, int, int]] = []
    for size, source, buffer in dims:
        if joined:
            outer, outer_source, outer_buffer = joined[-1]
            if outer_source == size * source and outer_buffer == size * buffer:
                joined[-1] = (outer * size, source, buffer)
                continue
        joined.append((size, source, buffer))
    return dataclasses.replace(
        form,
        sizes=tuple(dim[0] for dim in joined),
        source_strides=tuple(dim[1] for dim in joined),
        buffer_strides=tuple(dim[2] for dim in joined),
    )


def block(
    sizes: Sequence[int], strides: Sequence[int], itemsize: int, limits: Limits
) -> tuple[int, ...]:
    """The lengths of the parts, by dim, that a strided range of a file is read in.

    A part has neither larger gaps nor more bytes than `limits` has, except for gaps
    inside of its elements' rows.

    Args:
      sizes: of the dims.
      strides: of the file, in bytes.
      itemsize: of an element.
      limits: of a part.
    """
    lengths = [1] * len(sizes)
    extent = itemsize
    for dim in sorted(range(len(sizes)), key=lambda dim: strides[dim]):
        size, stride = sizes[dim], strides[dim]
        if stride - extent > limits.gap_bytes:
            break
        whole = stride * (size - 1) + extent
        if whole > limits.span_bytes:
            rows = 1 + max(0, limits.span_bytes - extent) // max(1, stride)
            lengths[dim] = min(size, rows)
            break
        lengths[dim], extent = size, whole
    return tuple(lengths)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Parts:
    """The parts of a form, in the order of the file.

    Attributes:
      forms: their forms.
      form: which of them each part has, `[parts]`.
      source: its place in the file, in bytes from that of the whole, int64 `[parts]`.
      buffer: its place in the buffer, in elements, int64 `[parts]`.
    """

    forms: tuple[Form, ...]
    form: np.ndarray
    source: np.ndarray
    buffer: np.ndarray


def _parts(form: Form, limits: Limits) -> _Parts:
    """Divides a form into parts that are read at once, each within `limits`."""
    lengths = block(form.sizes, form.source_strides, form.dtype.itemsize, limits)
    forms: list[Form] = []
    number = source = buffer = np.zeros(1, np.int64)
    sized = [form.sizes[:0]]
    order = sorted(range(len(lengths)), key=lambda dim: -form.source_strides[dim])
    for dim in order:
        size, length = form.sizes[dim], lengths[dim]
        starts = np.arange(0, size, length)
        kinds = [length] if size % length == 0 else [length, size % length]
        # Only the last part along a dim may be shorter.
        kind = (starts + length > size).astype(np.int64)
        number = np.add.outer(number * len(kinds), kind).ravel()
        sized = [(*before, each) for before in sized for each in kinds]
        source = np.add.outer(source, starts * form.source_strides[dim]).ravel()
        buffer = np.add.outer(buffer, starts * form.buffer_strides[dim]).ravel()
    for chosen in sized:
        sizes = dict(zip(order, chosen, strict=True))
        cut = dataclasses.replace(
            form, sizes=tuple(sizes[dim] for dim in range(len(lengths)))
        )
        forms.append(normalized(cut))
    return _Parts(forms=tuple(forms), form=number, source=source, buffer=buffer)


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
        parts = _parts(form, kinds[kind[rows[0]]])
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
