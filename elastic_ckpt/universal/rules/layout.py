"""A layout: the rules that relate a checkpoint's tensors to a target's tensors.

A layout is a YAML file (see GRAMMAR.md), or the same content as Python values:

    Layout.from_dict({"rules": [{"from": {...}, "to": {...}}]})

A file's keys are the attributes of the classes below, renamed as in `_KEYS`. A rule is
a relation: swapping its sides inverts it.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import yaml

from elastic_ckpt.core import codec, errors

# Stands for the parameter's name in the name of a state.
PARAMETER = "{}"
# A file's keys by attribute, where the names differ.
_KEYS = {
    **{"source": "from", "target": "to", "excepted": "except"},
    **{"viewed_as": "as", "paths": "value"},
}
# The attributes that are not keys in files.
_HIDDEN = ("place", "unmet", "drop_of_kind")
# The keys that can be combined with `through`.
_BESIDE = ("version", "through", "sizes", "fill", "lists", "tree", "tree_inverse")
# Becomes a directory name.
_TreeName = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9_-]{0,99}\Z")]
_StateName = Annotated[str, msgspec.Meta(pattern=r"\A[^{}]*\{\}[^{}]*\Z")]
# Sizes on each rank, by dim and rank axis.
Widths = Mapping[str, Mapping[str, tuple[Annotated[int, msgspec.Meta(ge=0)], ...]]]
# Allowed values by path; None allows a missing value.
Required = Mapping[str, tuple[bool | int | float | str | None, ...]]


class LayoutError(errors.ConfigError):
    """A layout is malformed or does not match its checkpoint or tree."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointValue:
    """A reference to a number among a checkpoint's values.

    Attributes:
      paths: paths such as `args/num_query_groups`; the first that exists is used.
      default: the number to use if no path exists; None for no default.
      place: the position in the layout, used in error messages.
    """

    paths: tuple[str, ...]
    default: int | float | None = None
    place: str = dataclasses.field(default="the layout", compare=False)

    def number(self, values: Mapping[str, Any]) -> int | float | None:
        """Looks up the number in a checkpoint's values; defaults to `default`.

        Args:
          values: values by path; see `Checkpoint.values`. None means missing, and a
            flag counts as 0 or 1.

        Raises:
          LayoutError: if the value is not a number or is too large.
        """
        for path in self.paths:
            value = values.get(path)
            above, _, at = path.rpartition("/")
            held = values.get(above)
            # A list of numbers is one value; `config/block_size/0` is its first number.
            if isinstance(held, list) and at in map(str, range(len(held))):
                value = held[int(at)]
            # Safetensors metadata are strings. Integers below 2**53 are exact floats.
            is_number = isinstance(value, int | float) or str(value).isdecimal()
            if is_number and abs(number := float(value or 0)) < 2**53:
                return int(number) if number.is_integer() else number
            if value is not None:
                raise LayoutError(
                    f"{self.place}: {path} in the checkpoint is {value!r:.100}, not a"
                    " number between -2**53 and 2**53; set a number in the layout"
                )
        return self.default

    @property
    def missing(self) -> str:
        """A message that the checkpoint has no value at any of the paths."""
        return f"{self.place}: the checkpoint has no value at {' or '.join(self.paths)}"


