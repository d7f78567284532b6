"""Edits numbers in the pytrees of a step.

A new value is exact or refused: an integer does not become a fraction, and a float does
not overflow.
"""

from __future__ import annotations

import dataclasses
import fractions
import math
from collections.abc import Awaitable
from typing import Any

import jax
import numpy as np
from etils import epath

from elastic_ckpt.checkpoint.component_io import Created
from elastic_ckpt.checkpoint.host.trees import leaf_path
from elastic_ckpt.core import errors, storage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edit:
    """An edit of one number.

    Attributes:
      path: its path with the name of the tree, `state/opt_state/learning_rate`.
      value: the new value, as text; None to scale the present one.
      factor: what the value is multiplied by, as text; None to set it.
    """

    path: str
    value: str | None = None
    factor: str | None = None


class StoredFiles:
    """The files of any component, loaded and saved as they are.

    Attributes:
      files: the content of each file, by name.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    async def load(self, directory: epath.Path) -> Awaitable[None]:
        """Reads all files of a component."""
        self.files = {path.name: path.read_bytes() for path in directory.iterdir()}
        return _nothing()

    async def save(self, directory: Created) -> Awaitable[None]:
        """Returns the writer of the files."""
        files = self.files

        async def write() -> None:
            path = await directory.await_creation()
            for name, content in files.items():
                storage.write_atomic(path / name, content)

        return write()


async def _nothing() -> None:
    pass


def edit(name: str, tree: Any, change: Edit) -> tuple[Any, str]:
    """Makes an edit in a pytree.

    Args:
      name: of the tree.
      tree: which stays as it is.
      change: the edit.

    Returns:
      The new tree, and what changed, in words.

    Raises:
      CheckpointError: if there is no such number, or it cannot have the new value.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    values = {leaf_path(name, keys): leaf for keys, leaf in leaves}
    numbers = [path for path, value in values.items() if _is_number(value)]
    if change.path not in numbers:
        raise errors.CheckpointError(
            f"{name!r} has no number {change.path!r}; its numbers are"
            f" {errors.first_of(numbers) or 'none'}"
        )
    before = values[change.path]
    after, line = _changed(change, before)
    if isinstance(before, jax.Array):
        after = jax.device_put(after, before.sharding)
    return jax.tree.unflatten(structure, (values | {change.path: after}).values()), line


def _changed(change: Edit, number: Any) -> tuple[Any, str]:
    # The new value, of the type of the one before, and a line about it.
    array = np.asarray(number)
    before = _plain(array)
    try:
        wanted = _wanted(before, change)
        with np.errstate(over="ignore"):
            after = np.full(array.shape, wanted, array.dtype)
        exact = isinstance(before, float) or _plain(after) == wanted
        if not exact or math.isfinite(_plain(after)) != math.isfinite(wanted):
            raise ValueError(f"the result is not a number of {array.dtype}")
    except (KeyError, ValueError, OverflowError, TypeError) as error:
        given = change.value if change.factor is None else f"times {change.factor}"
        raise errors.CheckpointError(
            f"{change.path} is a number of {array.dtype}, and cannot become {given}:"
            f" {error}"
        ) from None
    line = f"{change.path} ({array.dtype}): {before!r} -> {_plain(after)!r}"
    kind = type(number)
    return kind(after.item()) if kind in (bool, int, float) else after, line


def _wanted(before: Any, change: Edit) -> Any:
    if change.factor is not None and isinstance(before, float):
        return before * float(change.factor)
    if change.factor is not None:
        scaled = before * fractions.Fraction(change.factor)
        return int(scaled) if scaled.denominator == 1 else float(scaled)
    assert change.value is not None
    if isinstance(before, bool):
        return {"true": True, "false": False}[change.value.lower()]
    return type(before)(change.value)


def _plain(array: np.ndarray) -> Any:
    value = array.reshape(()).item()
    # Numbers of ml_dtypes, such as bfloat16, are objects of its classes.
    return value if isinstance(value, bool | int | float) else float(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool | int | float):
        return True
    # The dtype of random keys is none of NumPy's.
    dtype = getattr(value, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.kind in "iufbV" and value.size == 1
