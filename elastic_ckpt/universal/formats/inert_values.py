"""Values that stand for the objects, classes and functions that a pickle names."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


class Shell:
    """An object of another program, of which only the state is kept, and not copied."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state: Any = None


class Record(dict[str, Any]):
    """The attributes of an object of a class of another program; nothing else of it."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A name that a pickle may call: with it the decoder calls `function` instead.

    Attributes:
      name: as the pickle has it.
      function: makes an inert value of the arguments; raises TypeError or ValueError.
    """

    name: str
    function: Callable[..., Any] = dataclasses.field(repr=False)


def shell(name: str) -> Call:
    """Stands for a class, whose objects become shells. Arguments are dropped."""
    return Call(name, lambda *_: Shell())


def record(name: str) -> Call:
    """Stands for a class, whose objects become records. Arguments are dropped."""
    return Call(name, lambda *_: Record())


def shown(value: Any) -> str:
    """A short text of a decoded value, for messages; its parts are not followed."""
    if isinstance(value, str | bytes):
        return repr(value[:60])
    if isinstance(value, int | float | None):
        return repr(value)
    return f"a {type(value).__name__}"
