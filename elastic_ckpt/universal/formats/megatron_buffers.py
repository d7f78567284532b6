"""Optimizer states in the flat buffers of Megatron's distributed optimizer.

`distrib_optim.pt` of a rank has a buffer for each chunk of the model and type of its
parameters: float32 masters, first and second moments, gathered from the data-parallel
ranks. It lists no parameters. Megatron-core 0.16 fills a buffer with the parameters in
the reverse order of the model, each from a multiple of 64 elements on. It may cut the
buffer into buckets, without the padding between them; a buffer that is shorter than one
without cuts is refused, as its cuts are not known. Some masters are compared with the
weights, so that another order is not read as this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from elastic_ckpt.universal.formats import flat_parameters, state_kinds
from elastic_ckpt.universal.formats.flat_parameters import Range
from elastic_ckpt.universal.formats.source_files import ByteWindows
from elastic_ckpt.universal.formats.torch_file import Tensor, TorchFile
from elastic_ckpt.universal.stored import StoredTensor
from elastic_ckpt.universal.strides import row_major

FILE = "distrib_optim.pt"
_STATES = {"param": "master", **state_kinds.KINDS}
_ALIGNMENT = 64
# The first elements of so many parameters of each buffer are compared.
_COMPARED = 8
_ELEMENTS = 16
_ADVICE = "save it as torch_dist with the sharding type fully_reshardable"


def states(file: TorchFile, weights: Sequence[StoredTensor]) -> Iterator[StoredTensor]:
    """The states of the parameters of a rank.

    Args:
      file: `distrib_optim.pt` of the rank.
      weights: of kind `parameter`, in the order of the model; of float16 and more.

    Raises:
      FormatError: if its buffers are not those of these parameters.
    """
    if not isinstance(file.value, dict):
        raise file.error(
            "has several optimizers, as those of spread experts, which are not read;"
            f" {_ADVICE}"
        )
    buffers = [key for key in file.value if type(key) is int]
    groups = _groups(weights)
    if sorted(buffers) != list(range(len(groups))):
        raise file.error(
            f"has {len(buffers)} buffers of parameters, and the model beside it has"
            f" {len(groups)} chunks and types of them; {_ADVICE}"
        )
    for number, group in enumerate(groups):
        yield from _of_buffer(file, number, group)


def _groups(weights: Sequence[StoredTensor]) -> list[list[StoredTensor]]:
    # By chunk of the model and type.
    groups: dict[Any, dict[Any, StoredTensor]] = {}
    for each in weights:
        # Tied parameters lie at one place of the file.
        held = groups.setdefault((each.ranks, each.dtype), {})
        held.setdefault((each.fragments, each.shape), each)
    return [list(held.values()) for held in groups.values()]


def _of_buffer(
    file: TorchFile, number: int, group: Sequence[StoredTensor]
) -> Iterator[StoredTensor]:
    flats = _flats(file, number, group[0].dtype)
    starts, end = [], 0
    for parameter in reversed(group):
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append((parameter, start))
        end = start + _numel(parameter)
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
            (
                parameter,
                Range(file=file, flat=flat, start=start, numel=_numel(parameter)),
            )
            for parameter, start in reversed(starts)
        ]
        for key, flat in flats.items()
    }
    _check_order(file, ranges["param"])
    for key, listed in ranges.items():
        for parameter, part in listed:
            name, shape = parameter.name, parameter.shape
            yield StoredTensor(
                name=name,
                kind=_STATES.get(key, key),
                ranks=parameter.ranks,
                dtype=part.flat.dtype,
                shape=shape,
                fragments=flat_parameters.fragments(shape, [part], name),
            )


def _flats(file: TorchFile, number: int, dtype: np.dtype) -> dict[str, Tensor]:
    # The flat tensors of a buffer, which is of one type.
    by_type = file.value[number]
    named = list(by_type.items()) if isinstance(by_type, dict) else []
    kinds = named[0][0] if len(named) == 1 else None
    kind = kinds[0] if isinstance(kinds, tuple) and kinds else kinds
    is_of_type = isinstance(kind, np.dtype) and kind == dtype and _is_float(dtype)
    held: Any = named[0][1] if is_of_type else None
    flats = {
        str(key): each
        for key, each in (held.items() if isinstance(held, dict) else ())
        if isinstance(each, Tensor)
    }
    if "param" not in flats or file.value.get("buckets_coalesced") is not True:
        raise file.error(
            f"has the buffer {number} of another layout than Megatron-core 0.16's, or"
            f" of parameters that are not {dtype}; {_ADVICE}"
        )
    return flats


def _is_float(dtype: np.dtype) -> bool:
    return dtype == ml_dtypes.bfloat16 or np.issubdtype(dtype, np.floating)


def _numel(parameter: StoredTensor) -> int:
    return int(np.prod(parameter.shape, dtype=np.int64))


def _check_order(file: TorchFile, ranges: Sequence[tuple[StoredTensor, Range]]) -> None:
    # Whether the first elements of some masters are those of the weights.
    compared = [
        (parameter, part)
        for parameter, part in ranges
        if part.numel and _is_contiguous(parameter)
    ]
    compared = compared[:: max(1, len(compared) // _COMPARED)] + compared[-1:]
    spans: dict[str, list[tuple[int, int]]] = {}
    placed = []
    for parameter, part in compared:
        count = min(part.numel, _ELEMENTS)
        (fragment,) = parameter.fragments
        width = part.flat.dtype.itemsize
        master = part.flat.file_offset + part.start * width, count * width
        weight = fragment.offset, count * parameter.dtype.itemsize
        spans.setdefault(file.path, []).append((master[0], sum(master)))
        spans.setdefault(fragment.file, []).append((weight[0], sum(weight)))
        placed.append((parameter, part.flat.dtype, fragment.file, master, weight))
    windows = {path: ByteWindows(path, listed) for path, listed in spans.items()}
    for parameter, dtype, path, master, weight in placed:
        masters = np.frombuffer(windows[file.path].read(*master), dtype)
        weights = np.frombuffer(windows[path].read(*weight), parameter.dtype)
        info = ml_dtypes.finfo(parameter.dtype)
        if not np.allclose(
            weights.astype(np.float64),
            masters.astype(np.float64),
            rtol=float(info.eps),
            atol=float(info.smallest_normal),
            equal_nan=True,
        ):
            raise file.error(
                f"has masters where those of {parameter.name} are expected, which are"
                f" not its weights in {path}; {_ADVICE}"
            )


def _is_contiguous(parameter: StoredTensor) -> bool:
    strides = row_major(parameter.shape, parameter.dtype.itemsize)
    return len(parameter.fragments) == 1 and parameter.fragments[0].strides == strides
