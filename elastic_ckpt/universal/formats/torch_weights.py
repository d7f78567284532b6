"""Opens weights that PyTorch saved: any state dict, or shards of one.

`pytorch_model.bin`, or a file `.pt`, `.pth` or `.bin`, has a state dict. Nested dicts
and lists are joined by dots: a training checkpoint has `model.layers.0.weight` and
`optimizer.state.0.exp_avg`, with its numbers and texts as values. Shards are listed by
`pytorch_model.bin.index.json`, and a `config.json` beside them is among the values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from etils import epath

from elastic_ckpt.core import errors
from elastic_ckpt.universal.formats import hugging_face, torch_file
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.opened import OpenedCheckpoint
from elastic_ckpt.universal.formats.torch_file import TorchFile
from elastic_ckpt.universal.stored import StoredTensor

SUFFIXES = (".bin", ".pt", ".pth")
INDEX_SUFFIX = ".bin.index.json"
_USUAL = "pytorch_model"


def is_format(names: Collection[str]) -> bool:
    """Whether files of these names, in one directory, are such a checkpoint."""
    return any(name.endswith((*SUFFIXES, INDEX_SUFFIX)) for name in names)


def open_checkpoint(path: epath.PathLike) -> OpenedCheckpoint:
    """Opens a file, an index, or a directory that has one of them.

    Raises:
      FormatError: if a file is missing, damaged or no state dict, an index leads to
        another directory or does not fit its files, or a tensor is there twice.
    """
    source = epath.Path(path)
    folder = source if source.is_dir() else source.parent
    index = hugging_face.find_index(source, INDEX_SUFFIX, _USUAL)
    listed: Mapping[str, list[str]] = {}
    values: dict[str, Any] = {}
    if index is not None:
        listed, values = hugging_face.read_index(index)
    else:
        listed = {_only_file(source) if source.is_dir() else source.name: []}
    files = torch_file.read_all({name: folder / name for name in listed})
    tensors: dict[str, StoredTensor] = {}
    for name, file in files.items():
        for tensor in _tensors(file):
            if tensors.setdefault(tensor.name, tensor) is not tensor:
                raise file.error(f"has {tensor.name}, and so has another file or dict")
        lacking = [each for each in listed[name] if each not in tensors]
        if lacking:
            raise file.error(f"lacks {lacking[0]}, which {index} lists there")
        values |= file.values()
    if not tensors:
        raise FormatError(f"{path} has no tensors; it is no state dict")
    values |= hugging_face.config_values(folder / hugging_face.CONFIG)
    return OpenedCheckpoint(
        format="PyTorch",
        tensors=list(tensors.values()),
        values=values,
        checksums=torch_file.checksums,
    )


def _only_file(folder: epath.Path) -> str:
    names = sorted(each.name for each in folder.iterdir())
    if f"{_USUAL}.bin" in names:
        return f"{_USUAL}.bin"
    # transformers' Trainer saves its arguments beside weights.
    files = [
        name
        for name in names
        if name.endswith(SUFFIXES) and name != "training_args.bin"
    ]
    hugging_face.check_shards(folder, files)
    if len(files) != 1:
        raise FormatError(
            f"{folder} has {len(files)} files of PyTorch"
            f" ({errors.first_of(files) or 'no state dict'}) and no index of them; give"
            " the path of one file"
        )
    return files[0]


def _tensors(file: TorchFile) -> Iterator[StoredTensor]:
    for keys, tensor in torch_file.tensors(file.value):
        yield StoredTensor(
            name=".".join(map(str, keys)),
            dtype=tensor.dtype,
            shape=tensor.shape,
            fragments=tensor.fragments,
            view=tensor.view,
        )
