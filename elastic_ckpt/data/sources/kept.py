"""A thread-safe LRU cache with a budget in bytes."""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable, Hashable
from concurrent import futures
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """The most recently used values. Each is computed once while other threads wait.

    Args:
      budget: a function that returns the maximum total size of the values, in bytes.
      size: a function that returns the size of a value, in bytes.

    Attributes:
      num_bytes: the total size of all values.
    """

    def __init__(self, budget: Callable[[], int], size: Callable[[T], int]) -> None:
        self._budget, self._size = budget, size
        self.begin()
        os.register_at_fork(after_in_child=self.begin)

    def begin(self) -> None:
        """Clears the cache and renews its lock, which a thread may hold at a fork."""
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
        """The value of a key, computed if it is not cached; errors are not cached.

        Args:
          key: the cache key.
          make: a function that computes the value.
          submit: a function that calls its first argument with the others, in this or
            another thread.
          num_bytes: the assumed size until the value is computed.
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
            # The process is exiting and cannot start threads.
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
