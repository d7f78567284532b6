"""Encodes values of declared types as JSON, and decodes them strictly.

The types are dataclasses, tuples, named ones too, mappings with text as keys, enums,
bytes (in base64), paths, numbers, texts, some of them alone (`Literal`), None, unions
of these, and `Any` for what is JSON already.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any

from etils import epath

from elastic_ckpt.core import storage

_SCALARS = (type(None), bool, int, float, str)
_MAPPINGS = (dict, Mapping)


class DecodingError(ValueError):
    """JSON that is not of the declared type; the message names the place."""


def encode(value: Any) -> storage.Json:
    """Encodes a value as JSON.

    Raises:
      TypeError: if a part of it is of a type that has no encoding.
    """
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, epath.Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [encode(each) for each in value]
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"{value!r} has keys that are not text")
        return {key: encode(each) for key, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: encode(getattr(value, name)) for name in _fields(type(value))}
    raise TypeError(f"{value!r} is a {type(value).__name__}, which has no encoding")


def decode(kind: Any, encoded: storage.Json, *, name: str = "value") -> Any:
    """Decodes what `encode` returned.

    Args:
      kind: the type of the value, such as a dataclass or `tuple[int, ...]`.
      encoded: the JSON.
      name: of the value, in messages.

    Raises:
      DecodingError: if a field is unknown or missing, or a part is of another type.
    """
    if kind is Any:
        return encoded
    if kind is float and type(encoded) is int:
        return float(encoded)
    if kind in _SCALARS:
        return _checked(kind, encoded, name)
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(typing.get_args(kind), encoded, name)
    if origin is tuple:
        return _decode_tuple(typing.get_args(kind), encoded, name)
    if origin is typing.Literal:
        allowed = typing.get_args(kind)
        if encoded not in allowed:
            raise DecodingError(f"{name} is {encoded!r}, none of {allowed}")
        return encoded
    if origin in _MAPPINGS:
        _, of_values = typing.get_args(kind)
        return {
            key: decode(of_values, each, name=f"{name}[{key!r}]")
            for key, each in _checked(dict, encoded, name).items()
        }
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, encoded, name)
    if isinstance(kind, type) and issubclass(kind, tuple):
        return kind(*_decode_tuple(_elements(kind), encoded, name))
    if kind is epath.Path:
        return epath.Path(_checked(str, encoded, name))
    try:
        if kind is bytes:
            return base64.b64decode(str(encoded), validate=True)
        if issubclass(kind, enum.Enum):
            return kind(encoded)
    except ValueError as error:
        raise DecodingError(f"{name}: {error}") from None
    raise TypeError(f"{name} is declared as {kind}, which has no encoding")


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


@functools.cache
def _elements(kind: type) -> tuple[Any, ...]:
    return tuple(typing.get_type_hints(kind).values())


def _decode_dataclass(kind: type, encoded: storage.Json, name: str) -> Any:
    fields = _fields(kind)
    given = _checked(dict, encoded, name)
    if given.keys() != fields.keys():
        raise DecodingError(
            f"{name} has the fields {sorted(given)}, and a {kind.__name__} has"
            f" {sorted(fields)}; run the same version everywhere"
        )
    return kind(
        **{
            field: decode(of_field, given[field], name=f"{name}.{field}")
            for field, of_field in fields.items()
        }
    )


def _decode_tuple(kinds: tuple[Any, ...], encoded: storage.Json, name: str) -> Any:
    given = _checked(list, encoded, name)
    if len(kinds) == 2 and kinds[1] is ...:
        kinds = kinds[:1] * len(given)
    if len(kinds) != len(given):
        raise DecodingError(f"{name} has {len(given)} elements, not {len(kinds)}")
    return tuple(
        decode(kind, each, name=f"{name}[{number}]")
        for number, (kind, each) in enumerate(zip(kinds, given, strict=True))
    )


def _decode_union(kinds: tuple[Any, ...], encoded: storage.Json, name: str) -> Any:
    problems = []
    for kind in kinds:
        try:
            return decode(kind, encoded, name=name)
        except DecodingError as error:
            problems.append(str(error))
    raise DecodingError("; ".join(problems))


def _checked(kind: type, encoded: storage.Json, name: str) -> Any:
    # Not `isinstance`: True is no number.
    if type(encoded) is not kind:
        raise DecodingError(
            f"{name} is a {type(encoded).__name__}, not a {kind.__name__}"
        )
    return encoded
