"""Derives a DeepSpeed checkpoint's layout from the checkpoint's own description.

    deepspeed_rules.layout(checkpoint)

The layout relates the tensors of all ranks to whole parameters, under the parameters'
names: model weights as `parameter/1.mlp.weight`, optimizer states as `master/...`,
`first_moment/...`, `second_moment/...` and `step/...`. A rule covers names that differ
only in numbers.

The description is the value `universal_checkpoint_info`: lists of regular expressions,
one list for each way to shard a parameter. Precedence and defaults are the same as in
DeepSpeed's `ds_to_universal`: a parameter that is not in any list is sharded along its
first dim. All shards of a parameter must have the same shape; AutoTP's affine maps and
shards of different widths are rejected.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from elastic_ckpt.universal.formats import deepspeed
from elastic_ckpt.universal.formats.checkpoint import Checkpoint
from elastic_ckpt.universal.formats.files import FormatError
from elastic_ckpt.universal.rules import names
from elastic_ckpt.universal.rules.layout import (
    PARAMETER,
    Layout,
    Rule,
    State,
    TensorPattern,
)

_BUFFER = "buffer"
_AXIS = "tp"
# The numbers that a layout's captures match: no leading zeros, at most 18 digits.
_NUMBER = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,17})(?![0-9])")

_NEWEST = 0.4
_REPLICATED = "tp_replicated_parameter_patterns"
_AVERAGED = "parameter_to_average_patterns"
_HALVES = "parameter_with_2_sub_params_cat_dim_0"
_PARTS = "parameter_with_sub_params"
_ROWS = "parameter_with_row_parallelism_patterns"
_VOCABULARY = "vocabulary_parameter_patterns"
# A shard's dims by list, in order of precedence; the parameter's dims are the same
# without "@tp". `rows` is `d0`, or in a shard `(d0 + pad)`.
_DIMS = {
    _REPLICATED: "{rows} ...",
    _AVERAGED: "{rows} ...",
    _HALVES: "(part d0@tp) ...",
    _PARTS: "",
    _ROWS: "{rows} d1@tp ...",
}
_UNLISTED = "{rows}@tp ..."
# Keys that AutoTP adds to the lists.
_REFUSED = (
    "affine_map",
    "sub_param_shard_widths",
    "autotp_unsupported_parameter_patterns",
)
_OWN = "specify your own layout"

_Shape = tuple[int, ...]
# The name of a list, a pattern in it, and the pattern's entry in the list.
_Entry = tuple[str, re.Pattern[str], Any]


class _Cut(NamedTuple):
    # The dims of a shard and of its parameter, the shard's list, and sizes by name.
    source: str
    target: str
    key: str
    sizes: tuple[tuple[str, int], ...] = ()


def layout(checkpoint: Checkpoint, targets: Collection[str] | None = None) -> Layout:
    """The layout that maps a checkpoint's tensors to its parameters.

    If `targets`, the names of the target's tensors, is not None, kinds that do not
    occur in it are dropped.

    Raises:
      FormatError: if the description is missing or does not match the tensors.
    """
    info = checkpoint.values.get(deepspeed.INFO)
    ranks = checkpoint.axes.get(_AXIS, 1)
    if info is None and ranks > 1:
        raise FormatError(
            f"the checkpoint has {ranks} tensor-parallel ranks, but no"
            f" {deepspeed.INFO} to describe their shards; specify a layout"
        )
    # In a universal checkpoint, parameters are whole.
    is_whole = info is None or checkpoint.format == deepspeed.UNIVERSAL
    shapes: dict[tuple[str, str], list[_Shape]] = {}
    for tensor in checkpoint.tensors:
        shapes.setdefault((tensor.name, tensor.kind), []).append(tensor.shape)
    try:
        entries = [] if is_whole else _entries(info)
        cuts: dict[str, dict[_Cut, list[str]]] = {}
        for (name, kind), held in sorted(shapes.items()):
            if len(held) < ranks:
                raise FormatError(
                    f"only {len(held)} of {ranks} ranks have {name} ({kind}); add the"
                    " other ranks' files or, if this is an expert parameter, save again"
                    " with enable_expert_tensor_parallelism"
                )
            matched = {key: each for key, p, each in entries if p.match(name)}
            if kind == _BUFFER and not matched:
                # Buffers are identical on all ranks.
                matched = {_REPLICATED: None}
            cut = _cut(name, set(held), matched, info)
            cuts.setdefault(name, {}).setdefault(cut, []).append(kind)
    except (AttributeError, IndexError, KeyError, TypeError, re.error) as error:
        raise FormatError(
            f"{deepspeed.INFO} is malformed ({error!r:.300}); {_OWN}"
        ) from None
    kept = None if targets is None else {name.partition("/")[0] for name in targets}
    states = {
        kind: State(
            source=PARAMETER,
            target=f"{kind}/{PARAMETER}" if kept is None or kind in kept else None,
        )
        for kind in sorted({kind for _, kind in shapes})
    }
    by_template: dict[str, list[str]] = {}
    for name in cuts:
        by_template.setdefault(template(name), []).append(name)
    rules = []
    for pattern, held in by_template.items():
        alike = all(cuts[name] == cuts[held[0]] for name in held)
        for name in held[:1] if alike else held:
            one = pattern if alike else names.pattern_of(name)
            rules += [
                _rule(one, cut, tuple(kinds)) for cut, kinds in cuts[name].items()
            ]
    place = f"DeepSpeed's {deepspeed.INFO}"
    return Layout(rules=tuple(rules), states=states, place=place)


def template(name: str) -> str:
    """The pattern of all names that differ from `name` only in numbers."""
    first, *following = _NUMBER.split(names.pattern_of(name))
    return first + "".join(f"{{n{n}:01}}{part}" for n, part in enumerate(following))


def _rule(name: str, cut: _Cut, kinds: tuple[str, ...]) -> Rule:
    source = TensorPattern(
        name=name,
        dims=cut.source,
        replicated=(_AXIS,) if cut.key == _REPLICATED else (),
        mean=(_AXIS,) if cut.key == _AVERAGED else (),
    )
    return Rule(
        source=(source,),
        target=(TensorPattern(name=name, dims=cut.target),),
        pad={"pad": 0.0} if "pad" in cut.source else {},
        sizes=dict(cut.sizes),
        states=kinds,
    )


def _entries(info: Mapping[str, Any]) -> list[_Entry]:
    version = info.get("universal_checkpoint_version", 0.0)
    if not 0 <= version <= _NEWEST:
        raise FormatError(
            f"{deepspeed.INFO} has version {version!r}, but only versions 0 to"
            f" {_NEWEST} are supported; {_OWN}"
        )
    if refused := [key for key in _REFUSED if info.get(key)]:
        raise FormatError(
            f"{deepspeed.INFO} has AutoTP's {refused[0]}, which is not supported;"
            f" {_OWN}"
        )
    entries = [
        (key, re.compile(text), entry)
        for key in (*_DIMS, _VOCABULARY)
        for entry in info.get(key, ())
        for text in (entry["patterns"] if key == _PARTS else [entry])
    ]
    # The caller keeps the last match, so the first in a list must come last.
    return entries[::-1]


def _cut(
    name: str, shapes: Collection[_Shape], matched: Mapping[str, Any], info: Any
) -> _Cut:
    # How a parameter or one of its states is sharded.
    if len(shapes) > 1:
        raise FormatError(
            f"{name}: shards of different shapes, {sorted(shapes)}, are not supported;"
            f" {_OWN} with `widths`"
        )
    if () in shapes:
        return _Cut("...", "...", _REPLICATED)
    found = next((key for key in _DIMS if key in matched), "")
    dims, rows = _DIMS.get(found, _UNLISTED), "d0"
    sizes = {"part": 2} if found == _HALVES else {}
    if found == _PARTS:
        dims, sizes = _joined(**matched[_PARTS])
    if _VOCABULARY in matched:
        if found in (_HALVES, _PARTS):
            raise FormatError(
                f"{name}: {found} and {_VOCABULARY} in {deepspeed.INFO} both match it;"
                f" {_OWN}"
            )
        rows = "(d0 + pad)"
        sizes = {"d0": operator.index(info["original_vocab_size"])}
    target = dims.format(rows="d0").replace(f"@{_AXIS}", "")
    return _Cut(dims.format(rows=rows), target, found, tuple(sizes.items()))


def _joined(partition_dim: int, shape: Any, **_: Any) -> tuple[str, dict[str, int]]:
    # The dims of a shard of parameters that are joined along a dim, and sizes by name:
    # each part's length, or the number of equal parts.
    dim = range(len(shape))[partition_dim]
    parts, sizes = f"part d{dim}@{_AXIS}", {"part": shape[dim]}
    if not isinstance(shape[dim], int):
        sizes = {f"p{number}": length for number, length in enumerate(shape[dim])}
        parts = " + ".join(f"{each}@{_AXIS}" for each in sizes)
    return " ".join([*(f"d{n}" for n in range(dim)), f"({parts})", "..."]), sizes
