"""Writes PyTorch distributed checkpoints of many small tensors, without PyTorch.

The classes that PyTorch pickles are replaced by empty classes with the same names, so
that Python's pickler writes the same opcodes. All tensors have the same values.
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
from unittest import mock

import numpy as np

_NAMES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "TensorStorageMetadata", "TensorProperties"),
        *("ChunkStorageMetadata", "MetadataIndex", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("FloatStorage", "Size", "float32"),
    "torch.serialization": ("_get_layout",),
    "torch._utils": ("_rebuild_tensor_v2",),
}


class _Call:
    # Pickles as a class call.
    def __init__(self, name: Any, *arguments: Any) -> None:
        self._parts = name, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._parts


def write(
    directory: pathlib.Path, names: Sequence[str], *, shape: tuple[int, ...], files: int
) -> None:
    """Writes float32 tensors, in equal parts, to a number of value files."""
    directory.mkdir()
    with _classes() as classes:

        def made(kind: str, **state: Any) -> Any:
            value = classes[kind]()
            value.__dict__.update(state)
            return value

        def size(dims: tuple[int, ...]) -> _Call:
            return _Call(classes["Size"], dims)

        zeros = (0,) * len(shape)
        item = _item(classes, shape)
        per_file = -(-len(names) // files)
        stored, described = {}, {}
        for number in range(files):
            file = f"__{number}_0.distcp"
            part = names[number * per_file : (number + 1) * per_file]
            (directory / file).write_bytes(item * len(part))
            for at, name in enumerate(part):
                index = made("MetadataIndex", fqn=name, offset=size(zeros), index=0)
                stored[index] = made(
                    "_StorageInfo",
                    relative_path=file,
                    offset=at * len(item),
                    length=len(item),
                )
                chunk = made(
                    "ChunkStorageMetadata", offsets=size(zeros), sizes=size(shape)
                )
                properties = made(
                    "TensorProperties",
                    dtype=classes["float32"],
                    layout=_Call(classes["_get_layout"], "torch.strided"),
                    requires_grad=False,
                    memory_format=_Call(classes["_MEM_FORMAT_ENCODING"], 0),
                    pin_memory=False,
                )
                described[name] = made(
                    "TensorStorageMetadata",
                    properties=properties,
                    size=size(shape),
                    chunks=[chunk],
                )
        metadata = made(
            "Metadata",
            state_dict_metadata=described,
            planner_data={name: tuple(name.split(".")) for name in names},
            storage_data=stored,
            version="1.0.0",
        )
        with (directory / ".metadata").open("wb") as opened:
            pickle.dump(metadata, opened, protocol=4)


@contextlib.contextmanager
def _classes() -> Iterator[dict[str, type]]:
    modules = {name: types.ModuleType(name) for name in _NAMES}
    classes = {}
    for module, names in _NAMES.items():
        for name in names:
            classes[name] = type(name, (), {"__module__": module})
            setattr(modules[module], name, classes[name])
    # Its state is a tuple.
    properties: Any = classes["TensorProperties"]
    properties.__getstate__ = lambda value: tuple(value.__dict__.values())
    with mock.patch.dict(sys.modules, modules):
        yield classes


def _item(classes: dict[str, type], shape: tuple[int, ...]) -> bytes:
    values = np.ones(shape, np.float32)
    strides = tuple(each // values.itemsize for each in values.strides)
    arguments = (values, 0, shape, strides, False, collections.OrderedDict())
    value = _Call(classes["_rebuild_tensor_v2"], *arguments)

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if value is not values:
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
