"""The optimizer states of ZeRO: which ranges of which flat tensors a parameter has.

Stages 1 and 2 list, in each file, the parameters of which it has a range, and where;
ranges follow one another by data-parallel rank. Stage 3 lists nothing: each rank has an
equal part of every parameter, rounded up, in the order of `param_shapes`. Parameters of
experts are spread over fewer ranks: those of the same expert-parallel rank.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.universal.formats import coverage, state_kinds
from elastic_ckpt.universal.formats.deepspeed_files import Files
from elastic_ckpt.universal.formats.flat_parameters import Range
from elastic_ckpt.universal.formats.torch_file import Tensor, TorchFile

# The name of a parameter of an expert, whose number it has.
EXPERT = re.compile(r"(.*\bdeepspeed_experts\.)(\d{1,9})(\..*)", re.DOTALL)
_STATE = "optimizer_state_dict"
_MOMENTUM = "momentum_buffer"
# Each parameter of a group has all of them.
_MOST_STATES = 32
_SHAPE_BYTES, _STATE_BYTES, _RANGE_BYTES = 200, 400, 150
Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A state of a parameter of one rank of the model.

    Attributes:
      name: of the parameter.
      kind: see `StoredTensor.kind`.
      dtype: of its elements.
      shape: of the parameter; () of a number, such as its steps.
      ranges: that hold it, in the order of its elements.
    """

    name: str
    kind: str
    dtype: np.dtype
    shape: tuple[int, ...]
    ranges: list[Range]


def shapes_of(file: TorchFile) -> list[dict[str, tuple[int, ...]]]:
    """The shapes of the parameters of each group, from the file of a model.

    Raises:
      FormatError: if it has none, or they are no shapes.
    """
    groups = file.list_at("param_shapes")
    if not all(isinstance(group, dict) for group in groups):
        raise file.error("has a group of param_shapes that is no dict")
    return [named_shapes(file, group) for group in groups]


def named_shapes(file: TorchFile, shapes: Mapping[Any, Any]) -> dict[str, Any]:
    """Shapes by name, checked.

    Raises:
      FormatError: if one is none.
    """
    file.take(_SHAPE_BYTES * len(shapes))
    return {
        str(name): coverage.checked_shape(
            shape if isinstance(shape, tuple) else (shape,), f"{file.path}: {name}"
        )
        for name, shape in shapes.items()
    }


def states(files: Files, rank: int) -> Iterator[State]:
    """The states that the optimizer files of a rank of the model hold.

    Raises:
      FormatError: if a file contradicts another, or itself.
    """
    held = [files.optimizers[rank, dp] for dp in range(files.dp)]
    collect = _equal_parts if _is_stage_3(held[0]) else _listed
    for group, shapes in enumerate(shapes_of(files.models[rank])):
        yield from collect(held, group, shapes).values()


