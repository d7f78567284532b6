"""Opens checkpoints of DeepSpeed: ZeRO stages 0 to 3, pipelines, experts.

A tensor has the name of its parameter. Weights of the model are of kind `parameter`,
optimizer states `master`, `first_moment`, `second_moment` and `step`, buffers `buffer`.
Tensor-parallel ranks are the axis `tp`. Data-parallel ranks are no axis: their ranges
of a parameter are fragments of one tensor. Neither are stages: names count layers, and
files of experts number them, through all ranks. If several stages hold a parameter,
which is tied, the first stage's is taken, as in DeepSpeed's own conversion.

DeepSpeed's description of the layout is in `values["universal_checkpoint_info"]`: lists
of patterns of names, sizes of parts, and affine maps, as nested dicts and lists.

With stage 0 and an optimizer of PyTorch, states are numbered, not named. They get the
names of parameters where these follow, see `numbered_states` and `expert_states`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from etils import epath

from elastic_ckpt.universal.formats import (
    deepspeed_files,
    deepspeed_weights,
    expert_states,
    flat_parameters,
    numbered_states,
    plain_values,
    torch_file,
    zero_states,
)
from elastic_ckpt.universal.formats.deepspeed_files import Files
from elastic_ckpt.universal.formats.opened import OpenedCheckpoint
from elastic_ckpt.universal.formats.zero_states import State
from elastic_ckpt.universal.stored import StoredTensor

is_format = deepspeed_files.is_format


def open_checkpoint(path: epath.PathLike) -> OpenedCheckpoint:
    """Opens the directory of a step, or one whose file `latest` names it.

    Raises:
      FormatError: if a file is missing or damaged, contradicts another, or has names
        outside of `inert_names`.
    """
    files = deepspeed_files.read(deepspeed_files.folder_of(path))
    return OpenedCheckpoint(
        format=f"DeepSpeed ZeRO-{_stage(files)}",
        tensors=_tensors(files),
        axes={"tp": files.tp} if files.tp > 1 else {},
        values=_values(files),
        checksums=torch_file.checksums,
    )


def _stage(files: Files) -> int:
    if not files.optimizers:
        return 0
    # Optimizers of bfloat16 parameters do not state it.
    stage = files.optimizers[0, 0].at("optimizer_state_dict", "zero_stage")
    return stage if type(stage) is int else 1


def _values(files: Files) -> dict[str, Any]:
    values = deepspeed_files.model_values(files.models[0])
    if files.optimizers:
        file = files.optimizers[0, 0]
        flat = plain_values.flatten(
            file.at("optimizer_state_dict"),
            file=file.path,
            without=("param_slice_mappings",),
            budget=file.budget,
        )
        values |= {f"optimizer/{path}": value for path, value in flat.items()}
    return values


def _tensors(files: Files) -> list[StoredTensor]:
    held: dict[tuple[str, str, int], StoredTensor] = {}
    for rank in sorted(files.models):
        tp, _ = files.coordinates(rank)
        for tensor in _of_rank(files, rank, (("tp", tp),) if files.tp > 1 else ()):
            first = held.setdefault((tensor.name, tensor.kind, tp), tensor)
            is_tied = tensor.name.startswith(deepspeed_weights.TIED)
            if first is not tensor and not (is_tied and first.shape == tensor.shape):
                raise files.models[rank].error(
                    f"and another stage both have {tensor.name}; only tied parameters"
                    " are in several stages"
                )
    return list(held.values())


def _of_rank(
    files: Files, rank: int, ranks: tuple[tuple[str, int], ...]
) -> Iterator[StoredTensor]:
    weights = list(deepspeed_weights.weights(files, rank))
    for each in [*weights, *_states(files, rank, weights)]:
        yield dataclasses.replace(each, ranks=ranks) if ranks else each


def _states(
    files: Files, rank: int, weights: Sequence[StoredTensor]
) -> Iterator[StoredTensor]:
    parameters = [each for each in weights if each.kind == "parameter"]
    if files.optimizers:
        yield from map(_stored, zero_states.states(files, rank))
    elif files.expert_optimizers:
        yield from expert_states.states(files, rank, parameters)
    elif files.models[rank].at("optimizer") is not None:
        file = files.models[rank]
        yield from numbered_states.states(file, parameters, ("optimizer",))


def _stored(state: State) -> StoredTensor:
    flat = state.ranges[0].flat if state.ranges else None
    if flat is not None and not flat.shape:
        fragments = state.ranges[0].file.fragment(flat)
    else:
        fragments = flat_parameters.fragments(state.shape, state.ranges, state.name)
    return StoredTensor(
        name=state.name,
        kind=state.kind,
        dtype=state.dtype,
        shape=state.shape,
        fragments=fragments,
    )
