"""Safetensors files: a JSON header, followed by the values of the tensors.

The header is checked before any value is read: every tensor must have exactly as many
bytes as its shape requires, and the tensors together must fill the rest of the file
without gaps or overlaps. The format has no checksums.
"""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
from etils import epath

from elastic_ckpt.universal.formats import files
from elastic_ckpt.universal.formats.checkpoint import (
    StoredTensor,
    checked_shape,
    contiguous,
)
from elastic_ckpt.universal.formats.files import FormatError

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
# Marks the header of a file with parts of tensors, which PyTorch's distributed
# checkpointing may write.
_SHARDING = "DCP_SHARDING_INFO"


def dtype_name(dtype: np.dtype) -> str:
    """A dtype's name in headers.

    Raises:
      FormatError: if the format does not support the dtype.
    """
    if dtype not in _NAMES:
        raise FormatError(
            f"safetensors has no dtype {dtype}; cast such tensors to one of"
            f" {sorted(map(str, _NAMES))}"
        )
    return _NAMES[dtype]


def read_header(path: epath.PathLike) -> tuple[list[StoredTensor], dict[str, str]]:
    """Reads a file's header, but no tensor values.

    Returns:
      The tensors, in file order, and the metadata strings by name.

    Raises:
      FormatError: if the file is not a safetensors file, is truncated, or has parts of
        tensors.
    """
    with files.opened(path) as file:
        total = file.seek(0, 2)
        file.seek(0)
        size = int.from_bytes(file.read(8), "little")
        if not 2 <= size <= min(MOST_HEADER_BYTES, total - 8):
            raise FormatError(
                f"{path} is not a safetensors file or is truncated: its header would"
                f" have {size} bytes, but the file has {total}"
            )
        fields = files.parse_json(file.read(size), f"the header of {path}")
    tensors, at = [], 0
    try:
        texts = fields.pop("__metadata__", None) or {}
        texts = {key: str(text) for key, text in texts.items()}
        if _SHARDING in texts:
            raise FormatError(
                f"{path} has tensor parts from a distributed checkpoint; join them"
                " with torch.distributed.checkpoint's consolidate_safetensors_files,"
                " or save with enable_consolidation=True"
            )
        ordered = sorted(fields.items(), key=lambda item: item[1]["data_offsets"])
        for name, field in ordered:
            place, dtype = f"{path}: {name:.1000}", _DTYPES.get(field["dtype"])
            if dtype is None:
                raise FormatError(
                    f"{place} has the unsupported dtype {field['dtype']!r:.60};"
                    f" supported dtypes are {', '.join(_DTYPES)}"
                )
            shape = checked_shape(field["shape"], place)
            stop = at + math.prod(shape) * dtype.itemsize
            if field["data_offsets"] != [at, stop]:
                raise FormatError(
                    f"{place} has the data_offsets {field['data_offsets']!r:.60}, but"
                    f" values of shape {shape} should be at {[at, stop]}, so the header"
                    " is damaged"
                )
            fragments = contiguous(
                shape, dtype.itemsize, file=str(path), offset=8 + size + at
            )
            tensors.append(
                StoredTensor(name=name, dtype=dtype, shape=shape, fragments=fragments)
            )
            at = stop
    except (AttributeError, ValueError, TypeError, KeyError) as error:
        raise FormatError(
            f"{path} has an invalid safetensors header: {error!r:.200}"
        ) from None
    if 8 + size + at != total:
        raise FormatError(
            f"{path} has {total - 8 - size} bytes of values, but its header describes"
            f" {at}"
        )
    return tensors, texts
