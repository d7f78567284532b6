"""Opens checkpoints of safetensors files: one file, or a directory of them.

A directory may have an index, `model.safetensors.index.json`, that lists the file of
each tensor. Safetensors files have no checksums. PyTorch's distributed checkpoints may
write parts of tensors, with `DCP_SHARDING_INFO` in the header; they are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from etils import epath

from elastic_ckpt.universal.formats import (
    coverage,
    hugging_face,
    safetensors_file,
)
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.opened import OpenedCheckpoint
from elastic_ckpt.universal.formats.safetensors_file import Header
from elastic_ckpt.universal.stored import StoredTensor

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_SHARDING = "DCP_SHARDING_INFO"


def is_format(names: Collection[str]) -> bool:
    """Whether files of these names, in one directory, are such a checkpoint."""
    return any(name.endswith((SUFFIX, INDEX_SUFFIX)) for name in names)


def open_checkpoint(path: epath.PathLike) -> OpenedCheckpoint:
    """Opens a file, an index, or a directory that has one of them.

    Raises:
      FormatError: if a file is missing, damaged or not listed, also one of a numbered
        set without an index, an index leads to another directory, or files have parts
        of tensors.
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
        hugging_face.check_shards(source, listed)
    else:
        listed = {source.name: ()}
    headers: dict[str, Header] = {}
    for name, tensors in listed.items():
        file = str(folder / name)
        header = headers[file] = safetensors_file.read_header(file)
        if _SHARDING in header.metadata:
            raise FormatError(
                f"{file} has parts of tensors of a distributed checkpoint; join them"
                " with torch.distributed.checkpoint's consolidate_safetensors_files,"
                " or save with enable_consolidation=True"
            )
        for tensor in tensors:
            if tensor not in header.spans:
                raise FormatError(f"{file} lacks {tensor}, which {index} lists there")
        values |= header.metadata
    values |= hugging_face.config_values(folder / hugging_face.CONFIG)
    return OpenedCheckpoint(
        format="safetensors", tensors=_tensors(headers), values=values
    )


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
            fragments = coverage.contiguous(
                coverage.whole(span.shape),
                span.dtype.itemsize,
                file=file,
                offset=span.start,
            )
            tensors.append(
                StoredTensor(
                    name=name,
                    dtype=span.dtype,
                    shape=span.shape,
                    fragments=fragments,
                )
            )
    return tensors