# A number, arithmetic on other sizes, or a value of the checkpoint.
Size = int | float | str | CheckpointValue


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorPattern:
    """The tensors whose names match a pattern, and their dims.

    Their values are the other side's values, first scaled, then shifted.

    Attributes:
      name: a name pattern.
      dims: a dims expression. For scales in `times`, it may contain blocks:
        `out/128 in/128`.
      replicated: captures and rank axes over which values must be bit-identical, and
        dims whose first index is the only one that is read.
      unchecked: captures, rank axes and dims for which only the first value is read.
      mean: captures and rank axes over which values are averaged.
      sum: captures and rank axes over which values are added.
      copy: "checked" or "unchecked" for a duplicate of another tensor on the same side,
        which the inverse compares with the original or skips; "" for an original.
      times: tensors that multiply the matched tensors when these are read. They are
        constant along omitted dims.
      plus: two matrices whose product is added to the matched tensors when these are
        read. The two share one dim that the sum lacks.
      viewed_as: the dtype to read the stored bytes as; None for the stored dtype.
      scale: the scale, a number or arithmetic on named sizes.
      shift: the shift, a number or arithmetic on named sizes.
      dtype: a target tensor's dtype; None for its source's dtype.
    """

    name: str
    dims: str
    replicated: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    mean: tuple[str, ...] = ()
    sum: tuple[str, ...] = ()
    copy: Literal["", "checked", "unchecked"] = ""
    times: tuple[TensorPattern, ...] = ()
    plus: tuple[TensorPattern, ...] = ()
    viewed_as: str | None = None
    scale: int | float | str = 1
    shift: int | float | str = 0
    dtype: str | None = None

    @property
    def reduced(self) -> tuple[str, ...]:
        """The captures, rank axes and dims that the other side lacks."""
        return (*self.replicated, *self.unchecked, *self.mean, *self.sum)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The names of one kind of state; `{}` stands for the parameter's name.

    Attributes:
      source: the name in the checkpoint, such as `exp_avg/{}`; None if the checkpoint
        lacks the state.
      target: the name in the target, such as `opt_state/0/mu/{}`; None to drop the
        state.
    """

    source: _StateName | None
    target: _StateName | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Relates tensors of a checkpoint to tensors of a target.

    Each side maps name patterns to dims expressions. Dims, captures and rank axes are
    all coordinates of the same elements: `layer` can appear in names on one side and as
    a dim on the other.

    Attributes:
      source: the tensors of the checkpoint.
      target: the tensors of the target.
      pad: padding values, keyed by the names of dims that only one side has.
      sizes: sizes by name, which override the layout's sizes.
      widths: the sizes of a dim on each rank, by dim and rank axis, which override the
        layout's widths.
      states: the states that the rule applies to; empty for all of the layout's states.
      kind: the kind of tensors that the rule applies to; its names are then complete
        tensor names, not parameters' names. None for a rule that applies to states.
      optional: whether the rule's tensors may be missing from the checkpoint and the
        target.
      only: the only direction in which the rule applies, either from the checkpoint
        (`forward`) or to it (`inverse`); "" for both.
      excepted: names that the source patterns must not match; `*` stands for any
        string.
      require: the checkpoint values that the rule needs, by path.
      unmet: a message about the first required value that the checkpoint lacks; "" if
        it has them all.
      place: the position in the layout, used in error messages.
    """

    source: tuple[TensorPattern, ...]
    target: tuple[TensorPattern, ...]
    pad: Mapping[str, int | float] = dataclasses.field(default_factory=dict)
    sizes: Mapping[str, Size] = dataclasses.field(default_factory=dict)
    widths: Widths = dataclasses.field(default_factory=dict)
    states: tuple[str, ...] = ()
    kind: str | None = None
    optional: bool = False
    only: Literal["", "forward", "inverse"] = ""
    excepted: tuple[str, ...] = ()
    require: Required = dataclasses.field(default_factory=dict)
    unmet: str = ""
    place: str = dataclasses.field(default="", compare=False)

    def inverse(self) -> Rule:
        """The same relation in the other direction."""
        return dataclasses.replace(
            self,
            source=self.target,
            target=self.source,
            only={"forward": "inverse", "inverse": "forward"}.get(self.only, ""),
        )

    @property
    def text(self) -> str:
        """The rule's position in the layout; without one, its first tensor's name."""
        return self.place or f"the rule of {(*self.source, *self.target)[0].name!r}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A description of how a checkpoint's tensors relate to a tree's leaves.

    `load` reads a layout from a YAML file, and `from_dict` builds one from Python
    values. The attributes are the parsed keys, which the site's layout rules page
    explains.

    Attributes:
      version: the version of the layout format.
      rules: the rules, each of which relates some tensors to some leaves.
      sizes: the sizes of dims by name.
      widths: the sizes of a dim on each rank, by dim and rank axis, if ranks differ.
      ranks: the number of ranks by axis, for formats that do not store it.
      states: the names of a parameter's states, keyed by kind: the parameter itself,
        its master weights, its moments.
      drop: names of checkpoint tensors to ignore; `*` stands for any string.
      drop_inverse: the same in the other direction.
      drop_of_kind: pairs of a kind and a name, for tensors of that kind to ignore; not
        a key in files.
      fill: numbers, or references to checkpoint values, for leaves that no rule fills,
        keyed by leaf name.
      fill_inverse: the same in the other direction.
      require: the values that the checkpoint must have, by path; None allows a missing
        value.
      require_inverse: the same in the other direction.
      lists: the paths of lists, such as `opt_state`, in a tree to write; the keys of
        their elements are numbers.
      through: layouts to apply one after another, instead of rules.
      tree: the tree's name in an Orbax step to write.
      tree_inverse: the same in the other direction.
      place: the layout's file or another name for it, used in error messages.
    """

    version: Literal[1] = 1
    rules: tuple[Rule, ...] = ()
    sizes: Mapping[str, Size] = dataclasses.field(default_factory=dict)
    widths: Widths = dataclasses.field(default_factory=dict)
    ranks: Mapping[str, Annotated[int, msgspec.Meta(ge=1)]] = dataclasses.field(
        default_factory=dict
    )
    states: Mapping[str, State] = dataclasses.field(
        default_factory=lambda: {"parameter": State(source=PARAMETER, target=PARAMETER)}
    )
    drop: tuple[str, ...] = ()
    drop_inverse: tuple[str, ...] = ()
    drop_of_kind: tuple[tuple[str | None, str], ...] = ()
    fill: Mapping[str, int | float | CheckpointValue] = dataclasses.field(
        default_factory=dict
    )
    fill_inverse: Mapping[str, int | float | CheckpointValue] = dataclasses.field(
        default_factory=dict
    )
    require: Required = dataclasses.field(default_factory=dict)
    require_inverse: Required = dataclasses.field(default_factory=dict)
    lists: tuple[str, ...] = ()
    through: tuple[Layout, ...] = ()
    tree: _TreeName = "state"
    tree_inverse: _TreeName = "state"
    place: str = dataclasses.field(default="the layout", compare=False)

    def __post_init__(self) -> None:
        # That module imports this one.
        from elastic_ckpt.universal.rules.rule import ParsedRule

        if bool(self.rules) == bool(self.through):
            raise LayoutError(
                f"{self.place}: set either `rules` or `through`, but not both"
            )
        for rule in self.rules:
            if unknown := {*rule.states} - self.states.keys():
                raise LayoutError(
                    f"{rule.text}: the state {min(unknown)!r} is not in `states`, which"
                    f" lists {', '.join(self.states)}"
                )
            if rule.only != "inverse":
                ParsedRule(self.complete(rule))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Layout:
        """Reads a layout from a YAML file.

        Raises:
          LayoutError: if the file cannot be read or is not a layout. The message names
            the position in the layout.
        """
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LayoutError(
                f"{path}: this file cannot be read: {error}; check the path and its"
                " permissions"
            ) from None
        return cls.parse(text, file=os.fspath(path))

    @classmethod
    def parse(cls, text: str, *, file: str = "layout") -> Layout:
        """Parses a layout from a YAML file's text; `file` is used in messages.

        Raises:
          LayoutError: as `load`.
        """
        try:
            fields = _Loader(text).get_single_data()
        except (yaml.YAMLError, ValueError, TypeError) as error:
            raise LayoutError(f"{file}: this file is not valid YAML: {error}") from None
        return cls.from_dict(fields, name=file)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], *, name: str = "layout") -> Layout:
        """Builds a layout from the values that its file would contain.

            rule = {"from": {"wte": "vocab embed"}, "to": {"emb": "vocab embed"}}
            Layout.from_dict({"rules": [rule]})

        Args:
          fields: the keys and values of a layout file.
          name: the layout's name in messages.

        Raises:
          LayoutError: if `fields` are not a layout. The message names the position.
        """
        made = _decoded(cls, fields, name)
        if made.through and (beside := fields.keys() - {*_BESIDE}):
            raise LayoutError(
                f"{name}: {min(beside)} cannot be used with `through`; set it in one"
                " of those layouts instead"
            )
        made._check_used({name for each in (made, *made.rules) for name in each.sizes})
        return made

    def inverse(self) -> Layout:
        """The layout in the other direction, from the tree to the checkpoint."""
        return dataclasses.replace(
            self,
            through=tuple(each.inverse() for each in reversed(self.through)),
            rules=tuple(rule.inverse() for rule in self.rules),
            states={
                kind: State(source=state.target, target=state.source)
                for kind, state in self.states.items()
            },
            drop=self.drop_inverse,
            drop_inverse=self.drop,
            drop_of_kind=(),
            fill=self.fill_inverse,
            fill_inverse=self.fill,
            require=self.require_inverse,
            require_inverse=self.require,
            tree=self.tree_inverse,
            tree_inverse=self.tree,
        )

    def with_sizes(self, sizes: Mapping[str, Size]) -> Layout:
        """Returns the layout with these dim sizes added; rules keep their own sizes.

        Raises:
          LayoutError: if no rule uses one of the sizes.
        """
        self._check_used(sizes)
        return dataclasses.replace(
            self,
            sizes={**self.sizes, **sizes},
            through=tuple(
                each.with_sizes({n: sizes[n] for n in each._words() & sizes.keys()})
                for each in self.through
            ),
        )

    def _check_used(self, sizes: Iterable[str]) -> None:
        words = self._words()
        for name in {*sizes} - words:
            (near,) = difflib.get_close_matches(name, words, n=1, cutoff=0.0)
            raise LayoutError(
                f"{self.place}: no rule uses the size {name!r}; the nearest name is"
                f" {near!r}"
            )

    def _words(self) -> set[str]:
        # The words in all names, dims and arithmetic, including all size names.
        texts: list[Any] = [each._words() for each in self.through]
        for rule in map(self.complete, self.rules):
            texts += [rule.source, rule.target, rule.pad, rule.widths]
            texts += [size for size in rule.sizes.values() if isinstance(size, str)]
        return {*re.findall(r"\w+", str(texts))}

    def with_values(self, values: Mapping[str, Any]) -> Layout:
        """Replaces references to a checkpoint's values with numbers.

        Args:
          values: the values by path, such as a `config.json`'s. References to missing
            values stay because shapes may determine the sizes.

        Raises:
          LayoutError: if a value is not a number or does not meet `require`.
        """
        if lacking := _unmet(self.require, values):
            raise LayoutError(
                f"{self.place}: {lacking}; use a different layout, or change the value"
                " in the framework that wrote the checkpoint"
            )
        rules = [
            dataclasses.replace(
                rule,
                sizes=_with_values(rule.sizes, values),
                unmet=_unmet(rule.require, values),
            )
            for rule in self.rules
        ]
        return dataclasses.replace(
            self,
            sizes=_with_values(self.sizes, values),
            fill=_with_values(self.fill, values),
            rules=tuple(rules),
            through=tuple(each.with_values(values) for each in self.through),
        )

    def weights(self) -> Layout:
        """The layout of only the weights: parameters or, without them, master weights.

        Raises:
          LayoutError: if the layout has neither.
        """
        whole = {
            kind for kind, each in self.states.items() if each.source and each.target
        }
        if not self.through and not whole & {"parameter", "master"}:
            raise LayoutError(
                f"{self.place}: no `parameter` or `master` state has both `from` and"
                " `to`; add one to `states`"
            )
        chosen = "parameter" if "parameter" in whole else "master"
        return dataclasses.replace(
            self,
            states={
                kind: dataclasses.replace(
                    state, target=state.target if kind == chosen else None
                )
                for kind, state in self.states.items()
            },
            rules=tuple(each for each in self.rules if each.kind in (None, chosen)),
            drop_of_kind=tuple(
                (rule.kind, re.sub(r"\{[^}]*\}", "*", tensor.name))
                for rule in self.rules
                if rule.kind not in (None, chosen)
                for tensor in rule.source
            ),
            through=(*(each.weights() for each in self.through[:1]), *self.through[1:]),
        )

    def complete(self, rule: Rule) -> Rule:
        """Returns `rule` with the layout's sizes and widths added."""
        return dataclasses.replace(
            rule,
            sizes={**self.sizes, **rule.sizes},
            widths={**self.widths, **rule.widths},
        )


