"""Conversions to safetensors.

    model.safetensors                     if all tensors fit into one file
    model-00001-of-00003.safetensors      otherwise, with
    model.safetensors.index.json          the file of each tensor

Tensors are dealt to files in the order of their sources. Inside of a file those of
wider elements come first, so that each lies at a multiple of its element's size.

A directory becomes visible by a rename. Directories cannot be renamed in an object
store: there the index commits the files, or the only file itself. A file beside the
directory, `<target>.unfinished`, tells that a conversion writes it, or was killed.

Spec: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from etils import epath

from elastic_ckpt.core import errors, storage
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal.formats import safetensors_file
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.strides import row_major
from elastic_ckpt.universal.writing import files
from elastic_ckpt.universal.writing.conversion import Conversion
from elastic_ckpt.universal.writing.files import File, Write
from elastic_ckpt.universal.writing.writer import Destination, Written

INDEX, _ONE_FILE = "model.safetensors.index.json", "model.safetensors"
# A header of so many tensors is far below what readers accept.
_MOST_TENSORS = 100_000
_ALIGNMENT_BYTES = 8
_METADATA = "__metadata__"


@dataclasses.dataclass(frozen=True)
class _Layout:
    # The first bytes of a file, and where each of its tensors begins.
    head: bytes
    start_of: Mapping[str, int]


class SafetensorsDestination(Destination):
    """See `Destination`."""

    # Of the values in a file; a larger tensor is alone in one.
    most_file_bytes = 5 * 10**9

    def __init__(self, conversion: Conversion) -> None:
        super().__init__(conversion)
        targets = conversion.targets
        if not targets:
            raise errors.CheckpointError(
                "there are no tensors to write; give rules that match some"
            )
        if any(target.name == _METADATA for target in targets):
            raise errors.CheckpointError(
                f"a tensor is called {_METADATA}, as the texts of a header; rename it"
            )
        self._groups = list(_groups(targets, self.most_file_bytes))
        self._layouts = {
            self._name(number): _layout(group)
            for number, group in enumerate(self._groups, start=1)
        }
        self.files = [
            File(
                name,
                {target: conversion.boxes_of(target) for target in group},
                len(layout.head) + sum(target.num_bytes for target in group),
            )
            for (name, layout), group in zip(
                self._layouts.items(), self._groups, strict=True
            )
        ]

    def head(self, file: File) -> Iterable[Write]:
        """See `Destination`."""
        yield files.of_bytes(self._layouts[file.name].head, 0)

    def writes(
        self, file: File, target: TargetTensor, box: Box, values: np.ndarray
    ) -> Iterable[Write]:
        """See `Destination`."""
        strides = row_major(target.shape, target.dtype.itemsize)
        offset = self._layouts[file.name].start_of[target.name]
        offset += sum(a * b for a, b in zip(box.start, strides, strict=True))
        # The dims behind it are whole, and it is part of one row with them.
        dim = len(target.shape)
        while dim and (dim == len(target.shape) or box.shape[dim] == target.shape[dim]):
            dim -= 1
        counts = box.shape[:dim]
        if math.prod(counts) == 1:
            yield Write(values, offset)
        else:
            yield Write(values, offset, counts, strides[:dim])

    def make_room(self) -> bool:
        """See `Destination`."""
        if storage.is_local(self.target):
            if self.target.exists():
                return False
            storage.remove(self.unfinished)
            return True
        names = _names(self.target)
        if names.intersection((INDEX, _ONE_FILE)):
            storage.remove(self.unfinished)
            return False
        if names and not self.unfinished.exists():
            return False
        storage.write_atomic(self.unfinished, b"")
        storage.remove(self.target)
        return True

    def others(self) -> Mapping[str, bytes]:
        """The contents of the files beside the tensors, by name."""
        return {}

    def commit(self, attempt: str, contents: Written) -> None:
        """See `Destination`."""
        del contents
        directory = self.directory(attempt)
        for name, content in self.others().items():
            storage.write_atomic(directory / name, content)
        if len(self._groups) > 1:
            storage.write_atomic(directory / INDEX, self._index())
        if storage.is_local(directory):
            storage.rename(directory, self.target)
        else:
            storage.remove(self.unfinished)

    def _name(self, number: int) -> str:
        count = len(self._groups)
        if count == 1:
            return _ONE_FILE
        return f"model-{number:05d}-of-{count:05d}.safetensors"

    def _index(self) -> bytes:
        names = {
            name: file for file, each in self._layouts.items() for name in each.start_of
        }
        content = {
            "metadata": {"total_size": self.conversion.num_bytes},
            "weight_map": dict(sorted(names.items())),
        }
        return json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"


def _names(directory: epath.Path) -> set[str]:
    try:
        return set(storage.names(directory))
    except FileNotFoundError:
        return set()


def _groups(
    targets: Sequence[TargetTensor], most_bytes: int
) -> Iterator[list[TargetTensor]]:
    group: list[TargetTensor] = []
    num_bytes = 0
    for target in targets:
        is_full = num_bytes + target.num_bytes > most_bytes
        if group and (is_full or len(group) == _MOST_TENSORS):
            yield group
            group, num_bytes = [], 0
        group.append(target)
        num_bytes += target.num_bytes
    yield group


def _layout(group: Sequence[TargetTensor]) -> _Layout:
    # Hugging Face's transformers require the format.
    fields: dict[str, object] = {_METADATA: {"format": "pt"}}
    offset = 0
    offsets = {}
    for target in sorted(group, key=lambda each: (-each.dtype.itemsize, each.name)):
        offsets[target.name] = offset
        fields[target.name] = {
            "dtype": safetensors_file.dtype_name(target.dtype),
            "shape": list(target.shape),
            "data_offsets": [offset, offset + target.num_bytes],
        }
        offset += target.num_bytes
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    head = len(text).to_bytes(8, "little") + text
    starts = {name: len(head) + offset for name, offset in offsets.items()}
    return _Layout(head, starts)
