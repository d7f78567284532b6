"""Opens Megatron's checkpoints: `torch_dist`, and one file for each rank of the model.

`torch_dist` is a distributed checkpoint of PyTorch, whose tensors are global. Layers of
equal shapes are stacked: `decoder.layers.mlp.linear_fc1.weight` has a dim of layers,
and one of experts where there are some. States of the optimizer get the name of their
parameter. Values are the numbers and texts of `common.pt`, such as `args/num_layers`;
states of random number generators are left out.

`iter_0000100/mp_rank_TT_PPP_EEE/model_optim_rng.pt` is the file of tensor-parallel rank
TT, stage PPP and expert-parallel rank EEE; the last two are left out where there is
one. Names of tensors count layers within a stage, so stages are the axis `pp`, and
chunks of interleaved stages the axis `vp`. Optimizer states are numbered, see
`optimizer_states`. `distrib_optim.pt` is not read: it lists no parameters.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from elastic_ckpt.core import errors
from elastic_ckpt.universal.formats import (
    dcp,
    optimizer_states,
    source_files,
    state_kinds,
    torch_file,
)
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.opened import OpenedCheckpoint
from elastic_ckpt.universal.formats.optimizer_states import Ranks
from elastic_ckpt.universal.formats.torch_file import Tensor, TorchFile
from elastic_ckpt.universal.stored import Checksum, StoredTensor

LATEST = "latest_checkpointed_iteration.txt"
_COMMON = "common.pt"
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)", re.DOTALL)
_KINDS = {**state_kinds.KINDS, "fp32_param": "master", "param": "master"}
_STEP = "common_step"

_FOLDER = re.compile(r"mp_rank_(\d{2,9})(?:_(\d{3,9}))?(?:_(\d{3,9}))?")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_AXES = ("tp", "pp", "ep")
_CHUNK = re.compile(r"model(\d{0,4})")
_EXTRA = "_extra_state"


def is_format(names: Collection[str]) -> bool:
    """Whether a directory of these names is such a checkpoint, or leads to one."""
    return (
        LATEST in names
        or _is_torch_dist(names)
        or any(_FOLDER.fullmatch(name) for name in names)
    )


def open_checkpoint(path: epath.PathLike) -> OpenedCheckpoint:
    """Opens the directory of an iteration, or one whose file names the latest.

    Raises:
      FormatError: as `dcp.open_checkpoint`, and if a file of a rank is missing or
        damaged.
    """
    folder = _folder(epath.Path(path))
    if not _is_torch_dist([each.name for each in folder.iterdir()]):
        return _of_ranks(folder)
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
    if match := _STATE.fullmatch(tensor.name):
        kind = _KINDS.get(match[1], match[1])
        return dataclasses.replace(tensor, name=match[2], kind=kind)
    # Flat buckets of the distributed optimizer are states of no single parameter.
    is_state = tensor.name.startswith(("optimizer.", "chained_"))
    return dataclasses.replace(tensor, kind="optimizer" if is_state else "parameter")


def _of_common(file: TorchFile) -> Iterator[StoredTensor]:
    for keys, tensor in torch_file.tensors(file.value):
        kind = "step" if keys and keys[-1] == _STEP else "common"
        yield optimizer_states.stored("/".join(map(str, keys)), kind, tensor)


def _of_ranks(folder: epath.Path) -> OpenedCheckpoint:
    paths: dict[tuple[int, ...], epath.Path] = {}
    for each in sorted(folder.iterdir()):
        if match := _FOLDER.fullmatch(each.name):
            paths[tuple(int(part or 0) for part in match.groups())] = each
    files = torch_file.read_all({rank: _file(each) for rank, each in paths.items()})
    first = files[min(files)]
    if first.at("args", "pipeline_model_parallel_size") == 1:
        # Then the second number is that of experts.
        files = {(tp, 0, pp or ep): each for (tp, pp, ep), each in files.items()}
    sizes = [1 + max(numbers) for numbers in zip(*files, strict=True)]
    if len(files) != math.prod(sizes):
        raise FormatError(
            f"{folder} has files of {len(files)} ranks, and their numbers reach"
            f" {sizes[0]} tensor-parallel ranks, {sizes[1]} stages and {sizes[2]}"
            f" expert-parallel ranks: {errors.first_of(map(str, sorted(files)))}"
        )
    axes = {axis: size for axis, size in zip(_AXES, sizes, strict=True) if size > 1}
    tensors: dict[tuple[str, str, Ranks], StoredTensor] = {}
    for rank, file in sorted(files.items()):
        ranks = [each for each in zip(_AXES, rank, strict=True) if each[0] in axes]
        for tensor in _of_rank(file):
            stored = dataclasses.replace(tensor, ranks=(*ranks, *tensor.ranks))
            key = stored.name, stored.kind, stored.ranks
            if tensors.setdefault(key, stored) is not stored:
                raise file.error(f"has {stored.name} twice")
    chunks = {each for _, _, ranks in tensors for each in ranks if each[0] == "vp"}
    weights = [key for key in first.dict_at() if _CHUNK.fullmatch(str(key))]
    return OpenedCheckpoint(
        format="Megatron mp_rank",
        tensors=list(tensors.values()),
        axes=axes | ({"vp": len(chunks)} if chunks else {}),
        values=first.values(without=weights),
        checksums=torch_file.checksums,
    )


def _file(folder: epath.Path) -> epath.Path:
    for name in _FILES:
        if (folder / name).exists():
            return folder / name
    raise FormatError(
        f"{folder} lacks {_FILES[0]}; copy it from the rank that saved it"
    )


def _of_rank(file: TorchFile) -> Iterator[StoredTensor]:
    content = file.dict_at()
    weights: list[StoredTensor] = []
    for key, model in content.items():
        match = _CHUNK.fullmatch(key) if isinstance(key, str) else None
        if match and isinstance(model, dict):
            ranks = (("vp", int(match[1])),) if match[1] else ()
            weights += _weights(model, "", ranks)
    yield from weights
    parameters = [each for each in weights if each.kind == "parameter"]
    optimizers = content.get("optimizer")
    if isinstance(optimizers, dict) and optimizers:
        if all(type(key) is int for key in optimizers):
            raise file.error(
                "has several optimizers, whose states are not named; save as torch_dist"
            )
        if isinstance(optimizers.get("optimizer", optimizers).get("state"), dict):
            yield from optimizer_states.numbered(file, parameters)


def _weights(
    content: Mapping[Any, Any], prefix: str, ranks: Ranks
) -> Iterator[StoredTensor]:
    # Earlier versions nest modules.
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _weights(value, f"{prefix}{key}.", ranks)
        elif isinstance(value, Tensor):
            kind = "extra_state" if str(key).endswith(_EXTRA) else "parameter"
            yield optimizer_states.stored(f"{prefix}{key}", kind, value, ranks)
