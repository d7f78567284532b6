"""Opens GGUF files of tensors that are not quantized, as llama.cpp writes them.

A file has a header of keys with values, a list of tensors, and the bytes of these.
Dims are listed from the innermost, so shapes are reversed here. Keys are values, as
they are: `llama.block_count`, `tokenizer.ggml.tokens`. A directory has the parts of a
model, whose names end in `-00001-of-00003.gguf`. There are no checksums.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection
from typing import IO, Any

import ml_dtypes
import numpy as np
from etils import epath

from elastic_ckpt.universal.formats import coverage, source_files
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.opened import OpenedCheckpoint
from elastic_ckpt.universal.formats.source_budget import SourceBudget
from elastic_ckpt.universal.stored import StoredTensor

SUFFIX = ".gguf"
_VERSIONS = (2, 3)
_DTYPES = {
    0: np.dtype(np.float32),
    1: np.dtype(np.float16),
    24: np.dtype(np.int8),
    25: np.dtype(np.int16),
    26: np.dtype(np.int32),
    27: np.dtype(np.int64),
    28: np.dtype(np.float64),
    30: np.dtype(ml_dtypes.bfloat16),
}
_QUANTIZED = {
    **{2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1"},
    **{10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K"},
    **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL"},
    **{21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0"},
    **{35: "TQ2_0", 39: "MXFP4"},
}
# The kinds of values.
_NUMBERS = dict(enumerate(["<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "<u1"])) | {
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_BOOL, _TEXT, _LIST = 7, 8, 9
_MOST_DIMS = 4
_MOST_NAME_BYTES = 1 << 16
# A number of a list, a text without its characters, a tensor.
_NUMBER_BYTES, _TEXT_BYTES, _TENSOR_BYTES = 40, 100, 1000
_SPLITS = "split.count"


def is_format(names: Collection[str]) -> bool:
    """Whether files of these names, in one directory, are such a checkpoint."""
    return any(name.endswith(SUFFIX) for name in names)


def open_checkpoint(path: epath.PathLike) -> OpenedCheckpoint:
    """Opens a file, or a directory of the parts of a model.

    Raises:
      FormatError: if a file is missing or malformed, has tensors that are quantized, or
        a tensor is there twice.
    """
    source = epath.Path(path)
    files = [source]
    if source.is_dir():
        files = sorted(each for each in source.iterdir() if each.suffix == SUFFIX)
    budget = SourceBudget()
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, Any] = {}
    for file in files:
        budget.add_file(source_files.num_stored_bytes(file))
        with source_files.opened(file) as opened:
            read = _Header(opened, str(file), budget)
        for tensor in read.tensors:
            if tensors.setdefault(tensor.name, tensor) is not tensor:
                raise FormatError(
                    f"{file} has {tensor.name}, and so has another file; give the path"
                    " of one"
                )
        values = read.values | values
    splits = values.get(_SPLITS, len(files))
    if splits not in (0, len(files)):
        raise FormatError(
            f"{path} has {len(files)} of the {splits} files of a model; give the path"
            " of a directory that has them all"
        )
    return OpenedCheckpoint(
        format="GGUF", tensors=list(tensors.values()), values=values
    )


class _Header:
    """The header of a file, read from its beginning."""

    def __init__(self, file: IO[bytes], path: str, budget: SourceBudget) -> None:
        self._path = path
        self._budget = budget
        self._size = file.seek(0, 2)
        file.seek(0)
        self._file = file
        if file.read(4) != b"GGUF":
            raise self._error("is no GGUF file")
        version = self._unpacked("<I")
        if version not in _VERSIONS:
            raise self._error(
                f"has version {version}, and this program reads {_VERSIONS}, of"
                " little-endian files"
            )
        num_tensors, num_values = self._unpacked("<Q"), self._unpacked("<Q")
        self.values: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._text()
            if key in self.values:
                raise self._error(f"has the key {key[:200]} twice")
            self.values[key] = self._value(self._unpacked("<I"))
        alignment = self.values.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20:
            raise self._error(f"has the alignment {str(alignment)[:40]}, which is none")
        infos = [self._info() for _ in range(num_tensors)]
        begin = -(-file.tell() // alignment) * alignment
        self.tensors = [self._tensor(begin, *info) for info in infos]
        if len({info[0] for info in infos}) != num_tensors:
            raise self._error("has two tensors of a name")

    def _error(self, what: str) -> FormatError:
        return FormatError(f"{self._path} {what}")

    def _take(self, size: int) -> bytes:
        content = self._file.read(size) if size <= self._size else b""
        if len(content) != size:
            raise self._error("is cut short, or has a header that is malformed")
        return content

    def _unpacked(self, layout: str) -> Any:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _text(self, most_bytes: int = _MOST_NAME_BYTES) -> str:
        size = self._unpacked("<Q")
        if size > most_bytes:
            raise self._error(f"has a name or a key of {size} bytes")
        self._budget.take(_TEXT_BYTES + 4 * size, self._path)
        # Tokens may be parts of characters.
        return self._take(size).decode("utf-8", "backslashreplace")

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text(self._size)
        if kind in _NUMBERS:
            return self._numbers(kind, 1)[0]
        if kind != _LIST:
            raise self._error(f"has a value of the unknown kind {kind}")
        kind, count = self._unpacked("<I"), self._unpacked("<Q")
        if kind == _TEXT:
            return [self._text(self._size) for _ in range(count)]
        if kind not in _NUMBERS:
            raise self._error(f"has a list of the kind {kind}, which is not read")
        return self._numbers(kind, count)

    def _numbers(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(_NUMBERS[kind])
        self._budget.take(_NUMBER_BYTES * count, self._path)
        numbers = np.frombuffer(self._take(count * dtype.itemsize), dtype)
        return (numbers.astype(np.bool_) if kind == _BOOL else numbers).tolist()

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        # Name, shape, type, and the first byte behind the header.
        self._budget.take(_TENSOR_BYTES, self._path)
        name, num_dims = self._text(), self._unpacked("<I")
        if num_dims > _MOST_DIMS:
            raise self._error(f"has {name} of {num_dims} dims")
        dims = [self._unpacked("<Q") for _ in range(num_dims)]
        place = f"{self._path}: {name}"
        shape = coverage.checked_shape(reversed(dims), place)
        return name, shape, self._unpacked("<I"), self._unpacked("<Q")

    def _tensor(
        self, begin: int, name: str, shape: tuple[int, ...], kind: int, offset: int
    ) -> StoredTensor:
        dtype = _DTYPES.get(kind)
        if dtype is None:
            raise self._error(
                f"has {name[:200]} quantized as {_QUANTIZED.get(kind, f'type {kind}')},"
                " which is not read; convert the model to F32, F16 or BF16 (llama.cpp:"
                " convert_hf_to_gguf.py --outtype bf16)"
            )
        start = begin + offset
        size = math.prod(shape) * dtype.itemsize
        if start + size > self._size:
            raise self._error(
                f"is cut short: it has {self._size} bytes, and {name[:200]} takes"
                f" {size} from {start}"
            )
        fragments = coverage.contiguous(
            coverage.whole(shape), dtype.itemsize, file=self._path, offset=start
        )
        return StoredTensor(name=name, dtype=dtype, shape=shape, fragments=fragments)
