"""Reads the YAML text of a layout; it is strict about keys and types.

Errors name the file and the path in it, `rules[3].from['a'].dims`; for
an unknown key also the nearest one.
"""

from __future__ import annotations

import contextvars
import difflib
import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

from elastic_ckpt.universal.rules.checkpoint_value import CheckpointValue, Required
from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.rules.rule import (
    COPIES,
    DIRECTIONS,
    Rule,
    Size,
    TensorPattern,
)
from elastic_ckpt.universal.rules.state import State

if TYPE_CHECKING:
    from elastic_ckpt.universal.rules.layout import Layout

_VERSION = 1
# The layouts that are read, each for the one before.
_THROUGH: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar(
    "through", default=()
)
# That of a directory.
_TREE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_T = TypeVar("_T")


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


class _Node:
    """A value in the file, with its place."""

    def __init__(self, value: object, file: str, path: str) -> None:
        self._value = value
        self._file = file
        self._path = path

    @property
    def file(self) -> str:
        return self._file

    @property
    def place(self) -> str:
        return f"{self._file}: {self._path}" if self._path else self._file

    @property
    def is_mapping(self) -> bool:
        return isinstance(self._value, Mapping)

    @property
    def is_list(self) -> bool:
        return isinstance(self._value, list | tuple)

    @property
    def is_null(self) -> bool:
        return self._value is None

    def error(self, problem: str) -> LayoutError:
        return LayoutError(f"{self.place}: {problem}")

    def fields(self, readers: Mapping[str, Callable[[_Node], Any]]) -> dict[str, Any]:
        """The values of a mapping with these keys."""
        values = {}
        for key, node in self.items(quoted=False):
            if key not in readers:
                (near,) = difflib.get_close_matches(key, readers, n=1, cutoff=0.0)
                raise node.error(f"unknown key; the nearest key is {near!r}")
            values[key] = readers[key](node)
        return values

    def items(self, *, quoted: bool = True) -> list[tuple[str, _Node]]:
        """The entries of a mapping."""
        if not isinstance(self._value, Mapping):
            raise self.error(f"expected a mapping (key: value), not {self._text()}")
        entries = []
        for key, value in self._value.items():
            if not isinstance(key, str):
                raise self.error(f"a key is a text, not {key!r}; quote it")
            dot = "." if self._path else ""
            path = f"{self._path}[{key!r}]" if quoted else f"{self._path}{dot}{key}"
            entries.append((key, _Node(value, self._file, path)))
        return entries

    def map(self, reader: Callable[[_Node], _T]) -> dict[str, _T]:
        """The values of a mapping with any keys."""
        return {key: reader(node) for key, node in self.items()}

    def list(self, reader: Callable[[_Node], _T]) -> tuple[_T, ...]:
        """The values of a list."""
        if not isinstance(self._value, list | tuple):
            raise self.error(f"expected a list, not {self._text()}")
        return tuple(
            reader(_Node(node, self._file, f"{self._path}[{at}]"))
            for at, node in enumerate(self._value)
        )

    def scalar(self) -> object:
        if self.is_mapping or self.is_list:
            raise self.error("expected one value, not a list or mapping")
        return self._value

    def text(self) -> str:
        value = self.scalar()
        if not isinstance(value, str):
            raise self.error(f"expected a text, not {self._text()}; quote it")
        return value

    def one_of(self, choices: Sequence[str]) -> str:
        value = self.text()
        if value not in choices:
            raise self.error(f"expected {' or '.join(choices)}, not {value!r}")
        return value

    def dims(self) -> str:
        # `1` and an empty value need no quotes.
        if self.is_null or self.scalar() == 1:
            return "" if self.is_null else "1"
        return self.text()

    def whole(self) -> int:
        value = self.scalar()
        if type(value) is not int or value < 0:
            raise self.error(f"expected a whole number, not {self._text()}")
        return value

    def number(self) -> float:
        value = self.scalar()
        if isinstance(value, str):
            # YAML 1.1 reads `1e-3` as a text.
            try:
                value = float(value)
            except ValueError:
                value = None
        if type(value) not in (int, float):
            raise self.error(f"expected a number, not {self._text()}")
        return value  # type: ignore[return-value]

    def arithmetic(self) -> float | str:
        value = self.scalar()
        if type(value) is float and not math.isfinite(value):
            raise self.error(f"expected a finite number, not {self._text()}")
        if type(value) in (int, float, str):
            return value  # type: ignore[return-value]
        raise self.error(f"expected a number or arithmetic, not {self._text()}")

    def plain(self) -> str | float | None:
        value = self.scalar()
        if not isinstance(value, str | int | float | None):
            raise self.error(f"expected a text, number or flag, not {self._text()}")
        return value

    def flag(self) -> bool:
        value = self.scalar()
        if type(value) is not bool:
            raise self.error(f"expected true or false, not {self._text()}")
        return value

    def _text(self) -> str:
        if self.is_mapping or self.is_list:
            return "a list" if self.is_list else "a mapping"
        return "nothing" if self.is_null else repr(self._value)