def equal_part(
    file: TorchFile, flat: Tensor, *, start: int, numel: int, part: tuple[int, int]
) -> Range:
    """The range of a parameter of which each rank has an equal part, rounded up.

    Args:
      file: that holds `flat`.
      flat: the tensor of a rank.
      start: the first element of the part in it.
      numel: the elements of the whole parameter.
      part: its number, and how many there are.
    """
    number, count = part
    file.take(_RANGE_BYTES)
    size = -(-numel // count)
    kept = max(0, min(size, numel - number * size))
    return Range(file=file, flat=flat, start=start, numel=kept)


def _is_stage_3(file: TorchFile) -> bool:
    return file.at(_STATE, "fp32_flat_groups") is not None


class _Collected(dict[tuple[str, str], State]):
    """States by name and kind, as files add ranges to them."""

    def add(self, name: str, shape: tuple[int, ...], key: str, part: Range) -> None:
        kind, dtype = state_kinds.kind_of(key), part.flat.dtype
        is_number = not part.flat.shape
        held = self.get((name, kind))
        part.file.take(_RANGE_BYTES if held else _STATE_BYTES)
        if held is None:
            held = State(
                name=name,
                kind=kind,
                dtype=dtype,
                shape=() if is_number else shape,
                ranges=[],
            )
            self[name, kind] = held
        # Every rank has the same number.
        if not is_number or not held.ranges:
            held.ranges.append(part)


def _listed(held: Sequence[TorchFile], group: int, shapes: Shapes) -> _Collected:
    # Stages 1 and 2.
    collected = _Collected()
    listed: set[str] = set()
    for dp, file in enumerate(held):
        flats = _flat_tensors(file, group)
        expert_rank = _expert_rank(file, group, dp, len(held))
        experts = _experts(shapes) if expert_rank else {}
        mappings = file.list_at(_STATE, "param_slice_mappings")
        if group >= len(mappings) or not isinstance(mappings[group], dict):
            raise file.error(f"has no mapping of the parameters of group {group}")
        for name, address in mappings[group].items():
            if name not in shapes:
                raise file.error(f"has {name}, which param_shapes do not have")
            start, numel = _address(file, name, address)
            known = _global_name(name, experts, expert_rank)
            listed.add(name)
            for key, flat in flats.items():
                part = Range(file=file, flat=flat, start=start, numel=numel)
                collected.add(known, shapes[name], key, part)
    lacking = [
        name for name in shapes if name not in listed and math.prod(shapes[name])
    ]
    if lacking:
        raise held[0].error(
            f"and its neighbors lack states of {errors.first_of(lacking)}; files of"
            " ranks are missing, or of another save"
        )
    return collected


def _equal_parts(held: Sequence[TorchFile], group: int, shapes: Shapes) -> _Collected:
    # Stage 3.
    collected = _Collected()
    for dp, file in enumerate(held):
        if file.at(_STATE, "ds_zero_partition_groups") is not None:
            raise file.error(
                "has experts that AutoEP spread; convert it with DeepSpeed's"
                " ds_to_universal before"
            )
        flats, start = _flat_tensors(file, group), 0
        for name, shape in shapes.items():
            numel, part = math.prod(shape), (dp, len(held))
            for key, flat in flats.items():
                place = equal_part(file, flat, start=start, numel=numel, part=part)
                collected.add(name, shape, key, place)
            start += -(-numel // len(held))
    return collected


def _flat_tensors(file: TorchFile, group: int) -> dict[str, Tensor]:
    # The tensors of a group in one file, by the optimizer's names of them.
    if _is_stage_3(file):
        masters = file.list_at(_STATE, "fp32_flat_groups")
        base = file.dict_at(_STATE, _STATE)
    else:
        masters = file.list_at(_STATE, "single_partition_of_fp32_groups")
        base = file.at(_STATE, "base_optimizer_state")
    state: Any = {}
    if isinstance(base, list):
        # With the option `elastic_checkpoint`.
        state = base[group] if group < len(base) else {}
    elif isinstance(base, dict) and isinstance(base.get("state"), dict):
        state = base["state"].get(group, {})
    master = masters[group] if group < len(masters) else None
    if not isinstance(master, Tensor) or not isinstance(state, dict):
        raise file.error(f"has no states of group {group}")
    named = {"fp32": master, **state}
    flats = {key: each for key, each in named.items() if isinstance(each, Tensor)}
    if not _is_stage_3(file):
        _check_muon(file, group, flats)
    if len(flats) > _MOST_STATES:
        raise file.error(
            f"has {len(flats)} states of each parameter, and at most {_MOST_STATES}"
            " are read"
        )
    return flats


def _check_muon(file: TorchFile, group: int, flats: Mapping[str, Tensor]) -> None:
    # Its momentum has every parameter of which the rank has a part, as a whole, so that
    # the places of the parts are not those in the momentum.
    groups = file.at(_STATE, "base_optimizer_state")
    groups = groups.get("param_groups") if isinstance(groups, dict) else None
    settings: Any = {}
    if isinstance(groups, list) and group < len(groups):
        settings = groups[group] if isinstance(groups[group], dict) else {}
    # With the option `elastic_checkpoint` there are no groups.
    kind = file.at("ds_config", "optimizer", "type")
    is_muon = settings.get("use_muon") is True or (
        not settings and isinstance(kind, str) and "muon" in kind.lower()
    )
    if is_muon and _MOMENTUM in flats:
        raise file.error(
            f"has the {_MOMENTUM} of Muon in group {group}, which under ZeRO stages 1"
            " and 2 is not cut like its parameters, and is not read; save with ZeRO"
            " stage 3, or load the weights alone, from a copy without *_optim_states.pt"
        )


def _address(file: TorchFile, name: str, address: Any) -> tuple[int, int]:
    fields = address if isinstance(address, dict) else {}
    start, numel = fields.get("start"), fields.get("numel")
    if type(start) is not int or type(numel) is not int or start < 0 or numel < 0:
        raise file.error(f"has no place of {name} in its flat tensor")
    return start, numel


def _expert_rank(file: TorchFile, group: int, dp: int, ranks: int) -> int:
    # The expert-parallel rank; 0 if all ranks share the parameters of the group.
    counts = file.at(_STATE, "partition_count")
    count = counts[group] if isinstance(counts, list) and group < len(counts) else ranks
    if type(count) is not int or count < 1 or ranks % count:
        raise file.error(f"has a partition_count of group {group} that is none")
    if file.at("ds_config", "use_data_before_expert_parallelism") is True:
        return dp // count
    return dp % (ranks // count)


def _experts(shapes: Shapes) -> Mapping[tuple[str, str], int]:
    # The number of experts of a rank, by the texts around their numbers.
    matches = filter(None, map(EXPERT.fullmatch, shapes))
    return collections.Counter((match[1], match[3]) for match in matches)


def _global_name(
    name: str, experts: Mapping[tuple[str, str], int], expert_rank: int
) -> str:
    # Files of optimizers number experts within a rank, those of models through all.
    match = EXPERT.fullmatch(name)
    if not match or not expert_rank:
        return name
    before, number, after = match.groups()
    return f"{before}{int(number) + expert_rank * experts[before, after]}{after}"
