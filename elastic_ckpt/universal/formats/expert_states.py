"""Optimizer states of experts without ZeRO: a file for each expert-parallel rank.

`expp_rank_EE_mp_rank_XX_optim_states.pt` has numbered states of all parameters of a
rank: of those that all ranks share, which are taken from the first file, and of its
experts, in groups that are marked by `moe`. Each rank has as many experts of a layer,
in the order of their numbers. States are named as in `numbered_states`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from elastic_ckpt.universal.formats import numbered_states, zero_states
from elastic_ckpt.universal.formats.deepspeed_files import Files
from elastic_ckpt.universal.formats.numbered_states import Group
from elastic_ckpt.universal.formats.torch_file import TorchFile
from elastic_ckpt.universal.stored import StoredTensor

_OPTIMIZER = ("optimizer",)
_SIZE = re.compile(r"ep_size_(\d{1,9})")


def states(
    files: Files, rank: int, weights: Sequence[StoredTensor]
) -> Iterator[StoredTensor]:
    """The states of a rank of the model.

    Args:
      files: with `expert_optimizers`.
      rank: of the model.
      weights: of kind `parameter`, of this rank.

    Raises:
      FormatError: if a file is missing, or the experts that states are of are unknown.
    """
    held = {
        ep: file for (ep, mp), file in files.expert_optimizers.items() if mp == rank
    }
    if not held:
        raise files.models[rank].error("has no file expp_rank_*_optim_states.pt")
    for file in held.values():
        _check_size(file, set(held))
    shared = [each for each in weights if not zero_states.EXPERT.fullmatch(each.name)]
    yield from numbered_states.states(
        held[0], shared, _OPTIMIZER, is_chosen=lambda group: not _is_of_experts(group)
    )
    for ep, file in held.items():
        parameters = _experts(file, weights, (ep, len(held)))
        for state in numbered_states.states(
            file, parameters, _OPTIMIZER, is_chosen=_is_of_experts
        ):
            if state.name.startswith(numbered_states.UNNAMED):
                raise file.error(
                    "has states of experts, and several groups with parameters of shape"
                    f" {list(state.shape)}, so which they are of is not known; save"
                    " with ZeRO stage 1"
                )
            yield state


def _is_of_experts(group: Group) -> bool:
    return group.get("moe") is True


def _check_size(file: TorchFile, ranks: set[int]) -> None:
    # Groups are named after the number of ranks that experts are spread over.
    nested = file.at(*_OPTIMIZER, "optimizer_state_dict")
    inner = (*_OPTIMIZER, "optimizer_state_dict") if nested is not None else _OPTIMIZER
    names = [
        group.get("name")
        for group in file.list_at(*inner, "param_groups")
        if isinstance(group, dict)
    ]
    matches = [_SIZE.fullmatch(name) for name in names if isinstance(name, str)]
    for size in [int(match[1]) for match in matches if match] or [len(ranks)]:
        if len(ranks) != size or ranks != set(range(size)):
            raise file.error(
                f"has experts of {size} expert-parallel ranks, and there are files"
                f" expp_rank_* of {sorted(ranks)[:9]}; copy all, or save layers of"
                " several such numbers with ZeRO stage 1"
            )


def _experts(
    file: TorchFile, weights: Sequence[StoredTensor], part: tuple[int, int]
) -> list[StoredTensor]:
    # The parameters of the experts of one of the ranks, in the order of the model.
    number, count = part
    matches = [(each, zero_states.EXPERT.fullmatch(each.name)) for each in weights]
    named = [(each, match) for each, match in matches if match]
    sizes: dict[str, int] = {}
    for _, match in named:
        sizes[match[1]] = max(sizes.get(match[1], 0), int(match[2]) + 1)
    uneven = [layer for layer, size in sizes.items() if size % count]
    if uneven:
        raise file.error(
            f"is one of {count}, which do not divide the {sizes[uneven[0]]} experts of"
            f" {uneven[0]}"
        )
    # Files of earlier versions have one expert of all layers.
    order = {layer: at for at, layer in enumerate(sizes)}
    named.sort(key=lambda pair: (order[pair[1][1]], int(pair[1][2])))
    return [
        each
        for each, match in named
        if int(match[2]) // (sizes[match[1]] // count) == number
    ]
