"""Converts optimizer states, saved as flat ranges or without names, to named tensors.

In ZeRO stages 1 and 2, each file lists its parameters and, for each, a range of a flat
tensor; a parameter's ranges follow one another in data-parallel rank order. Stage 3
files list nothing: each rank has an equal part of every parameter, rounded up, in
`param_shapes` order. Expert parameters are spread over fewer ranks, which have the same
expert-parallel rank. Muon's momentum in stages 1 and 2 has its own layout, which is
rejected.

PyTorch's optimizers number parameters; see `numbered`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from elastic_ckpt.core import errors
from elastic_ckpt.universal import factors
from elastic_ckpt.universal.factors import row_major
from elastic_ckpt.universal.formats.checkpoint import (
    Fragment,
    StoredTensor,
    checked_shape,
    kind_of,
)
from elastic_ckpt.universal.formats.torch_file import TorchFile

# An expert parameter's name; the middle group is the expert's index.
EXPERT = re.compile(r"(.*\bdeepspeed_experts\.)(\d{1,9})(\..*)", re.DOTALL)
_STATE = "optimizer_state_dict"
# Prefix of a state whose parameter is unknown; the parameter's number follows.
UNNAMED = "optimizer/"
# Keys under which wrapping optimizers store the PyTorch optimizer's state dict, and the
# float32 parameters: DeepSpeed's, then Megatron's.
_NESTED = ("optimizer_state_dict", "optimizer")
_MASTERS = ("fp32_groups", "fp32_groups_flat", "fp32_from_fp16_params")
# States that have the shape of their parameter.
_SHAPED = ("fp32", "exp_avg", "momentum_buffer")
_MALFORMED = (AttributeError, IndexError, KeyError, TypeError, ValueError)
# A parameter's states have equal ranges and share their boxes.
_boxes_of_range = functools.lru_cache(maxsize=2**14)(factors.boxes_of_range)

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
# A data-parallel rank, and the number of data-parallel ranks.
_Rank = tuple[int, int]


class Range(NamedTuple):
    """`numel` elements of a file's tensor `flat`, beginning at `start`.

    A number, such as a step count, is a tensor without dims.
    """

    file: TorchFile
    flat: StoredTensor
    start: int
    numel: int


def of_ranges(
    name: str, kind: str, shape: Shape, ranges: Sequence[Range]
) -> StoredTensor:
    """A parameter's state as one tensor, from its ranges in element order.

    Raises:
      FormatError: if a range lies outside its flat tensor, or the ranges have more or
        fewer elements than the parameter.
    """
    first, held = ranges[0], sum(max(0, each.numel) for each in ranges)
    if not first.flat.shape:
        return dataclasses.replace(first.flat, name=name, kind=kind)
    if held != math.prod(shape):
        raise first.file.error(
            f"and its neighbors have {held} elements of {name}, but its shape needs"
            f" {math.prod(shape)}; files of some ranks are missing or are from a"
            " different save"
        )
    pieces: list[Fragment] = []
    width, at = first.flat.dtype.itemsize, 0
    for file, flat, start, numel in ranges:
        is_like = len(flat.shape) == 1 and flat.dtype == first.flat.dtype
        strides = [each.strides for each in flat.fragments if flat.shape != (1,)]
        if not is_like or flat.view or strides not in ([], [(width,)]):
            raise file.error(
                f"has {name} in a tensor {flat.dtype}{list(flat.shape)} {flat.view}"
                f" that is not flat or differs from the tensor in {first.file.path}"
            )
        if not 0 <= start <= start + numel <= flat.shape[0]:
            raise file.error(
                f"has {name} in elements {start} to {start + numel} of a tensor with"
                f" only {flat.shape[0]} elements"
            )
        for box in _boxes_of_range(shape, at, at + numel):
            offset = flat.fragments[0].offset + start * width
            strides_of_box = row_major(shape, width)
            pieces.append(
                Fragment(box=box, file=file.path, offset=offset, strides=strides_of_box)
            )
            start += box.volume
        at += numel
    return StoredTensor(
        name=name,
        kind=kind,
        dtype=first.flat.dtype,
        shape=shape,
        fragments=tuple(pieces),
    )


def equal_part(
    file: TorchFile, flat: StoredTensor, *, start: int, numel: int, rank: _Rank
) -> Range:
    """One rank's range of a parameter of `numel` elements, split equally, rounded up.

    The range begins at `start` in the rank's tensor `flat`.
    """
    number, count = rank
    size = -(-numel // count)
    return Range(file, flat, start, max(0, min(size, numel - number * size)))


def shapes_of(model: TorchFile) -> list[dict[str, Shape]]:
    """The parameter shapes of each group, from a model file.

    Raises:
      FormatError: if the shapes are missing or invalid.
    """
    return [named_shapes(model, each) for each in model.typed(list, "param_shapes")]


def named_shapes(file: TorchFile, shapes: Any) -> dict[str, Shape]:
    """Checks shapes, a dict keyed by parameter name.

    Raises:
      FormatError: if `shapes` is not a dict or one of its values is not a shape.
    """
    if not isinstance(shapes, dict):
        raise file.error("has a group of shapes that is not a dict")
    return {
        str(name): checked_shape(
            shape if isinstance(shape, tuple) else (shape,), f"{file.path}: {name}"
        )
        for name, shape in shapes.items()
    }


def states(model: TorchFile, held: Sequence[TorchFile]) -> Iterator[StoredTensor]:
    """The states in one model rank's optimizer files.

    `held` are these files, ordered by data-parallel rank.

    Raises:
      FormatError: if a file contradicts itself or another file.
    """
    is_equal = held[0].at(_STATE, "fp32_flat_groups") is not None
    for group, shapes in enumerate(shapes_of(model)):
        lacking = {name: None for name, shape in shapes.items() if math.prod(shape)}
        made: dict[tuple[str, str], tuple[Shape, list[Range]]] = {}
        for dp, file in enumerate(held):
            rank = dp, len(held)
            try:
                found = list(
                    _equal_parts(file, group, shapes, rank)
                    if is_equal
                    else _listed_parts(file, group)
                )
                experts = _experts(file, group, shapes, rank)
            except _MALFORMED as error:
                raise file.error(
                    f"has states in group {group} that are not in ZeRO's format"
                    f" ({error!r:.200})"
                ) from None
            for name, key, one in found:
                if name not in shapes:
                    raise file.error(f"has {name}, which param_shapes does not list")
                lacking.pop(name, None)
                state = experts.get(name, name), kind_of(key)
                _, ranges = made.setdefault(state, (shapes[name], []))
                # A number is the same on every rank.
                if one.flat.shape or not ranges:
                    ranges.append(one)
        if lacking:
            raise held[0].error(
                f"and its neighbors lack states of {errors.first_of(lacking)}; files of"
                " some ranks are missing or are from a different save"
            )
        for (name, kind), (shape, ranges) in made.items():
            yield of_ranges(name, kind, shape, ranges)


def _equal_parts(
    file: TorchFile, group: int, shapes: Shapes, rank: _Rank
) -> Iterator[tuple[str, str, Range]]:
    # Stage 3: the parameter, the optimizer's name for the state, and the range.
    if file.at(_STATE, "ds_zero_partition_groups") is not None:
        raise file.error(
            "has experts that AutoEP split; convert the checkpoint with DeepSpeed's"
            " ds_to_universal first"
        )
    masters = file.typed(list, _STATE, "fp32_flat_groups")
    flats = _flats(masters, file.at(_STATE, _STATE), group)
    start = 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        for key, flat in flats.items():
            yield name, key, equal_part(file, flat, start=start, numel=numel, rank=rank)
        start += -(-numel // rank[1])


def _listed_parts(file: TorchFile, group: int) -> Iterator[tuple[str, str, Range]]:
    # Stages 1 and 2: yields the same as `_equal_parts`.
    base = file.at(_STATE, "base_optimizer_state")
    masters = file.typed(list, _STATE, "single_partition_of_fp32_groups")
    flats = _flats(masters, base, group)
    # Without groups, the configuration shows it; DeepSpeed <= 0.19.8 records neither.
    groups = base.get("param_groups") if isinstance(base, dict) else None
    is_muon = groups[group].get("use_muon") if groups else False
    kind = str(file.at("ds_config", "optimizer", "type")).lower()
    is_muon = (is_muon or "muon" in kind) and "momentum_buffer" in flats
    if is_muon or file.at(_STATE, "whole_param_optimizer_states"):
        raise file.error(
            "has Muon's momentum, which is supported only in ZeRO stage 3; save with"
            " stage 3, or load only the weights from a copy of the checkpoint without"
            " its *_optim_states.pt files"
        )
    mapping = file.typed(list, _STATE, "param_slice_mappings")[group]
    for name, place in mapping.items():
        start, numel = operator.index(place["start"]), operator.index(place["numel"])
        for key, flat in flats.items():
            yield name, key, Range(file, flat, start, numel)


def _flats(masters: list[Any], base: Any, group: int) -> dict[str, StoredTensor]:
    # A group's tensors in one file, by the optimizer's names. With the
    # `elastic_checkpoint` option, `base` is a list of the groups.
    held = base["state"] if isinstance(base, dict) else base
    held = dict(enumerate(held)) if isinstance(held, list) else held
    named = {"fp32": masters[group], **held.get(group, {})}
    flats = {key: each for key, each in named.items() if isinstance(each, StoredTensor)}
    if "fp32" not in flats:
        raise ValueError("it has no float32 parameters")
    return flats


def _experts(
    file: TorchFile, group: int, shapes: Shapes, rank: _Rank
) -> dict[str, str]:
    # Maps expert parameters' names in optimizer files, which number experts within a
    # rank, to their names in model files, which number experts across all ranks.
    dp, ranks = rank
    counts = file.at(_STATE, "partition_count")
    # Stage 3 has one count for all groups.
    count = operator.index(counts[group]) if isinstance(counts, list) else ranks
    if count < 1 or ranks % count:
        raise ValueError(f"partition_count is {count}, but there are {ranks} ranks")
    is_outer = file.at("ds_config", "use_data_before_expert_parallelism") is True
    # 0 if all ranks share the parameters of the group.
    expert_rank = dp // count if is_outer else dp % (ranks // count)
    found = [match for name in shapes if (match := EXPERT.fullmatch(name))]
    held = collections.Counter((match[1], match[3]) for match in found)
    return {
        m[0]: f"{m[1]}{int(m[2]) + expert_rank * held[m[1], m[3]]}{m[3]}" for m in found
    }


def numbered(
    file: TorchFile, weights: Sequence[StoredTensor]
) -> Iterator[StoredTensor]:
    """An optimizer's states, named like the weights of their rank where possible.

    PyTorch's optimizers number parameters group by group and, within a group, in model
    order. So if all parameters of a shape are in one group, their order determines
    their names; otherwise the names are unknown.

    `weights` are the rank's tensors of kind `parameter`, in model order.

    Raises:
      FormatError: if the file has no valid `optimizer` state dict.
    """
    try:
        groups, held = _numbered(file.typed(dict, "optimizer"))
    except _MALFORMED as error:
        raise file.error(
            f"has optimizer states that are not in PyTorch's format ({error!r:.200})"
        ) from None
    by_shape: dict[Shape, dict[Any, StoredTensor]] = collections.defaultdict(dict)
    for each in weights:
        # Tied parameters share their bytes.
        by_shape[each.shape].setdefault(each.fragments, each)
    of_shape: dict[Shape, list[tuple[int, int]]] = collections.defaultdict(list)
    for group, numbers in enumerate(groups):
        for number in numbers:
            shaped = [held[number][key] for key in _SHAPED if key in held[number]]
            for tensor in shaped[:1]:
                of_shape[tensor.shape].append((group, number))
    names: dict[int, StoredTensor] = {}
    for shape, found in of_shape.items():
        fitting = by_shape[shape].values()
        if len({group for group, _ in found}) == 1 and len(found) == len(fitting):
            names |= zip((number for _, number in found), fitting, strict=True)
    for number, state in sorted(held.items()):
        weight = names.get(number)
        name, ranks = (
            (weight.name, weight.ranks) if weight else (f"{UNNAMED}{number}", ())
        )
        for key, tensor in state.items():
            yield dataclasses.replace(tensor, name=name, kind=kind_of(key), ranks=ranks)


def _numbered(
    optimizer: Mapping[str, Any],
) -> tuple[list[list[int]], dict[int, dict[str, StoredTensor]]]:
    # The parameter numbers of each group, and the states by number.
    nested = [optimizer[key] for key in _NESTED if isinstance(optimizer.get(key), dict)]
    inner = nested[0] if nested else optimizer
    groups = [list(map(operator.index, g["params"])) for g in inner["param_groups"]]
    held: dict[int, dict[str, StoredTensor]] = collections.defaultdict(dict)
    for number, state in inner["state"].items():
        for key, tensor in state.items() if type(number) is int else ():
            if isinstance(tensor, StoredTensor):
                held[number][str(key)] = tensor
    found = [optimizer[key] for key in _MASTERS if isinstance(optimizer.get(key), list)]
    for numbers, group in zip(groups, found[0], strict=True) if found else ():
        tensors = group if isinstance(group, list) else [group]
        for number, tensor in zip(numbers, tensors, strict=True):
            if isinstance(tensor, StoredTensor):
                held[number]["fp32"] = tensor
    return groups, held