def read(text: str, *, file: str) -> dict[str, Any]:
    """The fields of a `Layout`.

    Raises:
      LayoutError: names the file and the path in it.
    """
    try:
        document = _Loader(text).get_single_data()
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise LayoutError(f"{file}: this file is not valid YAML: {error}") from None
    if document is None:
        raise LayoutError(f"{file}: the layout is empty; start with `version: 1`")
    return _checked(document, file)


def _checked(document: object, file: str) -> dict[str, Any]:
    try:
        return _read(_Node(document, file, ""))
    except RecursionError:
        raise LayoutError(
            f"{file}: its values are nested too deeply, or contain themselves"
        ) from None


def read_values(fields: Mapping[str, Any], *, name: str) -> dict[str, Any]:
    """As `read`, of the values that YAML would have.

    Raises:
      LayoutError: names the layout and the path in it.
    """
    if isinstance(fields, Mapping):
        fields = {"version": _VERSION, **fields}
    return _checked(fields, name)


def _read(root: _Node) -> dict[str, Any]:
    values = root.fields(
        {
            "version": _version,
            "sizes": _sizes,
            "widths": _widths,
            "ranks": lambda node: node.map(_Node.whole),
            "states": lambda node: node.map(_state),
            "rules": lambda node: node.list(_rule),
            "drop": _drop,
            "fill": lambda node: node.map(_filling),
            "require": _required,
            "through": lambda node: node.list(lambda each: each),
            "lists": lambda node: node.list(_Node.text),
            "tree": _tree,
        }
    )
    if values.pop("version", None) is None:
        raise root.error(f"`version: {_VERSION}` is missing")
    if ("rules" in values) == ("through" in values):
        raise root.error("it has `rules`, or layouts that it leads `through`")
    if "through" in values:
        other = values.keys() - {"through", "sizes", "tree", "lists", "fill"}
        if other:
            raise root.error(
                f"beside `through` there is no {min(other)}; write it in one of the"
                " layouts"
            )
        values |= {"rules": (), "through": tuple(map(_resolved, values["through"]))}
    values |= values.pop("tree", {})
    drop = values.pop("drop", ((), ()))
    return {**values, "drop": drop[0], "drop_inverse": drop[1]}


def _resolved(node: _Node) -> Layout:
    # The module reads files by this one.
    from elastic_ckpt.universal import shipped_layouts

    text = node.text()
    beside = pathlib.Path(node.file).parent / text
    given = str(beside.resolve()) if beside.is_file() else text
    above = _THROUGH.get()
    if given in above:
        raise node.error(f"{text} leads through itself")
    token = _THROUGH.set((*above, given))
    try:
        return shipped_layouts.resolve(given)
    finally:
        _THROUGH.reset(token)


def _version(node: _Node) -> int:
    version = node.whole()
    if version != _VERSION:
        raise node.error(f"version {version} is not known; this is {_VERSION}")
    return version


def _sizes(node: _Node) -> dict[str, Size]:
    return node.map(lambda n: _value(n) if n.is_mapping else n.arithmetic())


