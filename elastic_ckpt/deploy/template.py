"""Templates: files of this package with holes, which the configuration fills.

A hole is `${name}`. A hole that is all of a text becomes its value, of whatever type; a
hole within a text becomes text. A hole whose value is empty or false leaves out its key
or its member of a list, and with it what has nothing else. Most holes have the name of
a key of the configuration.
"""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import yaml

Object: TypeAlias = dict[str, Any]
_HOLE = re.compile(r"\$\{([a-z_]+)\}")
_DIRECTORY = pathlib.Path(__file__).parent
_LEFT_OUT = object()


@functools.cache
def read(name: str) -> Any:
    """What `name`, a YAML file of this package, has: a list if of several documents."""
    documents = list(yaml.safe_load_all((_DIRECTORY / name).read_text()))
    return documents if len(documents) > 1 else documents[0]


def fill(template: Any, values: Mapping[str, Any]) -> Any:
    """`template` with `values` in its holes; None if nothing of it is left.

    Raises:
      KeyError: if a hole has no value.
    """
    filled = _filled(template, values)
    return None if filled is _LEFT_OUT else filled


def script(name: str, values: Mapping[str, Any]) -> str:
    """The text of `name`, a file of this package, with `values` in its holes."""
    return _text((_DIRECTORY / name).read_text(), values)


def _filled(template: Any, values: Mapping[str, Any]) -> Any:
    match template:
        case str():
            if whole := _HOLE.fullmatch(template):
                value = values[whole[1]]
                is_number = isinstance(value, int | float) and value is not False
                return value if value or is_number else _LEFT_OUT
            return _text(template, values)
        case dict():
            pairs = {key: _filled(each, values) for key, each in template.items()}
            kept: Any = {k: v for k, v in pairs.items() if v is not _LEFT_OUT}
        case list():
            members = [_filled(each, values) for each in template]
            kept = [each for each in members if each is not _LEFT_OUT]
        case _:
            return template
    return kept if kept or not template else _LEFT_OUT


def _text(template: str, values: Mapping[str, Any]) -> str:
    return _HOLE.sub(lambda hole: str(values[hole[1]]), template)
