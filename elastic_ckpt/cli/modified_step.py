"""Edits numbers in a step's pytrees.

A new value must be exact: an integer cannot become a fraction, and a float cannot
overflow.
"""

from __future__ import annotations

import asyncio
import dataclasses
import fractions
import math
from collections.abc import Awaitable
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath

from elastic_ckpt.checkpoint.component_io import Created
from elastic_ckpt.checkpoint.host import component_files
from elastic_ckpt.checkpoint.host.trees import leaf_path
from elastic_ckpt.core import errors


class Edit(NamedTuple):
    """An edit of one number.

    Attributes:
      path: the number's path, beginning with the tree's name, such as
        `state/opt_state/learning_rate`.
      text: the new value, or a factor.
      is_factor: whether `text` is a factor by which to multiply the current value.
    """

    path: str
    text: str
    is_factor: bool


@dataclasses.dataclass(eq=False)
class StoredFiles:
    """A component's files, loaded and saved unchanged.

    Attributes:
      files: the content of the files, keyed by file name.
    """

    files: dict[str, bytes] = dataclasses.field(default_factory=dict)

    async def load(self, directory: epath.Path) -> Awaitable[None]:
        """Reads all files of a component."""
        self.files = component_files.read(directory)
        return asyncio.sleep(0)

    async def save(self, directory: Created) -> Awaitable[None]:
        """Returns an awaitable that writes the files."""

        async def write() -> None:
            component_files.write(await directory.await_creation(), self.files)

        return write()


def edit(name: str, tree: Any, change: Edit) -> tuple[Any, str]:
    """Applies an edit to a copy of a pytree.

    Returns:
      The new tree, and a one-line description of the change.

    Raises:
      CheckpointError: if the pytree has no number at the edit's path, or the number's
        dtype cannot represent the new value.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    values = {leaf_path(name, keys): leaf for keys, leaf in leaves}
    before = values.get(change.path)
    if not _is_number(before):
        numbers = [path for path, value in values.items() if _is_number(value)]
        raise errors.CheckpointError(
            f"{name!r} has no numeric value at {change.path!r}; paths of its numeric"
            f" values: {errors.first_of(numbers) or 'none'}"
        )
    values[change.path], line = _changed(change, before)
    return jax.tree.unflatten(structure, values.values()), line


def _changed(change: Edit, number: Any) -> tuple[Any, str]:
    # The new value, with the old value's type, and a description of the change.
    array = np.asarray(number)
    before = _plain(array)
    try:
        if change.is_factor:
            wanted = before * fractions.Fraction(change.text)
        elif isinstance(before, bool):
            wanted = {"true": True, "false": False}[change.text.lower()]
        else:
            wanted = type(before)(change.text)
        with np.errstate(over="ignore"):
            after = np.full(array.shape, wanted, array.dtype)
        exact = isinstance(before, float) or _plain(after) == wanted
        if not exact or math.isfinite(_plain(after)) != math.isfinite(wanted):
            raise ValueError(f"{array.dtype} cannot represent the result")
    except (ArithmeticError, KeyError, ValueError, TypeError) as error:
        given = f"{change.text} times its value" if change.is_factor else change.text
        raise errors.CheckpointError(
            f"{change.path} has dtype {array.dtype} and cannot become {given}: {error}"
        ) from None
    line = f"{change.path} ({array.dtype}): {before!r} -> {_plain(after)!r}"
    if isinstance(number, jax.Array):
        return jax.device_put(after, number.sharding), line
    return type(number)(after.item()) if np.isscalar(number) else after, line


def _plain(array: np.ndarray) -> Any:
    value = array.reshape(()).item()
    # Numbers of ml_dtypes types, such as bfloat16, are not Python numbers.
    return value if isinstance(value, bool | int | float) else float(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool | int | float):
        return True
    # Random keys have a dtype that is not a NumPy dtype.
    dtype = getattr(value, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.kind in "iufbV" and value.size == 1
