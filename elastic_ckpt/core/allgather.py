"""Allgather of small values between the hosts of a world.

Values pass through JAX's coordination service, which every world of processes has: no
device takes part, so background threads may use it while the devices compute.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jax._src import distributed

from elastic_ckpt.core import errors, storage, topology, tree_allgather
from elastic_ckpt.core.host_tree import Order

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

    def run(
        self,
        kind: str,
        part: Callable[[], storage.Json],
        *,
        order: Order = "together",
        timeout_secs: float,
    ) -> list[Any]:
        """Has each host do its part of some work; returns what they made of it.

        Args:
          kind: see `gather`.
          part: called when it is this host's turn; returns its value.
          order: of the hosts along their tree.
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

    def run(
        self,
        kind: str,
        part: Callable[[], storage.Json],
        *,
        order: Order = "together",
        timeout_secs: float,
    ) -> list[Any]:
        """See `Allgather`."""
        del order
        return self.gather(kind, part(), timeout_secs=timeout_secs)


class CoordinationService(tree_allgather.TreeAllgather):
    """The allgather of a world under `jax.distributed`.

    Args:
      name: the same on all hosts, once in a process; by default the number of the
        object, which every host makes in the same order.
      hosts: those that take part, ascending; by default all of the world.
    """

    def __init__(
        self, name: str | None = None, hosts: Sequence[int] | None = None
    ) -> None:
        hosts = hosts or range(topology.num_hosts())
        # Orbax has a public way to it, and the sidecar's image has no Orbax.
        client: Any = distributed.global_state.client
        super().__init__(
            client,
            f"elastic_ckpt/{next(_numbers) if name is None else name}",
            host=hosts.index(topology.this_host()),
            num_hosts=len(hosts),
        )


def of_this_world() -> Allgather:
    """Returns the allgather of the processes of this process's world."""
    if topology.num_hosts() == 1:
        return OneHost()
    return CoordinationService()


@functools.cache
def shared(hosts: tuple[int, ...] | None = None) -> Allgather:
    """Returns the allgather of this world that all calls of this process share.

    Hosts may call it first at different points: each kind of values has its own turns.

    Args:
      hosts: those that take part, ascending; by default all of the world.
    """
    num_hosts = topology.num_hosts()
    if num_hosts == 1:
        return OneHost()
    if hosts is None or len(hosts) == num_hosts:
        return CoordinationService("shared")
    return CoordinationService(f"shared/{'-'.join(map(str, hosts))}", hosts)


def agreed(
    hosts: Allgather,
    kind: str,
    part: Callable[[], storage.Json],
    *,
    timeout_secs: float,
) -> list[Any]:
    """Gathers the results of each host's `part`; if one fails, all hosts raise.

    Args:
      hosts: those that take part.
      kind: see `Allgather.gather`.
      part: of this host.
      timeout_secs: how long hosts wait for each other.

    Raises:
      RunError: if `part` failed on another host, with its message, or its result did
        not arrive in time. An error of this host is raised as it is.
    """
    failure: Exception | None = None

    def outcome() -> storage.Json:
        nonlocal failure
        try:
            return {"result": part()}
        except Exception as error:
            failure = error
            return {"failed": str(error) or type(error).__name__}

    outcomes = hosts.run(kind, outcome, timeout_secs=timeout_secs)
    if failure is not None:
        raise failure
    for number, each in enumerate(outcomes):
        if "failed" in each:
            raise errors.RunError(f"host {number}: {each['failed']}")
    return [each["result"] for each in outcomes]
