"""The tensors of a checkpoint of any format, and where their bytes lie.

A reader of a format opens a path as a `Checkpoint`. Its tensors are those of the files:
if each rank saved a shard, each shard is a separate tensor, with the coordinates of
that rank. A layout (`elastic_ckpt.universal.rules`) describes which of them belong
together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from elastic_ckpt.core import box_cover, boxes
from elastic_ckpt.core.boxes import Box, Boxes
from elastic_ckpt.universal.factors import row_major
from elastic_ckpt.universal.formats.files import FormatError

# NumPy's limit.
MOST_DIMS = 64
MOST_ELEMENTS = 1 << 48
# By the names that optimizers give to states.
_KINDS = {"fp32": "master", "exp_avg": "first_moment", "exp_avg_sq": "second_moment"}
_PLAIN = (str, bytes, int, float, bool, type(None))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """A box of a tensor in a file, uncompressed and little-endian.

    Attributes:
      box: in the coordinates of the tensor.
      file: its path or URL.
      offset: the first byte of the box's first element.
      strides: bytes from an element to the next, by dim; not negative.
    """

    box: Box
    file: str
    offset: int
    strides: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint, as its format has it.

    Attributes:
      name: in the words of its format, `decoder.layers.3.mlp.linear_fc1.weight`.
      ranks: the coordinates of the rank that saved it, by axis (`tp`, `pp`, `dp`);
        empty where tensors are global.
      kind: what it is to its parameter: `parameter`, `master`, `first_moment`,
        `second_moment`, or the format's name of another state.
      dtype: of its elements.
      shape: in elements.
      fragments: boxes that cover it, each element once; empty if `spec` is there, or
        if names alone are matched.
      spec: of the TensorStore array that holds it, where its bytes are encoded.
      view: what is done with each element that is stored: "conj" (the conjugate),
        "neg" (the negative) or "conj neg"; "" if its values are those that are stored.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    ranks: tuple[tuple[str, int], ...] = ()
    kind: str = "parameter"
    fragments: tuple[Fragment, ...] = ()
    spec: Mapping[str, Any] | None = None
    view: str = ""


def kind_of(state: str) -> str:
    """See `StoredTensor.kind`; a state of another name is of a kind of that name."""
    return _KINDS.get(state, state)


class Checksum(NamedTuple):
    """What a format says of a range of a file.

    Attributes:
      start: the first byte.
      stop: the byte after the last.
      crc: the CRC-32.
    """

    start: int
    stop: int
    crc: int


def no_checksums(file: str) -> Sequence[Checksum]:
    """Those of a format that has none."""
    del file
    return ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An open checkpoint. It holds no values, and files only while one is read.

    Attributes:
      format: the name of the format, for people: `DeepSpeed ZeRO-1`.
      tensors: all tensors; a name, its kind and its ranks together occur once.
      axes: the number of ranks by axis; empty where tensors are global.
      values: numbers and texts beside the tensors, by path: `iteration`, `args/lr`.
      checksums: finds the ranges of a file of which the format has a checksum. It
        raises FormatError if they cannot be read; several threads call it.
    """

    format: str
    tensors: Sequence[StoredTensor]
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    checksums: Callable[[str], Sequence[Checksum]] = no_checksums


def damaged(file: str, start: int, stop: int, found: str) -> FormatError:
    """The error about bytes of a file that are not those that were written."""
    return FormatError(
        f"{file} is damaged: its bytes {start} to {stop} have {found}; copy it again"
        " from the place that it was written to, or use another step"
    )


@functools.lru_cache(maxsize=2**16)
def whole(shape: tuple[int, ...]) -> Box:
    """The box of a whole tensor."""
    return boxes.whole(shape)


def contiguous(
    shape: tuple[int, ...], itemsize: int, *, file: str, offset: int
) -> tuple[Fragment, ...]:
    """The fragment of a tensor that a file has in row-major order; none if empty."""
    if 0 in shape:
        return ()
    strides = row_major(shape, itemsize)
    return (Fragment(box=whole(shape), file=file, offset=offset, strides=strides),)


def checked_shape(shape: Iterable[object], place: str) -> tuple[int, ...]:
    """`shape` as a tuple of numbers.

    Args:
      shape: as a file has it.
      place: the file and the tensor, for messages.

    Raises:
      FormatError: if it is no shape, or one of a tensor that is too large.
    """
    dims = tuple(shape)
    numbers = [dim for dim in dims if type(dim) is int and dim >= 0]
    if len(numbers) != len(dims) or len(dims) > MOST_DIMS:
        # Parts that are no numbers may be nested.
        shown = [dim if type(dim) is int else type(dim).__name__ for dim in dims[:9]]
        raise FormatError(f"{place} has the shape {shown}, which is none")
    if math.prod(filter(None, numbers)) > MOST_ELEMENTS:
        raise FormatError(f"{place} has the shape {list(dims)}, which is too large")
    return tuple(numbers)


def check_cover(shape: tuple[int, ...], parts: Sequence[Box], place: str) -> None:
    """Fails unless `parts` cover an array of `shape`, each element once.

    Args:
      shape: of the array.
      parts: boxes of as many dims.
      place: the file and the tensor, for messages.

    Raises:
      FormatError: if a box lies outside, two overlap, or there is a gap.
    """
    array = whole(shape)
    if len(parts) == 1 and parts[0] == array:
        return
    for part in parts:
        if not boxes.contains(array, part):
            raise FormatError(f"{place} has the part {part} outside of {array}")
    held = Boxes.from_boxes([part for part in parts if part.volume], rank=len(shape))
    gaps = box_cover.gaps(array, held)
    if len(gaps):
        raise FormatError(f"{place} lacks the part {gaps[0]} of {array}")
    if int(held.volumes.sum()) != array.volume:
        raise FormatError(f"{place} has parts that overlap, among {len(held)}")


def flatten(value: Any, *, without: Collection[str] = ()) -> dict[str, Any]:
    """Numbers and texts by path, `args/lr`; lists of them are one value.

    Args:
      value: dicts and lists, with anything in them; tensors are left out.
      without: keys of the outermost dict that are left out.
    """
    if isinstance(value, dict):
        value = {key: each for key, each in value.items() if key not in without}
    return dict(_flat(value, ""))


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    is_list = isinstance(value, list | tuple)
    if isinstance(value, np.dtype):
        yield path, value.name
    elif isinstance(value, _PLAIN):
        yield path, value
    elif is_list and all(isinstance(each, _PLAIN) for each in value):
        yield path, list(value)
    elif is_list or isinstance(value, dict):
        for key, each in enumerate(value) if is_list else value.items():
            yield from _flat(each, f"{path}/{key}" if path else str(key))


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Switches the collector of cycles off while millions of tensors are made.

    It would scan them again and again, which doubles the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
