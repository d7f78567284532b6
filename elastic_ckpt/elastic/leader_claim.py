"""Elects the machine that leads a run: its supervisor holds a claim in storage.

    <shared>/leaders/<number>.json   the claim of the current or last leader

The holder renews the claim (see `records`). The claim contains the holder's address so
that the other machines can connect. Another machine may take over by creating the next
number

* once the holder has given the claim back, because it exited or left the run;
* once the holder has not renewed the claim for its duration;
* immediately, if the holder is known to have exited.

Numbers only grow. A leader that was frozen finds that its claim is lost and becomes a
follower. The claim by itself need not prevent two leaders from continuing a run,
because each world is also claimed (see `claims`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from etils import epath

from elastic_ckpt.core import clock, process, storage
from elastic_ckpt.tiers.persistent import records

DIRECTORY = "leaders"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leader:
    """The machine that leads, or that led last and did not give its claim back.

    Attributes:
      address: the supervisor's address, `host:port`.
      key: the key that followers must know.
      term: the claim number.
      lost: why the leader counts as lost; empty if it leads.
    """

    machine: int
    address: str
    key: str
    term: int
    claim: str
    lost: str


class LeaderClaims:
    """The claims of a run's leaders, as seen by one machine.

    Args:
      shared: a directory that all machines share, local or in an object store.
      lost_secs: the time without a renewal after which a claim lapses.
      owner: the process whose death immediately frees the claim for others on its
        machine; this process by default.
    """

    def __init__(
        self,
        shared: epath.PathLike,
        *,
        machine: int,
        lost_secs: float,
        owner: process.Process | None = None,
    ) -> None:
        # The mode protects the key of the links between supervisors.
        self.directory = storage.absolute(shared) / DIRECTORY
        self._records = records.RecordStore(self.directory, mode=0o600)
        self._machine = machine
        self._lost_secs = lost_secs
        self._owner = owner or process.this()
        # The newest claim, its renewal count, and when both were first seen.
        self._seen = (0, 0)
        self._since_secs = clock.monotonic()
        self._held: records.Held | None = None

    @property
    def has_lead(self) -> bool:
        """Whether this machine held the claim at its last renewal."""
        return self._held is not None and not self._held.is_lost

    def look(self) -> Leader | None:
        """The current or last leader; None if there is none or it gave its claim back.

        The claim may be taken if this returns None or a lost leader.

        Raises:
          CheckpointError: if the claim cannot be read.
          OSError: or another of `bucket_clients.failures`, if storage is unavailable.
        """
        # A late answer may show the state at the time of the request.
        asked_secs = clock.monotonic()
        term, there = self._records.newest()
        if there is not None:
            self.note(term, there.count)
        # This process may hold the claim even if its request seemed to fail.
        if there is None or not there.secs or there.process == self._owner:
            return None
        lost = ""
        if asked_secs - self._since_secs >= there.secs:
            lost = f"its claim was not renewed for {there.secs:g} s"
        elif there.process.is_dead:
            lost = f"{there.process} has exited"
        return Leader(
            **there.fields,
            term=term,
            claim=str(self._records.path(term)),
            lost=lost,
        )

    def note(self, term: int, count: int) -> None:
        """Records that the newest claim has been renewed `count` times."""
        if (term, count) > self._seen:
            self._seen = (term, count)
            self._since_secs = clock.monotonic()

    def take(
        self, address: str, key: str, *, renewed_to: Callable[[int], None]
    ) -> bool:
        """Takes the claim after the one that the last `look` saw, if it is still free.

        Calls `renewed_to` with each renewal count, in another thread. Returns whether
        this machine now holds the claim.

        Raises:
          CheckpointError: if a claim cannot be read.
          OSError: or another of `bucket_clients.failures`, if storage is unavailable.
        """
        term, _ = self._seen
        record = records.Record(
            start=records.new_start(),
            process=self._owner,
            secs=self._lost_secs,
            fields={"machine": self._machine, "address": address, "key": key},
        )
        held = self._records.take(term + 1, record, renewed=renewed_to)
        if held is not None:
            self._held, self._seen = held, (term + 1, 0)
        return self.has_lead

    def check(self) -> bool:
        """Whether this machine holds the claim; asks storage if it is reachable."""
        return self._held is not None and self._held.check()

    def release(self) -> None:
        """If this machine holds the claim, lets another take it immediately."""
        if self._held is not None:
            self._held.release()
            self._held = None