def _with_values(given: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    made = {
        name: each.number(values) if isinstance(each, CheckpointValue) else each
        for name, each in given.items()
    }
    return {name: given[name] if each is None else each for name, each in made.items()}


def _unmet(required: Required, values: Mapping[str, Any]) -> str:
    # A message about the first required value that the checkpoint lacks; "" if it has
    # all values.
    for path, allowed in required.items():
        found = next((each for each in values if each.startswith(f"{path}/")), path)
        value = values.get(found)
        if found != path or (None if value == [] else value) not in allowed:
            shown, *fitting = (
                "missing" if each is None else f"{each!r:.100}"
                for each in (value, *allowed)
            )
            return (
                f"{found} in the checkpoint is {shown}, but must be "
                f"{' or '.join(fitting)}"
            )
    return ""


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key!r} occurs twice; remove one of them",
                    problem_mark=node.start_mark,
                )
        return super().construct_mapping(node, deep)


def _decoded(kind: Any, value: Any, place: str) -> Any:
    # Decodes a value of an annotated type. A list of one element may omit its brackets.
    origin, arguments = get_origin(kind), get_args(kind)
    if isinstance(value, Mapping):
        fields = {_decoded(str, key, place): each for key, each in value.items()}
        if kind == tuple[TensorPattern, ...]:
            tensors = {
                key: each if isinstance(each, Mapping) else {"dims": each}
                for key, each in fields.items()
            }
            return tuple(
                _decoded(TensorPattern, {**each, "name": name}, f"{place}[{name!r}]")
                for name, each in tensors.items()
            )
        if origin is Mapping:
            return {
                key: _decoded(arguments[1], each, f"{place}[{key!r}]")
                for key, each in fields.items()
            }
        for each in filter(dataclasses.is_dataclass, (kind, *arguments)):
            return _made(each, fields, place)
    elif origin is tuple:
        listed = value if isinstance(value, list | tuple) else [value]
        return tuple(
            _decoded(arguments[0], each, f"{place}[{number}]")
            for number, each in enumerate(listed)
        )
    elif kind is Layout and isinstance(value, str):
        return _resolved(value, place)
    # Such as the dim `1`.
    value = str(value) if kind is str and type(value) is int else value
    remedy = (
        f"choose one of {arguments}"
        if origin is Literal
        else "see the layout rules page"
    )
    try:
        return codec.decode(kind, value, name=place)
    except ValueError as error:
        raise LayoutError(f"{error}; {remedy}") from None


