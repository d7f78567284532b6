"""Reads safetensors files: a JSON header, and the values of its tensors behind it.

The header is checked before a value is read: every tensor has exactly the bytes of its
shape, and together they are the rest of the file, without gaps or overlaps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
from etils import epath

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
}


def read(
    path: epath.PathLike, names: Iterable[str] | None = None
) -> dict[str, np.ndarray]:
    """The tensors of a file, by name.

    Args:
      path: local, or in a bucket.
      names: those that are read; None reads all.

    Raises:
      FormatError: if it is no such file, is cut short, or lacks one of the names.
    """
    file_path = epath.Path(path)
    with file_path.open("rb") as file:
        total = file.seek(0, 2)
        file.seek(0)
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= min(MOST_HEADER_BYTES, total - 8):
            raise FormatError(
                f"{path} is no safetensors file, or is cut short: its header would"
                f" have {size} bytes, and the file has {total}"
            )
        spans = _spans(file.read(size), total - 8 - size, str(path))
        chosen = spans.keys() if names is None else list(names)
        arrays = {}
        for name in chosen:
            if name not in spans:
                raise FormatError(f"{path} has no tensor {name}")
            dtype, shape, start, stop = spans[name]
            file.seek(8 + size + start)
            content = bytearray(file.read(stop - start))
            arrays[name] = np.frombuffer(content, dtype).reshape(shape)
        return arrays


def _spans(
    header: bytes, num_bytes: int, path: str
) -> dict[str, tuple[np.dtype, tuple[int, ...], int, int]]:
    try:
        fields = json.loads(header, object_pairs_hook=_without_doubles)
        if not isinstance(fields, dict):
            raise TypeError("it is no object")
        fields.pop("__metadata__", None)
        spans = {name: _span(field) for name, field in fields.items()}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(
            f"{path} has a header that is no safetensors header: {error}"
        ) from None
    end = 0
    for name, (_, _, start, stop) in sorted(
        spans.items(), key=lambda item: item[1][2:]
    ):
        if start != end:
            raise FormatError(f"{path} has a gap or an overlap before {name}")
        end = stop
    if end != num_bytes:
        raise FormatError(
            f"{path} has {num_bytes} bytes of values, and its header describes {end}"
        )
    return spans


def _span(field: dict[str, Any]) -> tuple[np.dtype, tuple[int, ...], int, int]:
    dtype, shape = _DTYPES[field["dtype"]], field["shape"]
    start, stop = field["data_offsets"]
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in (*shape, start, stop)):
        raise ValueError("a dim or an offset is no number from 0 up")
    if len(shape) > 64 or math.prod(shape) * dtype.itemsize != stop - start:
        raise ValueError(f"a tensor of shape {shape} has {stop - start} bytes")
    return dtype, tuple(shape), start, stop


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("it has a name twice")
    return fields
