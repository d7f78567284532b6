"""Opens checkpoints of safetensors files: one file, or a directory of them.

A directory may have an index, `model.safetensors.index.json`, that lists the file of
each tensor. PyTorch's distributed checkpoints write files without an index, of which
each has parts of tensors: `DCP_SHARDING_INFO` in its header has the first element of
each part. Safetensors files have no checksums.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal.formats import (
    coverage,
    hugging_face,
    safetensors_file,
    source_files,
)
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.opened import OpenedCheckpoint
from elastic_ckpt.universal.formats.safetensors_file import Header, Span
from elastic_ckpt.universal.stored import Fragment, StoredTensor

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_SHARDING = "DCP_SHARDING_INFO"
_VERSION = "DCP_VERSION"
_VERSIONS = ("1.0",)


def is_format(names: Collection[str]) -> bool:
    """Whether files of these names, in one directory, are such a checkpoint."""
    return any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names)


def open_checkpoint(path: epath.PathLike) -> OpenedCheckpoint:
    """Opens a file, an index, or a directory that has one of them.

    Raises:
      FormatError: if a file is missing, damaged or not listed, an index leads to
        another directory, or parts of a tensor overlap or are missing.
    """
    source = epath.Path(path)
    values: dict[str, Any] = {}
    folder = source if source.is_dir() else source.parent
    index = hugging_face.find_index(source, INDEX_SUFFIX, "model")
    listed: Mapping[str, Sequence[str]] = {}
    if index is not None:
        listed, values = hugging_face.read_index(index)
    elif source.is_dir():
        names = sorted(each.name for each in source.iterdir())
        listed = {name: () for name in names if name.endswith(SUFFIX)}
    else:
        listed = {source.name: ()}
    headers: dict[str, Header] = {}
    for name, tensors in listed.items():
        file = str(folder / name)
        header = headers[file] = safetensors_file.read_header(file)
        for tensor in tensors:
            if tensor not in header.spans:
                raise FormatError(f"{file} lacks {tensor}, which {index} lists there")
        values |= {k: v for k, v in header.metadata.items() if k != _SHARDING}
    values |= hugging_face.config_values(folder / hugging_face.CONFIG)
    if any(_SHARDING in header.metadata for header in headers.values()):
        name, made = "safetensors shards of PyTorch DCP", _shards(headers)
    else:
        name, made = "safetensors", _tensors(headers)
    return OpenedCheckpoint(format=name, tensors=made, values=values)


def _tensors(headers: Mapping[str, Header]) -> list[StoredTensor]:
    file_of: dict[str, str] = {}
    tensors = []
    for file, header in headers.items():
        for name, span in header.spans.items():
            if name in file_of:
                raise FormatError(
                    f"{file} has {name}, and so has {file_of[name]}; give the path of"
                    " one file, or of an index"
                )
            file_of[name] = file
            box = coverage.whole(span.shape)
            tensors.append(_tensor(name, span, span.shape, _fragments(box, span, file)))
    return tensors


def _tensor(
    name: str, span: Span, shape: tuple[int, ...], fragments: tuple[Fragment, ...]
) -> StoredTensor:
    return StoredTensor(name=name, dtype=span.dtype, shape=shape, fragments=fragments)


def _fragments(box: Box, span: Span, file: str) -> tuple[Fragment, ...]:
    return coverage.contiguous(box, span.dtype.itemsize, file=file, offset=span.start)


def _shards(headers: Mapping[str, Header]) -> list[StoredTensor]:
    # Joins the parts of each tensor. Its shape is that of the smallest box around them.
    parts: dict[str, list[tuple[Box, Span, str]]] = {}
    for file, header in headers.items():
        starts = _starts(header, file)
        for name, span in header.spans.items():
            start = starts.get(name, (0,) * len(span.shape))
            if len(start) != len(span.shape):
                raise FormatError(
                    f"{file} has {name} of {len(span.shape)} dims, and its first"
                    f" element at {list(start)}"
                )
            stop = tuple(a + b for a, b in zip(start, span.shape, strict=True))
            box = Box(start=start, stop=stop)
            parts.setdefault(name, []).append((box, span, file))
    return [_joined(name, held) for name, held in parts.items()]


def _joined(name: str, parts: list[tuple[Box, Span, str]]) -> StoredTensor:
    _, first, file = parts[0]
    for _, span, other in parts:
        if (span.dtype, len(span.shape)) != (first.dtype, len(first.shape)):
            raise FormatError(f"{other} has {name} of another type or rank than {file}")
    stops = np.array([box.stop for box, _, _ in parts], np.int64)
    shape = tuple(stops.max(axis=0).tolist()) if first.shape else ()
    place = f"{file}: {name}"
    coverage.check(coverage.checked_shape(shape, place), [p[0] for p in parts], place)
    fragments = [each for part in parts for each in _fragments(*part)]
    return _tensor(name, first, shape, tuple(fragments))


def _starts(header: Header, file: str) -> dict[str, tuple[int, ...]]:
    # The first element of each part, by the tensor's name.
    version = header.metadata.get(_VERSION)
    if version is not None and version not in _VERSIONS:
        raise FormatError(
            f"{file} has the {_VERSION} {version[:20]!r}, and this program reads"
            f" {_VERSIONS}; save it with an older torch"
        )
    place = f"{_SHARDING} in the header of {file}"
    encoded = header.metadata.get(_SHARDING, json.dumps({}))
    starts = {}
    for name, fields in source_files.parse_json(
        encoded.encode(errors="surrogatepass"), place
    ).items():
        offsets = fields.get("saved_offsets") if isinstance(fields, dict) else None
        if not isinstance(offsets, list):
            raise FormatError(f"{place} has no saved_offsets of {name}")
        starts[name] = coverage.checked_shape(offsets, f"{place}: {name}")
    return starts
