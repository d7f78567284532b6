"""Mistakes that a user is likely to make, and what is said of them.

A module for each room has its table `REFUSALS`; `test_refusals.py` runs every row.
"""

import functools
import pathlib
from collections.abc import Callable
from typing import NamedTuple

from elastic_ckpt.core import errors


class Refusal(NamedTuple):
    """A mistake and its error.

    Attributes:
      call: Makes the mistake. Its argument is a directory of its own.
      says: A regular expression that the message matches: what is wrong, what was
        found, and what to do.
      error: The type of the error.
      writes: Whether the mistake is in files that `call` itself writes first; else the
        directory has to stay empty.
    """

    call: Callable[[pathlib.Path], object]
    says: str
    error: type[Exception] = errors.ConfigError
    writes: bool = False


def row(
    make: Callable[..., object],
    *,
    error: type[Exception] = errors.ConfigError,
    writes: bool = False,
) -> Callable[..., Refusal]:
    """Of mistakes in the arguments of `make`: takes `says`, and then those.

    If it `writes`, the first argument of `make` is the directory.
    """

    def refused(says: str, *arguments: object, **settings: object) -> Refusal:
        call = functools.partial(make, **settings)
        if writes:
            return Refusal(lambda path: call(path, *arguments), says, error, writes)
        return Refusal(lambda _: call(*arguments), says, error)

    return refused
