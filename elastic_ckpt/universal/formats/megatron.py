"""Opens Megatron's checkpoints: `torch_dist`, and one file for each rank of the model.

`torch_dist` is a distributed checkpoint of PyTorch, whose tensors are global. Layers of
equal shapes are stacked: `decoder.layers.mlp.linear_fc1.weight` has a dim of layers,
and one of experts where there are some. States of the optimizer get the name of their
parameter. Files of ranks are described in `megatron_ranks`.

Values are the numbers and texts of `common.pt`, such as `args/num_layers`; states of
random number generators are left out.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence

from etils import epath

from elastic_ckpt.universal.formats import (
    dcp,
    megatron_ranks,
    source_files,
    state_kinds,
    torch_file,
)
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.opened import OpenedCheckpoint
from elastic_ckpt.universal.formats.torch_file import TorchFile
from elastic_ckpt.universal.stored import Checksum, StoredTensor

LATEST = "latest_checkpointed_iteration.txt"
_COMMON = "common.pt"
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)", re.DOTALL)
_KINDS = {**state_kinds.KINDS, "fp32_param": "master", "param": "master"}
_STEP = "common_step"


def is_format(names: Collection[str]) -> bool:
    """Whether a directory of these names is such a checkpoint, or leads to one."""
    return LATEST in names or _is_torch_dist(names) or megatron_ranks.is_format(names)


def open_checkpoint(path: epath.PathLike) -> OpenedCheckpoint:
    """Opens the directory of an iteration, or one whose file names the latest.

    Raises:
      FormatError: as `dcp.open_checkpoint` and `megatron_ranks`.
    """
    folder = _folder(epath.Path(path))
    if not _is_torch_dist([each.name for each in folder.iterdir()]):
        return megatron_ranks.open_checkpoint(folder)
    opened = dcp.open_checkpoint(folder)
    common = torch_file.read(folder / _COMMON)
    tensors = [_named(tensor) for tensor in opened.tensors]

    def checksums(file: str) -> Sequence[Checksum]:
        of_file = torch_file if file == common.path else opened
        return of_file.checksums(file)

    return dataclasses.replace(
        opened,
        format="Megatron torch_dist",
        tensors=[*tensors, *_of_common(common)],
        values=common.values(),
        checksums=checksums,
    )


def _is_torch_dist(names: Collection[str]) -> bool:
    return _COMMON in names and dcp.is_format(names)


def _folder(path: epath.Path) -> epath.Path:
    pointer = path / LATEST
    if not pointer.exists():
        return path
    content = source_files.read(pointer, most_bytes=source_files.MOST_NAME_BYTES)
    text = content.decode("utf-8", "replace").strip()
    is_number = text.isascii() and text.isdecimal()
    folder = path / (f"iter_{int(text):07d}" if is_number else text)
    if not (is_number or text == "release") or not folder.exists():
        raise FormatError(f"{pointer} names {text!r}, which is no iteration beside it")
    return folder


def _named(tensor: StoredTensor) -> StoredTensor:
    match = _STATE.fullmatch(tensor.name)
    if match:
        kind, name = _KINDS.get(match[1], match[1]), match[2]
        return dataclasses.replace(tensor, name=name, kind=kind)
    # Flat buckets of the distributed optimizer are states of no single parameter.
    is_state = tensor.name.startswith(("optimizer.", "chained_"))
    return dataclasses.replace(tensor, kind="optimizer" if is_state else "parameter")


def _of_common(file: TorchFile) -> list[StoredTensor]:
    tensors: list[StoredTensor] = []
    for keys, tensor in torch_file.tensors(file.value):
        file.take(sum(len(str(key)) for key in keys))
        tensors.append(
            StoredTensor(
                name="/".join(map(str, keys)),
                kind="step" if keys and keys[-1] == _STEP else "common",
                dtype=tensor.dtype,
                shape=tensor.shape,
                fragments=file.fragment(tensor),
            )
        )
    return tensors
