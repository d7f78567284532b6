"""The layout of a DeepSpeed checkpoint that its own description makes.

    described_layout.layout(checkpoint)

It relates the tensors of all ranks with whole parameters, under the parameters' names:
`parameter/1.mlp.weight` the weights of the model, `master/...`, `first_moment/...`,
`second_moment/...` and `step/...` the optimizer's. Rules hold for names that differ in
numbers alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from elastic_ckpt.universal.deepspeed_layout.description import FACTS, Description
from elastic_ckpt.universal.deepspeed_layout.shards import AXIS, Geometry
from elastic_ckpt.universal.formats import deepspeed_files
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.rules import name_pattern
from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.rules.rule import Rule, TensorPattern
from elastic_ckpt.universal.rules.state import PARAMETER, State
from elastic_ckpt.universal.stored import Checkpoint

FORMAT = "DeepSpeed"
_UNIVERSAL = "DeepSpeed universal"
_BUFFER = "buffer"
# Numbers that a capture matches: without leading zeros, of 18 digits at most.
_NUMBER = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,17})(?![0-9])")

# The geometries of a parameter and its states, with the kinds that have them.
_Kinds = tuple[tuple[Geometry, tuple[str, ...]], ...]


def layout(checkpoint: Checkpoint, targets: Collection[str] | None = None) -> Layout:
    """The layout from the tensors of a checkpoint to its parameters.

    Args:
      checkpoint: of DeepSpeed.
      targets: the names of the target's tensors; kinds that none of them is of are
        dropped. None for all kinds.

    Raises:
      FormatError: if it is of another format, has no description, or one that does not
        fit its tensors.
    """
    if not checkpoint.format.startswith(FORMAT):
        raise FormatError(
            f"a checkpoint of the format {checkpoint.format} has no layout; give one"
        )
    info = checkpoint.values.get(deepspeed_files.INFO)
    ranks = checkpoint.axes.get(AXIS, 1)
    if info is None and ranks > 1:
        raise FormatError(
            f"the checkpoint has {ranks} tensor-parallel ranks, and no"
            f" {deepspeed_files.INFO} that describes their shards; give a layout"
        )
    # In a universal checkpoint, parameters are whole.
    is_whole = checkpoint.format == _UNIVERSAL
    description = Description({} if is_whole else _checked(info))
    kept = None if targets is None else {name.partition("/")[0] for name in targets}
    kinds = sorted({tensor.kind for tensor in checkpoint.tensors})
    return Layout(
        rules=tuple(_rules(_named(checkpoint, description, ranks))),
        states={
            kind: State(
                source=PARAMETER,
                target=None
                if kept is not None and kind not in kept
                else f"{kind}/{PARAMETER}",
            )
            for kind in kinds
        },
        place=f"DeepSpeed's {deepspeed_files.INFO}",
    )


def facts(checkpoint: Checkpoint) -> dict[str, dict[str, Any]]:
    """How ranks cut the parameters of a checkpoint, as universal checkpoints have it.

    Args:
      checkpoint: of any format; only DeepSpeed's have such facts.

    Returns:
      The facts of `UniversalFolder.write` by parameter; none where DeepSpeed's defaults
      hold.

    Raises:
      FormatError: if the description is malformed.
    """
    names = {tensor.name for tensor in checkpoint.tensors}
    if not checkpoint.format.startswith(FORMAT):
        return {}
    if checkpoint.format == _UNIVERSAL:
        return {
            name: {
                key: checkpoint.values[f"parameters/{name}/{key}"]
                for key in FACTS
                if f"parameters/{name}/{key}" in checkpoint.values
            }
            for name in names
        }
    description = Description(_checked(checkpoint.values.get(deepspeed_files.INFO)))
    return {name: description.facts(name) for name in names}


def _checked(info: Any) -> Mapping[str, Any]:
    if info is not None and not isinstance(info, dict):
        raise FormatError(f"{deepspeed_files.INFO} is no dict; give a layout")
    return info or {}


def _named(
    checkpoint: Checkpoint, description: Description, ranks: int
) -> dict[str, _Kinds]:
    # The geometries of each parameter.
    shapes: dict[str, dict[str, dict[int, tuple[int, ...]]]] = {}
    for tensor in checkpoint.tensors:
        rank = dict(tensor.ranks).get(AXIS, 0)
        kinds = shapes.setdefault(tensor.name, {})
        kinds.setdefault(tensor.kind, {})[rank] = tensor.shape
    named = {}
    for name, kinds in shapes.items():
        # By shapes and whether it is a buffer.
        alike: dict[tuple[tuple[tuple[int, ...], ...], bool], list[str]] = {}
        for kind, by_rank in kinds.items():
            lacking = [rank for rank in range(ranks) if rank not in by_rank]
            if lacking:
                raise FormatError(
                    f"the tensor-parallel rank {lacking[0]} lacks {name} ({kind}),"
                    " which others have"
                )
            held = tuple(by_rank[rank] for rank in range(ranks))
            alike.setdefault((held, kind == _BUFFER), []).append(kind)
        by_geometry: dict[Geometry, list[str]] = {}
        for (held, is_buffer), of_kind in alike.items():
            geometry = description.geometry(name, held, is_buffer=is_buffer)
            by_geometry.setdefault(geometry, []).extend(of_kind)
        named[name] = tuple(
            (geometry, tuple(sorted(each))) for geometry, each in by_geometry.items()
        )
    return named


def _rules(named: Mapping[str, _Kinds]) -> Iterator[Rule]:
    by_template: dict[str, list[str]] = {}
    for name in named:
        by_template.setdefault(template(name), []).append(name)
    for pattern, names in by_template.items():
        alike = len({named[name] for name in names}) == 1
        for name in names[:1] if alike else names:
            for geometry, kinds in named[name]:
                one = pattern if alike else name_pattern.pattern_of(name)
                yield _rule(one, geometry, kinds)


def template(name: str) -> str:
    """The name pattern of `name` and all names that differ from it in numbers alone."""
    parts = _NUMBER.split(name_pattern.pattern_of(name))
    captures = (f"{{n{number}:01}}" for number in range(len(parts)))
    return parts[0] + "".join(
        capture + part for capture, part in zip(captures, parts[1:], strict=False)
    )


def _rule(name: str, geometry: Geometry, kinds: Sequence[str]) -> Rule:
    reduced = geometry.reduced
    source = TensorPattern(
        name=name,
        dims=geometry.source,
        scale=geometry.scale,
        replicated=(AXIS,) if reduced == "replicated" else (),
        mean=(AXIS,) if reduced == "mean" else (),
    )
    return Rule(
        source=(source,),
        target=(TensorPattern(name=name, dims=geometry.target),),
        pad=dict.fromkeys(geometry.pad, 0.0),
        sizes=dict(geometry.sizes),
        widths={each: {AXIS: widths} for each, widths in geometry.widths},
        states=tuple(kinds),
    )
