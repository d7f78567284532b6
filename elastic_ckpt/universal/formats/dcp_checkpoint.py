"""Opens PyTorch's distributed checkpoints: `.metadata`, and `.distcp` files of values.

FSDP, DTensor and tensor parallelism save through it. Tensors are global: a tensor has a
fragment for each shard. States of an optimizer have the name of their parameter, and a
kind. Everything that is no tensor is among the values, which are decoded when they are
asked for.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from etils import epath

from elastic_ckpt.universal.formats import dcp_ranks, state_kinds, torch_zip
from elastic_ckpt.universal.formats.dcp_items import Chunk, ItemFile
from elastic_ckpt.universal.formats.dcp_metadata import Item, Metadata
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.opened import OpenedCheckpoint
from elastic_ckpt.universal.formats.source_budget import SourceBudget
from elastic_ckpt.universal.stored import Fragment, StoredTensor


def is_format(names: Collection[str]) -> bool:
    """Whether files of these names, in one directory, are such a checkpoint."""
    return any(map(dcp_ranks.is_metadata, names))


def open_checkpoint(path: epath.PathLike) -> OpenedCheckpoint:
    """Opens a directory, or a file of metadata in it.

    Raises:
      FormatError: if a file is missing, damaged or malformed, names code or another
        directory, or parts overlap or are missing.
    """
    directory = epath.Path(path)
    if dcp_ranks.is_metadata(directory.name):
        directory = directory.parent
    budget = dcp_ranks.budget_of(directory)
    metadata = dcp_ranks.read(directory, budget)
    files = _files(directory, metadata, budget)
    names = _StateNames(metadata)
    tensors = [
        StoredTensor(
            name=names.parameter(name),
            kind=names.kind(name),
            dtype=metadata.tensors[name].dtype,
            shape=metadata.tensors[name].shape,
            fragments=tuple(fragments),
        )
        for name, fragments in _fragments(metadata, files).items()
    ]

    def verify(file: str) -> bool:
        held = files.get(epath.Path(file).name)
        if held is None or held.path != file:
            return False
        held.verify()
        return True

    return OpenedCheckpoint(
        format="PyTorch distributed checkpoint",
        tensors=tensors,
        values=_Values(directory, metadata),
        verify=verify,
    )


def _files(
    directory: epath.Path, metadata: Metadata, budget: SourceBudget
) -> dict[str, ItemFile]:
    items: dict[str, list[Item]] = collections.defaultdict(list)
    for tensor in metadata.tensors.values():
        for _, item in tensor.chunks:
            items[item.file].append(item)
    for item in metadata.values.values():
        items[item.file].append(item)
    return {
        name: ItemFile(directory, name, parts, budget) for name, parts in items.items()
    }


def _fragments(
    metadata: Metadata, files: Mapping[str, ItemFile]
) -> dict[str, list[Fragment]]:
    # By the name of the tensor.
    chunks: dict[str, list[Chunk]] = collections.defaultdict(list)
    for name, tensor in metadata.tensors.items():
        for box, item in tensor.chunks:
            chunk = Chunk(name=name, dtype=tensor.dtype, box=box, item=item)
            chunks[item.file].append(chunk)
    fragments: dict[str, list[Fragment]] = {name: [] for name in metadata.tensors}
    for file, held in chunks.items():
        for chunk, fragment in files[file].fragments(held):
            fragments[chunk.name].append(fragment)
    return fragments


class _StateNames:
    """Finds the parameters of the states of an optimizer.

    Args:
      metadata: of the checkpoint.
    """

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._named: dict[str, list[str]] = collections.defaultdict(list)
        self._states: dict[str, tuple[str, str]] = {}
        for name in metadata.tensors:
            state = self._state(name)
            if state is not None:
                self._states[name] = state
            else:
                keys = metadata.paths.get(name, (name,))
                self._named[str(keys[-1])].append(name)

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
        keys = self._metadata.paths.get(name)
        if keys is not None:
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

    def __init__(self, directory: epath.Path, metadata: Metadata) -> None:
        self._directory = directory
        self._items = {
            "/".join(map(str, metadata.paths.get(name, (name,)))): item
            for name, item in metadata.values.items()
        }

    def __getitem__(self, path: str) -> Any:
        item = self._items[path]
        file = self._directory / item.file
        with torch_zip.TorchZip(file, span=(item.offset, item.size)) as content:
            for _, _ in torch_zip.tensors(content.value):
                raise FormatError(
                    f"{file} has tensors in the value {path}, which are not read"
                )
            return content.value

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)
