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
`optimizer_states`, or in the flat buffers of the distributed optimizer.

`distrib_optim.pt` of a rank has a buffer for each chunk of the model and type of its
parameters: float32 masters, first and second moments, gathered from the data-parallel
ranks. It lists no parameters. Megatron-core 0.16 fills a buffer with the parameters in
the reverse order of the model, each from a multiple of 64 elements on. It may cut the
buffer into buckets, without the padding between them; a buffer that is shorter than one
without cuts is refused, as its cuts are not known. Some masters are compared with the
weights, so that another order is not read as this one.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
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
from elastic_ckpt.universal.formats.optimizer_states import Range, Ranks
from elastic_ckpt.universal.formats.source_budget import SourceBudget
from elastic_ckpt.universal.formats.source_files import ByteWindows
from elastic_ckpt.universal.formats.torch_file import Tensor, TorchFile
from elastic_ckpt.universal.stored import Checksum, StoredTensor
from elastic_ckpt.universal.strides import row_major

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
# Names of nested modules repeat those of all modules around them.
_NAME_BYTES = 100

_BUFFERS = "distrib_optim.pt"
_ALIGNMENT = 64
# The first elements of so many parameters of each buffer are compared.
_COMPARED = 8
_ELEMENTS = 16
_ADVICE = "save it as torch_dist with the sharding type fully_reshardable"


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
      FormatError: as `dcp.open_checkpoint`, and if a file of a rank is
        missing or damaged, or has names outside of `inert_names`.
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
        file.take(sum(len(str(key)) for key in keys))
        kind = "step" if keys and keys[-1] == _STEP else "common"
        yield optimizer_states.stored(file, "/".join(map(str, keys)), kind, tensor)


def _of_ranks(folder: epath.Path) -> OpenedCheckpoint:
    paths: dict[tuple[int, ...], epath.Path] = {}
    for each in sorted(folder.iterdir()):
        if match := _FOLDER.fullmatch(each.name):
            paths[tuple(int(part or 0) for part in match.groups())] = each
    budget = SourceBudget()
    files = torch_file.read_all(
        {rank: _file(each) for rank, each in paths.items()}, budget
    )
    beside = {rank: each / _BUFFERS for rank, each in paths.items()}
    buffers = torch_file.read_all(
        {rank: each for rank, each in beside.items() if each.exists()}, budget
    )
    first = files[min(files)]
    if first.at("args", "pipeline_model_parallel_size") == 1:
        # Then the second number is that of experts.
        moved = {(tp, pp, ep): (tp, 0, pp or ep) for tp, pp, ep in files}
        files = {moved[rank]: file for rank, file in files.items()}
        buffers = {moved[rank]: file for rank, file in buffers.items()}
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
        if buffers and rank not in buffers:
            raise file.error(
                f"has no {_BUFFERS} beside it, as those of other ranks have; copy it"
                " from the rank that saved it"
            )
        ranks = [each for each in zip(_AXES, rank, strict=True) if each[0] in axes]
        for tensor in _of_rank(file, buffers.get(rank)):
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


def _of_rank(file: TorchFile, buffers: TorchFile | None) -> Iterator[StoredTensor]:
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
        yield from _buffered_states(buffers, parameters)
    optimizers = content.get("optimizer")
    if isinstance(optimizers, dict) and optimizers:
        if all(type(key) is int for key in optimizers):
            raise file.error(
                "has several optimizers, whose states are not named; save as torch_dist"
            )
        if isinstance(optimizers.get("optimizer", optimizers).get("state"), dict):
            yield from optimizer_states.numbered(file, parameters)


def _weights(
    file: TorchFile, content: Mapping[Any, Any], prefix: str, ranks: Ranks
) -> Iterator[StoredTensor]:
    # Earlier versions nest modules.
    for key, value in content.items():
        file.take(_NAME_BYTES + len(prefix) + len(str(key)))
        if isinstance(value, dict):
            yield from _weights(file, value, f"{prefix}{key}.", ranks)
        elif isinstance(value, Tensor):
            kind = "extra_state" if str(key).endswith(_EXTRA) else "parameter"
            yield optimizer_states.stored(file, f"{prefix}{key}", kind, value, ranks)


