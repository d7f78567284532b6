"""Checks keys of dicts and items of sets before Python hashes and compares them.

Python hashes tuples by recursion and each time anew, and large integers to few numbers.
Hashes of texts differ in each process, but tuples of equal hashes can be made: dicts of
them take time that grows with the square of their number.
"""

from __future__ import annotations

from typing import Any

from elastic_ckpt.universal.formats.inert_values import Shell

_MOST_PARTS = 100
_MOST_OTHERS = 10_000
_PLAIN = (str, bytes, int, float, type(None), Shell)


class PickleKeys:
    """The keys of one pickle."""

    def __init__(self) -> None:
        self._num_others = 0

    def problem(self, key: Any) -> str | None:
        """The reason that a key is refused for, which continues a sentence."""
        parts = key if isinstance(key, tuple) else (key,)
        if (
            isinstance(key, frozenset)
            or len(parts) > _MOST_PARTS
            or any(isinstance(part, tuple | frozenset) for part in parts)
            or any(isinstance(part, int) and part.bit_length() > 64 for part in parts)
        ):
            return (
                "has a key that is a nested or long tuple, or a number of over 64 bits,"
                " which is not supported"
            )
        if not isinstance(key, _PLAIN):
            self._num_others += 1
            if self._num_others > _MOST_OTHERS:
                return f"has over {_MOST_OTHERS} keys that are no texts or numbers"
        try:
            hash(key)
        except TypeError as error:
            return f"is malformed ({error})"
        return None
