"""Opens checkpoints of safetensors files: one file, or a directory of them.

A directory may have an index, `model.safetensors.index.json`, that lists the file of
each tensor. PyTorch's distributed checkpoints write files without an index, of which
each has parts of tensors: `DCP_SHARDING_INFO` in its header has the first element of
each part. Safetensors files have no checksums. Beside them, Hugging Face has the sizes
of the model in `config.json`; they are values, `config/num_key_value_heads`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from etils import epath

from elastic_ckpt.core import errors
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal.formats import (
    bounded_json,
    coverage,
    file_names,
    plain_values,
    safetensors_file,
)
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.opened import OpenedCheckpoint
from elastic_ckpt.universal.formats.safetensors_file import Header, Span
from elastic_ckpt.universal.stored import Fragment, StoredTensor

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_CONFIG = "config.json"
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
    listed: Mapping[str, str] = {}
    values: dict[str, Any] = {}
    if source.is_dir():
        index = _index(source)
    else:
        index = source if source.name.endswith(INDEX_SUFFIX) else None
    if index is not None:
        listed, values = _read_index(index)
        files = [index.parent / name for name in sorted(set(listed.values()))]
    elif source.is_dir():
        files = sorted(each for each in source.iterdir() if each.suffix == SUFFIX)
    else:
        files = [source]
    headers = {str(file): safetensors_file.read_header(file) for file in files}
    for name, file_name in listed.items():
        file = str(files[0].parent / file_name)
        if name not in headers[file].spans:
            raise FormatError(f"{file} lacks {name}, which {index} lists there")
    for header in headers.values():
        values |= {k: v for k, v in header.metadata.items() if k != _SHARDING}
    values |= _config(files[0].parent / _CONFIG)
    if any(_SHARDING in header.metadata for header in headers.values()):
        name, tensors = "safetensors shards of PyTorch DCP", _shards(headers)
    else:
        name, tensors = "safetensors", _tensors(headers)
    return OpenedCheckpoint(format=name, tensors=tensors, values=values)


def _config(path: epath.Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    config = {"config": bounded_json.read(path)}
    return plain_values.flatten(config, file=str(path))


def _index(directory: epath.Path) -> epath.Path | None:
    # Its index; of several, the usual one is taken.
    names = [
        each.name for each in directory.iterdir() if each.name.endswith(INDEX_SUFFIX)
    ]
    usual = f"model{INDEX_SUFFIX}"
    if len(names) > 1 and usual not in names:
        raise FormatError(
            f"{directory} has several indices ({errors.first_of(sorted(names))}); give"
            " the path of one of them"
        )
    if not names:
        return None
    return directory / (usual if usual in names else names[0])


def _read_index(index: epath.Path) -> tuple[dict[str, str], dict[str, Any]]:
    # The file of each tensor; numbers and texts.
    fields = bounded_json.read(index, tensors=index.parent)
    weight_map, metadata = fields.get("weight_map"), fields.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{index} has no weight_map")
    for name, file in weight_map.items():
        if not file_names.is_plain(file):
            raise FormatError(
                f"{index} lists {name} in {file!r}, which is no file beside it"
            )
    kept = metadata if isinstance(metadata, dict) else {}
    return weight_map, {
        key: value
        for key, value in kept.items()
        if isinstance(value, str | int | float)
    }


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
    for name, fields in bounded_json.parse(
        encoded.encode(errors="surrogatepass"), place
    ).items():
        offsets = fields.get("saved_offsets") if isinstance(fields, dict) else None
        if not isinstance(offsets, list):
            raise FormatError(f"{place} has no saved_offsets of {name}")
        starts[name] = coverage.checked_shape(offsets, f"{place}: {name}")
    return starts
