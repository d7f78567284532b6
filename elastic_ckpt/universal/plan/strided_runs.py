"""The form of a strided copy, and its division into parts that are read at once.

Copies of the same form differ in their place alone. A checkpoint of 1e6 tensors has few
forms, so that the work of this module is done once for each of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np


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
    """

    sizes: tuple[int, ...]
    source_strides: tuple[int, ...]
    buffer_strides: tuple[int, ...]
    dtype: np.dtype
    scale: float = 1.0
    shift: float = 0.0

    @property
    def volume(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    @property
    def extent(self) -> int:
        """Bytes in the file from the begin of the first element to the last's end."""
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
class Parts:
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


def parts(form: Form, limits: Limits) -> Parts:
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
    return Parts(forms=tuple(forms), form=number, source=source, buffer=buffer)
