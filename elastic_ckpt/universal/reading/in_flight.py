"""Limits the bytes in flight: those that were read and are not yet in their place."""

from __future__ import annotations

import threading


class InFlight:
    """Bytes of two kinds, each within a budget; any thread may call it.

    The bytes of a request are freed when it is done. Those of buffers are freed when
    they have been handed on, for which further requests may be needed: so one request
    is always admitted if nothing else is going on.

    Args:
      budget_bytes: of each kind.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._changed = threading.Condition()
        self._requests = 0
        self._request_bytes = 0
        self._buffer_bytes = 0
        # Buffers that are complete and about to be handed on.
        self._complete = 0
        self._ended = False
        self.peak_bytes = 0

    def begin(self, request_bytes: int, buffer_bytes: int) -> bool:
        """Waits until a request fits.

        Args:
          request_bytes: of the request.
          buffer_bytes: of the buffers that it is the first for.

        Returns:
          Whether to go on; False after `end`.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._ended or self._fits(request_bytes, buffer_bytes)
            )
            self._requests += 1
            self._request_bytes += request_bytes
            self._buffer_bytes += buffer_bytes
            in_flight = self._request_bytes + self._buffer_bytes
            self.peak_bytes = max(self.peak_bytes, in_flight)
            return not self._ended

    def done(self, request_bytes: int, *, completed: int = 0) -> None:
        """Frees the bytes of a request; `completed` buffers will be handed on."""
        with self._changed:
            self._requests -= 1
            self._request_bytes -= request_bytes
            self._complete += completed
            self._changed.notify_all()

    def handed_on(self, buffer_bytes: int, *, completed: int = 0) -> None:
        """Frees the bytes of buffers, of which `completed` were announced."""
        with self._changed:
            self._buffer_bytes -= buffer_bytes
            self._complete -= completed
            self._changed.notify_all()

    def end(self) -> None:
        """Admits no further request."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _fits(self, request_bytes: int, buffer_bytes: int) -> bool:
        if not self._requests and not self._complete:
            return True
        if self._request_bytes + request_bytes > self._budget:
            return False
        return not buffer_bytes or self._buffer_bytes + buffer_bytes <= self._budget
