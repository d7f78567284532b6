"""Opens checkpoints of DeepSpeed: ZeRO stages 0 to 3, pipelines, experts.

DeepSpeed numbers the ranks of a model (`mp_rank_XX`) through stages and tensor-parallel
ranks, the latter first. Each of them has one file of the model, and one of optimizer
states for each data-parallel rank (`zero_pp_rank_DD`). With ZeRO-3, each data-parallel
rank has a file of the model, too. Layers of a pipeline and experts have files of their
own.

A tensor has the name of its parameter. Weights of the model are of kind `parameter`,
optimizer states `master`, `first_moment`, `second_moment` and `step`, buffers `buffer`.
Tensor-parallel ranks are the axis `tp`. Data-parallel ranks are no axis: their ranges
of a parameter are fragments of one tensor. Neither are stages: names count layers, and
files of experts number them, through all ranks. If several stages hold a parameter,
which is tied, the first stage's is taken, as in DeepSpeed's own conversion.

DeepSpeed's description of the layout is in `values["universal_checkpoint_info"]`: lists
of patterns of names, sizes of parts, and affine maps, as nested dicts and lists.

With stage 0 and an optimizer of PyTorch, states are numbered, not named. They get the
names of parameters where these follow, see `optimizer_states`. With experts, their
files of states (`expp_rank_*`) are not read.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from etils import epath

from elastic_ckpt.core import errors
from elastic_ckpt.universal.formats import (
    optimizer_states,
    plain_values,
    source_files,
    torch_file,
    zero,
)
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.opened import OpenedCheckpoint
from elastic_ckpt.universal.formats.optimizer_states import Shape
from elastic_ckpt.universal.formats.torch_file import Tensor, TorchFile
from elastic_ckpt.universal.stored import StoredTensor

LATEST = "latest"
INFO = "universal_checkpoint_info"
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
# By what they hold.
_FILES = {
    "model": _MODEL,
    "layer": _LAYER,
    "optimizer": re.compile(
        r"(?:(?:bf16|fp16)_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt"
    ),
    "expert": re.compile(
        r"(?:layer_(\d+)_)?expert_(\d+)_mp_rank_(\d+)_model_states\.pt"
    ),
}
# In the file of a model: tensors, and what describes them.
_STRUCTURE = (
    *("module", "optimizer", "param_shapes", "buffer_names", INFO),
    *("frozen_param_shapes", "frozen_param_fragments"),
)
# Begins names of parameters that layers share: a pipeline has one in each stage.
_TIED = "tied_modules."


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rank:
    """The files of a rank of the model.

    Attributes:
      tp: its number among the tensor-parallel ranks.
      model: the file of the model; the first data-parallel rank's, if all have one.
      shards: by data-parallel rank, files of ZeRO-3's models.
      optimizers: by data-parallel rank.
      layers: of a pipeline, with their numbers; the first stage has those of all.
      peers: files of the models of all stages, of the same tensor-parallel rank.
      experts: ordered by layer and number.
    """

    tp: int
    model: TorchFile
    shards: list[TorchFile]
    optimizers: list[TorchFile]
    layers: list[tuple[int, TorchFile]]
    peers: list[TorchFile]
    experts: list[TorchFile]


def is_format(names: Collection[str]) -> bool:
    """Whether a directory of these names holds such files, or leads to them."""
    return LATEST in names or any(
        pattern.fullmatch(name) for pattern in (_MODEL, _LAYER) for name in names
    )


def folder_of(path: epath.PathLike, latest: str = LATEST) -> epath.Path:
    """The directory of files: `path`, or that which its file `latest` names.

    Raises:
      FormatError: if it names none.
    """
    folder = epath.Path(path)
    pointer = folder / latest
    if not pointer.exists():
        return folder
    content = source_files.read(pointer, most_bytes=source_files.MOST_NAME_BYTES)
    tag = content.decode("utf-8", "replace").strip()
    if not source_files.is_plain_name(tag):
        raise FormatError(f"{pointer} names {tag!r}, which is no directory beside it")
    if not (folder / tag).exists():
        raise FormatError(f"{pointer} names {tag}, which {folder} does not have")
    return folder / tag


def model_values(model: TorchFile) -> dict[str, Any]:
    """The numbers and texts in the file of a model, see `Checkpoint.values`."""
    values = model.values(without=_STRUCTURE)
    info = model.at(INFO)
    if isinstance(info, dict):
        values[INFO] = plain_values.plain(info)
    return values


def open_checkpoint(path: epath.PathLike) -> OpenedCheckpoint:
    """Opens the directory of a step, or one whose file `latest` names it.

    Raises:
      FormatError: if a file is missing or damaged, or contradicts another.
    """
    tp, ranks = _ranks(folder_of(path))
    values, stage = model_values(ranks[0].model), 0
    for file in ranks[0].optimizers[:1]:
        # Optimizers of bfloat16 parameters do not state it.
        stated = file.at("optimizer_state_dict", "zero_stage")
        stage = stated if type(stated) is int else 1
        flat = plain_values.flatten(
            file.at("optimizer_state_dict"), without=("param_slice_mappings",)
        )
        values |= {f"optimizer/{key}": value for key, value in flat.items()}
    return OpenedCheckpoint(
        format=f"DeepSpeed ZeRO-{stage}",
        tensors=_tensors(ranks, {"tp": tp} if tp > 1 else {}),
        axes={"tp": tp} if tp > 1 else {},
        values=values,
        checksums=torch_file.checksums,
    )


def _tensors(ranks: Sequence[_Rank], axes: Mapping[str, int]) -> list[StoredTensor]:
    held: dict[tuple[str, str, int], StoredTensor] = {}
    for rank in ranks:
        coordinates = tuple((axis, rank.tp) for axis in axes)
        weights = list(_weights(rank))
        for each in itertools.chain(weights, _states(rank, weights)):
            tensor = dataclasses.replace(each, ranks=coordinates) if axes else each
            first = held.setdefault((tensor.name, tensor.kind, rank.tp), tensor)
            is_tied = tensor.name.startswith(_TIED)
            if first is not tensor and not (is_tied and first.shape == tensor.shape):
                raise rank.model.error(
                    f"and another stage both have {tensor.name}; only tied parameters"
                    " are in several stages"
                )
    return list(held.values())


def _ranks(folder: epath.Path) -> tuple[int, list[_Rank]]:
    # The number of tensor-parallel ranks, and all ranks of the model.
    by_kind = _read(folder)
    models = {rank: f for (dp, rank), f in by_kind["model"].items() if dp < 1}
    if not models:
        raise FormatError(f"{folder} has no files mp_rank_*_model_states.pt")
    tp, pp = _degrees(models, by_kind["layer"])
    # By rank of the model and data-parallel rank.
    shards = {(rank, dp): f for (dp, rank), f in by_kind["model"].items() if dp >= 0}
    optimizers = {(rank, dp): f for (dp, rank), f in by_kind["optimizer"].items()}
    first, dps = models[min(models)], [dp for dp, _ in by_kind["optimizer"]]
    stated = first.at("dp_world_size") if dps else 1
    dp = max([stated if type(stated) is int else 1, *(each + 1 for each in dps)])
    missing = [f"mp_rank_{rank:02d}" for rank in range(tp * pp) if rank not in models]
    absent = (
        f"zero_pp_rank_{each}_mp_rank_{rank:02d}"
        for held in (optimizers, shards)
        if held
        for rank in range(tp * pp)
        for each in range(dp)
        if (rank, each) not in held
    )
    missing += itertools.islice(absent, errors.MOST_NAMED + 1)
    if missing:
        raise FormatError(
            f"{folder} lacks the files of {errors.first_of(missing)}; copy them from"
            " the machines that saved them"
        )
    experts = _experts(folder, by_kind["expert"], tp)
    layers: dict[int, list[tuple[int, TorchFile]]] = collections.defaultdict(list)
    for (layer, rank), file in sorted(by_kind["layer"].items()):
        layers[rank].append((layer, file))
    return tp, [
        _Rank(
            tp=rank % tp,
            model=models[rank],
            shards=[shards[rank, each] for each in range(dp)] if shards else [],
            optimizers=[optimizers[rank, n] for n in range(dp)] if optimizers else [],
            layers=layers[rank] if rank < tp else [],
            peers=[models[each] for each in range(rank % tp, tp * pp, tp)],
            experts=experts[rank],
        )
        for rank in range(tp * pp)
    ]


def _read(folder: epath.Path) -> dict[str, dict[tuple[int, ...], TorchFile]]:
    # By what they hold, and the numbers in their names; -1 where these lack one.
    paths: dict[tuple[str, tuple[int, ...]], epath.Path] = {}
    for path in sorted(folder.iterdir()):
        for kind, pattern in _FILES.items():
            if match := pattern.fullmatch(path.name):
                absent = 0 if kind == "layer" else -1
                numbers = (absent if n is None else int(n[:9]) for n in match.groups())
                first = paths.setdefault((kind, tuple(numbers)), path)
                if first is not path:
                    raise FormatError(
                        f"{path} and {first.name} are of the same rank; remove that of"
                        " another save"
                    )
    files = torch_file.read_all(paths)
    return {
        kind: {key: file for (each, key), file in files.items() if each == kind}
        for kind in _FILES
    }


def _degrees(
    models: Mapping[int, TorchFile], layers: Collection[tuple[int, ...]]
) -> tuple[int, int]:
    # The numbers of tensor-parallel ranks and stages.
    file = models[min(models)]
    stated = file.at("checkpoint_parallel_dimensions")
    tp = 1 + max(rank for _, rank in layers) if layers else len(models)
    pp = len(models) // tp
    if isinstance(stated, dict):
        tp, pp = (stated.get(f"{axis}_degree") for axis in ("tp", "pp"))
    if type(tp) is not int or type(pp) is not int or not 0 < tp * pp == len(models):
        raise file.error(
            f"states {str(tp)[:9]} tensor-parallel ranks and {str(pp)[:9]} stages,"
            f" and there are files of {len(models)} ranks of the model"
        )
    return tp, pp


def _experts(
    folder: epath.Path, files: Mapping[tuple[int, ...], TorchFile], tp: int
) -> dict[int, list[TorchFile]]:
    # By rank of the model.
    experts: dict[int, list[TorchFile]] = collections.defaultdict(list)
    for (_, _, rank), file in sorted(files.items()):
        experts[rank].append(file)
    held = collections.Counter((n, expert, rank // tp) for n, expert, rank in files)
    for (layer, expert, _), count in held.items():
        if count != tp:
            raise FormatError(
                f"{folder} has the expert {expert} of layer {layer} in files of"
                f" {count} of {tp} tensor-parallel ranks: files are missing, or ranks"
                " have different experts, which are not read; save with"
                " enable_expert_tensor_parallelism"
            )
    return experts


def _weights(rank: _Rank) -> Iterator[StoredTensor]:
    # Layers count as of the first stage.
    file, buffers = rank.model, _buffers(rank.model)
    for name, tensor in torch_file.tensors_of(file.at("module")):
        # ZeRO-3 leaves empty tensors in place of those that it divides.
        if not (rank.shards and tensor.shape == (0,) and name not in buffers):
            yield _weight(name, tensor, buffers)
    if rank.shards:
        yield from _frozen(rank.shards)
    yield from _of_layers(rank)
    for expert in rank.experts:
        for name, tensor in torch_file.tensors_of(expert.value):
            yield _weight(name, tensor)


def _buffers(file: TorchFile) -> set[str]:
    names = file.at("buffer_names")
    listed = names if isinstance(names, list) else []
    return {name for name in listed if isinstance(name, str)}


def _weight(name: str, tensor: Tensor, buffers: Collection[str] = ()) -> StoredTensor:
    kind = "buffer" if name in buffers else "parameter"
    return optimizer_states.stored(name, kind, tensor)


def _frozen(shards: Sequence[TorchFile]) -> Iterator[StoredTensor]:
    # Parameters that are not trained: no optimizer has them.
    shapes = shards[0].at("frozen_param_shapes")
    named = zero.named_shapes(shards[0], shapes) if isinstance(shapes, dict) else {}
    for name, shape in named.items():
        ranges, numel = [], math.prod(shape)
        for dp, file in enumerate(shards):
            flat = file.dict_at("frozen_param_fragments").get(name)
            if not isinstance(flat, Tensor):
                raise file.error(f"lacks its part of {name}")
            part = dp, len(shards)
            ranges.append(zero.equal_part(file, flat, start=0, numel=numel, part=part))
        yield optimizer_states.of_ranges(name, "parameter", shape, ranges)


def _of_layers(rank: _Rank) -> Iterator[StoredTensor]:
    shapes: dict[str, Shape] = {}
    buffers: set[str] = set()
    for model in rank.peers if rank.layers else ():
        buffers |= _buffers(model)
        if model.at("param_shapes") is not None:
            for group in zero.shapes_of(model):
                shapes |= group
    tied = {name: each for name, each in shapes.items() if name.startswith(_TIED)}
    seen: set[str] = set()
    for layer, file in rank.layers:
        for key, tensor in torch_file.tensors_of(file.value):
            name = f"{layer}.{key}"
            if name not in shapes and name not in buffers:
                shape = tensor.shape
                fit = [t for t in tied if t.endswith(f".{key}") and tied[t] == shape]
                name = fit[0] if len(fit) == 1 else name
            # Each of the layers that share a parameter has it.
            if name not in seen:
                seen.add(name)
                yield _weight(name, tensor, buffers)


def _states(rank: _Rank, weights: Sequence[StoredTensor]) -> Iterator[StoredTensor]:
    parameters = [each for each in weights if each.kind == "parameter"]
    if rank.optimizers:
        yield from zero.states(rank.model, rank.optimizers)
    elif rank.model.at("optimizer") is not None:
        yield from optimizer_states.numbered(rank.model, parameters)
