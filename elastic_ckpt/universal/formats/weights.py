"""Opens a model's weights in safetensors or PyTorch format, in one or more files.

A directory may have an index, `model.safetensors.index.json`, that lists each tensor's
file, and a `config.json`, whose entries become values, such as
`config/num_key_value_heads`.

PyTorch files (`pytorch_model.bin`, or any `.pt`, `.pth` or `.bin`) contain state dicts.
Keys of nested dicts and lists are joined by dots: a training checkpoint has
`model.layers.0.weight` and `optimizer.state.0.exp_avg`. Its numbers and strings become
values.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
from typing import Any

from etils import epath

from elastic_ckpt.core import errors
from elastic_ckpt.universal.formats import files, safetensors, torch_file
from elastic_ckpt.universal.formats.checkpoint import (
    Checkpoint,
    Checksum,
    StoredTensor,
    flatten,
    no_checksums,
)
from elastic_ckpt.universal.formats.files import FormatError

CONFIG = "config.json"
# `model-00001-of-00003.safetensors`
_SHARD = re.compile(r"(.+)-\d+-of-(\d{1,9})(\.\w+)", re.ASCII)
# transformers' Trainer saves its arguments next to the weights.
_NO_WEIGHTS = "training_args.bin"
# Requests to a bucket are slow.
_THREADS = 8

_Read = Callable[[epath.PathLike], tuple[Sequence[StoredTensor], Mapping[str, Any]]]


def _read_torch(path: epath.PathLike) -> tuple[list[StoredTensor], dict[str, Any]]:
    value = torch_file.read(path).value
    return list(torch_file.tensors(value)), flatten(value)


@dataclasses.dataclass(frozen=True)
class Weights:
    """A file format for weights.

    Attributes:
      index: the suffix of an index.
      usual: the usual name of a file or an index, without suffix.
      read: a function that reads a file's tensors and values.
      are_joined: whether multiple files without an index form one model.
    """

    format: str
    suffixes: tuple[str, ...]
    index: str
    usual: str
    read: _Read
    checksums: Callable[[str], Sequence[Checksum]]
    are_joined: bool

    def is_format(self, names: Collection[str]) -> bool:
        """Whether a directory with these file names has weights in this format."""
        return any(name.endswith((*self.suffixes, self.index)) for name in names)

    def open_checkpoint(self, path: epath.PathLike) -> Checkpoint:
        """Opens a file, an index, or a directory with one of them.

        Raises:
          FormatError: if a file is missing, damaged or not listed; a numbered set
            without an index is incomplete; an index refers to a different directory or
            does not match its files; or a tensor occurs twice.
        """
        source = epath.Path(path)
        is_dir = source.is_dir()
        folder = source if is_dir else source.parent
        names = (
            sorted(each.name for each in source.iterdir()) if is_dir else [source.name]
        )
        index = self._index(source, names)
        listed: Mapping[str, Collection[str]]
        if index is None:
            held = self._without_index(source, names) if is_dir else names
            listed, values = dict.fromkeys(held, ()), {}
        else:
            listed, values = _read_index(folder / index)
        with futures.ThreadPoolExecutor(_THREADS) as pool:
            contents = list(pool.map(self.read, (folder / name for name in listed)))
        # Another file may replace a tensor of a file that it is laid over.
        chosen = {name: file for file, names in listed.items() for name in names}
        tensors: dict[str, StoredTensor] = {}
        for (file, expected), (held, texts) in zip(
            listed.items(), contents, strict=True
        ):
            for tensor in held:
                if chosen.get(tensor.name, file) != file:
                    continue
                if tensors.setdefault(tensor.name, tensor) is not tensor:
                    raise FormatError(
                        f"{folder / file} has {tensor.name}, which is also in another"
                        " file or dict; pass the path of one file, or of an index that"
                        " lists the tensor in the file to read it from"
                    )
            lacking = set(expected).difference(tensor.name for tensor in held)
            if lacking:
                raise FormatError(
                    f"{folder / file} lacks {min(lacking)}, although {index} lists it"
                )
            values |= texts
        if not tensors:
            raise FormatError(f"{path} has no tensors; pass the path of a model")
        return Checkpoint(
            format=self.format,
            tensors=list(tensors.values()),
            values=values | config_values(folder / CONFIG),
            checksums=self.checksums,
        )

    def _index(self, path: epath.Path, names: Sequence[str]) -> str | None:
        found = [name for name in names if name.endswith(self.index)]
        if self.usual + self.index in found:
            return self.usual + self.index
        if len(found) > 1:
            raise FormatError(
                f"{path} has more than one index ({errors.first_of(found)}); pass the"
                " path of one of them"
            )
        return found[0] if found else None

    def _without_index(self, path: epath.Path, names: Sequence[str]) -> list[str]:
        if (usual := self.usual + self.suffixes[0]) in names and not self.are_joined:
            return [usual]
        found = [n for n in names if n.endswith(self.suffixes) and n != _NO_WEIGHTS]
        shards = (match for name in found if (match := _SHARD.fullmatch(name)))
        held = collections.Counter(match.groups() for match in shards)
        for (stem, count, suffix), number in held.items():
            if number < int(count):
                raise FormatError(
                    f"{path} has only {number} of the {int(count)} files"
                    f" {stem}-*-of-{count}{suffix} and no index, so a conversion or"
                    " download did not finish; run it again"
                )
        if len(found) != 1 and not self.are_joined:
            raise FormatError(
                f"{path} has {len(found)} {self.format} files"
                f" ({errors.first_of(found) or 'no state dict'}) and no index; pass the"
                " path of one file"
            )
        return found


SAFETENSORS = Weights(
    format="safetensors",
    suffixes=(".safetensors",),
    index=".safetensors.index.json",
    usual="model",
    read=safetensors.read_header,
    checksums=no_checksums,
    are_joined=True,
)
PYTORCH = Weights(
    format="PyTorch",
    suffixes=(".bin", ".pt", ".pth"),
    index=".bin.index.json",
    usual="pytorch_model",
    read=_read_torch,
    checksums=torch_file.checksums,
    are_joined=False,
)


def config_values(path: epath.Path) -> dict[str, Any]:
    """The values in a configuration file, as `config/...`; empty if there is no file.

    Raises:
      FormatError: if the file is not a JSON object.
    """
    return flatten({"config": files.read_json(path)}) if path.exists() else {}


def _read_index(index: epath.Path) -> tuple[dict[str, list[str]], dict[str, Any]]:
    # Each file's tensors, and the index's numbers and strings.
    fields = files.read_json(index)
    weight_map, metadata = fields.get("weight_map"), fields.get("metadata")
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{index} has no weight_map")
    by_file: dict[str, list[str]] = collections.defaultdict(list)
    for name, file in weight_map.items():
        if not files.is_plain_name(file):
            raise FormatError(
                f"{index} lists {name:.200} in {file!r:.99}, which is not a file in the"
                " same directory"
            )
        by_file[file].append(name)
    kept: Mapping[str, Any] = metadata if isinstance(metadata, dict) else {}
    plain = {k: v for k, v in kept.items() if isinstance(v, str | int | float)}
    return dict(sorted(by_file.items())), plain
