"""The layout of a conversion without rules: a checkpoint's description, or its names.

A DeepSpeed checkpoint describes how its ranks share parameters. Tensors of other
formats keep their names if they are global. If there are several kinds of tensors, the
kind comes first, as in `deepspeed_layout`: `first_moment/1.mlp.weight`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Set

from elastic_ckpt.core import errors
from elastic_ckpt.universal import shipped_layouts
from elastic_ckpt.universal.deepspeed_layout import described_layout
from elastic_ckpt.universal.rules import name_pattern
from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.rules.rule import Rule, side
from elastic_ckpt.universal.rules.state import ONLY_PARAMETERS, PARAMETER, State
from elastic_ckpt.universal.stored import Checkpoint

_WEIGHTS = "parameter"
# As DeepSpeed's own conversion, which has frozen weights and buffers among them.
_MASTERS = ("master", _WEIGHTS, "buffer")


def layout(checkpoint: Checkpoint, *, of_optimizer: bool = False) -> Layout:
    """The layout from the tensors of a checkpoint to whole tensors of their names.

    Args:
      checkpoint: that is open.
      of_optimizer: whether the target has the tensors of an optimizer alone, in
        float32: states and masters, which are the weights that have no others.

    Raises:
      FormatError: if the description of a DeepSpeed checkpoint is missing or wrong.
      LayoutError: if the tensors of another format are those of ranks, or there are no
        tensors; the message names the layouts that ship and fit.
    """
    if checkpoint.format.startswith(described_layout.FORMAT):
        made = described_layout.layout(checkpoint)
    else:
        made = _same_names(checkpoint)
    return _of_optimizer(made, checkpoint) if of_optimizer else made


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
        rules=tuple(_rules(checkpoint)),
        states=ONLY_PARAMETERS if kinds == [_WEIGHTS] else states,
        place="the layout of the same names",
    )


def _rules(checkpoint: Checkpoint) -> Iterator[Rule]:
    # The kinds of each name, by their number of dims.
    named: dict[str, dict[int, list[str]]] = {}
    for tensor in checkpoint.tensors:
        kinds = named.setdefault(tensor.name, {})
        kinds.setdefault(len(tensor.shape), []).append(tensor.kind)
    by_template: dict[str, list[str]] = {}
    for name in named:
        by_template.setdefault(described_layout.template(name), []).append(name)
    for template, names in by_template.items():
        first = _sorted(named[names[0]])
        alike = all(_sorted(named[name]) == first for name in names)
        for name in names[:1] if alike else names:
            for num_dims, kinds in _sorted(named[name]):
                dims = " ".join(f"d{dim}" for dim in range(num_dims))
                pattern = template if alike else name_pattern.pattern_of(name)
                tensors = side({pattern: dims})
                yield Rule(source=tensors, target=tensors, states=kinds)


def _sorted(kinds: dict[int, list[str]]) -> list[tuple[int, tuple[str, ...]]]:
    return [(dims, tuple(sorted(each))) for dims, each in sorted(kinds.items())]


def _of_optimizer(made: Layout, checkpoint: Checkpoint) -> Layout:
    # The masters of a name are of the first of `_MASTERS` that it has.
    kinds_of: dict[str, set[str]] = {}
    for tensor in checkpoint.tensors:
        kinds_of.setdefault(tensor.name, set()).add(tensor.kind)
    drop = {
        (tensor.kind, name_pattern.glob_of(tensor.name)): None
        for tensor in checkpoint.tensors
        if _is_dropped(tensor.kind, kinds_of[tensor.name])
    }
    # Names that a pattern matches have the same kinds.
    patterns: dict[str, set[str]] = {}
    for rule in made.rules:
        patterns.setdefault(rule.source[0].name, set()).update(rule.states or ())
    rules = []
    for rule in made.rules:
        held = patterns[rule.source[0].name]
        kept = tuple(k for k in rule.states or () if not _is_dropped(k, held))
        target = tuple(
            dataclasses.replace(tensor, dtype="float32") for tensor in rule.target
        )
        if kept:
            rules.append(dataclasses.replace(rule, target=target, states=kept))
    states = {
        kind: _state(_MASTERS[0] if kind in _MASTERS else kind) for kind in made.states
    }
    return dataclasses.replace(
        made, states=states, rules=tuple(rules), drop_of_kind=tuple(drop)
    )


def _is_dropped(kind: str, kinds: Set[str]) -> bool:
    # Whether others of the kinds of the same name are the masters.
    return kind in _MASTERS and kind != next(k for k in _MASTERS if k in kinds)


def _state(kind: str) -> State:
    return State(source=PARAMETER, target=f"{kind}/{PARAMETER}")
