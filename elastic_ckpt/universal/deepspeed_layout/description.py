"""DeepSpeed's description of a checkpoint: how ranks share which parameters.

It is the value `universal_checkpoint_info`: lists of regular expressions, one for each
way in which a parameter can be cut, and affine maps. Their precedence and defaults are
those of DeepSpeed's `ds_to_universal`: a parameter that no list has is cut along its
first dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ckpt.universal.deepspeed_layout import affine_maps, shards
from elastic_ckpt.universal.deepspeed_layout.pattern_set import PatternSet
from elastic_ckpt.universal.deepspeed_layout.shards import Geometry, Segment
from elastic_ckpt.universal.formats.format_error import FormatError

_NEWEST = 0.4
_REPLICATED = "tp_replicated_parameter_patterns"
_AVERAGED = "parameter_to_average_patterns"
_HALVES = "parameter_with_2_sub_params_cat_dim_0"
_ROWS = "parameter_with_row_parallelism_patterns"
_VOCABULARY = "vocabulary_parameter_patterns"
_UNSUPPORTED = "autotp_unsupported_parameter_patterns"
_LISTS = (_REPLICATED, _AVERAGED, _HALVES, _ROWS, _VOCABULARY)
_PARTS, _WIDTHS = "parameter_with_sub_params", "sub_param_shard_widths"
_AFFINE = "affine_map"
# The facts about a parameter in universal checkpoints.
_DIM, _NUM_PARTS, _IS_VOCABULARY = "cat_dim", "param_n_sub_params", "vocab_tensor"
FACTS = (_DIM, _NUM_PARTS, _IS_VOCABULARY)

Shapes = Sequence[tuple[int, ...]]


class Description:
    """A parsed description.

    Args:
      info: of dicts and lists.

    Raises:
      FormatError: if it is malformed, or newer than what is read.
    """

    def __init__(self, info: Mapping[str, Any]) -> None:
        self._info = info
        version = info.get("universal_checkpoint_version", 0.0)
        if type(version) not in (int, float) or not 0 <= version <= _NEWEST:
            raise FormatError(
                f"universal_checkpoint_info has the version {version!r}, and 0 to"
                f" {_NEWEST} are read; give a layout of your own"
            )
        if info.get(_UNSUPPORTED):
            raise FormatError(
                f"universal_checkpoint_info has {_UNSUPPORTED}: it does not describe"
                " all parameters; give a layout of your own"
            )
        self._has_widths = version >= _NEWEST
        # The list of each pattern, its text, and what it stands for.
        self._entries: list[tuple[str, str, Any]] = []
        for key in _LISTS:
            for pattern in _list(info.get(key, []), key):
                self._entries.append((key, _text(pattern, key), None))
        for parts in _list(info.get(_PARTS, []), _PARTS):
            for pattern in _list(_dict(parts, _PARTS).get("patterns"), _PARTS):
                self._entries.append((_PARTS, _text(pattern, _PARTS), parts))
        affine = _dict(info.get(_AFFINE, {}), _AFFINE)
        if affine.get("version", affine_maps.VERSION) != affine_maps.VERSION:
            raise FormatError(
                f"affine maps have the version {affine['version']!r}, and"
                f" {affine_maps.VERSION} is read; give a layout of your own"
            )
        for pattern, entry in _dict(affine.get("params", {}), _AFFINE).items():
            self._entries.append((_AFFINE, pattern, entry))
        self._patterns = PatternSet([text for _, text, _ in self._entries])

    def geometry(self, name: str, shapes: Shapes, *, is_buffer: bool) -> Geometry:
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

    def facts(self, name: str) -> dict[str, Any]:
        """How ranks cut a parameter, as DeepSpeed's universal checkpoints have it.

        Parts of unequal sizes and affine maps have no facts there.

        Raises:
          FormatError: if the description does not fit it.
        """
        matched = self._matched(name)
        facts: dict[str, Any] = {}
        if _HALVES in matched:
            facts[_NUM_PARTS] = 2
        if _ROWS in matched and not {_REPLICATED, _AVERAGED, _HALVES} & matched.keys():
            facts[_DIM] = 1
        if _VOCABULARY in matched:
            facts[_IS_VOCABULARY] = True
        return facts

    def _geometry(self, name: str, shapes: Shapes, is_buffer: bool) -> Geometry:
        ranks = len(shapes)
        if not shapes[0]:
            return shards.whole((), ranks=ranks, reduced="replicated")
        matched = self._matched(name)
        rows = self._vocabulary() if _VOCABULARY in matched else None
        if _AFFINE in matched:
            return affine_maps.geometry(matched[_AFFINE][1], shapes, rows=rows)
        dim = 0
        if _REPLICATED in matched or _AVERAGED in matched:
            reduced = "replicated" if _REPLICATED in matched else "mean"
            return _whole(shapes, reduced, rows)
        if _HALVES in matched:
            halves = [shape[0] for shape in shapes]
            parts = [[-(-each // 2) for each in halves], [each // 2 for each in halves]]
        elif _PARTS in matched:
            dim, parts = self._parts(*matched[_PARTS], shapes)
        elif is_buffer and _ROWS not in matched and rows is None:
            return _whole(shapes, "replicated", None)
        else:
            dim = int(_ROWS in matched)
            _check_dim(dim, shapes)
            parts = [[shape[dim] for shape in shapes]]
        if rows is not None and dim:
            raise FormatError(f"a vocabulary is cut along the dim {dim}, not 0")
        return shards.cut(shapes, dim, _segments(parts), rows=rows)

    def _matched(self, name: str) -> dict[str, tuple[str, Any]]:
        # By list: the pattern that matches, and what it stands for.
        matched: dict[str, tuple[str, Any]] = {}
        for number in self._patterns.matches(name):
            key, pattern, value = self._entries[number]
            if key not in matched:
                matched[key] = (pattern, value)
            elif key != _PARTS:
                raise FormatError(
                    f"{matched[key][0]!r} and {pattern!r} of {key} both match it"
                )
        return matched

    def _vocabulary(self) -> int:
        rows = self._info.get("original_vocab_size")
        if type(rows) is not int or rows < 1:
            raise FormatError(f"original_vocab_size is {rows!r}")
        return rows

    def _parts(
        self, pattern: str, entry: Any, shapes: Shapes
    ) -> tuple[int, list[list[int]]]:
        # The dim along which several parts are joined, and their widths by rank.
        dim, spec = entry.get("partition_dim"), _list(entry.get("shape"), _PARTS)
        if type(dim) is not int or not 0 <= dim < len(spec):
            raise FormatError(f"{_PARTS} has the dim {dim!r} of the shape {spec}")
        _check_dim(dim, shapes)
        ranks, total = len(shapes), sum(shape[dim] for shape in shapes)
        sizes = spec[dim]
        if type(sizes) is int and sizes > 0 and not self._has_widths:
            # Earlier descriptions have the number of equal parts.
            sizes = [total // sizes] * sizes if total % sizes == 0 else None
        sizes = _numbers(sizes, _PARTS)
        if self._has_widths:
            held = _dict(self._info.get(_WIDTHS, {}), _WIDTHS).get(pattern)
            widths = [_numbers(each, _WIDTHS) for each in _list(held, _WIDTHS)]
        else:
            widths = [[size // ranks] * ranks for size in sizes]
        if [sum(each) for each in widths] != sizes or any(
            len(each) != ranks for each in widths
        ):
            raise FormatError(
                f"parts of {sizes} rows are not divided among {ranks} ranks by {widths}"
            )
        return dim, widths


def _segments(parts: Sequence[Sequence[int]]) -> list[Segment]:
    # Each rank has its width of every part, in their order.
    ends = [0] * len(parts[0]) if parts else []
    segments, start = [], 0
    for widths in parts:
        for rank, width in enumerate(widths):
            segments.append(Segment(start=start, length=width, at={rank: ends[rank]}))
            start += width
            ends[rank] += width
    return segments


def _whole(shapes: Shapes, reduced: str, rows: int | None) -> Geometry:
    if len(set(shapes)) > 1:
        raise FormatError(
            f"ranks have the shapes {sorted(set(shapes))}, and should be equal"
        )
    return shards.whole(shapes[0], ranks=len(shapes), reduced=reduced, rows=rows)


def _check_dim(dim: int, shapes: Shapes) -> None:
    if any(len(shape) <= dim for shape in shapes):
        raise FormatError(f"it has no dim {dim}: its shape is {list(shapes[0])}")


def _list(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise FormatError(f"{key} is no list, or lacks one")
    return value


def _dict(value: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FormatError(f"{key} is no dict, or lacks one")
    return value


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise FormatError(f"{key} has a pattern that is no text")
    return value


def _numbers(value: Any, key: str) -> list[int]:
    numbers = _list(value, key)
    if not all(type(each) is int and each >= 0 for each in numbers):
        raise FormatError(f"{key} has sizes that are none: {numbers}")
    return numbers
