"""Opens Megatron's checkpoints: `torch_dist`, and one file for each model rank.

`torch_dist` is a PyTorch distributed checkpoint, whose tensors are global. Layers of
the same shape are stacked: `decoder.layers.mlp.linear_fc1.weight` has a layer dim, and
an expert dim if there are experts. Optimizer states get the name of their parameter.
Values are the numbers and strings in `common.pt`, such as `args/num_layers`, except RNG
states.

`iter_0000100/mp_rank_TT_PPP_EEE/model_optim_rng.pt` is the file of tensor-parallel rank
TT, stage PPP and expert-parallel rank EEE; the name omits PPP if there is only one
stage, and EEE if there is only one expert-parallel rank. Tensor names number layers
within a stage, so stages form the axis `pp`, and chunks of interleaved stages form the
axis `vp`. Optimizer states are numbered; see `zero.numbered`. `distrib_optim.pt` is not
read because it does not list parameters.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from etils import epath

from elastic_ckpt.core import errors
from elastic_ckpt.universal.formats import dcp, files, torch_file, zero
from elastic_ckpt.universal.formats.checkpoint import (
    Checkpoint,
    Checksum,
    StoredTensor,
    flatten,
    kind_of,
)
from elastic_ckpt.universal.formats.files import FormatError
from elastic_ckpt.universal.formats.torch_file import TorchFile

LATEST = "latest_checkpointed_iteration.txt"
_COMMON = "common.pt"
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)", re.DOTALL)
_MASTERS = ("fp32_param", "param")
_STEP = "common_step"

_FOLDER = re.compile(r"mp_rank_(\d{2,9})(?:_(\d{3,9}))?(?:_(\d{3,9}))?")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_AXES = ("tp", "pp", "ep")
_CHUNK = re.compile(r"model(\d{0,4})")
_EXTRA = "_extra_state"


def is_format(names: Collection[str]) -> bool:
    """Whether a directory with these file names is or points to such a checkpoint."""
    return (
        LATEST in names
        or _is_torch_dist(names)
        or any(_FOLDER.fullmatch(name) for name in names)
    )


def open_checkpoint(path: epath.PathLike) -> Checkpoint:
    """Opens an iteration's directory, or a directory with a pointer to the latest one.

    Raises:
      FormatError: see `dcp.open_checkpoint`; also if a rank's file is missing or
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
        values=flatten(common.value),
        checksums=checksums,
    )


def _is_torch_dist(names: Collection[str]) -> bool:
    return _COMMON in names and dcp.is_format(names)


def _folder(path: epath.Path) -> epath.Path:
    pointer = path / LATEST
    if not pointer.exists():
        return path
    text = files.read_name(pointer)
    is_number = text.isascii() and text.isdecimal()
    folder = path / (f"iter_{int(text):07d}" if is_number else text)
    if not (is_number or text == "release") or not folder.exists():
        raise FormatError(
            f"{pointer} contains {text!r}, which is not an iteration in {path}"
        )
    return folder


def _named(tensor: StoredTensor) -> StoredTensor:
    if match := _STATE.fullmatch(tensor.name):
        kind = "master" if match[1] in _MASTERS else kind_of(match[1])
        return dataclasses.replace(tensor, name=match[2], kind=kind)
    # Flat buckets of the distributed optimizer span multiple parameters.
    is_state = tensor.name.startswith(("optimizer.", "chained_"))
    return dataclasses.replace(tensor, kind="optimizer" if is_state else "parameter")


def _of_common(file: TorchFile) -> Iterator[StoredTensor]:
    for tensor in torch_file.tensors(file.value, "/"):
        kind = "step" if tensor.name.endswith(_STEP) else "common"
        yield dataclasses.replace(tensor, kind=kind)


def _of_ranks(folder: epath.Path) -> Checkpoint:
    paths: dict[tuple[int, ...], epath.Path] = {}
    for each in sorted(folder.iterdir()):
        if match := _FOLDER.fullmatch(each.name):
            held = [each / name for name in _FILES if (each / name).exists()]
            # A missing file is reported when it is read.
            path = held[0] if held else each / _FILES[0]
            paths[tuple(int(part or 0) for part in match.groups())] = path
    read = torch_file.read_all(paths)
    first = read[min(read)]
    if first.at("args", "pipeline_model_parallel_size") == 1:
        # In this case, the second number is the expert-parallel rank.
        read = {(tp, 0, pp or ep): each for (tp, pp, ep), each in read.items()}
    sizes = [1 + max(numbers) for numbers in zip(*read, strict=True)]
    if len(read) != math.prod(sizes):
        raise FormatError(
            f"{folder} has files of {len(read)} ranks, but the numbers in their names"
            f" imply {sizes[0]} tensor-parallel ranks, {sizes[1]} stages and {sizes[2]}"
            f" expert-parallel ranks: {errors.first_of(map(str, sorted(read)))}"
        )
    axes = {axis: size for axis, size in zip(_AXES, sizes, strict=True) if size > 1}
    tensors: dict[tuple[str, str, Any], StoredTensor] = {}
    for rank, file in sorted(read.items()):
        ranks = [each for each in zip(_AXES, rank, strict=True) if each[0] in axes]
        for tensor in _of_rank(file):
            stored = dataclasses.replace(tensor, ranks=(*ranks, *tensor.ranks))
            key = stored.name, stored.kind, stored.ranks
            if tensors.setdefault(key, stored) is not stored:
                raise file.error(f"has {stored.name} twice")
    chunks = {each for _, _, ranks in tensors for each in ranks if each[0] == "vp"}
    weights = [key for key in first.typed(dict) if _CHUNK.fullmatch(str(key))]
    return Checkpoint(
        format="Megatron mp_rank",
        tensors=list(tensors.values()),
        axes=axes | ({"vp": len(chunks)} if chunks else {}),
        values=flatten(first.value, without=weights),
        checksums=torch_file.checksums,
    )


def _of_rank(file: TorchFile) -> Iterator[StoredTensor]:
    weights: list[StoredTensor] = []
    for key, model in file.typed(dict).items():
        if match := _CHUNK.fullmatch(str(key)):
            ranks = (("vp", int(match[1])),) if match[1] else ()
            for tensor in torch_file.tensors(model):
                is_extra = tensor.name.endswith(_EXTRA)
                kind = "extra_state" if is_extra else "parameter"
                weights.append(dataclasses.replace(tensor, kind=kind, ranks=ranks))
    yield from weights
    optimizers = file.at("optimizer")
    if isinstance(optimizers, dict) and optimizers:
        if all(type(key) is int for key in optimizers):
            raise file.error(
                "has more than one optimizer with unnamed states; save as torch_dist"
            )
        # The distributed optimizer's states are in other files.
        if isinstance(optimizers.get("optimizer", optimizers).get("state"), dict):
            yield from zero.numbered(
                file, [w for w in weights if w.kind == "parameter"]
            )
