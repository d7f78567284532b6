"""Views: arrays of JAX in host memory that a save holds instead of copying them.

A NumPy view of an array keeps its memory as it is: the array may be deleted, and a
program that the array is donated to copies it first. Two things speak against a view.

* The memory may belong to other code, which may change it: `jax.device_put` and DLPack
  take over memory of NumPy as it is. Only the results of programs are surely XLA's own,
  and JAX notes in each array where it was made. Anything else is copied.
* If each step donates its state, XLA copies it into fresh memory, which takes about ten
  times as long as a copy into memory that is kept. So a view is held of an array that
  is the first of its leaf, or is the same as at the save before. Otherwise the leaf is
  copied and the array is watched until it is freed: if it was not donated, the next
  saves hold views.
"""

from __future__ import annotations

import inspect
import os
import weakref
from typing import Any, cast

import jax

# For smaller arrays the copy takes no longer than the decision.
_LEAST_BYTES = 2**20
# A program may begin to donate, which is detected after so many saves.
_VIEWS = 10
# How JAX runs a program, where its C++ alone does not.
_CALLS = frozenset(
    {("pxla.py", "ExecuteReplicated.__call__"), ("stages.py", "Compiled.__call__")}
)
# The directory of JAX as code objects name it.
_JAX = os.path.dirname(
    os.path.dirname(inspect.unwrap(jax.device_put).__code__.co_filename)
)


class Views:
    """Decides for which leaves views are held, from one save to the next."""

    def __init__(self) -> None:
        self._last: dict[str, weakref.ref[jax.Array]] = {}
        self._watched: dict[str, weakref.ref[jax.Array]] = {}
        # By path, how many views to hold before the leaf is watched again.
        self._left: dict[str, int] = {}

    def allow(self, path: str, array: jax.Array) -> bool:
        """Whether a view of an array in host memory may stand for a copy.

        Args:
          path: of the leaf.
          array: that it is; its memory is the host's.
        """
        if array.nbytes < _LEAST_BYTES or not is_result_of_program(array):
            return False
        reference = weakref.ref(array)
        last = self._last.get(path)
        self._last[path] = reference
        if last is None or last() is array:
            return True
        left = self._left.get(path, 0)
        if left:
            self._left[path] = left - 1
            return True
        self._watch(path, array)
        return False

    def _watch(self, path: str, array: jax.Array) -> None:
        # The clone shares the memory of the part: a donation deletes both.
        part = cast(Any, array.addressable_shards[0].data).clone()

        def on_freed(reference: weakref.ref[jax.Array]) -> None:
            if self._watched.get(path) is reference:
                del self._watched[path]
                if not part.is_deleted():
                    self._left[path] = _VIEWS

        self._watched[path] = weakref.ref(array, on_freed)


def is_result_of_program(array: jax.Array) -> bool:
    """Whether a program of XLA made an array, and so its memory is XLA's alone.

    False where JAX has not noted where the array was made.
    """
    traceback = getattr(array, "traceback", None)
    if traceback is None or not traceback.frames:
        return False
    innermost = traceback.frames[0]
    if not innermost.file_name.startswith(_JAX + os.sep):
        # Only programs are called by C++ straight from a caller's code.
        return True
    return (os.path.basename(innermost.file_name), innermost.function_name) in _CALLS
