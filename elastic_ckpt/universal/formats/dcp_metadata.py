"""Reads `.metadata` of PyTorch's distributed checkpoints: their tensors and items.

It is a pickle of dataclasses of PyTorch, of which only the states are kept. A tensor
has chunks, boxes of it; an item is the place of a chunk in a file, or of a value that
is no tensor. `dcp_ranks` reads the files of several ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from etils import epath

from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal.formats import (
    bounded_file,
    closed_pickle,
    coverage,
    file_names,
    inert_names,
    torch_names,
    torch_tensor,
)
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.inert_values import Call, shell, shown
from elastic_ckpt.universal.formats.source_budget import SourceBudget
from elastic_ckpt.universal.formats.torch_zip import MOST_PICKLE_BYTES

FILE = ".metadata"
# The places of a chunk, for each of its dims.
_DIM_BYTES = 100
_MODULE = "torch.distributed.checkpoint.metadata"
_MALFORMED = (AttributeError, IndexError, KeyError, TypeError, ValueError)


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """A part of a file.

    Attributes:
      file: its name in the directory.
      offset: the first byte.
      size: in bytes.
    """

    file: str
    offset: int
    size: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor that a file of metadata lists.

    Attributes:
      dtype: of its elements.
      shape: in elements.
      chunks: boxes of it, with the item that has each.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    chunks: tuple[tuple[Box, Item], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metadata:
    """The content of a file of metadata, or of several.

    Attributes:
      tensors: by name.
      values: the items of what is no tensor, by name.
      paths: the keys that lead to a name in the state that was saved, if it was nested.
    """

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Item]
    paths: Mapping[str, tuple[Any, ...]]


def read(path: epath.Path, budget: SourceBudget) -> Metadata:
    """The metadata in a file, which may have only some chunks of a tensor.

    Args:
      path: of the file.
      budget: of the checkpoint.

    Raises:
      FormatError: if it is missing, malformed, or names a file outside of its
        directory.
    """
    most_bytes = max(MOST_PICKLE_BYTES, budget.stored_bytes // 2)
    content = bounded_file.read(path, most_bytes=most_bytes)
    value = closed_pickle.decode(
        content,
        file=str(path),
        names=_NAMES,
        # Parts are followed to a fixed depth, and each once.
        check_size=False,
        budget=budget,
    )
    try:
        return _metadata(value, str(path), budget)
    except _MALFORMED as error:
        raise FormatError(
            f"{path} is no metadata of a distributed checkpoint ({error!r})"
        ) from None


def _metadata(value: Any, path: str, budget: SourceBudget) -> Metadata:
    fields = _fields(value)
    entries, stored = fields["state_dict_metadata"], fields["storage_data"]
    items = {
        _key(_fields(index), path): _item(_fields(info), path)
        for index, info in stored.items()
    }
    used = 0
    tensors: dict[str, Tensor] = {}
    values: dict[str, Item] = {}
    for name, entry in entries.items():
        if not isinstance(name, str):
            raise TypeError(f"the name {shown(name)} is no text")
        parts = _fields(entry)
        if "chunks" not in parts:
            values[name] = items[name, None]
            continue
        used += len(parts["chunks"])
        if used > len(items):
            raise ValueError(f"{name} has chunks that are nowhere stored")
        budget.take(_DIM_BYTES * len(parts["chunks"]) * len(parts["size"]), path)
        tensors[name] = _tensor(name, parts, items, path)
    paths = fields.get("planner_data")
    paths = paths if isinstance(paths, dict) else {}
    # Other keys may be nested, and are no names.
    keys = {
        name: keys
        for name, keys in paths.items()
        if isinstance(name, str)
        and isinstance(keys, tuple)
        and all(isinstance(key, str | int) for key in keys)
    }
    for each in keys.values():
        budget.take(sum(len(str(key)) for key in each), path)
    return Metadata(tensors=tensors, values=values, paths=keys)


def _fields(value: Any) -> Mapping[str, Any]:
    # The fields of a dataclass; one without any has no state.
    fields = {} if value.state is None else value.state
    if not isinstance(fields, dict):
        raise TypeError(f"{shown(fields)} is no dict of fields")
    return fields


def _key(index: Mapping[str, Any], path: str) -> tuple[str, tuple[int, ...] | None]:
    # Checked before it is hashed, which takes long for tuples of tuples.
    name, offset = index["fqn"], index.get("offset")
    if not isinstance(name, str):
        raise TypeError(f"the name {shown(name)} is no text")
    if offset is not None:
        offset = coverage.checked_shape(offset, f"{path}: {name}")
    return name, offset


def _item(info: Mapping[str, Any], path: str) -> Item:
    name, offset, size = info["relative_path"], info["offset"], info["length"]
    if transforms := info.get("transform_descriptors"):
        listed = transforms if isinstance(transforms, list | tuple) else [transforms]
        raise FormatError(
            f"{path} lists items that extensions changed, such as by compression"
            f" ({', '.join(map(shown, listed[:3]))}); save without extensions"
        )
    if not file_names.is_plain(name):
        raise FormatError(
            f"{path} lists the file {shown(name)}, which is not beside it"
        )
    if type(offset) is not int or type(size) is not int or min(offset, size) < 0:
        raise FormatError(
            f"{path} lists {shown(size)} bytes from {shown(offset)} of {name}"
        )
    return Item(name, offset, size)


def _tensor(
    name: str, entry: Mapping[str, Any], items: Mapping[Any, Item], path: str
) -> Tensor:
    dtype, layout = entry["properties"].state[:2]
    if not isinstance(dtype, np.dtype) or layout != "torch.strided":
        raise FormatError(
            f"{path} has {name} of the unsupported layout {shown(layout)}"
        )
    place = f"{path}: {name}"
    shape = coverage.checked_shape(entry["size"], place)
    chunks = []
    for chunk in entry["chunks"]:
        start, sizes = (
            coverage.checked_shape(chunk.state[key], place)
            for key in ("offsets", "sizes")
        )
        if not len(start) == len(sizes) == len(shape):
            raise FormatError(f"{place} has a chunk of {len(sizes)} dims")
        stop = tuple(a + b for a, b in zip(start, sizes, strict=True))
        item = items.get((name, start))
        if item is None:
            raise FormatError(f"{place} has a chunk at {list(start)} without values")
        chunks.append((Box(start=start, stop=stop), item))
    return Tensor(dtype=dtype, shape=shape, chunks=tuple(chunks))


def _layout(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError("it is no text")
    return name


def _number(value: Any) -> Any:
    return value


_OBJECTS = (
    *(
        f"{_MODULE} {name}"
        for name in (
            "Metadata",
            "MetadataIndex",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    "torch.distributed.checkpoint.filesystem _StorageInfo",
    # Megatron adds the plans of all ranks, which are not used.
    "torch.distributed.checkpoint.planner BytesIOWriteData",
    "torch.distributed.checkpoint.planner SavePlan",
    "torch.distributed.checkpoint.planner TensorWriteData",
    "torch.distributed.checkpoint.planner WriteItem",
    # Earlier versions have these.
    "torch.distributed._shard.sharded_tensor.metadata TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata MEM_FORMAT_ENCODING",
)
_NAMES: dict[str, Any] = {
    **{name: shell(name.replace(" ", ".")) for name in _OBJECTS},
    "torch.distributed.checkpoint.planner WriteItemType": Call("kind", _number),
    "torch.serialization _get_layout": Call("layout", _layout),
    "pathlib PosixPath": inert_names.NAMES["pathlib PosixPath"],
    "torch Size": torch_names.NAMES["torch Size"],
    **{f"torch {name}": dtype for name, dtype in torch_tensor.DTYPES.items()},
}