def _buffered_states(
    file: TorchFile, weights: Sequence[StoredTensor]
) -> Iterator[StoredTensor]:
    # Of the distributed optimizer; `weights` are in the order of the model.
    if not isinstance(file.value, dict):
        raise file.error(
            "has several optimizers, as those of spread experts, which are not read;"
            f" {_ADVICE}"
        )
    # By chunk of the model and type.
    groups: dict[Any, list[StoredTensor]] = collections.defaultdict(list)
    for each in optimizer_states.distinct(weights):
        groups[each.ranks, each.dtype].append(each)
    numbers = sorted(key for key in file.value if type(key) is int)
    if numbers != list(range(len(groups))):
        raise file.error(
            f"has {len(numbers)} buffers of parameters, and the model beside it has"
            f" {len(groups)} chunks and types of them; {_ADVICE}"
        )
    for number, group in enumerate(groups.values()):
        yield from _of_buffer(file, number, group)


def _of_buffer(
    file: TorchFile, number: int, group: Sequence[StoredTensor]
) -> Iterator[StoredTensor]:
    flats = _flats(file, number, group[0].dtype)
    starts, end = [0] * len(group), 0
    for at in reversed(range(len(group))):
        starts[at] = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = starts[at] + math.prod(group[at].shape)
    sizes = {flat.shape for flat in flats.values()}
    if sizes != {(end,)}:
        raise file.error(
            f"has the buffer {number} of shape {sorted(sizes)[0]}, and the"
            f" {len(group)} parameters of {group[0].dtype} in the model beside it take"
            f" {end} elements: some were not trained, or it was cut into buckets;"
            f" {_ADVICE}"
        )
    ranges = {
        key: [
            Range(file=file, flat=flat, start=start, numel=math.prod(each.shape))
            for each, start in zip(group, starts, strict=True)
        ]
        for key, flat in flats.items()
    }
    _check_order(file, list(zip(group, ranges["param"], strict=True)))
    for key, parts in ranges.items():
        for each, part in zip(group, parts, strict=True):
            yield optimizer_states.of_ranges(
                each.name, _KINDS.get(key, key), each.shape, [part], each.ranks
            )


def _flats(file: TorchFile, number: int, dtype: np.dtype) -> dict[str, Tensor]:
    # The flat tensors of a buffer, which is of one type.
    by_type = file.value[number]
    named = list(by_type.items()) if isinstance(by_type, dict) else []
    kinds, held = named[0] if len(named) == 1 else (None, None)
    kind = kinds[0] if isinstance(kinds, tuple) and kinds else kinds
    is_float = dtype == ml_dtypes.bfloat16 or np.issubdtype(dtype, np.floating)
    is_of_type = is_float and isinstance(kind, np.dtype) and kind == dtype
    items = held.items() if is_of_type and isinstance(held, dict) else ()
    flats = {str(key): each for key, each in items if isinstance(each, Tensor)}
    if "param" not in flats or file.value.get("buckets_coalesced") is not True:
        raise file.error(
            f"has the buffer {number} of another layout than Megatron-core 0.16's, or"
            f" of parameters that are not {dtype}; {_ADVICE}"
        )
    return flats


def _check_order(file: TorchFile, ranges: Sequence[tuple[StoredTensor, Range]]) -> None:
    # Whether the first elements of some masters are those of the weights.
    compared = [
        (parameter, part)
        for parameter, part in ranges
        if part.numel
        and [each.strides for each in parameter.fragments]
        == [row_major(parameter.shape, parameter.dtype.itemsize)]
    ]
    compared = compared[:: max(1, len(compared) // _COMPARED)] + compared[-1:]
    # Their files, dtypes, first bytes, and numbers of bytes.
    places: list[tuple[str, np.dtype, int, int]] = []
    for parameter, part in compared:
        count, (weight,) = min(part.numel, _ELEMENTS), parameter.fragments
        width = part.flat.dtype.itemsize
        begin = part.flat.file_offset + part.start * width
        places.append((file.path, part.flat.dtype, begin, count * width))
        num_bytes = count * parameter.dtype.itemsize
        places.append((weight.file, parameter.dtype, weight.offset, num_bytes))
    spans: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
    for path, _, begin, size in places:
        spans[path].append((begin, begin + size))
    windows = {path: ByteWindows(path, listed) for path, listed in spans.items()}
    values = [
        np.frombuffer(windows[path].read(begin, size), dtype).astype(np.float64)
        for path, dtype, begin, size in places
    ]
    for (parameter, _), masters, weights in zip(
        compared, values[::2], values[1::2], strict=True
    ):
        info = ml_dtypes.finfo(parameter.dtype)
        limits = {"rtol": float(info.eps), "atol": float(info.smallest_normal)}
        if not np.allclose(weights, masters, **limits, equal_nan=True):
            raise file.error(
                f"has masters where those of {parameter.name} are expected, which are"
                f" not its weights in {parameter.fragments[0].file}; {_ADVICE}"
            )