def _filling(node: _Node) -> float | CheckpointValue:
    return _value(node) if node.is_mapping else node.number()


def _required(node: _Node) -> Required:
    return node.map(
        lambda each: each.list(_Node.plain) if each.is_list else (each.plain(),)
    )


def _value(node: _Node) -> CheckpointValue:
    paths = lambda n: n.list(_Node.text) if n.is_list else (n.text(),)  # noqa: E731
    fields = node.fields({"value": paths, "default": _finite})
    if not fields.get("value"):
        raise node.error("`value` is missing: a path in the checkpoint, or several")
    return CheckpointValue(
        paths=fields["value"], default=fields.get("default"), place=node.place
    )


def _finite(node: _Node) -> float:
    number = node.number()
    if not math.isfinite(number):
        raise node.error(f"expected a finite number, not {number}")
    return number


def _widths(node: _Node) -> dict[str, dict[str, tuple[int, ...]]]:
    return node.map(lambda axes: axes.map(lambda each: each.list(_Node.whole)))


def _state(node: _Node) -> State:
    fields = node.fields({"from": _state_name, "to": _state_name})
    state = State(source=fields.get("from"), target=fields.get("to"))
    if fields.keys() != {"from", "to"} or state.source is state.target is None:
        raise node.error("a state has `from` and `to`, of which one can be null")
    return state


def _state_name(node: _Node) -> str | None:
    if node.is_null:
        return None
    text = node.text()
    if text.count("{}") != 1 or "{" in text.replace("{}", ""):
        raise node.error("{} stands for the name of the parameter; it occurs once")
    return text


def _drop(node: _Node) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if not node.is_mapping:
        return node.list(_Node.text), ()
    names = lambda each: each.list(_Node.text)  # noqa: E731
    fields = node.fields({"from": names, "to": names})
    return fields.get("from", ()), fields.get("to", ())


def _tree(node: _Node) -> dict[str, str]:
    if not node.is_mapping:
        return {"tree": _tree_name(node)}
    fields = node.fields({"from": _tree_name, "to": _tree_name})
    sides = {"from": "tree_inverse", "to": "tree"}
    return {sides[side]: name for side, name in fields.items()}


def _tree_name(node: _Node) -> str:
    name = node.text()
    if not _TREE_NAME.fullmatch(name):
        raise node.error("the name of a tree has letters, digits, `_` and `-`")
    return name


def _rule(node: _Node) -> Rule:
    fields = node.fields(
        {
            "from": _side,
            "to": _side,
            "pad": lambda each: each.map(_Node.number),
            "sizes": _sizes,
            "widths": _widths,
            "states": lambda each: each.list(_Node.text),
            "kind": _Node.text,
            "optional": _Node.flag,
            "only": lambda each: each.one_of(DIRECTIONS),
            "except": lambda each: each.list(_Node.text),
            "require": _required,
        }
    )
    if not fields.keys() >= {"from", "to"}:
        raise node.error("a rule has `from` and `to`")
    source, target = fields.pop("from"), fields.pop("to")
    if "except" in fields:
        fields["excepted"] = fields.pop("except")
    return Rule(source=source, target=target, place=node.place, **fields)


def _side(node: _Node) -> tuple[TensorPattern, ...]:
    return tuple(_tensor(name, each) for name, each in node.items())


def _tensor(name: str, node: _Node) -> TensorPattern:
    if not node.is_mapping:
        return TensorPattern(name=name, dims=node.dims())
    names = lambda each: each.list(_Node.text)  # noqa: E731
    fields = node.fields(
        {
            "dims": _Node.dims,
            "replicated": names,
            "unchecked": names,
            "mean": names,
            "sum": names,
            "copy": lambda each: each.one_of(COPIES),
            "times": _side,
            "plus": _side,
            "as": _Node.text,
            "scale": _Node.arithmetic,
            "shift": _Node.arithmetic,
            "dtype": _Node.text,
        }
    )
    if "dims" not in fields:
        raise node.error("`dims` is missing")
    if "as" in fields:
        fields["viewed_as"] = fields.pop("as")
    return TensorPattern(name=name, **fields)
