"""The flat tensors of ZeRO: which ranges of them a parameter has, on which ranks.

Stages 1 and 2 list, in each file, the parameters of which it has a range, and where;
ranges follow one another by data-parallel rank. Stage 3 lists nothing: each rank has an
equal part of every parameter, rounded up, in the order of `param_shapes`. Parameters of
experts are spread over fewer ranks: those of the same expert-parallel rank.

In stages 1 and 2 the momentum of Muon has a layout of its own, which is refused.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from elastic_ckpt.core import errors
from elastic_ckpt.universal.formats import coverage, optimizer_states, state_kinds
from elastic_ckpt.universal.formats.optimizer_states import Range, Shape
from elastic_ckpt.universal.formats.torch_file import Tensor, TorchFile
from elastic_ckpt.universal.stored import StoredTensor

# The name of a parameter of an expert, whose number it has.
EXPERT = re.compile(r"(.*\bdeepspeed_experts\.)(\d{1,9})(\..*)", re.DOTALL)
_STATE = "optimizer_state_dict"
Shapes = Mapping[str, Shape]
# The name of a parameter, its shape, the optimizer's name of a state, a range of it,
# and whether every rank has the same.
_Place = tuple[str, Shape, str, Range, bool]


def shapes_of(model: TorchFile) -> list[dict[str, Shape]]:
    """The shapes of the parameters of each group, from the file of a model.

    Raises:
      FormatError: if it has none, or they are no shapes.
    """
    groups = model.list_at("param_shapes")
    if not all(isinstance(group, dict) for group in groups):
        raise model.error("has a group of param_shapes that is no dict")
    return [named_shapes(model, group) for group in groups]


def named_shapes(file: TorchFile, shapes: Mapping[Any, Any]) -> dict[str, Shape]:
    """Shapes by name, checked.

    Raises:
      FormatError: if one is none.
    """
    return {
        str(name): coverage.checked_shape(
            shape if isinstance(shape, tuple) else (shape,), f"{file.path}: {name}"
        )
        for name, shape in shapes.items()
    }


def states(model: TorchFile, held: Sequence[TorchFile]) -> Iterator[StoredTensor]:
    """The states in the optimizer files of a rank of the model.

    Args:
      model: the file of the model.
      held: the files of its optimizer, by data-parallel rank.

    Raises:
      FormatError: if a file contradicts another, or itself.
    """
    places = _equal_places if _is_stage_3(held[0]) else _listed_places
    for group, shapes in enumerate(shapes_of(model)):
        made: dict[tuple[str, str], tuple[Shape, list[Range]]] = {}
        for name, shape, key, part, is_copy in places(held, group, shapes):
            state = name, state_kinds.kind_of(key)
            if state not in made:
                made[state] = shape, [part]
            elif not is_copy:
                made[state][1].append(part)
        for (name, kind), (shape, ranges) in made.items():
            yield optimizer_states.of_ranges(name, kind, shape, ranges)


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
    size = -(-numel // count)
    kept = max(0, min(size, numel - number * size))
    return Range(file=file, flat=flat, start=start, numel=kept)


def _is_stage_3(file: TorchFile) -> bool:
    return file.at(_STATE, "fp32_flat_groups") is not None


def _equal_places(
    held: Sequence[TorchFile], group: int, shapes: Shapes
) -> Iterator[_Place]:
    # Stage 3.
    for dp, file in enumerate(held):
        if file.at(_STATE, "ds_zero_partition_groups") is not None:
            raise file.error(
                "has experts that AutoEP spread; convert it with DeepSpeed's"
                " ds_to_universal before"
            )
        master = _of_group(file, group, "fp32_flat_groups")
        flats = _flat_tensors(file, group, master, file.dict_at(_STATE, _STATE))
        start = 0
        for name, shape in shapes.items():
            numel, part = math.prod(shape), (dp, len(held))
            for key, flat in flats.items():
                place = equal_part(file, flat, start=start, numel=numel, part=part)
                yield name, shape, key, place, not flat.shape
            start += -(-numel // len(held))


def _listed_places(
    held: Sequence[TorchFile], group: int, shapes: Shapes
) -> Iterator[_Place]:
    # Stages 1 and 2.
    lacking = {name for name, shape in shapes.items() if math.prod(shape)}
    for dp, file in enumerate(held):
        master = _of_group(file, group, "single_partition_of_fp32_groups")
        base = file.at(_STATE, "base_optimizer_state")
        flats = _flat_tensors(file, group, master, base)
        _check_not_muon(file, group, flats)
        names = _names(file, group, shapes, (dp, len(held)))
        mapping = _of_group(file, group, "param_slice_mappings")
        if not isinstance(mapping, dict):
            raise file.error(f"has no mapping of the parameters of group {group}")
        places = {name: _place(file, name, each) for name, each in mapping.items()}
        for name in places:
            if name not in shapes:
                raise file.error(f"has {name}, which param_shapes do not have")
        lacking -= places.keys()
        for name, (start, numel) in places.items():
            for key, flat in flats.items():
                part = Range(file=file, flat=flat, start=start, numel=numel)
                state = names.get(name, name), shapes[name], key
                yield *state, part, not flat.shape
    if lacking:
        named = [name for name in shapes if name in lacking]
        raise held[0].error(
            f"and its neighbors lack states of {errors.first_of(named)}; files of"
            " ranks are missing, or of another save"
        )


def _flat_tensors(
    file: TorchFile, group: int, master: Any, base: Any
) -> dict[str, Tensor]:
    # The tensors of a group in one file, by the optimizer's names of them. With the
    # option `elastic_checkpoint`, `base` is a list of the groups.
    held = base.get("state") if isinstance(base, dict) else base
    held = dict(enumerate(held)) if isinstance(held, list) else held
    state = held.get(group, {}) if isinstance(held, dict) else {}
    if not isinstance(master, Tensor) or not isinstance(state, dict):
        raise file.error(f"has no states of group {group}")
    named = {"fp32": master, **state}
    return {key: each for key, each in named.items() if isinstance(each, Tensor)}


def _check_not_muon(file: TorchFile, group: int, flats: Mapping[str, Tensor]) -> None:
    of_group = _of_group(file, group, "base_optimizer_state", "param_groups")
    # With the option `elastic_checkpoint` there are no groups.
    kind = file.at("ds_config", "optimizer", "type")
    is_muon = (
        of_group.get("use_muon") is True
        if isinstance(of_group, dict)
        else isinstance(kind, str) and "muon" in kind.lower()
    )
    # DeepSpeed up to 0.19.8 does not record it.
    is_whole = _of_group(file, group, "whole_param_optimizer_states")
    if (is_muon and "momentum_buffer" in flats) or is_whole:
        raise file.error(
            "has the momentum of Muon, which is read of ZeRO stage 3 alone; save with"
            " it, or load the weights alone, from a copy without *_optim_states.pt"
        )


def _place(file: TorchFile, name: str, address: Any) -> tuple[int, int]:
    fields = address if isinstance(address, dict) else {}
    start, numel = fields.get("start"), fields.get("numel")
    if type(start) is not int or type(numel) is not int or start < 0 or numel < 0:
        raise file.error(f"has no place of {name} in its flat tensor")
    return start, numel


def _of_group(file: TorchFile, group: int, *keys: str) -> Any:
    listed = file.at(_STATE, *keys)
    return listed[group] if isinstance(listed, list) and group < len(listed) else None


def _names(
    file: TorchFile, group: int, shapes: Shapes, part: tuple[int, int]
) -> dict[str, str]:
    # The names of experts. Files of optimizers number them within a rank, those of
    # models through all.
    dp, ranks = part
    count = _of_group(file, group, "partition_count")
    count = ranks if count is None else count
    if type(count) is not int or count < 1 or ranks % count:
        raise file.error(f"has a partition_count of group {group} that is none")
    is_outer = file.at("ds_config", "use_data_before_expert_parallelism") is True
    # It is 0 if all ranks share the parameters of the group.
    expert_rank = dp // count if is_outer else dp % (ranks // count)
    matches = [EXPERT.fullmatch(name) for name in shapes] if expert_rank else []
    experts = [match for match in matches if match]
    counts = collections.Counter((match[1], match[3]) for match in experts)
    return {
        m[0]: f"{m[1]}{int(m[2]) + expert_rank * counts[m[1], m[3]]}{m[3]}"
        for m in experts
    }
