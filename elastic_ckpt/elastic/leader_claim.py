"""Who leads the machines of a run: the supervisor that holds the claim in storage.

    <shared>/leaders/<number>.json   the claim of the machine that leads, or led last

Its holder renews it (see `records`), and its address stands in it, so that the other
machines connect to it. It is free for the machine that creates the next number

* once it was given back: its holder ended, or left the run;
* once it was not renewed for its duration;
* once its holder is known to have ended, which needs no waiting.

Numbers only grow. A leader that stood still finds that its claim is lost, and follows.
That no two leaders continue a run does not depend on it: each world is claimed, too
(see `claims`).
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
    """The machine that leads, or led last and did not give its claim back.

    Attributes:
      machine: its number.
      address: of its supervisor, `host:port`.
      key: that followers have to show there.
      term: the number of its claim.
      claim: the file of its claim.
      lost: why it counts as lost; empty if it leads.
    """

    machine: int
    address: str
    key: str
    term: int
    claim: str
    lost: str


class LeaderClaims:
    """The claims of the leaders of a run, as one of its machines sees them.

    Args:
      shared: a directory that all machines share, local or in an object store.
      machine: the number of this one.
      lost_secs: after which a machine that gives no sign is lost, and a claim of this
        one lapses.
      owner: the process by which others on its machine see whether it is alive; by
        default this one.

    Attributes:
      directory: where the claims are.
    """

    def __init__(
        self,
        shared: epath.PathLike,
        *,
        machine: int,
        lost_secs: float,
        owner: process.Process | None = None,
    ) -> None:
        # Records have the key of the links between supervisors.
        self.directory = storage.absolute(shared) / DIRECTORY
        self._records = records.Records(self.directory, mode=0o600)
        self._machine = machine
        self._lost_secs = lost_secs
        self._owner = owner or process.this()
        # The newest claim and its count, and since when they are known.
        self._seen = (0, 0)
        self._since_secs = clock.monotonic()
        self._held: records.Held | None = None

    @property
    def has_lead(self) -> bool:
        """Whether this machine holds the claim, as far as its last renewal showed."""
        return self._held is not None and not self._held.is_lost

    def look(self) -> Leader | None:
        """The machine that leads, or led; None if nobody does, or gave it back.

        The claim may be taken if there is none, or if it counts as lost.

        Raises:
          CheckpointError: if it cannot be read.
          OSError: if storage is unavailable, or another of `bucket_clients.failures`.
        """
        # An answer that is late shows what was there when it was asked for.
        asked_secs = clock.monotonic()
        term, there = self._records.newest()
        if there is not None:
            self.note(term, there.count)
        # A request of this process may have been carried out, though it failed.
        if there is None or not there.secs or there.process == self._owner:
            return None
        lost = ""
        if asked_secs - self._since_secs >= there.secs:
            lost = f"its claim was not renewed for {there.secs:g} s"
        elif there.process.is_dead:
            lost = f"{there.process} has ended"
        return Leader(
            **there.fields,
            term=term,
            claim=str(self._records.path(term)),
            lost=lost,
        )

    def note(self, term: int, count: int) -> None:
        """Notes that the newest claim was seen with a count of renewals."""
        if (term, count) > self._seen:
            self._seen = (term, count)
            self._since_secs = clock.monotonic()

    def take(
        self, address: str, key: str, *, renewed_to: Callable[[int], None]
    ) -> bool:
        """Takes the claim after the one that the last `look` saw, unless another has.

        Args:
          address: of this supervisor, `host:port`.
          key: that followers have to show there.
          renewed_to: called with the count of each renewal, in another thread.

        Raises:
          CheckpointError: if a claim cannot be read.
          OSError: if storage is unavailable, or another of `bucket_clients.failures`.
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
        """Whether this machine holds the claim; asks storage, if that is in reach."""
        return self._held is not None and self._held.check()

    def give_back(self) -> None:
        """Lets another machine take the claim at once, if this one holds it."""
        if self._held is not None:
            self._held.give_back()
            self._held = None
