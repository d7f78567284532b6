"""The machines of a run, as their supervisors see each other.

Supervisors share values through JAX's coordination service. One of them, the leader,
holds the service, in a disposable process (`membership_child`); the others are its
clients. When the leader is lost, the lowest-numbered machine that is left opens the
next service, at its own address, which all have known from the start. Nothing is read
from an earlier service: the leader publishes anew what counts.

Several leaders are possible for a while, if machines cannot reach each other. Each
sees only its own part of the run, and which of them may continue is decided elsewhere:
by the claim of the next world in storage, or by a majority of the machines.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent import futures
from multiprocessing import connection, process

from elastic_ckpt.core import storage
from elastic_ckpt.elastic import termination
from elastic_ckpt.elastic.machines import membership_child

# The longest time for an address on a network to accept a connection, and the time
# between two looks for a service.
_PROBE_SECS = 1.0
_LOOK_SECS = 0.2


def has_majority(alive: Collection[int], num_machines: int) -> bool:
    """Whether more than half of the machines are alive; half is not enough."""
    return 2 * len(alive) > num_machines


def choose_leader(
    own: int,
    *,
    accepting: Collection[int],
    lost: Collection[int],
    waited_secs: float,
    lost_secs: float,
) -> int | None:
    """The machine whose service to use; None to look once more.

    A service that is there is used. Otherwise the lowest machine opens one. Each waits
    `lost_secs` for every machine before it that is not known to be lost.

    Args:
      own: the number of this machine.
      accepting: other machines at whose address there is a service.
      lost: machines whose service was just lost, or did not answer.
      waited_secs: since this machine began to look for a service.
      lost_secs: the time after which a machine without a sign counts as lost.
    """
    there = sorted(set(accepting) - set(lost))
    if there:
        return there[0]
    before = [number for number in range(own) if number not in lost]
    return own if waited_secs >= lost_secs * len(before) else None


class Membership:
    """This machine's view of the machines of the run.

    Args:
      own: the number of this machine, from 0.
      addresses: of each machine's service, `host:port`; the same list on all machines.
      log: the file for the output of the process that holds the client.
      lost_secs: the time without a sign after which a machine counts as lost.
      clock: the time in seconds.

    Attributes:
      own: the number of this machine.
      num_machines: of the run.
      lost_secs: the time without a sign after which a machine counts as lost.
      leader: the machine that holds the service; None while there is none.
      term: how many services this machine has joined.
      values: of the service, by key, without those of `BEAT`.
      expected: the machines that were alive under the last leader, without it; at first
        all.
    """

    def __init__(
        self,
        own: int,
        addresses: Sequence[str],
        *,
        log: str,
        lost_secs: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.own = own
        self.num_machines = len(addresses)
        self.lost_secs = lost_secs
        self._addresses = tuple(addresses)
        self._log = log
        self._clock = clock
        self._lower = frozenset(range(own))
        # A leader yields to services at these machines.
        self._yields_to = self._lower
        self._may_lead = True
        self.leader: int | None = None
        self.term = 0
        self.values: Mapping[str, str] = {}
        self._attempt: int | None = None
        self._child: process.BaseProcess | None = None
        self._pipe: connection.Connection | None = None
        self._lost: set[int] = set()
        # Those that were lost and still accept connections, as if they were frozen.
        self._silent: set[int] = set()
        self._since_secs = clock()
        self._probe_at_secs = clock()
        self.expected = frozenset(range(len(addresses)))
        # By machine: its last beat, and when it changed.
        self._beats: dict[int, tuple[str, float]] = {}

    @property
    def is_leader(self) -> bool:
        """Whether this machine holds the service."""
        return self.leader == self.own

    def machines(self) -> frozenset[int]:
        """The machines that are alive; empty while there is no service."""
        if self.leader is None:
            return frozenset()
        return self._alive(self._clock())

    def fileno(self) -> int | None:
        """A descriptor that is readable when `poll` has something to do."""
        return None if self._pipe is None else self._pipe.fileno()

    def publish(self, values: Mapping[str, str]) -> None:
        """Sets values for all machines; lost with the service."""
        if self._pipe is not None:
            # A lost service is noticed by `poll`.
            with contextlib.suppress(OSError):
                self._pipe.send_bytes(json.dumps(dict(values)).encode())

    def claimed(self) -> None:
        """Notes that this leader has claimed a world: it does not yield any more."""
        self._yields_to = frozenset()

    def short(self) -> None:
        """Notes that this leader lacks slices for a world.

        If it has claimed one before, any other leader may have continued the run.
        """
        if not self._yields_to:
            self._yields_to = frozenset(range(self.num_machines)) - {self.own}

    def replaced(self) -> None:
        """Notes that another machine leads the run: this one waits for its service."""
        self._may_lead = False

    def poll(self) -> None:
        """Takes in what has changed, and looks for a service if there is none."""
        if self._child is None:
            self._look()
            return
        assert self._pipe is not None
        try:
            while self._pipe.poll():
                self._take(json.loads(self._pipe.recv_bytes()))
        except (EOFError, OSError):
            self._lose()
            return
        can_yield = self.is_leader and bool(self._yields_to)
        is_time = can_yield and self._is_time_to_probe(self.lost_secs / 2)
        if is_time and self._other_services():
            # Two parts of the run reach each other again: one leader is left.
            self._lose()

    def close(self) -> None:
        """Ends the process that holds the client, and the service if it is here."""
        if self._child is not None and self._pipe is not None:
            self._pipe.close()
            self._child.kill()
            self._child.join()
        self._child = self._pipe = None

    def _take(self, values: dict[str, str]) -> None:
        now_secs = self._clock()
        if self.leader is None:
            self.leader = self._attempt
            self.term += 1
            self._beats = {}
            self._may_lead = True
        for key in [each for each in values if each.startswith(membership_child.BEAT)]:
            number, beat = int(key.removeprefix(membership_child.BEAT)), values.pop(key)
            if self._beats.get(number, ("", 0.0))[0] != beat:
                self._beats[number] = (beat, now_secs)
        self.values = values

    def _lose(self) -> None:
        self.close()
        was_there = self.leader is not None
        assert self._attempt is not None
        if was_there:
            self._lost = set()
            self._since_secs = self._clock()
            # The leader may have been silent for so long that all seem to be.
            newest_secs = max((at for _, at in self._beats.values()), default=0.0)
            self.expected = self._alive(newest_secs) - {self._attempt}
        self._lost.add(self._attempt)
        self._silent.add(self._attempt)
        self._lost.discard(self.own)
        self.leader, self.values, self._yields_to = None, {}, self._lower

    def _alive(self, now_secs: float) -> frozenset[int]:
        return frozenset(
            number
            for number, (_, at_secs) in self._beats.items()
            if now_secs - at_secs < self.lost_secs
        )

    def _is_time_to_probe(self, every_secs: float) -> bool:
        now_secs = self._clock()
        if now_secs < self._probe_at_secs:
            return False
        self._probe_at_secs = now_secs + every_secs
        return True

    def _accepting(self, numbers: Iterable[int]) -> list[int]:
        others = [number for number in numbers if number != self.own]
        with futures.ThreadPoolExecutor(max(1, len(others))) as threads:
            accept = list(threads.map(_accepts, (self._addresses[n] for n in others)))
        return [number for number, does in zip(others, accept, strict=True) if does]

    def _other_services(self) -> set[int]:
        accepting = set(self._accepting(self._yields_to))
        self._silent &= accepting
        return accepting - self._silent

    def _look(self) -> None:
        if not self._is_time_to_probe(_LOOK_SECS):
            return
        leader = choose_leader(
            self.own,
            accepting=self._accepting(range(len(self._addresses))),
            lost=self._lost,
            waited_secs=self._clock() - self._since_secs,
            lost_secs=self.lost_secs,
        )
        if leader is not None and (self._may_lead or leader != self.own):
            self._join(leader)

    def _join(self, leader: int) -> None:
        place = membership_child.Place(
            machine=self.own,
            num_machines=len(self._addresses),
            address=self._addresses[leader],
            holds_service=leader == self.own,
            lost_secs=max(1, round(self.lost_secs)),
        )
        storage.make_directory(os.path.dirname(self._log))
        context = multiprocessing.get_context("forkserver")
        self._pipe, others_end = context.Pipe()
        with termination.held():
            self._child = context.Process(
                target=membership_child.run,
                args=(place, self._log, others_end),
                name="membership",
                daemon=True,
            )
            self._child.start()
        others_end.close()
        self._attempt = leader


def _accepts(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_PROBE_SECS).close()
    except OSError:
        return False
    return True
