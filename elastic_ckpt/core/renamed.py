"""Names that the public API had before: each is an error that names the new one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

C = TypeVar("C", bound=Callable[..., Any])


def in_module(namespace: dict[str, Any], **names: str) -> None:
    """Makes a module answer for its former names.

    Args:
      namespace: the `globals()` of a module that has a `__getattr__`.
      **names: by former name, what to write instead.
    """
    present = namespace["__getattr__"]

    def __getattr__(name: str) -> Any:
        if name in names:
            # An AttributeError would lose its text in `from module import name`.
            raise ImportError(
                f"{namespace['__name__']}.{name} is called {names[name]} now"
            )
        return present(name)

    namespace["__getattr__"] = __getattr__


def attributes(**names: str) -> Callable[[type], type]:
    """Makes the instances of a class answer for former names of its attributes.

    Args:
      **names: by former name, what to write instead.
    """

    def add(cls: type) -> type:
        def __getattr__(_: Any, name: str) -> Any:
            if name in names:
                raise AttributeError(
                    f"{cls.__name__}.{name} is called {names[name]} now"
                )
            raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")

        cls.__getattr__ = __getattr__  # type: ignore[attr-defined]
        return cls

    return add


def parameters(**names: str) -> Callable[[C], C]:
    """Makes a function answer for former names of its parameters.

    Args:
      **names: by former name, what to write instead.
    """

    def add(function: C) -> C:
        @functools.wraps(function)
        def checked(*args: Any, **keywords: Any) -> Any:
            for name in names.keys() & keywords.keys():
                raise TypeError(
                    f"{function.__qualname__}({name}=...) is called {names[name]} now"
                )
            return function(*args, **keywords)

        checked.__signature__ = inspect.signature(function)  # type: ignore
        return checked  # type: ignore[return-value]

    return add
