"""States of PyTorch's optimizers, which number parameters and do not name them.

Numbers run through the groups of parameters, in each of them in the order of the model.
So if all parameters of a shape are in one group, the names of these follow from the
order; otherwise they are not known.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from elastic_ckpt.universal.formats import state_kinds
from elastic_ckpt.universal.formats.torch_file import Tensor, TorchFile
from elastic_ckpt.universal.stored import StoredTensor

# Begins the name of a state whose parameter is not known; its number follows.
UNNAMED = "optimizer/"
# Keys of the state dict of PyTorch's optimizer in that of the one around it, and of the
# float32 parameters: DeepSpeed's, then Megatron's.
_NESTED = ("optimizer_state_dict", "optimizer")
_MASTERS = ("fp32_groups", "fp32_groups_flat", "fp32_from_fp16_params")


Group = Mapping[Any, Any]


def states(
    file: TorchFile,
    weights: Sequence[StoredTensor],
    keys: Sequence[str],
    *,
    is_chosen: Callable[[Group], bool] = bool,
) -> Iterator[StoredTensor]:
    """The states of an optimizer, named as the weights of the same rank where possible.

    Args:
      file: that has the optimizer's state dict.
      weights: of kind `parameter`, in the order of the model.
      keys: of nested dicts that lead to the state dict.
      is_chosen: whether the parameters of a group are among `weights`; states of other
        groups are left out.

    Raises:
      FormatError: if it is no state dict.
    """
    optimizer = file.dict_at(*keys)
    nested = [key for key in _NESTED if isinstance(optimizer.get(key), dict)]
    inner = [*keys, *nested[:1]]
    param_groups = file.list_at(*inner, "param_groups")
    groups = _groups(file, param_groups)
    by_number: dict[int, dict[str, Tensor]] = collections.defaultdict(dict)
    for number, state in file.dict_at(*inner, "state").items():
        if isinstance(number, int) and isinstance(state, dict):
            for key, each in state.items():
                if isinstance(each, Tensor):
                    by_number[number][str(key)] = each
    for number, master in _masters(file, optimizer, groups):
        by_number[number]["fp32"] = master
    chosen = [
        numbers
        for numbers, group in zip(groups, param_groups, strict=True)
        if is_chosen(group)
    ]
    names = _names(by_number, chosen, weights)
    is_all = len(chosen) == len(groups)
    kept = {number for numbers in chosen for number in numbers}
    for number, state in sorted(by_number.items()):
        weight = names.get(number)
        for key, tensor in state.items() if is_all or number in kept else ():
            yield StoredTensor(
                name=weight.name if weight else f"{UNNAMED}{number}",
                ranks=weight.ranks if weight else (),
                kind=state_kinds.kind_of(key),
                dtype=tensor.dtype,
                shape=tensor.shape,
                fragments=file.fragment(tensor),
            )


def _masters(
    file: TorchFile, optimizer: Mapping[str, Any], groups: Sequence[Sequence[int]]
) -> Iterator[tuple[int, Tensor]]:
    # The float32 parameters, by number.
    masters = [
        optimizer[key] for key in _MASTERS if isinstance(optimizer.get(key), list)
    ]
    if masters and len(masters[0]) != len(groups):
        raise file.error(
            f"has float32 parameters of {len(masters[0])} groups, and {len(groups)}"
            " groups of parameters"
        )
    for numbers, group in zip(groups, *masters[:1], strict=True) if masters else ():
        tensors = group if isinstance(group, list) else [group]
        if len(tensors) != len(numbers):
            raise file.error(
                f"has {len(tensors)} float32 parameters in a group of {len(numbers)}"
            )
        for number, each in zip(numbers, tensors, strict=True):
            if isinstance(each, Tensor):
                yield number, each


def _groups(file: TorchFile, groups: Sequence[Any]) -> list[list[int]]:
    # The numbers of the parameters of each group.
    numbers = []
    for group in groups:
        listed = group.get("params") if isinstance(group, dict) else None
        if not isinstance(listed, list) or not all(type(n) is int for n in listed):
            raise file.error("has a group of parameters without their numbers")
        numbers.append(listed)
    return numbers


def _names(
    by_number: Mapping[int, Mapping[str, Tensor]],
    groups: Sequence[Sequence[int]],
    weights: Sequence[StoredTensor],
) -> dict[int, StoredTensor]:
    # Tied parameters have one state, and lie at one place of the file.
    distinct: dict[Any, StoredTensor] = {}
    for each in weights:
        distinct.setdefault((each.fragments, each.shape), each)
    by_shape: dict[tuple[int, ...], list[StoredTensor]] = collections.defaultdict(list)
    for each in distinct.values():
        by_shape[each.shape].append(each)
    of_shape: dict[tuple[int, ...], list[tuple[int, int]]]
    of_shape = collections.defaultdict(list)
    for group, numbers in enumerate(groups):
        for number in numbers:
            state = by_number.get(number, {})
            tensor = state.get("fp32", state.get("exp_avg"))
            if tensor is not None:
                of_shape[tensor.shape].append((group, number))
    names = {}
    for shape, held in of_shape.items():
        fitting = by_shape.get(shape, [])
        if len({group for group, _ in held}) == 1 and len(held) == len(fitting):
            numbers = [number for _, number in held]
            names |= dict(zip(numbers, fitting, strict=True))
    return names
