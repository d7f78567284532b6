"""Opens DeepSpeed checkpoints: ZeRO stages 0 to 3, pipelines, experts.

DeepSpeed numbers a model's ranks (`mp_rank_XX`) stage by stage; a stage's
tensor-parallel ranks are consecutive. Each rank has one model file, and an optimizer
file for each data-parallel rank (`zero_pp_rank_DD`). With ZeRO-3, each data-parallel
rank also has a model file. Pipeline layers and experts have their own files.

A tensor has the name of its parameter. Model weights have the kind `parameter`;
optimizer states, `master`, `first_moment`, `second_moment` or `step`; buffers,
`buffer`. Tensor-parallel ranks form the axis `tp`. Data-parallel ranks do not form an
axis: their ranges of a parameter are fragments of one tensor. Neither do stages: layers
and experts are numbered across all ranks. If multiple stages have a tied parameter, the
first stage's copy is used, as in DeepSpeed's own conversion.

DeepSpeed's description of the layout is in `values["universal_checkpoint_info"]`: lists
of name patterns, sizes of parts, and affine maps, nested as DeepSpeed writes them.

With stage 0 and a PyTorch optimizer, states are numbered. They get the names of their
parameters if `zero.numbered` can derive these names. The experts' optimizer files
(`expp_rank_*`) are not read.

A universal checkpoint has files of whole parameters, for any number of ranks:
`zero/<parameter>/fp32.pt`, `exp_avg.pt`, `exp_avg_sq.pt` and `step.pt`. The model's
weights in other dtypes are skipped. Model files next to these contain the parameter
shapes, which files from ZeRO-3 lack.
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
from elastic_ckpt.universal.formats import files, torch_file, zero
from elastic_ckpt.universal.formats.checkpoint import (
    Checkpoint,
    StoredTensor,
    flatten,
    kind_of,
)
from elastic_ckpt.universal.formats.files import FormatError
from elastic_ckpt.universal.formats.torch_file import TorchFile
from elastic_ckpt.universal.formats.zero import Shape

FORMAT, UNIVERSAL = "DeepSpeed", "DeepSpeed universal"
INFO = "universal_checkpoint_info"
# Files that contain the name of a step directory.
_LATEST = ("latest", "latest_universal")
# The directory of a universal checkpoint.
_PARAMETERS = "zero"
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_SUFFIX = ".pt"
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
# File names by content.
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
# A model file's keys that contain or describe tensors.
_STRUCTURE = (
    *("module", "optimizer", "param_shapes", "buffer_names", INFO),
    *("frozen_param_shapes", "frozen_param_fragments"),
)
# Prefix of parameters that layers share; each pipeline stage has a copy.
_TIED = "tied_modules."


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rank:
    """The files of one model rank.

    Attributes:
      tp: the tensor-parallel rank.
      model: the model file; the first data-parallel rank's, if each has one.
      shards: ZeRO-3's model files, by data-parallel rank.
      optimizers: the optimizer files, by data-parallel rank.
      layers: the indices and files of pipeline layers; the first stage has all of them.
      peers: the model files of all stages with the same tensor-parallel rank.
      experts: the experts' files, ordered by layer and expert index.
    """

    tp: int
    model: TorchFile
    shards: list[TorchFile]
    optimizers: list[TorchFile]
    layers: list[tuple[int, TorchFile]]
    peers: list[TorchFile]
    experts: list[TorchFile]


def is_format(names: Collection[str]) -> bool:
    """Whether a directory with these file names has DeepSpeed files or a `latest`."""
    patterns = (_MODEL, _LAYER)
    return any(n in _LATEST or any(p.fullmatch(n) for p in patterns) for n in names)


def open_checkpoint(path: epath.PathLike) -> Checkpoint:
    """Opens a step directory, or a directory whose `latest` file names a step.

    Raises:
      FormatError: if a file is missing or damaged, or contradicts another file.
    """
    folder = _folder(epath.Path(path))
    if (folder / _PARAMETERS).exists():
        return _open_universal(folder)
    tp, ranks = _ranks(folder)
    values, stage = _model_values(ranks[0].model), 0
    for file in ranks[0].optimizers[:1]:
        # Optimizers of bfloat16 parameters do not state their stage.
        stated = file.at("optimizer_state_dict", "zero_stage")
        stage = stated if type(stated) is int else 1
        held = file.at("optimizer_state_dict")
        flat = flatten(held, without=("param_slice_mappings",))
        values |= {f"optimizer/{key}": value for key, value in flat.items()}
    return Checkpoint(
        format=f"{FORMAT} ZeRO-{stage}",
        tensors=_tensors(ranks, {"tp": tp} if tp > 1 else {}),
        axes={"tp": tp} if tp > 1 else {},
        values=values,
        checksums=torch_file.checksums,
    )


def _folder(path: epath.Path) -> epath.Path:
    for pointer in (path / name for name in _LATEST):
        if pointer.exists():
            tag = files.read_name(pointer)
            if not files.is_plain_name(tag) or not (path / tag).exists():
                raise FormatError(
                    f"{pointer} contains {tag!r}, which is not a directory in {path}"
                )
            return path / tag
    return path


def _model_values(model: TorchFile) -> dict[str, Any]:
    values = flatten(model.value, without=_STRUCTURE)
    info = model.at(INFO)
    return values if info is None else {**values, INFO: info}


def _open_universal(folder: epath.Path) -> Checkpoint:
    found = {each: each for each in sorted(folder.iterdir()) if _is_first(each.name)}
    models = list(torch_file.read_all(found).values())
    shapes = _shapes(models)
    # The files by parameter and state.
    paths = {
        (parameter.name, file.name.removesuffix(_SUFFIX)): file
        for parameter in (folder / _PARAMETERS).iterdir()
        if not parameter.name.endswith(_SUFFIX)
        for file in parameter.iterdir()
        if file.name.endswith(_SUFFIX)
    }
    tensors = []
    for (name, key), file in sorted(torch_file.read_all(paths).items()):
        held = file.value.get("param") if isinstance(file.value, dict) else file.value
        if isinstance(held, StoredTensor):
            numel, kind = math.prod(held.shape), kind_of(key)
            tensor = dataclasses.replace(held, name=name, kind=kind)
            if held.shape == (numel,) == (math.prod(shapes.get(name, (-1,))),):
                part = zero.Range(file, held, 0, numel)
                tensor = zero.of_ranges(name, kind, shapes[name], [part])
            tensors.append(tensor)
        elif not isinstance(held, int | float):
            raise file.error("contains neither a tensor nor a number")
    if not tensors:
        raise FormatError(f"{folder / _PARAMETERS} has no parameter directories")
    return Checkpoint(
        format=UNIVERSAL,
        tensors=tensors,
        values=_model_values(models[0]) if models else {},
        checksums=torch_file.checksums,
    )


def _is_first(name: str) -> bool:
    # Whether `name` is a model file from the first data-parallel rank.
    match = _MODEL.fullmatch(name)
    return match is not None and int(match[1] or 0) == 0


def _shapes(models: Sequence[TorchFile]) -> dict[str, Shape]:
    held = [model for model in models if model.at("param_shapes") is not None]
    groups = (group for model in held for group in zero.shapes_of(model))
    return {name: shape for group in groups for name, shape in group.items()}


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
                    " may be in more than one stage"
                )
    return list(held.values())


def _ranks(folder: epath.Path) -> tuple[int, list[_Rank]]:
    # The number of tensor-parallel ranks, and the files of all model ranks.
    by_kind = _read(folder)
    models = {rank: f for (dp, rank), f in by_kind["model"].items() if dp < 1}
    if not models:
        raise FormatError(f"{folder} has no mp_rank_*_model_states.pt files")
    tp, pp = _degrees(models, by_kind["layer"])
    # The files by model rank and data-parallel rank.
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
    experts: dict[int, list[TorchFile]] = collections.defaultdict(list)
    for (_, _, rank), file in sorted(by_kind["expert"].items()):
        experts[rank].append(file)
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
            peers=[models[n] for n in range(rank % tp, tp * pp, tp)] if layers else [],
            experts=experts[rank],
        )
        for rank in range(tp * pp)
    ]


def _read(folder: epath.Path) -> dict[str, dict[tuple[int, ...], TorchFile]]:
    # The files by content and by the numbers in their names; -1 for an absent number.
    paths: dict[tuple[str, tuple[int, ...]], epath.Path] = {}
    for path in sorted(folder.iterdir()):
        for kind, pattern in _FILES.items():
            if match := pattern.fullmatch(path.name):
                absent = 0 if kind == "layer" else -1
                numbers = (absent if n is None else int(n[:9]) for n in match.groups())
                first = paths.setdefault((kind, tuple(numbers)), path)
                if first is not path:
                    raise FormatError(
                        f"{path} and {first.name} belong to the same rank; remove the"
                        " file that is from a different save"
                    )
    read = torch_file.read_all(paths)
    return {
        kind: {key: file for (each, key), file in read.items() if each == kind}
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
            f"specifies {str(tp)[:9]} tensor-parallel ranks and {str(pp)[:9]} stages,"
            f" but there are files of {len(models)} model ranks"
        )
    return tp, pp


def _weights(rank: _Rank) -> Iterator[StoredTensor]:
    # Layers are treated as the first stage's.
    buffers = _buffers([rank.model])
    for tensor in torch_file.tensors(rank.model.at("module")):
        # ZeRO-3 replaces the tensors that it partitions with empty ones.
        if tensor.name in buffers:
            yield dataclasses.replace(tensor, kind="buffer")
        elif not rank.shards or tensor.shape != (0,):
            yield tensor
    yield from _frozen(rank.shards)
    yield from _of_layers(rank)
    for expert in rank.experts:
        yield from torch_file.tensors(expert.value)


def _buffers(models: Sequence[TorchFile]) -> set[str]:
    listed = (model.at("buffer_names") for model in models)
    return {str(name) for names in listed if isinstance(names, list) for name in names}


def _frozen(shards: Sequence[TorchFile]) -> Iterator[StoredTensor]:
    # Frozen parameters are not in any optimizer.
    shapes = shards[0].at("frozen_param_shapes") if shards else None
    named = zero.named_shapes(shards[0], shapes) if shapes else {}
    for name, shape in named.items():
        ranges, numel = [], math.prod(shape)
        for dp, file in enumerate(shards):
            flat = file.typed(StoredTensor, "frozen_param_fragments", name)
            rank = dp, len(shards)
            ranges.append(zero.equal_part(file, flat, start=0, numel=numel, rank=rank))
        yield zero.of_ranges(name, "parameter", shape, ranges)


def _of_layers(rank: _Rank) -> Iterator[StoredTensor]:
    shapes, buffers = _shapes(rank.peers), _buffers(rank.peers)
    tied = {name: each for name, each in shapes.items() if name.startswith(_TIED)}
    seen: set[str] = set()
    for layer, file in rank.layers:
        for tensor in torch_file.tensors(file.value):
            name, end = f"{layer}.{tensor.name}", f".{tensor.name}"
            if name not in shapes and name not in buffers:
                shape = tensor.shape
                fit = [t for t in tied if t.endswith(end) and tied[t] == shape]
                name = fit[0] if len(fit) == 1 else name
            # Each layer that shares a parameter has a copy.
            if name not in seen:
                seen.add(name)
                kind = "buffer" if name in buffers else "parameter"
                yield dataclasses.replace(tensor, name=name, kind=kind)


def _states(rank: _Rank, weights: Sequence[StoredTensor]) -> Iterator[StoredTensor]:
    if rank.optimizers:
        yield from zero.states(rank.model, rank.optimizers)
    elif rank.model.at("optimizer") is not None:
        parameters = [each for each in weights if each.kind == "parameter"]
        yield from zero.numbered(rank.model, parameters)
