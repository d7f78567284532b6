"""Edits of single numbers of a step: in its trees, and in the states of components.

A result is exact or refused: an integer does not become a fraction, and nothing is cut
to fit.

A component has one state, or one for each host, node or group, and an edit is made in
all of them. Each is a file, whose digest changes with the state; all other files of the
component stay as they are.
"""

from __future__ import annotations

import dataclasses
import fractions
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from elastic_ckpt.checkpoint.components import description, encoding, state_file
from elastic_ckpt.checkpoint.components.encoding import Encoded, Number
from elastic_ckpt.checkpoint.host import verified_read
from elastic_ckpt.core import checked_json, digest, errors
from elastic_ckpt.steps.holdings import Holdings
from elastic_ckpt.steps.manifest import ComponentFile

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


def change(number: Number, edit: Edit, *, file: str = "") -> Change:
    """The change that an edit makes.

    Args:
      number: whose path has its component.
      edit: of it.
      file: see `Change`.

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
        path=number.path, dtype=number.dtype, before=before, after=after, file=file
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


def states_of(
    holdings: Holdings, reader: verified_read.VerifiedReader, component: str
) -> dict[str, Encoded]:
    """The states of a component of a step, by the paths of their files.

    Raises:
      CheckpointError: if it is none of `ec.components`, or a file cannot be read.
    """
    items = {file.path: n for n, file in enumerate(holdings.files)}

    def content(path: str) -> bytes:
        item = items[path]
        offers = holdings.holders(len(holdings.leaf) + item)
        return reader.file(holdings.files[item], offers)

    own_description = f"{component}/{description.FILE}"
    if own_description not in items:
        raise errors.CheckpointError(
            f"component {component!r} has a file format of its own; only numbers in"
            " pytrees and in components of ec.components can be edited"
        )
    try:
        names = description.from_bytes(content(own_description)).states
        paths = [f"{component}/{description.state_name(name)}" for name in names]
        return {path: state_file.from_bytes(content(path)) for path in paths}
    except (KeyError, checked_json.UnreadableError, errors.CheckpointError) as error:
        raise errors.CheckpointError(
            f"component {component!r} cannot be read: {error}; run elastic-ckpt verify"
        ) from None


def change_in_state(encoded: Encoded, file: str, component: str, edit: Edit) -> Change:
    """The change that an edit makes in the state in a file of a component.

    Raises:
      CheckpointError: if the state lacks the number, or as `change`.
    """
    listed = encoding.numbers(encoded)
    path = "" if edit.path == WHOLE else edit.path
    equal = [each for each in listed if each.path == path]
    if not equal:
        raise missing(edit.path, file, [each.path for each in listed])
    if len(equal) > 1:
        raise errors.CheckpointError(
            f"{file} has {len(equal)} numbers with the path {path!r} (keys differ in"
            " their type, or contain slashes), so none of them is edited"
        )
    number = equal[0]._replace(path=full_path(component, edit))
    return change(number, edit, file=file)


def edited_file(
    file: ComponentFile, content: bytes, changes: Sequence[Change]
) -> tuple[ComponentFile, bytes]:
    """A file of a step and its content, with those changes that are in it."""
    after: Mapping[str, bool | int | float] = {
        each.path.partition("/")[2]: each.after
        for each in changes
        if each.file == file.path
    }
    if not after:
        return file, content
    encoded = encoding.replaced(state_file.from_bytes(content), after)
    content = state_file.to_bytes(encoded)
    checksum = digest.values_digest(np.frombuffer(content, np.uint8))
    file = dataclasses.replace(file, digest=checksum, stored_bytes=len(content))
    return file, content


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
