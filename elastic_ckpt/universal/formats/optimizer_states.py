"""Optimizer states as ranks save them, without the names of their parameters.

PyTorch's optimizers number parameters. Optimizers that divide them among ranks join
them to flat tensors, of which a rank has a range. Both become tensors of parameters
here.

Numbers run through the groups of parameters, in each of them in the order of the model.
So if all parameters of a shape are in one group, the names of these follow from the
order; otherwise they are not known.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal import flat_ranges
from elastic_ckpt.universal.formats import coverage, state_kinds
from elastic_ckpt.universal.formats.torch_file import Tensor, TorchFile
from elastic_ckpt.universal.stored import Fragment, StoredTensor
from elastic_ckpt.universal.strides import row_major

# Begins the name of a state whose parameter is not known; its number follows.
UNNAMED = "optimizer/"
# Keys of the state dict of PyTorch's optimizer in that of the one around it, and of the
# float32 parameters: DeepSpeed's, then Megatron's.
_OPTIMIZER = "optimizer"
_NESTED = ("optimizer_state_dict", "optimizer")
_MASTERS = ("fp32_groups", "fp32_groups_flat", "fp32_from_fp16_params")
# States that have the shape of their parameter.
_SHAPED = ("fp32", "exp_avg", "momentum_buffer")

Shape = tuple[int, ...]
Ranks = tuple[tuple[str, int], ...]


def stored(name: str, kind: str, tensor: Tensor, ranks: Ranks = ()) -> StoredTensor:
    """A tensor that a file has as it is; see `StoredTensor` for its attributes."""
    return StoredTensor(
        name=name,
        kind=kind,
        ranks=ranks,
        dtype=tensor.dtype,
        shape=tensor.shape,
        fragments=tensor.fragments,
        view=tensor.view,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Elements of a flat tensor.

    Attributes:
      file: that holds the flat tensor.
      flat: the tensor; of a number, such as steps, it has no dims.
      start: the first element in it.
      numel: the number of elements.
    """

    file: TorchFile
    flat: Tensor
    start: int
    numel: int


def of_ranges(
    name: str, kind: str, shape: Shape, ranges: Sequence[Range]
) -> StoredTensor:
    """A state of a parameter, which ranges hold.

    Args:
      name: of the parameter.
      kind: see `StoredTensor`.
      shape: of the parameter.
      ranges: in the order of its elements; of one dtype.

    Raises:
      FormatError: as `fragments`.
    """
    first = ranges[0]
    if not first.flat.shape:
        return stored(name, kind, first.flat)
    return StoredTensor(
        name=name,
        kind=kind,
        dtype=first.flat.dtype,
        shape=shape,
        fragments=fragments(shape, ranges, name),
    )


def fragments(
    shape: Shape, ranges: Sequence[Range], place: str
) -> tuple[Fragment, ...]:
    """The boxes of a parameter that ranges hold, which follow one another.

    Args:
      shape: of the parameter.
      ranges: in the order of its elements; of one dtype.
      place: the parameter, for messages.

    Raises:
      FormatError: if a range lies outside of its flat tensor, or they are more or fewer
        elements than the parameter has.
    """
    coverage.checked_shape(shape, place)
    total = math.prod(shape)
    held = sum(each.numel for each in ranges)
    for each in ranges:
        _check(each, ranges[0], place)
    if held != total:
        raise ranges[0].file.error(
            f"and its neighbors hold {held} elements of {place}, which has {total};"
            " files of ranks are missing, or of another save"
        )
    pieces: list[Fragment] = []
    at = 0
    for each in ranges:
        boxes = _boxes(shape, at, at + each.numel)
        at += each.numel
        width = each.flat.dtype.itemsize
        strides = row_major(shape, width)
        offset = each.flat.file_offset + each.start * width
        for box, first in boxes:
            pieces.append(
                Fragment(
                    box=box,
                    file=each.file.path,
                    offset=offset + first * width,
                    strides=strides,
                )
            )
    return tuple(pieces)


def _check(part: Range, first: Range, place: str) -> None:
    flat, file = part.flat, part.file
    width = flat.dtype.itemsize
    if len(flat.shape) != 1 or (flat.shape[0] > 1 and flat.byte_strides != (width,)):
        raise file.error(f"holds {place} in a tensor of shape {flat.shape}")
    if flat.view:
        raise file.error(f"holds {place} in a tensor whose {flat.view} bit is set")
    if flat.dtype != first.flat.dtype:
        raise file.error(
            f"holds {place} as {flat.dtype}, and {first.file.path} as"
            f" {first.flat.dtype}"
        )
    if not 0 <= part.start <= part.start + part.numel <= flat.shape[0]:
        raise file.error(
            f"holds {place} in elements {part.start} to {part.start + part.numel} of a"
            f" tensor of {flat.shape[0]}"
        )


