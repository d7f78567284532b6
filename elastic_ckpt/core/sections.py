"""Sections: dataclasses of configuration keys, and their values in strict YAML.

A section is a frozen dataclass with fields from `key`. A `Setting` is a value from a
file, a command line or a caller, and where it was set; `checked` converts settings to
values. An unknown key, a key that is set twice or a value of the wrong type is an error
that says where and, for an unknown key, suggests the nearest existing key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import typing
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import yaml
from etils import epath

from elastic_ckpt.core import bucket_clients, errors

Value: TypeAlias = bool | int | float | str


def key(
    default: Value,
    doc: str,
    *,
    choices: tuple[Value, ...] = (),
    at_least: float | None = None,
    below: float | None = None,
    multiple_of: int | None = None,
    off: int | None = None,
    lists: str = "",
) -> Any:
    """A dataclass field of a section that defines one key.

    Args:
      default: the value if the key is not set.
      doc: the description, for `configs/base.yml` and the command line.
      choices: the allowed values; empty to allow all.
      at_least: the smallest allowed number.
      below: the exclusive upper bound.
      multiple_of: a divisor of every allowed number.
      off: an extra number that also means the default, as in MaxText.
      lists: how to convert a list that is set in place of a string: `names` joins the
        items with commas, and `any` stores the list as JSON; empty to reject lists.
    """
    return dataclasses.field(
        default=default,
        metadata={
            "doc": doc,
            "choices": choices,
            "at_least": at_least,
            "below": below,
            "multiple_of": multiple_of,
            "off": off,
            "lists": lists,
        },
    )


def render(value: Value) -> str:
    """Returns `value` as YAML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        quoted = value.replace("'", "''")
        return f'"{value}"' if '"' not in value else f"'{quoted}'"
    return repr(value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A key's value as it was set, and where it was set (used in error messages)."""

    value: object
    place: str


def compose(path: epath.Path, *, by: str) -> yaml.Node | None:
    """Parses a YAML file, local or in a bucket; None if it is empty.

    `by` says who set the path; it is used in the message that the file does not exist.

    Raises:
      ConfigError: if the file cannot be read or is not valid YAML.
    """
    try:
        return parse(path.read_text(), path=path)
    except FileNotFoundError:
        raise errors.ConfigError(f"{path}: no such configuration file{by}") from None
    except (UnicodeDecodeError, *bucket_clients.failures()) as error:
        raise errors.ConfigError(
            f"{path}: this file cannot be read: {error}; check"
            " the path and its permissions"
        ) from None


def parse(text: str, *, path: epath.PathLike) -> yaml.Node | None:
    """Parses YAML; messages refer to it by `path`.

    Raises:
      ConfigError: if the YAML is invalid.
    """
    try:
        return yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise errors.ConfigError(f"{path}: not valid YAML: {error}") from None


def read_mapping(path: epath.PathLike, node: yaml.MappingNode) -> dict[str, Setting]:
    """The settings in a mapping of a YAML file.

    Raises:
      ConfigError: if a key is set twice or a value cannot be read.
    """
    settings: dict[str, Setting] = {}
    constructor = yaml.SafeLoader("")
    for key_node, value_node in node.value:
        key = str(key_node.value)
        place = f"{path}, line {key_node.start_mark.line + 1}"
        if key in settings:
            first = settings[key].place.rpartition(" ")[2]
            raise errors.ConfigError(
                f"{place}: {key} is already set on line {first}; remove one of the two"
            )
        try:
            value = constructor.construct_object(value_node, deep=True)
        except yaml.YAMLError as error:
            raise errors.ConfigError(
                f"{place}: {key} cannot be read: {error}"
            ) from None
        settings[key] = Setting(value=value, place=place)
    return settings


def checked(
    settings: Mapping[str, Setting],
    fields: Iterable[dataclasses.Field[Any]],
    *,
    also: Iterable[str] = (),
    of: str = "",
) -> dict[str, Value]:
    """Checks settings and returns their values.

    Args:
      settings: the settings by key.
      fields: the fields of all sections that may define the keys.
      also: additional keys to suggest in place of an unknown key.
      of: the owner of these keys, used in the message about an unknown key.

    Raises:
      ConfigError: if a key is unknown or a value is invalid.
    """
    known = {field.name: field for field in fields}
    values: dict[str, Value] = {}
    for name, setting in settings.items():
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *also], n=1, cutoff=0.0)
            raise errors.ConfigError(
                f"{setting.place}: unknown key {name!r}; the nearest key{of} is"
                f" {near[0]!r}"
            )
        values[name] = _value(known[name], setting)
    return values


def _value(field: dataclasses.Field[Any], setting: Setting) -> Value:
    key = field.name
    expected = type(field.default)
    value = setting.value
    if expected is float and type(value) in (int, str):
        # YAML 1.1 reads `1e-3` as a string.
        with contextlib.suppress(ValueError):
            value = float(typing.cast(str, value))
    if expected is str and value is None:
        value = ""
    lists = field.metadata["lists"]
    if lists == "names" and isinstance(value, list) and {*map(type, value)} == {str}:
        value = ",".join(value)
    if lists == "any" and isinstance(value, list):
        # Values that JSON lacks, such as dates, become strings.
        value = json.dumps(value, default=str)
    off = field.metadata["off"]
    if off is not None and type(value) is int and value == off:
        value = field.default
    choices = field.metadata["choices"]
    if isinstance(value, bool):
        # YAML 1.1 reads `off` and `on` as booleans.
        value = next((each for each in choices if each in _BOOLEANS[value]), value)
    if type(value) is not expected:
        remedy = ""
        if expected is str and isinstance(value, int | float):
            remedy = f'; put it in quotes ({key}: "{setting.value}")'
        raise errors.ConfigError(
            f"{setting.place}: {key} must be {_ARTICLES[expected]}, not"
            f" {setting.value!r}{remedy}"
        )
    number = typing.cast(float, value)
    at_least, below, factor = map(
        field.metadata.get, ("at_least", "below", "multiple_of")
    )
    for is_broken, rule in (
        (choices and value not in choices, f"one of {', '.join(map(render, choices))}"),
        (at_least is not None and not number >= at_least, f"at least {at_least}"),
        (expected is float and not math.isfinite(number), "a finite number"),
        (below is not None and not number < below, f"below {below}"),
        (factor is not None and number % factor, f"a multiple of {factor}"),
    ):
        if is_broken:
            raise errors.ConfigError(
                f"{setting.place}: {key} must be {rule}, not {setting.value!r}"
            )
    return typing.cast(Value, value)


_BOOLEANS = {False: ("off", "no", "false"), True: ("on", "yes", "true")}
_ARTICLES: dict[type, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
}
