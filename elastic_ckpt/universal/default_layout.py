"""The layout of a checkpoint for which none is given: its description, or its names.

A DeepSpeed checkpoint describes how its ranks share parameters. An adapter is merged
into its base, by a layout that ships. Tensors of other formats keep their names if they
are global. If there are several kinds of tensors, the kind comes first, as in
`deepspeed_layout`: `first_moment/1.mlp.weight`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from elastic_ckpt.core import errors
from elastic_ckpt.universal import shipped_layouts
from elastic_ckpt.universal.deepspeed_layout import described_layout
from elastic_ckpt.universal.formats import peft_adapter
from elastic_ckpt.universal.formats.opened import OpenedCheckpoint
from elastic_ckpt.universal.rules import name_pattern
from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.rules.rule import Rule, side
from elastic_ckpt.universal.rules.state import ONLY_PARAMETERS, PARAMETER, State
from elastic_ckpt.universal.stored import Checkpoint

_WEIGHTS = "parameter"
# As DeepSpeed's own conversion, which has frozen weights and buffers among them.
_MASTERS = ("master", _WEIGHTS, "buffer")
# Each tensor becomes that of its name.
SAME_NAMES = Rule(
    source=side({"{name:path}": "..."}),
    target=side({"{name:path}": "..."}),
    place="the layout of the same names",
)


def layout(
    checkpoint: Checkpoint,
    targets: Collection[str] | None = None,
    *,
    of_optimizer: bool = False,
) -> Layout:
    """The layout from the tensors of a checkpoint to whole tensors of their names.

    Args:
      checkpoint: that is open.
      targets: the names of the target's tensors; None if they are those that the layout
        makes.
      of_optimizer: whether the target has the tensors of an optimizer alone, in
        float32: states and masters, which are the weights that have no others.

    Raises:
      FormatError: if the description of a DeepSpeed checkpoint is missing or wrong.
      LayoutError: if the tensors of another format are those of ranks, or there are no
        tensors; the message names the layouts that ship and fit.
    """
    if checkpoint.format.startswith(peft_adapter.FORMAT):
        return shipped_layouts.load("lora")
    drop: list[tuple[str, str]] = []
    if of_optimizer:
        checkpoint, drop = _of_optimizer(checkpoint)
    if checkpoint.format.startswith(described_layout.FORMAT):
        made = described_layout.layout(checkpoint, targets)
    else:
        made = _same_names(checkpoint)
    if not of_optimizer:
        return made
    return dataclasses.replace(
        made,
        rules=tuple(_in_float32(rule) for rule in made.rules),
        states={kind: _state(kind, of_optimizer=True) for kind in made.states},
        drop_of_kind=tuple(drop),
    )


def _same_names(checkpoint: Checkpoint) -> Layout:
    tensors = checkpoint.tensors
    if not tensors or any(tensor.ranks for tensor in tensors):
        names = shipped_layouts.fitting(tensors)
        choice = f"; {errors.first_of(names)} ships and fits its names" if names else ""
        raise LayoutError(
            f"the checkpoint of the format {checkpoint.format} has"
            f" {'shards of ranks' if tensors else 'no tensors'}, which only rules"
            f" relate with whole tensors; give `rules`{choice}"
        )
    kinds = sorted({tensor.kind for tensor in tensors})
    states = {kind: _state(kind) for kind in kinds}
    return Layout(
        rules=(SAME_NAMES,),
        states=ONLY_PARAMETERS if kinds == [_WEIGHTS] else states,
        place="the layout of the same names",
    )


def _of_optimizer(
    checkpoint: Checkpoint,
) -> tuple[Checkpoint, list[tuple[str, str]]]:
    # A checkpoint of the tensors of the optimizer, and the kinds and names of others:
    # the masters of a name are of the first of `_MASTERS` that it has.
    kinds_of: dict[str, set[str]] = {}
    for tensor in checkpoint.tensors:
        kinds_of.setdefault(tensor.name, set()).add(tensor.kind)
    kept, dropped = [], {}
    for tensor in checkpoint.tensors:
        masters = [kind for kind in _MASTERS if kind in kinds_of[tensor.name]]
        if tensor.kind in masters[1:]:
            dropped[tensor.kind, name_pattern.glob_of(tensor.name)] = None
        else:
            kept.append(tensor)
    opened = OpenedCheckpoint(
        format=checkpoint.format,
        tensors=kept,
        axes=checkpoint.axes,
        values=checkpoint.values,
    )
    return opened, list(dropped)


def _in_float32(rule: Rule) -> Rule:
    target = (dataclasses.replace(tensor, dtype="float32") for tensor in rule.target)
    return dataclasses.replace(rule, target=tuple(target))


def _state(kind: str, *, of_optimizer: bool = False) -> State:
    if of_optimizer and kind in _MASTERS:
        kind = _MASTERS[0]
    return State(source=PARAMETER, target=f"{kind}/{PARAMETER}")
