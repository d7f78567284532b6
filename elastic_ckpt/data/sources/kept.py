"""Values that the threads of a process share: those that were used last are kept."""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable, Hashable
from concurrent import futures
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """The values that were used last. Each is made once, and others wait for it.

    Args:
      budget: returns the most bytes that they take together.
      size: returns the bytes that one takes.

    Attributes:
      num_bytes: what they take.
    """

    def __init__(self, budget: Callable[[], int], size: Callable[[T], int]) -> None:
        self._budget, self._size = budget, size
        self.begin()
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        """Keeps none; also after a fork, when another thread may hold the lock."""
        self._lock = threading.Lock()
        self._values: collections.OrderedDict[
            Hashable, tuple[futures.Future[T], int]
        ] = collections.OrderedDict()
        self.num_bytes = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._values

    def get(
        self,
        key: Hashable,
        make: Callable[[], T],
        *,
        submit: Callable[..., object] = lambda function, *of: function(*of),
        num_bytes: int = 0,
    ) -> futures.Future[T]:
        """The value of a key, made if it is not kept; an error is not kept.

        Args:
          key: of the value.
          make: makes it.
          submit: calls a function with arguments, in this thread or in another.
          num_bytes: what it takes until it is made.
        """
        with self._lock:
            found = self._values.get(key)
            if found is not None:
                self._values.move_to_end(key)
                return found[0]
            made = futures.Future[T]()
            self._put(key, made, num_bytes)
        try:
            submit(self._make, key, made, make)
        except RuntimeError:
            # No thread begins any more: the program ends.
            self._make(key, made, make)
        return made

    def _make(
        self, key: Hashable, made: futures.Future[T], make: Callable[[], T]
    ) -> None:
        try:
            value = make()
        except BaseException as error:  # Ctrl-C too: others wait
            with self._lock:
                self.num_bytes -= self._values.pop(key, (made, 0))[1]
            made.set_exception(error)
            return
        with self._lock:
            if self._values.get(key, (None, 0))[0] is made:
                self._put(key, made, self._size(value))
        made.set_result(value)

    def _put(self, key: Hashable, made: futures.Future[T], num_bytes: int) -> None:
        self.num_bytes += num_bytes - self._values.get(key, (made, 0))[1]
        self._values[key] = made, num_bytes
        while self.num_bytes > self._budget() and len(self._values) > 1:
            self.num_bytes -= self._values.popitem(last=False)[1][1]
