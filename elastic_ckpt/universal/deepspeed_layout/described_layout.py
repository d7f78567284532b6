"""The layout of a DeepSpeed checkpoint that its own description makes.

    described_layout.layout(checkpoint)

It relates the tensors of all ranks with whole parameters, under the parameters' names:
`parameter/1.mlp.weight` the weights of the model, `master/...`, `first_moment/...`,
`second_moment/...` and `step/...` the optimizer's. Rules hold for names that differ in
numbers alone.

The description is the value `universal_checkpoint_info`: lists of regular expressions,
one for each way in which a parameter can be cut, and affine maps. Their precedence and
defaults are those of DeepSpeed's `ds_to_universal`: a parameter that no list has is cut
along its first dim.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from elastic_ckpt.universal.deepspeed_layout import parts
from elastic_ckpt.universal.deepspeed_layout.parts import AXIS, Geometry, Shape
from elastic_ckpt.universal.formats import deepspeed
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

_NEWEST, _NEWEST_AFFINE = 0.4, 1
_REPLICATED = "tp_replicated_parameter_patterns"
_AVERAGED = "parameter_to_average_patterns"
_HALVES = "parameter_with_2_sub_params_cat_dim_0"
_ROWS = "parameter_with_row_parallelism_patterns"
_VOCABULARY = "vocabulary_parameter_patterns"
_UNSUPPORTED = "autotp_unsupported_parameter_patterns"
_LISTS = (_REPLICATED, _AVERAGED, _HALVES, _ROWS, _VOCABULARY)
_PARTS, _WIDTHS = "parameter_with_sub_params", "sub_param_shard_widths"
_AFFINE = "affine_map"

_Value = TypeVar("_Value")


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
    info = checkpoint.values.get(deepspeed.INFO)
    ranks = checkpoint.axes.get(AXIS, 1)
    if info is None and ranks > 1:
        raise FormatError(
            f"the checkpoint has {ranks} tensor-parallel ranks, and no"
            f" {deepspeed.INFO} that describes their shards; give a layout"
        )
    # In a universal checkpoint, parameters are whole.
    description = Description({} if checkpoint.format == _UNIVERSAL else info)
    kept = None if targets is None else {name.partition("/")[0] for name in targets}
    states = {
        kind: State(
            source=PARAMETER,
            target=f"{kind}/{PARAMETER}" if kept is None or kind in kept else None,
        )
        for kind in sorted({tensor.kind for tensor in checkpoint.tensors})
    }
    return Layout(
        rules=tuple(_rules(_geometries(checkpoint, description, ranks))),
        states=states,
        place=f"DeepSpeed's {deepspeed.INFO}",
    )


def template(name: str) -> str:
    """The name pattern of `name` and all names that differ from it in numbers alone."""
    first, *following = _NUMBER.split(name_pattern.pattern_of(name))
    return first + "".join(f"{{n{n}:01}}{part}" for n, part in enumerate(following))


def _geometries(
    checkpoint: Checkpoint, description: Description, ranks: int
) -> dict[str, dict[Geometry, list[str]]]:
    # The geometries of each parameter, with the kinds that have them.
    shards: dict[tuple[str, str], dict[int, Shape]] = {}
    for tensor in checkpoint.tensors:
        rank = dict(tensor.ranks).get(AXIS, 0)
        shards.setdefault((tensor.name, tensor.kind), {})[rank] = tensor.shape
    made: dict[str, dict[Geometry, list[str]]] = {}
    for (name, kind), held in sorted(shards.items()):
        lacking = [rank for rank in range(ranks) if rank not in held]
        if lacking:
            raise FormatError(
                f"the tensor-parallel rank {lacking[0]} lacks {name} ({kind}),"
                " which others have"
            )
        shapes = [held[rank] for rank in range(ranks)]
        geometry = description.geometry(name, shapes, is_buffer=kind == _BUFFER)
        made.setdefault(name, {}).setdefault(geometry, []).append(kind)
    return made


def _rules(named: Mapping[str, Mapping[Geometry, Sequence[str]]]) -> Iterator[Rule]:
    by_template: dict[str, list[str]] = {}
    for name in named:
        by_template.setdefault(template(name), []).append(name)
    for pattern, names in by_template.items():
        alike = all(named[name] == named[names[0]] for name in names)
        for name in names[:1] if alike else names:
            for geometry, kinds in named[name].items():
                one = pattern if alike else name_pattern.pattern_of(name)
                yield _rule(one, geometry, tuple(kinds))


def _rule(name: str, geometry: Geometry, kinds: tuple[str, ...]) -> Rule:
    source = TensorPattern(
        name=name,
        dims=geometry.source,
        scale=geometry.scale,
        replicated=(AXIS,) if geometry.reduced == "replicated" else (),
        mean=(AXIS,) if geometry.reduced == "mean" else (),
    )
    return Rule(
        source=(source,),
        target=(TensorPattern(name=name, dims=geometry.target),),
        pad=dict.fromkeys(geometry.pad, 0.0),
        sizes=dict(geometry.sizes),
        widths={each: {AXIS: widths} for each, widths in geometry.widths},
        states=kinds,
    )


class Description:
    """A parsed description.

    Args:
      info: of dicts and lists; None for one without patterns.

    Raises:
      FormatError: if it is malformed, or newer than what is read.
    """

    def __init__(self, info: Any) -> None:
        self._info = _typed(dict, {} if info is None else info, deepspeed.INFO)
        version = self._info.get("universal_checkpoint_version", 0.0)
        if type(version) not in (int, float) or not 0 <= version <= _NEWEST:
            raise FormatError(
                f"universal_checkpoint_info has the version {version!r}, and 0 to"
                f" {_NEWEST} are read; give a layout of your own"
            )
        if self._info.get(_UNSUPPORTED):
            raise FormatError(
                f"universal_checkpoint_info has {_UNSUPPORTED}: it does not describe"
                " all parameters; give a layout of your own"
            )
        self._has_widths = version >= _NEWEST
        affine = self._value(dict, _AFFINE)
        if affine.get("version", _NEWEST_AFFINE) != _NEWEST_AFFINE:
            raise FormatError(
                f"affine maps have the version {affine['version']!r}, and"
                f" {_NEWEST_AFFINE} is read; give a layout of your own"
            )
        maps = _typed(dict, affine.get("params", {}), _AFFINE)
        # The list of each pattern, its text, and what it stands for.
        self._entries: list[tuple[str, str, Any]] = [
            *((key, text, None) for key in _LISTS for text in self._value(list, key)),
            *(
                (_PARTS, text, each)
                for each in self._value(list, _PARTS)
                for text in _typed(
                    list, _typed(dict, each, _PARTS).get("patterns"), _PARTS
                )
            ),
            *((_AFFINE, text, each) for text, each in maps.items()),
        ]
        texts = [_typed(str, text, key) for key, text, _ in self._entries]
        self._patterns = [_compiled(text) for text in texts]

    def geometry(
        self, name: str, shapes: Sequence[Shape], *, is_buffer: bool
    ) -> Geometry:
        """The dims of a parameter, or of a state of it.

        Args:
          name: of the parameter.
          shapes: of each rank's shard.
          is_buffer: whether it is a buffer, which ranks share unless a list has it.

        Raises:
          FormatError: if the description does not fit it.
        """
        try:
            return self._geometry(name, shapes, is_buffer)
        except FormatError as error:
            raise FormatError(
                f"{name}: {error} (by universal_checkpoint_info)"
            ) from None

    def _value(self, kind: type[_Value], key: str) -> _Value:
        return _typed(kind, self._info.get(key, kind()), key)

    def _geometry(
        self, name: str, shapes: Sequence[Shape], is_buffer: bool
    ) -> Geometry:
        if not shapes[0]:
            return parts.whole(shapes, "replicated")
        matched = self._matched(name)
        rows = self._info.get("original_vocab_size") if _VOCABULARY in matched else None
        if _VOCABULARY in matched and (type(rows) is not int or rows < 1):
            raise FormatError(f"original_vocab_size is {rows!r}")
        if _AFFINE in matched:
            return parts.mapped(shapes, matched[_AFFINE][1], rows)
        if _REPLICATED in matched or _AVERAGED in matched:
            reduced = "replicated" if _REPLICATED in matched else "mean"
            return parts.whole(shapes, reduced, rows)
        if _HALVES in matched:
            sizes = [shape[0] for shape in shapes]
            halves = [[-(-size // 2) for size in sizes], [size // 2 for size in sizes]]
            return parts.joined(shapes, 0, halves, rows)
        if _PARTS in matched:
            return parts.joined(shapes, *self._widths(*matched[_PARTS], shapes), rows)
        if is_buffer and not {_ROWS, _VOCABULARY} & matched.keys():
            return parts.whole(shapes, "replicated")
        dim = int(_ROWS in matched)
        return parts.joined(
            shapes, dim, [[sum(s[dim : dim + 1]) for s in shapes]], rows
        )

    def _matched(self, name: str) -> dict[str, tuple[str, Any]]:
        # By list: the pattern that matches, and what it stands for.
        matched: dict[str, tuple[str, Any]] = {}
        for entry, compiled in zip(self._entries, self._patterns, strict=True):
            if not compiled.match(name):
                continue
            key, pattern, value = entry
            if key in matched and key != _PARTS:
                first, _ = matched[key]
                raise FormatError(f"{first!r} and {pattern!r} of {key} both match it")
            matched.setdefault(key, (pattern, value))
        return matched

    def _widths(
        self, pattern: str, entry: Any, shapes: Sequence[Shape]
    ) -> tuple[int, list[list[int]]]:
        # The dim along which several parts are joined, and their widths by rank.
        dim, spec = entry.get("partition_dim"), _typed(list, entry.get("shape"), _PARTS)
        if type(dim) is not int or not 0 <= dim < len(spec):
            raise FormatError(f"{_PARTS} has the dim {dim!r} of the shape {spec}")
        ranks, sizes = len(shapes), spec[dim]
        if type(sizes) is int and sizes > 0 and not self._has_widths:
            # Earlier descriptions have the number of equal parts.
            total = sum(size for shape in shapes for size in shape[dim : dim + 1])
            sizes = [total // sizes] * sizes if total % sizes == 0 else None
        sizes = _numbers(sizes, _PARTS)
        widths = [[size // ranks] * ranks for size in sizes]
        if self._has_widths:
            held = _typed(list, self._value(dict, _WIDTHS).get(pattern), _WIDTHS)
            widths = [_numbers(each, _WIDTHS) for each in held]
        if [sum(each) for each in widths] != sizes or any(
            len(each) != ranks for each in widths
        ):
            raise FormatError(
                f"parts of {sizes} rows are not divided among {ranks} ranks by {widths}"
            )
        return dim, widths


def _typed(kind: type[_Value], value: Any, key: str) -> _Value:
    if not isinstance(value, kind):
        name = "text" if kind is str else kind.__name__
        raise FormatError(f"{key} is no {name}, or lacks one")
    return value


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise FormatError(
            f"the pattern {pattern[:200]!r} is no regular expression ({error}); give a"
            " layout of your own"
        ) from None


def _numbers(value: Any, key: str) -> list[int]:
    numbers = _typed(list, value, key)
    if not all(type(each) is int and each >= 0 for each in numbers):
        raise FormatError(f"{key} has sizes that are none: {numbers}")
    return numbers
