"""A checkpoint's tensors, in any format, and where their bytes are.

A format's reader opens a path as a `Checkpoint`, which has the tensors as the files
store them: if each rank saved a shard, each shard is a separate tensor with its rank's
coordinates. A layout (`elastic_ckpt.universal.rules`) says which shards belong
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
# Kinds, by the names that optimizers use for their states.
_KINDS = {"fp32": "master", "exp_avg": "first_moment", "exp_avg_sq": "second_moment"}
_PLAIN = (str, bytes, int, float, bool, type(None))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """A box of a tensor in a file, uncompressed and little-endian.

    Attributes:
      file: the path or URL of the file.
      offset: the position in the file of the box's first element, in bytes.
      strides: the stride of each dim in bytes, at least 0.
    """

    box: Box
    file: str
    offset: int
    strides: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint, as its format stores it.

    Attributes:
      name: the name in the format, such as `decoder.layers.3.mlp.linear_fc1.weight`.
      ranks: the coordinates of the rank that saved the tensor, keyed by axis (`tp`,
        `pp`, `dp`); empty if tensors are global.
      kind: the tensor's role for its parameter: `parameter`, `master`, `first_moment`,
        `second_moment`, or the format's name for any other state.
      fragments: boxes that cover the tensor, each element once; empty if `spec` is set,
        or if only names are matched.
      spec: the spec of the TensorStore array with the encoded bytes; None if they are
        not encoded.
      view: the operation on each stored element: "conj" (conjugate), "neg" (negate),
        "conj neg", or "" (none).
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
    """The `StoredTensor.kind` of an optimizer state; unknown states keep their name."""
    return _KINDS.get(state, state)


class Checksum(NamedTuple):
    """The CRC-32 that a format stores for the bytes `start` to `stop` of a file."""

    start: int
    stop: int
    crc: int


def no_checksums(file: str) -> Sequence[Checksum]:
    """Returns no checksums, for formats without checksums."""
    del file
    return ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An open checkpoint, without tensor values in memory and without open files.

    Attributes:
      format: the human-readable name of the format, such as `DeepSpeed ZeRO-1`.
      tensors: all tensors, unique by the combination of name, kind and ranks.
      axes: the number of ranks on each axis, keyed by axis; empty if tensors are
        global.
      values: the other numbers and strings, keyed by path, such as `args/lr`.
      checksums: a function that returns a file's checksums or raises FormatError if
        they cannot be read; multiple threads call it.
    """

    format: str
    tensors: Sequence[StoredTensor]
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    checksums: Callable[[str], Sequence[Checksum]] = no_checksums


def damaged(file: str, start: int, stop: int, found: str) -> FormatError:
    """The error about bytes that changed after they were written."""
    return FormatError(
        f"{file} is damaged: its bytes {start} to {stop} have {found}; copy the file"
        " again from the machine that wrote it, or use a different step"
    )


@functools.lru_cache(maxsize=2**16)
def whole(shape: tuple[int, ...]) -> Box:
    """The box that covers a whole tensor."""
    return boxes.whole(shape)


def contiguous(
    shape: tuple[int, ...], itemsize: int, *, file: str, offset: int
) -> tuple[Fragment, ...]:
    """The fragment of a tensor that is stored row-major; none for an empty tensor."""
    if 0 in shape:
        return ()
    strides = row_major(shape, itemsize)
    return (Fragment(box=whole(shape), file=file, offset=offset, strides=strides),)


def checked_shape(shape: Iterable[object], place: str) -> tuple[int, ...]:
    """Checks a shape from a file.

    `place` is the file and the tensor, used in error messages.

    Raises:
      FormatError: if the value is not a shape or is too large.
    """
    dims = tuple(shape)
    numbers = [dim for dim in dims if type(dim) is int and dim >= 0]
    if len(numbers) != len(dims) or len(dims) > MOST_DIMS:
        # Values that are not numbers may be nested.
        shown = [dim if type(dim) is int else type(dim).__name__ for dim in dims[:9]]
        raise FormatError(f"{place} has the invalid shape {shown}")
    if math.prod(filter(None, numbers)) > MOST_ELEMENTS:
        raise FormatError(f"{place} has shape {list(dims)}, which is too large")
    return tuple(numbers)


def check_cover(shape: tuple[int, ...], parts: Sequence[Box], place: str) -> None:
    """Checks that `parts` cover an array of `shape`, each element once.

    `place` is the file and the tensor, used in error messages.

    Raises:
      FormatError: if a part lies outside the array, two parts overlap, or there is a
        gap.
    """
    array = whole(shape)
    if len(parts) == 1 and parts[0] == array:
        return
    for part in parts:
        if not boxes.contains(array, part):
            raise FormatError(f"{place}: the part {part} lies outside {array}")
    held = Boxes.from_boxes([part for part in parts if part.volume], rank=len(shape))
    gaps = box_cover.gaps(array, held)
    if len(gaps):
        raise FormatError(f"{place} lacks the part {gaps[0]} of {array}")
    if int(held.volumes.sum()) != array.volume:
        raise FormatError(f"{place}: some of its {len(held)} parts overlap")


def flatten(value: Any, *, without: Collection[str] = ()) -> dict[str, Any]:
    """Flattens numbers and strings into a dict with paths as keys, such as `args/lr`.

    A list of numbers or strings is one value.

    Args:
      value: nested dicts and lists; anything else in them, such as tensors, is skipped.
      without: keys of the outermost dict to skip.
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
    """Disables the garbage collector while millions of tensors are created.

    The collector would scan the tensors again and again, which doubles the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