def _made(kind: Any, fields: Mapping[str, Any], place: str) -> Any:
    # Builds a dataclass from a file's keys.
    hints = get_type_hints(kind, include_extras=True)
    made: dict[str, Any] = {"place": place} if "place" in hints else {}
    names = {_KEYS.get(name, name): name for name in hints if name not in _HIDDEN}
    for key, value in fields.items():
        within = f"{place}: {key}" if kind is Layout else f"{place}.{key}"
        if key not in names:
            (near,) = difflib.get_close_matches(key, names, n=1, cutoff=0.0)
            raise LayoutError(f"{within}: unknown key; the nearest key is {near!r}")
        made[names[key]] = _decoded(hints[names[key]], value, within)
    missing = [
        _KEYS.get(each.name, each.name)
        for each in dataclasses.fields(kind)
        if each.default is each.default_factory is dataclasses.MISSING
        and each.name not in made
    ]
    if missing:
        raise LayoutError(f"{place}: `{missing[0]}` is missing; add it")
    return kind(**made)


def _resolved(name: str, place: str) -> Layout:
    # That module imports this one.
    from elastic_ckpt.universal import shipped

    beside = pathlib.Path(place.rpartition(": ")[0]).parent / name
    try:
        return shipped.resolve(beside if beside.is_file() else name)
    except RecursionError:
        raise LayoutError(
            f"{place}: {name} includes itself; remove it from `through`"
        ) from None
