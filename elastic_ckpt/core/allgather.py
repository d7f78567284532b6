"""Allgather of small values between the hosts of a world.

Values pass through JAX's coordination service, which every world of processes has: no
device takes part, so background threads may use it while the devices compute.
"""

from __future__ import annotations

import collections
import functools
import itertools
import json
import threading
from typing import Any, Protocol

from jax._src import distributed

from elastic_ckpt.core import errors, storage, topology

# Numbers the objects of a process that have no name.
_numbers = itertools.count()


class Allgather(Protocol):
    """Gathers a value of each host on all hosts, which make the same calls."""

    @property
    def host(self) -> int:
        """The number of this host, from 0."""
        ...

    @property
    def num_hosts(self) -> int:
        """How many hosts take part."""
        ...

    def gather(
        self, kind: str, value: storage.Json, *, timeout_secs: float
    ) -> list[Any]:
        """Returns the value of each host, in the order of their numbers.

        Args:
          kind: a name of the values. Calls of one kind come from one thread at a time,
            in the same order on all hosts; those of different kinds in any order.
          value: of this host, JSON of kilobytes at most.
          timeout_secs: how long hosts wait for each other.

        Raises:
          RunError: if the value of a host did not arrive in time.
        """
        ...


class OneHost:
    """The allgather of a world with one host."""

    host = 0
    num_hosts = 1

    def gather(
        self, kind: str, value: storage.Json, *, timeout_secs: float
    ) -> list[Any]:
        """Returns the value alone, as it would arrive from another host."""
        del kind, timeout_secs
        return [json.loads(storage.canonical_json(value))]


class CoordinationService:
    """The allgather of a world under `jax.distributed`.

    Host 0 collects the values and publishes them in one piece, so that n hosts make 3n
    requests, not n**2.

    Args:
      name: the same on all hosts, once in a process; by default the number of the
        object, which every host makes in the same order.
    """

    def __init__(self, name: str | None = None) -> None:
        self.host = topology.this_host()
        self.num_hosts = topology.num_hosts()
        # Orbax has a public way to it, and the sidecar's image has no Orbax.
        self._client: Any = distributed.global_state.client
        self._prefix = f"elastic_ckpt/{next(_numbers) if name is None else name}"
        self._lock = threading.Lock()
        self._turns: collections.Counter[str] = collections.Counter()

    def gather(
        self, kind: str, value: storage.Json, *, timeout_secs: float
    ) -> list[Any]:
        """See `Allgather`."""
        with self._lock:
            turn = self._turns[kind]
            self._turns[kind] += 1
        prefix = f"{self._prefix}/{kind}/{turn}"
        self._client.key_value_set_bytes(
            f"{prefix}/{self.host}", storage.canonical_json(value)
        )
        if self.host == 0:
            values = [
                self._wait_for(f"{prefix}/{host}", kind, timeout_secs)
                for host in range(self.num_hosts)
            ]
            self._client.key_value_set_bytes(
                f"{prefix}/all", b"[" + b",".join(values) + b"]"
            )
            # A host whose value of this turn is there has read those of the one before.
            if turn:
                self._client.key_value_delete(f"{self._prefix}/{kind}/{turn - 1}/")
        return json.loads(self._wait_for(f"{prefix}/all", kind, timeout_secs))

    def _wait_for(self, key: str, kind: str, timeout_secs: float) -> bytes:
        timeout_ms = int(1000 * timeout_secs)
        try:
            return self._client.blocking_key_value_get_bytes(key, timeout_ms)
        except Exception as error:
            # The service raises one class for all failures. If it is gone, so is host
            # 0, whose own error is more specific.
            reason = str(error).partition("\n")[0]
            if "DEADLINE_EXCEEDED" not in reason:
                raise
            raise errors.RunError(
                f"host {self.host} waited for {key.rpartition('/')[2]} ({kind}) for"
                f" {timeout_secs:g} s ({reason}); look at the log of the"
                " host that is missing, and start the world anew"
            ) from None


def of_this_world() -> Allgather:
    """Returns the allgather of the processes of this process's world."""
    if topology.num_hosts() == 1:
        return OneHost()
    return CoordinationService()


@functools.cache
def shared() -> Allgather:
    """Returns the allgather of this world that all calls of this process share.

    Hosts may call it first at different points: each kind of values has its own turns.
    """
    return OneHost() if topology.num_hosts() == 1 else CoordinationService("shared")
