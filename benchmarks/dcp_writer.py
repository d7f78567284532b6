"""Writes distributed checkpoints of PyTorch of many small tensors, without PyTorch.

The classes that PyTorch pickles are replaced by empty ones of the same names, so that
Python's pickler writes the same opcodes. All tensors have equal values.
"""

from __future__ import annotations

import collections
import contextlib
import io
import pathlib
import pickle
import sys
import types
import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_NAMES = {
    _METADATA: (
        *("Metadata", "TensorStorageMetadata", "TensorProperties"),
        *("ChunkStorageMetadata", "MetadataIndex", "_MEM_FORMAT_ENCODING"),
    ),
    _FILESYSTEM: ("_StorageInfo",),
    "torch": ("FloatStorage", "Size", "float32"),
    "torch.serialization": ("_get_layout",),
    "torch._utils": ("_rebuild_tensor_v2",),
}


class _Named:
    # Pickles as a call of a class.
    def __init__(self, name: Any, arguments: tuple[Any, ...]) -> None:
        self._parts = name, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._parts


class _Storage:
    # Pickles as a persistent id.
    pass


def write(
    directory: pathlib.Path, names: Sequence[str], *, shape: tuple[int, ...], files: int
) -> None:
    """Writes tensors of float32.

    Args:
      directory: that is new.
      names: of the tensors, in equal parts for each file.
      shape: of each.
      files: the number of files of values.
    """
    directory.mkdir()
    with _classes() as classes:
        item = _item(classes, shape)
        per_file = -(-len(names) // files)
        stored = {}
        for number in range(files):
            file = f"__{number}_0.distcp"
            part = names[number * per_file : (number + 1) * per_file]
            (directory / file).write_bytes(item * len(part))
            for at, name in enumerate(part):
                stored[_index(classes, name, shape)] = _place(
                    classes, file, at * len(item), len(item)
                )
        metadata = _object(
            classes["Metadata"],
            {
                "state_dict_metadata": {
                    name: _tensor(classes, shape) for name in names
                },
                "planner_data": {name: tuple(name.split(".")) for name in names},
                "storage_data": stored,
                "version": "1.0.0",
            },
        )
        with (directory / ".metadata").open("wb") as file:
            pickle.dump(metadata, file, protocol=4)


@contextlib.contextmanager
def _classes() -> Iterator[dict[str, type]]:
    modules = {name: types.ModuleType(name) for name in _NAMES}
    classes = {
        name: type(name, (), {"__module__": module})
        for module, names in _NAMES.items()
        for name in names
    }
    # Its state is a tuple.
    properties: Any = classes["TensorProperties"]
    properties.__getstate__ = lambda value: tuple(value.__dict__.values())
    for module, names in _NAMES.items():
        for name in names:
            setattr(modules[module], name, classes[name])
    sys.modules.update(modules)
    try:
        yield classes
    finally:
        for name in modules:
            del sys.modules[name]


def _object(kind: type, state: dict[str, Any]) -> Any:
    made = kind()
    made.__dict__.update(state)
    return made


def _size(classes: dict[str, type], dims: tuple[int, ...]) -> _Named:
    return _Named(classes["Size"], (dims,))


def _tensor(classes: dict[str, type], shape: tuple[int, ...]) -> Any:
    properties = {
        "dtype": classes["float32"],
        "layout": _Named(classes["_get_layout"], ("torch.strided",)),
        "requires_grad": False,
        "memory_format": _Named(classes["_MEM_FORMAT_ENCODING"], (0,)),
        "pin_memory": False,
    }
    chunk = {"offsets": _zeros(classes, shape), "sizes": _size(classes, shape)}
    state = {
        "properties": _object(classes["TensorProperties"], properties),
        "size": _size(classes, shape),
        "chunks": [_object(classes["ChunkStorageMetadata"], chunk)],
    }
    return _object(classes["TensorStorageMetadata"], state)


def _zeros(classes: dict[str, type], shape: tuple[int, ...]) -> _Named:
    return _size(classes, (0,) * len(shape))


def _index(classes: dict[str, type], name: str, shape: tuple[int, ...]) -> Any:
    state = {"fqn": name, "offset": _zeros(classes, shape), "index": 0}
    return _object(classes["MetadataIndex"], state)


def _place(classes: dict[str, type], file: str, offset: int, size: int) -> Any:
    state = {"relative_path": file, "offset": offset, "length": size}
    return _object(classes["_StorageInfo"], state)


def _item(classes: dict[str, type], shape: tuple[int, ...]) -> bytes:
    values = np.ones(shape, np.float32)
    strides = tuple(each // values.itemsize for each in values.strides)
    arguments = (_Storage(), 0, shape, strides, False, collections.OrderedDict())
    value = _Named(classes["_rebuild_tensor_v2"], arguments)

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if not isinstance(value, _Storage):
                return None
            return "storage", classes["FloatStorage"], "0", "cpu", values.size

    pickled, item = io.BytesIO(), io.BytesIO()
    Pickler(pickled, protocol=2).dump(value)
    with zipfile.ZipFile(item, "w") as archive:
        archive.writestr("archive/data.pkl", pickled.getvalue())
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/data/0", values.tobytes())
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/.data/serialization_id", "0" * 40)
    return item.getvalue()
