"""Opens Megatron's checkpoints of one file for each rank of the model.

`iter_0000100/mp_rank_TT_PPP_EEE/model_optim_rng.pt` is the file of tensor-parallel rank
TT, stage PPP and expert-parallel rank EEE; the last two are left out where there is
one. Names of tensors count layers within a stage, so stages are the axis `pp`, and
chunks of interleaved stages the axis `vp`. Optimizer states are numbered; they get
names as in `numbered_states`, those of the distributed optimizer in `distrib_optim.pt`
as in `megatron_buffers`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from etils import epath

from elastic_ckpt.core import errors
from elastic_ckpt.universal.formats import (
    megatron_buffers,
    numbered_states,
    torch_file,
)
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.opened import OpenedCheckpoint
from elastic_ckpt.universal.formats.source_budget import SourceBudget
from elastic_ckpt.universal.formats.torch_file import Tensor, TorchFile
from elastic_ckpt.universal.stored import StoredTensor

_FOLDER = re.compile(r"mp_rank_(\d{2,9})(?:_(\d{3,9}))?(?:_(\d{3,9}))?")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_CHUNK = re.compile(r"model(\d{0,4})")
_EXTRA = "_extra_state"
# Names of nested modules repeat those of all modules around them.
_NAME_BYTES = 100
Coordinates = tuple[int, int, int]


def is_format(names: Collection[str]) -> bool:
    """Whether a directory of these names is such a checkpoint."""
    return any(_FOLDER.fullmatch(name) for name in names)


def open_checkpoint(folder: epath.Path) -> OpenedCheckpoint:
    """Opens the directory of an iteration.

    Raises:
      FormatError: if a file is missing or damaged, or has names outside of
        `inert_names`.
    """
    paths: dict[Coordinates, epath.Path] = {}
    buffers: dict[Coordinates, epath.Path] = {}
    for each in sorted(folder.iterdir()):
        if match := _FOLDER.fullmatch(each.name):
            tp, pp, ep = (int(part or 0) for part in match.groups())
            paths[tp, pp, ep] = _file(each)
            if (each / megatron_buffers.FILE).exists():
                buffers[tp, pp, ep] = each / megatron_buffers.FILE
    budget = SourceBudget()
    models = torch_file.read_all(paths, budget)
    optimizers = torch_file.read_all(buffers, budget)
    files = {rank: (file, optimizers.get(rank)) for rank, file in models.items()}
    first, _ = files[min(files)]
    if first.at("args", "pipeline_model_parallel_size") == 1:
        # Then the second number is that of experts.
        files = {(tp, 0, pp or ep): file for (tp, pp, ep), file in files.items()}
    axes = _axes(folder, files)
    tensors: dict[tuple[str, str, Any], StoredTensor] = {}
    for coordinates, (file, optimizer) in sorted(files.items()):
        named = dict(zip(("tp", "pp", "ep"), coordinates, strict=True))
        if optimizers and not optimizer:
            raise file.error(
                f"has no {megatron_buffers.FILE} beside it, as those of other ranks"
                " have; copy it from the rank that saved it"
            )
        for tensor in _of_file(file, optimizer):
            ranks = [(axis, named[axis]) for axis in axes if axis in named]
            stored = dataclasses.replace(tensor, ranks=(*ranks, *tensor.ranks))
            key = stored.name, stored.kind, stored.ranks
            if tensors.setdefault(key, stored) is not stored:
                raise file.error(f"has {stored.name} twice")
    chunks = {
        rank for each in tensors.values() for rank in each.ranks if rank[0] == "vp"
    }
    return OpenedCheckpoint(
        format="Megatron mp_rank",
        tensors=list(tensors.values()),
        axes=axes | ({"vp": len(chunks)} if chunks else {}),
        values=_values(first),
        checksums=torch_file.checksums,
    )


def _file(folder: epath.Path) -> epath.Path:
    for name in _FILES:
        if (folder / name).exists():
            return folder / name
    raise FormatError(
        f"{folder} lacks {_FILES[0]}; copy it from the rank that saved it"
    )


def _axes(folder: epath.Path, files: Mapping[Coordinates, Any]) -> dict[str, int]:
    sizes = [1 + max(rank[axis] for rank in files) for axis in range(3)]
    if len(files) != sizes[0] * sizes[1] * sizes[2]:
        raise FormatError(
            f"{folder} has files of {len(files)} ranks, and their numbers reach"
            f" {sizes[0]} tensor-parallel ranks, {sizes[1]} stages and {sizes[2]}"
            f" expert-parallel ranks: {errors.first_of(map(str, sorted(files)))}"
        )
    named = zip(("tp", "pp", "ep"), sizes, strict=True)
    return {axis: size for axis, size in named if size > 1}


def _of_file(file: TorchFile, buffers: TorchFile | None) -> Iterator[StoredTensor]:
    content = file.dict_at()
    weights: list[StoredTensor] = []
    for key, model in content.items():
        match = _CHUNK.fullmatch(key) if isinstance(key, str) else None
        if match and isinstance(model, dict):
            ranks = (("vp", int(match[1])),) if match[1] else ()
            weights += _weights(file, model, "", ranks)
    yield from weights
    parameters = [each for each in weights if each.kind == "parameter"]
    if buffers is not None:
        yield from megatron_buffers.states(buffers, parameters)
    optimizers = content.get("optimizer")
    if isinstance(optimizers, dict) and optimizers:
        if all(type(key) is int for key in optimizers):
            raise file.error(
                "has several optimizers, whose states are not named; save as torch_dist"
            )
        if isinstance(optimizers.get("optimizer", optimizers).get("state"), dict):
            yield from numbered_states.states(file, parameters, ("optimizer",))


def _weights(
    file: TorchFile,
    content: Mapping[Any, Any],
    prefix: str,
    ranks: tuple[tuple[str, int], ...],
) -> Iterator[StoredTensor]:
    # Earlier versions nest modules.
    for key, value in content.items():
        file.take(_NAME_BYTES + len(prefix) + len(str(key)))
        if isinstance(value, dict):
            yield from _weights(file, value, f"{prefix}{key}.", ranks)
        elif isinstance(value, Tensor):
            yield StoredTensor(
                name=f"{prefix}{key}",
                ranks=ranks,
                kind="extra_state" if str(key).endswith(_EXTRA) else "parameter",
                dtype=value.dtype,
                shape=value.shape,
                fragments=file.fragment(value),
            )


def _values(file: TorchFile) -> dict[str, Any]:
    weights = [key for key in file.dict_at() if _CHUNK.fullmatch(str(key))]
    return file.values(without=weights)
