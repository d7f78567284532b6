"""Gathers a small value from every host on every host, over JAX's coordination service.

No device takes part, so background threads may gather while the devices compute. Values
travel up a tree of hosts to host 0, which publishes them all under one key. A host
makes at most `FAN_IN + 4` requests, regardless of the number of hosts. Together, n
hosts make 3n requests, or 5n in the order `down`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import json
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from elastic_ckpt.core import codec, errors, storage

# Eight neighbors cost little, and 10,000 hosts are five passes deep.
FAN_IN = 7
# When a host runs its work: immediately, after all hosts below it, or after all above.
Order = Literal["together", "up", "down"]
# Parents wait longer than their children, so that errors name the missing host.
_GRACE_SECS = 2.0
# Gives each unnamed object of this process a number.
_numbers = itertools.count()
# Runs of identical values from consecutive hosts: the number of hosts, and the value's
# JSON, or None if the value has not arrived.
_Runs = list[tuple[int, str | None]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostTree:
    """The tree along which the hosts of a world pass messages.

    Host 0 is the root. The indices of the hosts below a host follow its own index, and
    its children split these hosts evenly, so hosts of the same slice exchange messages
    first. Each host has at most `fan_in` children.
    """

    num_hosts: int
    fan_in: int = FAN_IN

    def children(self, host: int) -> list[int]:
        """The children of a host, in ascending order."""
        return [subtree.start for subtree in self._split(self.below(host))]

    def below(self, host: int) -> range:
        """A host and all hosts below it."""
        return self.way(host)[-1]

    def way(self, host: int) -> list[range]:
        """The subtrees on the path from the root to a host."""
        way = [range(self.num_hosts)]
        while way[-1].start != host:
            way.append(next(hosts for hosts in self._split(way[-1]) if host in hosts))
        return way

    def in_order(self, order: Order) -> list[Sequence[int]]:
        """Groups of hosts; each group waits for the one before it."""
        if order == "together":
            return [range(self.num_hosts)]
        return self._levels if order == "down" else self._levels[::-1]

    @functools.cached_property
    def _levels(self) -> list[Sequence[int]]:
        levels, subtrees = [], [range(self.num_hosts)]
        while subtrees:
            levels.append([subtree.start for subtree in subtrees])
            subtrees = [below for each in subtrees for below in self._split(each)]
        return [*levels]

    def _split(self, hosts: range) -> list[range]:
        # The subtrees of the root's children.
        num_below = len(hosts) - 1
        num_subtrees = min(self.fan_in, num_below)
        ends = [
            hosts.start + 1 - (-number * num_below // num_subtrees)
            for number in range(num_subtrees + 1)
            if num_subtrees
        ]
        return [range(*pair) for pair in itertools.pairwise(ends)]


class Allgather:
    """Gathers values from hosts that make the same calls.

    Args:
      store: a key-value store that all hosts can reach, with the methods
        `key_value_set_bytes`, `blocking_key_value_get_bytes` and `key_value_delete` of
        JAX's coordination service; None in a world of one host.
      prefix: a prefix for all keys, the same on all hosts.
      host: this host's index, from 0.
      num_hosts: the number of participating hosts.
    """

    def __init__(
        self,
        store: Any,
        prefix: str = "",
        *,
        host: int = 0,
        num_hosts: int = 1,
    ) -> None:
        self.host, self.num_hosts = host, num_hosts
        self._store, self._prefix = store, prefix
        self._tree = HostTree(num_hosts=num_hosts)
        self._lock = threading.Lock()
        self._rounds: collections.Counter[str] = collections.Counter()
        # On host 0: values by kind that it has published but `take` has not returned.
        self._published: dict[str, _Runs] = {}

    def gather(
        self, kind: str, value: storage.Json, *, timeout_secs: float
    ) -> list[Any]:
        """Returns the value of each host; see `run`."""
        return self.run(kind, lambda: value, timeout_secs=timeout_secs)

    def run(
        self,
        kind: str,
        work: Callable[[], storage.Json],
        *,
        order: Order = "together",
        timeout_secs: float,
    ) -> list[Any]:
        """Runs `work` on every host and returns all results, ordered by host index.

        Args:
          kind: a name for the results. All hosts must make the calls of one kind in the
            same order, from one thread at a time; different kinds are independent.
          work: a function that returns at most a few kilobytes of JSON.
          order: when each host runs `work`: immediately (`together`), after all hosts
            below it in the tree (`up`), or after all hosts above it (`down`).
          timeout_secs: how long hosts wait for each other.

        Raises:
          RunError: if a host's result does not arrive in time.
        """
        if self._store is None:
            return [json.loads(storage.canonical_json(work()))]
        with self._lock:
            round_number = self._rounds[kind]
            self._rounds[kind] += 1
        self.pass_up(kind, round_number, work, order=order, timeout_secs=timeout_secs)
        return self.take(kind, round_number, timeout_secs=timeout_secs)

    def agreed(
        self, kind: str, work: Callable[[], Any], *, timeout_secs: float
    ) -> list[Any]:
        """Like `run`, but if `work` fails on any host, all hosts raise an error.

        Raises:
          RunError: if `work` failed on another host, with the message of that failure.
            If `work` failed on this host, its own error is raised unchanged.
        """
        failure: Exception | None = None
        try:
            own = {"answer": codec.encode(work())}
        except Exception as error:
            failure, own = error, failed(error)
        outcomes = self.gather(kind, own, timeout_secs=timeout_secs)
        if failure is not None:
            raise failure
        try:
            return answers(dict(enumerate(outcomes)))
        except errors.HostsFailedError as error:
            raise errors.RunError(str(error)) from None

    def pass_up(
        self,
        kind: str,
        round_number: int,
        work: Callable[[], storage.Json],
        *,
        order: Order = "together",
        timeout_secs: float,
    ) -> None:
        """The first half of `run`: passes this host's values to its parent.

        `round_number` is the number of earlier rounds of this kind.
        """
        prefix = f"{self._prefix}/{kind}/{round_number}"
        deadline = time.monotonic() + timeout_secs + self._grace_secs(self.host)
        children = self._tree.children(self.host)

        def below() -> _Runs:
            return [
                run
                for child in children
                for run in self._runs(f"{prefix}/{child}", child, deadline)
            ]

        runs_below = below() if order == "up" else []
        if order == "down" and self.host:
            # If the parent is missing, its value is too, and `take` fails on all hosts.
            parent = self._tree.way(self.host)[-2].start
            self._value(f"{prefix}/below/{parent}", timeout_secs)
        own: _Runs = [(1, storage.canonical_json(work()).decode())]
        if order == "down" and children:
            self._store.key_value_set_bytes(f"{prefix}/below/{self.host}", b"")
        runs = _joined([*own, *(runs_below if order == "up" else below())])
        message = zlib.compress(storage.canonical_json([*runs]), 1)
        self._store.key_value_set_bytes(f"{prefix}/{self.host or 'all'}", message)
        if not self.host:
            self._published[kind] = runs
        if not self.host and round_number and all(text is not None for _, text in runs):
            # A host that has sent its value for this round has read the previous round.
            self._store.key_value_delete(f"{self._prefix}/{kind}/{round_number - 1}/")

    def take(self, kind: str, round_number: int, *, timeout_secs: float) -> list[Any]:
        """The second half of `run`: returns all results, without duplicate objects."""
        deadline = time.monotonic() + timeout_secs + self._grace_secs(0) + _GRACE_SECS
        runs = self._published.pop(kind, None) or self._runs(
            f"{self._prefix}/{kind}/{round_number}/all", 0, deadline
        )
        texts = [text for number, text in runs for _ in range(number)]
        missing = [str(host) for host, text in enumerate(texts) if text is None]
        if missing:
            raise errors.RunError(
                f"host {self.host} waited {timeout_secs:g} s for a message ({kind})"
                f" from these hosts: {errors.first_of(missing)}; check their logs, then"
                " restart the run"
            )
        values = {text: json.loads(str(text)) for text in texts}
        return [values[text] for text in texts]

    def _grace_secs(self, host: int) -> float:
        depth = len(self._tree.in_order("down")) - len(self._tree.way(host))
        return _GRACE_SECS * max(0, depth - 1)

    def _runs(self, key: str, host: int, deadline: float) -> _Runs:
        # The values that a host has passed up: its own and those from below.
        message = self._value(key, max(0.0, deadline - time.monotonic()))
        if message is None:
            return [(len(self._tree.below(host)), None)]
        return json.loads(zlib.decompress(message))

    def _value(self, key: str, timeout_secs: float) -> bytes | None:
        # The value of a key; None if the key is not set in time.
        timeout_ms = max(1, int(1000 * timeout_secs))
        try:
            return self._store.blocking_key_value_get_bytes(key, timeout_ms)
        except Exception as error:
            # The service raises one class for all failures. If the service is gone,
            # host 0 is too, and its own error is more specific.
            if "DEADLINE_EXCEEDED" not in str(error).partition("\n")[0]:
                raise
            return None


def _joined(runs: _Runs) -> _Runs:
    return [
        (sum(number for number, _ in equal), text)
        for text, equal in itertools.groupby(runs, key=lambda run: run[1])
    ]


def outcome(work: Callable[[], Any]) -> dict[str, Any]:
    """Runs `work` and encodes its result or failure for `answers` on other hosts."""
    try:
        return {"answer": codec.encode(work())}
    except Exception as error:
        return failed(error)


def failed(error: Exception) -> dict[str, str]:
    """The outcome of a call that raised `error`, with a traceback if it is a bug."""
    # Reads an error even if its own `__str__` fails.
    shown, kind = traceback.TracebackException.from_exception(error), type(error)
    why = str(shown)
    if not isinstance(error, errors.ElasticCkptError | OSError):
        trace = "".join(shown.format())
        why = f"{kind.__name__}: {why}\n\nIts traceback:\n{trace}"
    return {"failed": why, "kind": kind.__name__}


def answers(outcomes: Mapping[int, Mapping[str, Any]]) -> list[Any]:
    """The results in `outcomes`, still encoded.

    Args:
      outcomes: each host's result of `outcome`, keyed by host index.

    Raises:
      ReplacedError: if a host found that a later launch has continued the run.
      OpenFilesError: if a host could open no more files.
      HostsFailedError: if the call failed on a host for a different reason.
    """
    problems = {n: each["failed"] for n, each in outcomes.items() if "failed" in each}
    for kind in (errors.ReplacedError, errors.OpenFilesError):
        if any(each.get("kind") == kind.__name__ for each in outcomes.values()):
            raise kind("; ".join(dict.fromkeys(problems.values())))
    if problems:
        raise errors.HostsFailedError(problems)
    return [each["answer"] for each in outcomes.values()]


def new(name: str | None = None, hosts: Iterable[int] = ()) -> Allgather:
    """Creates an allgather over the processes of this world.

    Args:
      name: a name that is unique in the process and the same on all hosts. By default,
        the name is a counter; all hosts must then create these objects in the same
        order.
      hosts: the participating hosts, in ascending order; by default all.
    """
    from jax._src import distributed

    from elastic_ckpt.core import topology

    members = [*hosts] or [*range(topology.num_hosts())]
    if len(members) == 1:
        return Allgather(None)
    # Orbax has a public function for this, but the sidecar's image has no Orbax.
    return Allgather(
        distributed.global_state.client,
        f"elastic_ckpt/{next(_numbers) if name is None else name}",
        host=members.index(topology.this_host()),
        num_hosts=len(members),
    )


@functools.cache
def shared(hosts: tuple[int, ...] = ()) -> Allgather:
    """Returns an allgather like `new` does, but one that the whole process shares.

    Hosts may create it at different times, because each kind counts its own rounds.
    """
    return new("-".join(["shared", *map(str, hosts)]), hosts)
