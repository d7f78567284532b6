"""Edits of single numbers: how one is given, checked against a type, and computed.

A result is exact or refused: an integer does not become a fraction, and nothing is cut
to fit.
"""

from __future__ import annotations

import dataclasses
import fractions
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from elastic_ckpt.core import errors

# Stands for the whole tree or state that is a number itself.
WHOLE = "."
_PYTHON = {"int": np.dtype(object), "float": np.dtype(float), "bool": np.dtype(bool)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edit:
    """An edit of one number.

    Attributes:
      path: of the number in its component, `opt_state/learning_rate`; `.` if that is a
        single number.
      value: the new value, as text; None to scale it.
      factor: that the value is multiplied by, as text; None to set it.
    """

    path: str
    value: str | None = None
    factor: str | None = None


class Number(NamedTuple):
    """A number that can be edited.

    Attributes:
      path: with its component.
      dtype: of its leaf, or the class of a number of Python.
      value: an array without dims.
      file: of a component, that has it; empty for the leaf of a tree.
    """

    path: str
    dtype: str
    value: np.ndarray
    file: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A number before and after an edit.

    Attributes:
      path: of the number, with its component.
      dtype: of its leaf, or the class of a number of Python.
      before: its value.
      after: its value.
      file: of a component, that has it; empty for the leaf of a tree.
    """

    path: str
    dtype: str
    before: bool | int | float
    after: bool | int | float
    file: str = ""

    def __str__(self) -> str:
        file = f" in {self.file}" if self.file else ""
        return f"{self.path} ({self.dtype}){file}: {self.before!r} -> {self.after!r}"


def full_path(component: str, edit: Edit) -> str:
    """The path of the number of an edit, with its component."""
    return component if edit.path == WHOLE else f"{component}/{edit.path}"


def change(number: Number, edit: Edit) -> Change:
    """The change that an edit makes.

    Raises:
      CheckpointError: if the new value is none of the number's type.
    """
    before = _plain(number.value)
    python = _PYTHON.get(number.dtype)
    dtype = np.dtype(number.dtype) if python is None else python
    is_exact = dtype.kind in "iubO"
    try:
        if edit.value is not None:
            wanted = _parsed(edit.value, dtype)
        else:
            assert edit.factor is not None
            wanted = (
                before * fractions.Fraction(edit.factor)
                if is_exact
                else before * float(edit.factor)
            )
            if is_exact and wanted == int(wanted):
                wanted = int(wanted)
        with np.errstate(over="ignore"):
            after = _plain(np.array(wanted).astype(dtype))
    except (ValueError, OverflowError) as error:
        raise _refused(number, edit, str(error)) from None
    kept = (
        after == wanted if is_exact else math.isfinite(after) == math.isfinite(wanted)
    )
    if not kept or (is_exact and not isinstance(after, int)):
        wanted = float(wanted) if is_exact else after
        raise _refused(number, edit, f"{wanted} is not a number of {number.dtype}")
    return Change(
        path=number.path,
        dtype=number.dtype,
        before=before,
        after=after,
        file=number.file,
    )


def missing(path: str, holder: str, numbers: Iterable[str]) -> errors.CheckpointError:
    """The error of a number that is not there.

    Args:
      path: of it.
      holder: what lacks it.
      numbers: the paths of those that there are.
    """
    return errors.CheckpointError(
        f"{holder} has no number {path!r}; its numbers are"
        f" {errors.first_of(each or WHOLE for each in numbers) or 'none'}"
    )


def _plain(values: np.ndarray) -> bool | int | float:
    value = values.item()
    # Numbers of ml_dtypes are objects of its classes.
    return value if isinstance(value, bool | int | float) else float(value)


def _parsed(text: str, dtype: np.dtype) -> bool | int | float:
    if dtype.kind == "b":
        if text.lower() not in ("true", "false"):
            raise ValueError("give true or false")
        return text.lower() == "true"
    return int(text) if dtype.kind in "iuO" else float(text)


def _refused(number: Number, edit: Edit, why: str) -> errors.CheckpointError:
    given = edit.value if edit.value is not None else f"times {edit.factor}"
    return errors.CheckpointError(
        f"{number.path} is a number of {number.dtype}, and cannot become {given}: {why}"
    )
