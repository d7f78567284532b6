"""The layout of a DeepSpeed checkpoint that its own description makes.

    described_layout.layout(checkpoint)

It relates the tensors of all ranks with whole parameters, under the parameters' names:
`parameter/1.mlp.weight` the weights of the model, `master/...`, `first_moment/...`,
`second_moment/...` and `step/...` the optimizer's. Rules hold for names that differ in
numbers alone.

The description is the value `universal_checkpoint_info`: lists of regular expressions,
one for each way in which a parameter can be cut. Their precedence and defaults are
those of DeepSpeed's `ds_to_universal`: a parameter that no list has is cut along its
first dim. All shards of a parameter are equal; affine maps and shards of different
widths, which AutoTP writes, are refused.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from elastic_ckpt.universal.formats import deepspeed
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.rules import name_pattern
from elastic_ckpt.universal.rules.layout import (
    PARAMETER,
    Layout,
    Rule,
    State,
    TensorPattern,
)
from elastic_ckpt.universal.stored import Checkpoint

FORMAT = "DeepSpeed"
_UNIVERSAL = "DeepSpeed universal"
_BUFFER = "buffer"
_AXIS = "tp"
# Numbers that a capture matches: without leading zeros, of 18 digits at most.
_NUMBER = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,17})(?![0-9])")

_NEWEST = 0.4
_REPLICATED = "tp_replicated_parameter_patterns"
_AVERAGED = "parameter_to_average_patterns"
_HALVES = "parameter_with_2_sub_params_cat_dim_0"
_PARTS = "parameter_with_sub_params"
_ROWS = "parameter_with_row_parallelism_patterns"
_VOCABULARY = "vocabulary_parameter_patterns"
# The dims of a shard by list, in the order of their precedence; those of the parameter
# are the same without "@tp". `rows` is `d0`, or in a shard `(d0 + pad)`.
_DIMS = {
    _REPLICATED: "{rows} ...",
    _AVERAGED: "{rows} ...",
    _HALVES: "(part d0@tp) ...",
    _PARTS: "",
    _ROWS: "{rows} d1@tp ...",
}
_UNLISTED = "{rows}@tp ..."
# What AutoTP adds to the lists.
_REFUSED = (
    "affine_map",
    "sub_param_shard_widths",
    "autotp_unsupported_parameter_patterns",
)

_Shape = tuple[int, ...]
_Value = TypeVar("_Value")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """How the shards of a parameter relate to it.

    Attributes:
      source: the dims of a shard.
      target: those of the parameter.
      key: of the list that has the parameter; "" if none has.
      sizes: by name.
    """

    source: str
    target: str
    key: str
    sizes: tuple[tuple[str, int], ...] = ()


def layout(checkpoint: Checkpoint, targets: Collection[str] | None = None) -> Layout:
    """The layout from the tensors of a checkpoint to its parameters.

    Args:
      checkpoint: of DeepSpeed.
      targets: the names of the target's tensors; kinds that none of them is of are
        dropped. None for all kinds.

    Raises:
      FormatError: if it has no description, or one that does not fit its tensors.
    """
    info = checkpoint.values.get(deepspeed.INFO)
    ranks = checkpoint.axes.get(_AXIS, 1)
    if info is None and ranks > 1:
        raise FormatError(
            f"the checkpoint has {ranks} tensor-parallel ranks, and no"
            f" {deepspeed.INFO} that describes their shards; give a layout"
        )
    # In a universal checkpoint, parameters are whole.
    description = _Description({} if checkpoint.format == _UNIVERSAL else info)
    kept = None if targets is None else {name.partition("/")[0] for name in targets}
    states = {
        kind: State(
            source=PARAMETER,
            target=f"{kind}/{PARAMETER}" if kept is None or kind in kept else None,
        )
        for kind in sorted({tensor.kind for tensor in checkpoint.tensors})
    }
    return Layout(
        rules=tuple(_rules(_cuts(checkpoint, description, ranks))),
        states=states,
        place=f"DeepSpeed's {deepspeed.INFO}",
    )


def template(name: str) -> str:
    """The name pattern of `name` and all names that differ from it in numbers alone."""
    first, *following = _NUMBER.split(name_pattern.pattern_of(name))
    return first + "".join(f"{{n{n}:01}}{part}" for n, part in enumerate(following))


def _cuts(
    checkpoint: Checkpoint, description: _Description, ranks: int
) -> dict[str, dict[_Cut, list[str]]]:
    # Of each parameter, with the kinds that are cut so.
    shapes: dict[tuple[str, str], list[_Shape]] = {}
    for tensor in checkpoint.tensors:
        shapes.setdefault((tensor.name, tensor.kind), []).append(tensor.shape)
    made: dict[str, dict[_Cut, list[str]]] = {}
    for (name, kind), held in sorted(shapes.items()):
        if len(held) < ranks:
            raise FormatError(
                f"{len(held)} of {ranks} tensor-parallel ranks have {name} ({kind})"
            )
        try:
            cut = description.cut(name, set(held), is_buffer=kind == _BUFFER)
        except FormatError as error:
            raise FormatError(f"{name}: {error} (by {deepspeed.INFO})") from None
        made.setdefault(name, {}).setdefault(cut, []).append(kind)
    return made


def _rules(named: Mapping[str, Mapping[_Cut, Sequence[str]]]) -> Iterator[Rule]:
    by_template: dict[str, list[str]] = {}
    for name in named:
        by_template.setdefault(template(name), []).append(name)
    for pattern, names in by_template.items():
        alike = all(named[name] == named[names[0]] for name in names)
        for name in names[:1] if alike else names:
            for cut, kinds in named[name].items():
                one = pattern if alike else name_pattern.pattern_of(name)
                yield _rule(one, cut, tuple(kinds))


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


class _Description:
    """A parsed description.

    Args:
      info: of dicts and lists; None for one without patterns.

    Raises:
      FormatError: if it is malformed, newer than what is read, or AutoTP's.
    """

    def __init__(self, info: Any) -> None:
        self._info = _typed(dict, {} if info is None else info, deepspeed.INFO)
        version = self._info.get("universal_checkpoint_version", 0.0)
        if type(version) not in (int, float) or not 0 <= version <= _NEWEST:
            raise FormatError(
                f"{deepspeed.INFO} has the version {version!r}, and 0 to {_NEWEST} are"
                " read; give a layout of your own"
            )
        for key in _REFUSED:
            if self._info.get(key):
                raise FormatError(
                    f"{deepspeed.INFO} has {key}, of AutoTP, which is not read; give a"
                    " layout of your own"
                )
        # The list of each pattern, the pattern, and the entry of parts.
        self._entries: list[tuple[str, re.Pattern[str], Any]] = [
            (key, _compiled(text, key), entry)
            for key in (*_DIMS, _VOCABULARY)
            for entry in self._list(key)
            for text in (_patterns(entry) if key == _PARTS else [entry])
        ]

    def _list(self, key: str) -> list[Any]:
        return _typed(list, self._info.get(key, []), key)

    def cut(self, name: str, shapes: Collection[_Shape], *, is_buffer: bool) -> _Cut:
        """How a parameter, or a state of it, is cut.

        Args:
          name: of the parameter.
          shapes: of its shards, without duplicates.
          is_buffer: whether it is a buffer, which ranks share unless a list has it.

        Raises:
          FormatError: if the description does not fit it.
        """
        if len(shapes) > 1:
            raise FormatError(
                f"ranks have shards of the shapes {sorted(shapes)}, and equal ones"
                " alone are read; give a layout of your own, with `widths`"
            )
        if () in shapes:
            return _Cut(source="...", target="...", key=_REPLICATED)
        matched = self._matched(name)
        found = next((key for key in _DIMS if key in matched), "")
        if is_buffer and not matched:
            found = _REPLICATED
        dims = _DIMS.get(found, _UNLISTED)
        sizes = {"part": 2} if found == _HALVES else {}
        if found == _PARTS:
            dims, sizes = _joined(matched[_PARTS])
        rows = "d0"
        if _VOCABULARY in matched:
            if found in (_HALVES, _PARTS):
                raise FormatError(f"{found} and {_VOCABULARY} both have it")
            kept = self._info.get("original_vocab_size")
            if type(kept) is not int or kept < 1:
                raise FormatError(f"original_vocab_size is {kept!r}")
            rows, sizes = "(d0 + pad)", {"d0": kept}
        return _Cut(
            source=dims.format(rows=rows),
            target=dims.format(rows="d0").replace(f"@{_AXIS}", ""),
            key=found,
            sizes=tuple(sizes.items()),
        )

    def _matched(self, name: str) -> dict[str, Any]:
        # By list: the entry of parts. Its first pattern that matches counts.
        matched: dict[str, Any] = {}
        for key, pattern, entry in self._entries:
            if pattern.match(name):
                if key in matched and key != _PARTS:
                    raise FormatError(f"two patterns of {key} match it")
                matched.setdefault(key, entry)
        return matched


def _joined(entry: Any) -> tuple[str, dict[str, int]]:
    # The dims of a shard of parameters that are joined along a dim, and their sizes:
    # a list of them, or the number of equal ones.
    dim, shape = entry.get("partition_dim"), _typed(list, entry.get("shape"), _PARTS)
    if type(dim) is not int or not 0 <= dim < len(shape):
        raise FormatError(f"{_PARTS} has the dim {dim!r} of the shape {shape}")
    lengths = shape[dim]
    if type(lengths) is int:
        parts, sizes = f"part d{dim}@{_AXIS}", {"part": lengths}
    else:
        names = [f"p{number}" for number in range(len(_typed(list, lengths, _PARTS)))]
        parts = " + ".join(f"{name}@{_AXIS}" for name in names)
        sizes = dict(zip(names, lengths, strict=True))
    if not all(type(each) is int and each > 0 for each in sizes.values()):
        raise FormatError(f"{_PARTS} has sizes that are none: {lengths}")
    return " ".join([*(f"d{n}" for n in range(dim)), f"({parts})", "..."]), sizes


def _patterns(entry: Any) -> list[Any]:
    return _typed(list, _typed(dict, entry, _PARTS).get("patterns"), _PARTS)


def _typed(kind: type[_Value], value: Any, key: str) -> _Value:
    if not isinstance(value, kind):
        name = "text" if kind is str else kind.__name__
        raise FormatError(f"{key} is no {name}, or lacks one")
    return value


def _compiled(pattern: Any, key: str) -> re.Pattern[str]:
    text = _typed(str, pattern, key)
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise FormatError(
            f"the pattern {text[:200]!r} is no regular expression ({error}); give a"
            " layout of your own"
        ) from None
