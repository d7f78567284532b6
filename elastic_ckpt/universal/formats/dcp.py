"""Opens PyTorch distributed checkpoints: `.metadata`, and `.distcp` files of values.

FSDP, DTensor and tensor parallelism save in this format. Tensors are global: a tensor
has a fragment for each chunk. A chunk is an item in a file: a `torch.save` zip with one
tensor. An optimizer state has the name of its parameter, and a kind. Everything except
tensors is in the values, which are decoded on demand.

There may be a million chunks. So only a few bytes at each item's start and end are
read, with one read for nearby items, and items with identical pickles (of the same
shape) are decoded once.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal.formats import files, torch_file
from elastic_ckpt.universal.formats.checkpoint import (
    Checkpoint,
    Checksum,
    Fragment,
    StoredTensor,
    check_cover,
    checked_shape,
    kind_of,
)
from elastic_ckpt.universal.formats.files import FormatError
from elastic_ckpt.universal.formats.torch_file import Archive

FILE = ".metadata"
# An item's zip directory and storage header are in its first and last bytes.
_ENDS_BYTES = 8 << 10
# How many items' first and last bytes are in memory at a time.
_BATCH = 1 << 11

_Keys = tuple[Any, ...]


class _Item(NamedTuple):
    # A part of a file that begins at byte `start`.
    file: str
    start: int
    size: int


class _Listed(NamedTuple):
    # A tensor in the metadata, and each chunk's item.
    dtype: np.dtype
    shape: tuple[int, ...]
    chunks: list[tuple[Box, _Item]]


def is_format(names: Collection[str]) -> bool:
    """Whether a directory with these file names is a distributed checkpoint."""
    return FILE in names


def open_checkpoint(path: epath.PathLike) -> Checkpoint:
    """Opens a directory, or the metadata file in it.

    Raises:
      FormatError: if a file is missing, damaged or malformed or refers to a different
        directory, or if parts overlap or are missing.
    """
    given = epath.Path(path)
    directory = given.parent if given.name == FILE else given
    metadata = str(directory / FILE)
    content = files.read(metadata, most_bytes=torch_file.MOST_PICKLE_BYTES)
    loaded = torch_file.decoded(content, metadata)
    try:
        listed, values, paths = _read(loaded.state, metadata)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(
            f"{metadata} is not the metadata of a distributed checkpoint"
            f" ({error!r:.200})"
        ) from None
    del content, loaded
    held, storages = _read_items(listed)
    named = _names(listed, paths)
    return Checkpoint(
        format="PyTorch distributed checkpoint",
        tensors=[_tensor(name, *named[name], listed[name], held) for name in listed],
        values=_Values(
            {"/".join(map(str, paths.get(n, (n,)))): each for n, each in values.items()}
        ),
        checksums=lambda file: storages.get(file, ()),
    )


def _read(
    fields: Mapping[str, Any], metadata: str
) -> tuple[dict[str, _Listed], dict[str, _Item], Mapping[str, _Keys]]:
    # The tensors, the values, and each name's keys in the saved dict.
    stored = {}
    for index, info in fields["storage_data"].items():
        stored[index.state["fqn"], index.state.get("offset")] = info.state
    listed, values = {}, {}
    for name, entry in fields["state_dict_metadata"].items():
        # Raises unless the name is a string.
        place, parts = f"{metadata}: " + name[:200], entry.state or {}
        if "chunks" not in parts:
            values[name] = _item(stored, name, None, metadata)
            continue
        dtype, layout = parts["properties"].state[:2]
        dtype = torch_file.NAMES.get(dtype.full_name)
        if dtype is None or layout.arguments != ("torch.strided",):
            raise FormatError(f"{place} has an unsupported type or layout")
        shape = checked_shape(parts["size"], place)
        chunks = []
        for chunk in parts["chunks"]:
            first, sizes = chunk.state["offsets"], chunk.state["sizes"]
            item = _item(stored, name, first, metadata)
            chunks.append((_box(first, sizes, len(shape)), item))
        check_cover(shape, [box for box, _ in chunks], place)
        listed[name] = _Listed(dtype, shape, chunks)
    paths = fields.get("planner_data") or {}
    known = {n: keys for n, keys in paths.items() if keys and isinstance(keys, tuple)}
    return listed, values, known


@functools.lru_cache(maxsize=2**14)
def _box(first: tuple[int, ...], sizes: tuple[int, ...], rank: int) -> Box:
    # Cached because most chunks have one of a few shapes.
    numbers = [n for n in (*first, *sizes) if type(n) is int and 0 <= n < 1 << 63]
    if not len(numbers) == 2 * len(first) == 2 * len(sizes) == 2 * rank:
        raise ValueError(f"a chunk of {rank} dims at {first} has the sizes {sizes}")
    return Box(
        start=first, stop=tuple(a + b for a, b in zip(first, sizes, strict=True))
    )


def _item(
    stored: Mapping[Any, dict[str, Any]], name: str, first: Any, metadata: str
) -> _Item:
    info = stored.get((name, first))
    if info is None:
        raise FormatError(
            f"{metadata} lists a part of {name!r:.200} that begins at {first}, but"
            " does not say where it is stored"
        )
    file, start, size = info["relative_path"], info["offset"], info["length"]
    if info.get("transform_descriptors"):
        raise FormatError(
            f"{metadata} lists items that extensions transformed, such as by"
            f" compression ({info['transform_descriptors']!r:.60}), which is"
            " unsupported; save without extensions"
        )
    numbers = [n for n in (start, size) if type(n) is int and 0 <= n < 1 << 62]
    if len(numbers) < 2 or not files.is_plain_name(file):
        raise FormatError(
            f"{metadata} lists {size!r:.60} bytes at offset {start!r:.60} in"
            f" {file!r:.60}, which is not a valid part of a file next to {FILE}"
        )
    return _Item(metadata.removesuffix(FILE) + file, start, size)


def _read_items(
    listed: Mapping[str, _Listed],
) -> tuple[dict[_Item, StoredTensor], dict[str, list[Checksum]]]:
    # Each item's tensor, and each file's checksums.
    names = {item: name for name, each in listed.items() for _, item in each.chunks}
    by_file: dict[str, list[_Item]] = collections.defaultdict(list)
    for item in sorted(names):
        by_file[item.file].append(item)
    held: dict[_Item, StoredTensor] = {}
    storages: dict[str, list[Checksum]] = collections.defaultdict(list)
    views: dict[bytes, Any] = {}
    for file, items in by_file.items():
        for at in range(0, len(items), _BATCH):
            batch = items[at : at + _BATCH]
            read = files.windows(file, (span for item in batch for span in _ends(item)))
            for item in batch:
                archive = Archive(read, item.start, item.size, file)
                content = archive.pickle()
                if content not in views:
                    views[content] = torch_file.decoded(content, archive.place)
                held[item], entry = archive.tensor(views[content], names[item])
                if archive.has_crc and entry.start < entry.stop:
                    storages[file].append(entry)
    return held, storages


def _ends(item: _Item) -> list[tuple[int, int]]:
    # The parts of an item that contain all of its headers.
    stop, size = item.start + item.size, min(item.size, _ENDS_BYTES)
    return [(item.start, item.start + size), (stop - size, stop)]


def _tensor(
    full_name: str,
    name: str,
    kind: str,
    listed: _Listed,
    held: Mapping[_Item, StoredTensor],
) -> StoredTensor:
    fragments: list[Fragment] = []
    views = {held[item].view for _, item in listed.chunks}
    for box, item in listed.chunks:
        part = held[item]
        if (part.dtype, part.shape) != (listed.dtype, box.shape) or len(views) > 1:
            raise FormatError(
                f"{item.file} has a tensor {part.dtype}{list(part.shape)} at byte"
                f" {item.start}, where {full_name} is listed as"
                f" {listed.dtype}{list(box.shape)}. If these are the same, only some"
                f" parts of {full_name} have the conj or neg bit; call resolve_conj()"
                " and resolve_neg() before saving"
            )
        fragments += [dataclasses.replace(each, box=box) for each in part.fragments]
    return StoredTensor(
        name=name,
        kind=kind,
        dtype=listed.dtype,
        shape=listed.shape,
        fragments=tuple(fragments),
        view="".join(views),
    )


def _names(
    listed: Collection[str], paths: Mapping[str, _Keys]
) -> dict[str, tuple[str, str]]:
    # For each tensor name, the parameter's name and the kind.
    states = {name: _state_of(name, paths.get(name)) for name in listed}
    named: dict[str, list[str]] = collections.defaultdict(list)
    for name, state in states.items():
        if state is None:
            named[str(paths.get(name, (name,))[-1])].append(name)
    found = {}
    for name, state in states.items():
        # Parameters of two models may have the same name.
        held = named.get(state[0], []) if state else []
        kind = kind_of(state[1]) if state else "parameter"
        found[name] = held[0] if len(held) == 1 else name, kind
    return found


def _state_of(name: str, keys: _Keys | None) -> tuple[str, str] | None:
    # The parameter's name in its model and the state's name; None if `name` is not a
    # state.
    if keys is not None:
        is_state = len(keys) > 2 and keys[-3] == "state"
        return (str(keys[-2]), str(keys[-1])) if is_state else None
    before, _, state = name.rpartition(".")
    parts = before.split(".")
    for at in reversed(range(len(parts) - 1)):
        if state and parts[at] == "state" and parts[at + 1 :] != [""]:
            return ".".join(parts[at + 1 :]), state
    return None


class _Values(Mapping[str, Any]):
    """Values other than tensors, keyed by path; each is decoded on demand."""

    def __init__(self, items: Mapping[str, _Item]) -> None:
        self._items = items

    def __getitem__(self, path: str) -> Any:
        name, start, size = self._items[path]
        file = torch_file.read(name, span=(start, size))
        if any(True for _ in torch_file.tensors(file.value)):
            raise file.error(f"has tensors in the value {path}, which is unsupported")
        return file.value

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)
