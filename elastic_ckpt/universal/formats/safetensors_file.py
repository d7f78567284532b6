"""Reads safetensors files: a JSON header, and the values of its tensors behind it.

The header is checked before a value is read: every tensor has exactly the bytes of its
shape, and together they are the rest of the file, without gaps or overlaps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import IO, Any

import ml_dtypes
import numpy as np
from etils import epath

from elastic_ckpt.universal.formats import coverage, source_files
from elastic_ckpt.universal.formats.format_error import FormatError

MOST_HEADER_BYTES = 100 << 20

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "C64": np.dtype(np.complex64),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}


_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The place of a tensor in a file.

    Attributes:
      dtype: of its elements.
      shape: in elements.
      start: its first byte in the file.
      stop: the byte after its last.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """The header of a file.

    Attributes:
      spans: the tensors by name.
      metadata: texts by name.
    """

    spans: Mapping[str, Span]
    metadata: Mapping[str, str]


def dtype_name(dtype: np.dtype) -> str:
    """The name of a dtype in headers.

    Raises:
      FormatError: if the format has no such dtype.
    """
    if dtype not in _NAMES:
        raise FormatError(
            f"safetensors has no dtype {dtype}; cast such tensors, to one of"
            f" {sorted(map(str, _NAMES))}"
        )
    return _NAMES[dtype]


def read_header(path: epath.PathLike) -> Header:
    """The header of a file, checked; no values are read.

    Raises:
      FormatError: if it is no such file, or is cut short.
    """
    with source_files.opened(path) as file:
        return _header(file, str(path))


def _header(file: IO[bytes], path: str) -> Header:
    total = file.seek(0, 2)
    file.seek(0)
    size = int.from_bytes(file.read(8), "little")
    if not 2 <= size <= min(MOST_HEADER_BYTES, total - 8):
        raise FormatError(
            f"{path} is no safetensors file, or is cut short: its header would"
            f" have {size} bytes, and the file has {total}"
        )
    fields = source_files.parse_json(file.read(size), f"the header of {path}")
    metadata = fields.pop("__metadata__", None) or {}
    try:
        texts = {key: str(text) for key, text in metadata.items()}
        spans = {
            name: _span(field, 8 + size, f"{path}: {name}")
            for name, field in fields.items()
        }
    except (AttributeError, ValueError, TypeError, KeyError) as error:
        raise FormatError(
            f"{path} has a header that is no safetensors header: {error!r}"
        ) from None
    end = 8 + size
    ordered = sorted(spans.items(), key=lambda item: (item[1].start, item[1].stop))
    for name, span in ordered:
        if span.start != end:
            raise FormatError(f"{path} has a gap or an overlap before {name}")
        end = span.stop
    if end != total:
        raise FormatError(
            f"{path} has {total - 8 - size} bytes of values, and its header describes"
            f" {end - 8 - size}"
        )
    return Header(spans=spans, metadata=texts)


def _span(field: dict[str, Any], begin: int, place: str) -> Span:
    dtype = _DTYPES.get(field["dtype"])
    if dtype is None:
        raise FormatError(
            f"{place[:1000]} has the dtype {field['dtype']!r:.60}, which is not read;"
            f" those that are: {', '.join(_DTYPES)}"
        )
    shape = coverage.checked_shape(field["shape"], place)
    start, stop = field["data_offsets"]
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in (start, stop)):
        raise ValueError("an offset is no number from 0 up")
    if math.prod(shape) * dtype.itemsize != stop - start:
        raise ValueError(f"a tensor of shape {shape} has {stop - start} bytes")
    return Span(dtype=dtype, shape=shape, start=begin + start, stop=begin + stop)