# The states of a parameter have equal ranges, whose boxes they share.
@functools.lru_cache(maxsize=2**14)
def _boxes(shape: Shape, start: int, stop: int) -> list[tuple[Box, int]]:
    # With the number of the first element of each, from `start`.
    boxes = flat_ranges.boxes_of_range(shape, start, stop)
    firsts = itertools.accumulate((box.volume for box in boxes), initial=0)
    return list(zip(boxes, firsts, strict=False))


def distinct(weights: Sequence[StoredTensor]) -> list[StoredTensor]:
    """One of the tensors that lie at one place of a file, as tied parameters do."""
    held: dict[Any, StoredTensor] = {}
    for each in weights:
        held.setdefault((each.fragments, each.shape), each)
    return list(held.values())


def numbered(
    file: TorchFile, weights: Sequence[StoredTensor]
) -> Iterator[StoredTensor]:
    """The states of an optimizer, named as the weights of the same rank where possible.

    Args:
      file: that has the optimizer's state dict as `optimizer`.
      weights: of kind `parameter`, in the order of the model.

    Raises:
      FormatError: if it is no state dict.
    """
    optimizer, inner = file.dict_at(_OPTIMIZER), inner_keys(file)
    groups = []
    for group in file.list_at(*inner, "param_groups"):
        numbers = group.get("params") if isinstance(group, dict) else None
        if not isinstance(numbers, list) or not all(type(n) is int for n in numbers):
            raise file.error("has a group of parameters without their numbers")
        groups.append(numbers)
    held: dict[int, dict[str, Tensor]] = collections.defaultdict(dict)
    for number, state in file.dict_at(*inner, "state").items():
        if isinstance(number, int) and isinstance(state, dict):
            tensors = state.items()
            held[number] |= {str(k): t for k, t in tensors if isinstance(t, Tensor)}
    for number, master in _masters(file, optimizer, groups):
        held[number]["fp32"] = master
    names = _names(held, groups, weights)
    for number, state in sorted(held.items()):
        weight = names.get(number)
        name = weight.name if weight else f"{UNNAMED}{number}"
        for key, tensor in state.items():
            ranks = weight.ranks if weight else ()
            yield stored(name, state_kinds.kind_of(key), tensor, ranks)


def inner_keys(file: TorchFile) -> list[str]:
    """The keys of the state dict of PyTorch's optimizer, in that of one around it."""
    nested = [k for k in _NESTED if isinstance(file.at(_OPTIMIZER, k), dict)]
    return [_OPTIMIZER, *nested[:1]]


def _masters(
    file: TorchFile, optimizer: Mapping[str, Any], groups: Sequence[Sequence[int]]
) -> Iterator[tuple[int, Tensor]]:
    # The float32 parameters, by number.
    listed = (optimizer.get(key) for key in _MASTERS)
    masters = next((each for each in listed if isinstance(each, list)), None)
    if masters is not None and len(masters) != len(groups):
        raise file.error(
            f"has float32 parameters of {len(masters)} groups, and {len(groups)}"
            " groups of parameters"
        )
    for numbers, group in zip(groups, masters or (), strict=masters is not None):
        tensors = group if isinstance(group, list) else [group]
        if len(tensors) != len(numbers):
            raise file.error(
                f"has {len(tensors)} float32 parameters in a group of {len(numbers)}"
            )
        pairs = zip(numbers, tensors, strict=True)
        yield from ((n, each) for n, each in pairs if isinstance(each, Tensor))


def _names(
    states: Mapping[int, Mapping[str, Tensor]],
    groups: Sequence[Sequence[int]],
    weights: Sequence[StoredTensor],
) -> dict[int, StoredTensor]:
    by_shape: dict[Shape, list[StoredTensor]] = collections.defaultdict(list)
    for each in distinct(weights):
        by_shape[each.shape].append(each)
    of_shape: dict[Shape, list[tuple[int, int]]] = collections.defaultdict(list)
    for group, numbers in enumerate(groups):
        for number in numbers:
            state = states.get(number, {})
            for key in [key for key in _SHAPED if key in state][:1]:
                of_shape[state[key].shape].append((group, number))
    names = {}
    for shape, held in of_shape.items():
        fitting = by_shape[shape]
        if len({group for group, _ in held}) == 1 and len(held) == len(fitting):
            names |= dict(zip((number for _, number in held), fitting, strict=True))
    return names
