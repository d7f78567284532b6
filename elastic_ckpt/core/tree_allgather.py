"""The allgather over a store of keys and values: hosts pass their values up a tree.

Each host merges the values of its children with its own (`grouped_values`), host 0
publishes the whole, and all read that. So a host makes at most `FAN_IN + 3` requests
however many hosts there are, and n hosts make 3n. If they do their parts downwards,
each also waits for the key of its parent, and sets one for its children.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from elastic_ckpt.core import errors, storage
from elastic_ckpt.core.grouped_values import GroupedValues
from elastic_ckpt.core.host_tree import HostTree, Order

# Parents wait longer than their children, so that the host that is missing is named.
_GRACE_SECS = 2.0


class KeyValueStore(Protocol):
    """Keys and values that all hosts reach, as JAX's coordination service has them."""

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        """Sets a key, once."""
        ...

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """The value of a key, as soon as it is set; DEADLINE_EXCEEDED if it is not."""
        ...

    def key_value_delete(self, key: str) -> None:
        """Removes a key, or all keys below one that ends with `/`."""
        ...


class TreeAllgather:
    """The allgather of one host; see `allgather.Allgather`.

    Args:
      store: of the world.
      prefix: of all keys, the same on all hosts.
      host: the number of this host.
      num_hosts: of the world.

    Attributes:
      host: the number of this host.
      num_hosts: of the world.
    """

    def __init__(
        self, store: KeyValueStore, prefix: str, *, host: int, num_hosts: int
    ) -> None:
        self.host = host
        self.num_hosts = num_hosts
        self._store = store
        self._prefix = prefix
        self._tree = HostTree(num_hosts=num_hosts)
        self._lock = threading.Lock()
        self._turns: collections.Counter[str] = collections.Counter()

    def gather(
        self, kind: str, value: storage.Json, *, timeout_secs: float
    ) -> list[Any]:
        """See `Allgather`."""
        return self.run(kind, lambda: value, timeout_secs=timeout_secs)

    def run(
        self,
        kind: str,
        part: Callable[[], storage.Json],
        *,
        order: Order = "together",
        timeout_secs: float,
    ) -> list[Any]:
        """See `Allgather`."""
        with self._lock:
            turn = self._turns[kind]
            self._turns[kind] += 1
        self.pass_up(kind, turn, part, order=order, timeout_secs=timeout_secs)
        return self.take(kind, turn, timeout_secs=timeout_secs)

    def pass_up(
        self,
        kind: str,
        turn: int,
        part: Callable[[], storage.Json],
        *,
        order: Order = "together",
        timeout_secs: float,
    ) -> None:
        """Passes the values of the hosts below this one, and its own, to its parent.

        Args:
          kind: of the values.
          turn: how many values of this kind were gathered before.
          part: returns the value of this host, when it is its turn.
          order: of the hosts.
          timeout_secs: how long to wait for other hosts.
        """
        prefix = f"{self._prefix}/{kind}/{turn}"
        deadline = time.monotonic() + timeout_secs + self._grace_secs()
        children = self._tree.children(self.host)
        if order == "up":
            below = [self._of_child(prefix, child, deadline) for child in children]
            own = part()
        else:
            parent = self._tree.parent(self.host)
            if order == "down" and parent is not None:
                # If it is missing, so is its value, and `take` fails on all hosts.
                self._value(f"{prefix}/below/{parent}", timeout_secs)
            own = part()
            if order == "down" and children:
                self._store.key_value_set_bytes(f"{prefix}/below/{self.host}", b"")
            below = [self._of_child(prefix, child, deadline) for child in children]
        merged = GroupedValues.merged([GroupedValues.of_host(self.host, own), *below])
        name = str(self.host) if self.host else "all"
        self._store.key_value_set_bytes(f"{prefix}/{name}", merged.to_bytes())
        if not self.host and turn and not merged.missing:
            # A host whose value of this turn is there has read those of the one before.
            self._store.key_value_delete(f"{self._prefix}/{kind}/{turn - 1}/")

    def take(self, kind: str, turn: int, *, timeout_secs: float) -> list[Any]:
        """Returns the values of all hosts, which `pass_up` has passed to host 0.

        Args:
          kind: of the values.
          turn: how many values of this kind were gathered before.
          timeout_secs: how long hosts wait for each other.

        Raises:
          RunError: if the value of a host did not arrive in time.
        """
        most_secs = timeout_secs + _GRACE_SECS * (self._tree.depth(0) + 1)
        key = f"{self._prefix}/{kind}/{turn}/all"
        message = self._value(key, most_secs)
        missing: tuple[int, ...] = (0,)
        if message is not None:
            values = GroupedValues.from_bytes(message)
            if not values.missing:
                return values.values(self.num_hosts)
            missing = values.missing
        raise errors.RunError(
            f"host {self.host} waited for {errors.first_of(map(str, missing))}"
            f" ({kind}) for {timeout_secs:g} s; look at the log of the host that is"
            " missing, and start the run again"
        )

    def _of_child(self, prefix: str, child: int, deadline: float) -> GroupedValues:
        message = self._value(
            f"{prefix}/{child}", max(0.0, deadline - time.monotonic())
        )
        if message is None:
            return GroupedValues(hosts={}, missing=(child,))
        return GroupedValues.from_bytes(message)

    def _grace_secs(self) -> float:
        return _GRACE_SECS * max(0, self._tree.depth(self.host) - 1)

    def _value(self, key: str, timeout_secs: float) -> bytes | None:
        # None if it is not set in time.
        timeout_ms = max(1, int(1000 * timeout_secs))
        try:
            return self._store.blocking_key_value_get_bytes(key, timeout_ms)
        except Exception as error:
            # The service raises one class for all failures. If it is gone, so is host
            # 0, whose own error is more specific.
            if "DEADLINE_EXCEEDED" not in str(error).partition("\n")[0]:
                raise
            return None
