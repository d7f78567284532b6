"""Encodes values of declared types as JSON, and decodes them by their types.

The supported types are paths and msgspec's types: dataclasses, tuples, mappings with
string keys, enums, bytes (as base64), literals and unions.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

import msgspec
from etils import epath

from elastic_ckpt.core import storage

_lock = threading.Lock()
# Types that have already been decoded.
_known: set[Any] = set()


def encode(value: Any) -> storage.Json:
    """Encodes a value as JSON.

    Raises:
      TypeError: if the value or a nested value has an unsupported type.
    """
    return msgspec.to_builtins(value, enc_hook=_encoded)


def decode(kind: Any, encoded: storage.Json, *, name: str = "value") -> Any:
    """Decodes a value of type `kind`, such as a dataclass or `tuple[int, ...]`.

    Fields that a dataclass lacks are ignored. Messages call the value `name`.

    Raises:
      ValueError: if a field is missing or a value has the wrong type. The message says
        where.
    """
    # msgspec 0.22 attaches its type information to a class before the information is
    # complete, and a second thread that finds it reads invalid memory.
    with contextlib.nullcontext() if kind in _known else _lock:
        try:
            return msgspec.convert(encoded, kind, dec_hook=_decoded)
        except msgspec.ValidationError as error:
            raise ValueError(f"{name}: {error}") from None
        finally:
            _known.add(kind)


def _encoded(value: Any) -> Any:
    if isinstance(value, epath.Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(
        f"{value!r} is of type {type(value).__name__}, which cannot be encoded"
    )


def _decoded(kind: type, encoded: Any) -> Any:
    if kind is epath.Path and isinstance(encoded, str):
        return epath.Path(encoded)
    raise TypeError(f"{encoded!r} is not of type {kind.__name__}")
