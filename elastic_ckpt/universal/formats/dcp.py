"""Opens PyTorch's distributed checkpoints: `.metadata`, and `.distcp` files of values.

FSDP, DTensor and tensor parallelism save through it. Tensors are global: a tensor has a
fragment for each shard, which is an item of a file. States of an optimizer have the
name of their parameter, and a kind. Everything that is no tensor is among the values,
which are decoded when they are asked for.

There may be a million tensors, so metadata are columns, and items are read as
`dcp_items` says.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal.formats import (
    coverage,
    plain_pickle,
    source_files,
    state_kinds,
    torch_file,
)
from elastic_ckpt.universal.formats.dcp_items import Item, ItemFile
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.opened import OpenedCheckpoint
from elastic_ckpt.universal.formats.source_budget import SourceBudget
from elastic_ckpt.universal.stored import Checksum, Fragment, StoredTensor

FILE = ".metadata"
# The places of a chunk, for each of its dims.
_DIM_BYTES = 100
# The columns of a chunk.
_TENSOR, _START, _SIZES, _FILE, _OFFSET, _BYTES = range(6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Metadata:
    """The content of a file of metadata.

    Attributes:
      tensors: their types and shapes, by name.
      chunks: of all tensors, int64 `[n, 6]`: the number of the tensor, those of its
        first element and of its sizes among the shapes, the number of its file, and the
        first byte and the size of its item.
      shapes: of tensors and of their parts.
      shape_of: the number of the shape of each tensor.
      files: by number.
      values: the items of what is no tensor, by name, each with its file.
      paths: the keys that lead to a name in the state that was saved, if it was nested;
        None if they are its parts between dots.
    """

    tensors: dict[str, tuple[np.dtype, tuple[int, ...]]]
    chunks: np.ndarray
    shapes: Sequence[tuple[int, ...]]
    shape_of: np.ndarray
    files: Sequence[str]
    values: dict[str, tuple[str, Item]]
    paths: dict[str, Sequence[Any] | None]


def is_format(names: Collection[str]) -> bool:
    """Whether files of these names, in one directory, are such a checkpoint."""
    return any(map(_is_metadata, names))


def _is_metadata(name: str) -> bool:
    # Or that of one rank, which is refused.
    return name == FILE or (name.startswith("__") and name.endswith(FILE))


def open_checkpoint(path: epath.PathLike) -> OpenedCheckpoint:
    """Opens a directory, or the file of metadata in it.

    Raises:
      FormatError: if a file is missing, damaged or malformed, names another directory,
        or parts overlap or are missing.
    """
    directory = epath.Path(path)
    if _is_metadata(directory.name):
        directory = directory.parent
    files = list(directory.iterdir())
    if not any(each.name == FILE for each in files):
        raise FormatError(
            f"{directory} has metadata of single ranks alone; save with collectives"
        )
    # A tensor takes 250 bytes of metadata and over 800 of another file.
    values = [each for each in files if each.name != FILE]
    budget = SourceBudget(sum(map(source_files.num_stored_bytes, values)))
    metadata = _read(directory / FILE, budget)
    boxes = _boxes(metadata, str(directory), budget)
    items = _files(directory, metadata, budget)
    fragments = _fragments(metadata, boxes, items)
    states = _StateNames(metadata)
    tensors = [
        StoredTensor(
            name=states.parameter(name),
            kind=states.kind(name),
            dtype=dtype,
            shape=shape,
            fragments=tuple(held),
            view=view,
        )
        for (name, (dtype, shape)), (held, view) in zip(
            metadata.tensors.items(), fragments, strict=True
        )
    ]

    def checksums(file: str) -> Sequence[Checksum]:
        held = items.get(epath.Path(file).name)
        return held.checksums() if held is not None and held.path == file else ()

    return OpenedCheckpoint(
        format="PyTorch distributed checkpoint",
        tensors=tensors,
        values=_Values(directory, metadata),
        checksums=checksums,
    )


def _read(path: epath.Path, budget: SourceBudget) -> _Metadata:
    most_bytes = max(torch_file.MOST_PICKLE_BYTES, budget.stored_bytes // 2)
    content = source_files.read(path, most_bytes=most_bytes)
    tables, columns = plain_pickle.metadata(content, file=str(path), budget=budget)
    dtype_of, shape_of, counts, starts, sizes, file_of, offsets, lengths = columns
    # Tensors that have none have a place among shapes, too.
    shapes = [
        coverage.checked_shape(each or (), f"{path}: a tensor")
        for each in tables["shapes"]
    ]
    for name in tables["files"]:
        if not source_files.is_plain_name(name):
            raise FormatError(
                f"{path} lists the file {name[:60]!r}, which is not beside it"
            )
    names, values = tables["names"], tables["values"]
    for name in tables["dtypes"]:
        if name not in torch_file.NAMES:
            raise FormatError(f"{path} has tensors of the unsupported type {name[:60]}")
    dtypes = [torch_file.NAMES[name] for name in tables["dtypes"]]
    tensors = {
        name: (dtypes[dtype], shapes[shape])
        for name, dtype, shape in zip(
            names, dtype_of.tolist(), shape_of.tolist(), strict=True
        )
    }
    of_tensor = np.repeat(np.arange(len(names)), counts)
    num_chunks = len(of_tensor)
    # Items of values follow those of chunks.
    places = np.stack([file_of, offsets, lengths], axis=1)
    return _Metadata(
        tensors=tensors,
        chunks=np.column_stack([of_tensor, starts, sizes, places[:num_chunks]]),
        shapes=shapes,
        shape_of=shape_of,
        files=tables["files"],
        values={
            name: (tables["files"][file], Item(offset, size))
            for name, (file, offset, size) in zip(
                values, places[num_chunks:].tolist(), strict=True
            )
        },
        paths=_paths([*names, *values], tables["paths"], str(path), budget),
    )


def _paths(
    names: Sequence[str], listed: Sequence[Any], place: str, budget: SourceBudget
) -> dict[str, Sequence[Any] | None]:
    paths: dict[str, Sequence[Any] | None] = {}
    for name, keys in zip(names, listed, strict=True):
        if keys == 1:
            paths[name] = None
        elif keys != 0:
            budget.take(sum(len(str(key)) for key in keys), place)
            paths[name] = keys
    return paths


def _keys(paths: Mapping[str, Sequence[Any] | None], name: str) -> Sequence[Any]:
    # Those that lead to a name; the name itself, if they are not known.
    keys = paths.get(name, (name,))
    return name.split(".") if keys is None else keys


def _boxes(metadata: _Metadata, place: str, budget: SourceBudget) -> list[Box]:
    """The box of each chunk; those of a tensor must cover it."""
    rows, shapes = metadata.chunks, metadata.shapes
    dims = np.array([len(shape) for shape in shapes], np.int64)
    budget.take(_DIM_BYTES * int(dims[rows[:, _SIZES]].sum()), place)
    # Most chunks are whole tensors of a few shapes: equal ones are checked once.
    of_tensor = rows[:, _TENSOR]
    counts = np.bincount(of_tensor, minlength=len(metadata.tensors))
    columns = [metadata.shape_of[of_tensor], rows[:, _START], rows[:, _SIZES]]
    keys = (columns[0] * len(shapes) + columns[1]) * len(shapes) + columns[2]
    _, firsts, kind_of = np.unique(keys, return_index=True, return_inverse=True)
    names = list(metadata.tensors)
    kinds = []
    for row in firsts.tolist():
        shape, first, sizes = (shapes[int(column[row])] for column in columns)
        name = names[int(of_tensor[row])]
        if not len(first) == len(sizes) == len(shape):
            raise FormatError(f"{place}: {name} has a chunk of {len(sizes)} dims")
        stop = tuple(a + b for a, b in zip(first, sizes, strict=True))
        kinds.append(Box(start=first, stop=stop))
    boxes = [kinds[kind] for kind in kind_of.tolist()]
    is_single = counts[of_tensor] == 1
    singles = np.unique(kind_of[is_single], return_index=True)[1]
    for row in np.flatnonzero(is_single)[singles].tolist():
        name = names[int(of_tensor[row])]
        coverage.check(metadata.tensors[name][1], [boxes[row]], f"{place}: {name}")
    parts: dict[int, list[Box]] = {n: [] for n in np.flatnonzero(counts != 1).tolist()}
    for row in np.flatnonzero(~is_single).tolist():
        parts[int(of_tensor[row])].append(boxes[row])
    for number, held in parts.items():
        name = names[number]
        coverage.check(metadata.tensors[name][1], held, f"{place}: {name}")
    return boxes


def _files(
    directory: epath.Path, metadata: _Metadata, budget: SourceBudget
) -> dict[str, ItemFile]:
    values: dict[str, list[Item]] = collections.defaultdict(list)
    for name, item in metadata.values.values():
        values[name].append(item)
    files = {}
    for number, name in enumerate(metadata.files):
        of_chunks = metadata.chunks[metadata.chunks[:, _FILE] == number, _OFFSET:]
        of_values = np.array(values[name], np.int64).reshape(-1, 2)
        items = np.concatenate([of_chunks, of_values])
        if len(items):
            files[name] = ItemFile(directory / name, items, budget)
    return files


def _fragments(
    metadata: _Metadata, boxes: Sequence[Box], files: Mapping[str, ItemFile]
) -> list[tuple[list[Fragment], str]]:
    # Of each tensor, with its view.
    held: list[list[Fragment]] = [[] for _ in metadata.tensors]
    views: list[str | None] = [None] * len(held)
    listed = list(metadata.tensors.items())
    rows = metadata.chunks
    for number, name in enumerate(metadata.files):
        of_file = np.flatnonzero(rows[:, _FILE] == number)
        of_file = of_file[np.argsort(rows[of_file, _OFFSET], kind="stable")]
        if not len(of_file):
            continue
        file, chosen = files[name], rows[of_file]
        items = [Item(*each) for each in chosen[:, _OFFSET:].tolist()]
        of_item = zip(
            of_file.tolist(),
            chosen[:, _TENSOR].tolist(),
            chosen[:, _SIZES].tolist(),
            strict=True,
        )
        for (row, tensor, sizes), item, found in zip(
            of_item, items, file.located(items), strict=True
        ):
            box = boxes[row]
            known, (dtype, _) = listed[tensor]
            if (found.dtype, found.shape) != (dtype, metadata.shapes[sizes]):
                raise FormatError(
                    f"{file.path} has a tensor {found.dtype}{list(found.shape)} from"
                    f" byte {item.offset}, and {known} is listed there as"
                    f" {dtype}{list(box.shape)}"
                )
            if views[tensor] not in (None, found.view):
                raise FormatError(
                    f"{file.path}: {known} has parts with and without the conj or neg"
                    " bit; call resolve_conj() and resolve_neg() before it is saved"
                )
            views[tensor] = found.view
            if 0 not in found.shape:
                offset = item.offset + found.offset
                held[tensor].append(
                    Fragment(
                        box=box, file=file.path, offset=offset, strides=found.strides
                    )
                )
    return [(each, view or "") for each, view in zip(held, views, strict=True)]


class _StateNames:
    """Finds the parameters of the states of an optimizer.

    Args:
      metadata: of the checkpoint.
    """

    def __init__(self, metadata: _Metadata) -> None:
        self._paths = metadata.paths
        self._states = {
            name: state
            for name in metadata.tensors
            if (state := self._state(name)) is not None
        }
        self._named: dict[str, list[str]] = collections.defaultdict(list)
        for name in metadata.tensors if self._states else ():
            if name not in self._states:
                last = str(_keys(metadata.paths, name)[-1])
                self._named[last].append(name)

    def parameter(self, name: str) -> str:
        """The name of the parameter that a tensor is a state of; else its own."""
        if name not in self._states:
            return name
        named = self._named.get(self._states[name][0], [])
        # Two models may have parameters of equal names.
        return named[0] if len(named) == 1 else name

    def kind(self, name: str) -> str:
        """See `StoredTensor.kind`."""
        if name not in self._states:
            return "parameter"
        return state_kinds.kind_of(self._states[name][1])

    def _state(self, name: str) -> tuple[str, str] | None:
        # The name of the parameter in its model, and that of the state.
        if "state" not in name and self._paths.get(name) is None:
            return None
        if name in self._paths:
            keys = _keys(self._paths, name)
            if len(keys) < 3 or keys[-3] != "state":
                return None
            return str(keys[-2]), str(keys[-1])
        before, _, state = name.rpartition(".")
        parts = before.split(".")
        for at in reversed(range(len(parts) - 1)):
            if state and parts[at] == "state" and parts[at + 1 :] != [""]:
                return ".".join(parts[at + 1 :]), state
        return None


class _Values(Mapping[str, Any]):
    """Values that are no tensors, by path; each is decoded when it is asked for."""

    def __init__(self, directory: epath.Path, metadata: _Metadata) -> None:
        self._directory = directory
        self._items = {
            "/".join(map(str, _keys(metadata.paths, name))): item
            for name, item in metadata.values.items()
        }

    def __getitem__(self, path: str) -> Any:
        name, item = self._items[path]
        file = torch_file.read(self._directory / name, span=(item.offset, item.size))
        for _, _ in torch_file.tensors(file.value):
            raise file.error(f"has tensors in the value {path}, which are not read")
        return file.value

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)
