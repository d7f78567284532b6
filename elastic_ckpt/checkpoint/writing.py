"""Agreement among all processes on whether this program may write to storage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.checkpoint.run_world import RunWorld
from elastic_ckpt.core import bucket_clients, codec, errors
from elastic_ckpt.steps.step import Line
from elastic_ckpt.tiers import run_identity
from elastic_ckpt.tiers.choices import Chosen
from elastic_ckpt.tiers.persistent.claims import Claim, Writer


class Writing:
    """The writer of storage; every process that drives the hosts makes one, alike.

    Args:
      hosts: of the world.
      chosen: the tiers; without storage there is nothing to do.
      world: among those of the run.
      run: the identity of the run.

    Attributes:
      is_writer: whether this program has been the writer of storage since `begin`.
    """

    def __init__(
        self, hosts: Hosts, chosen: Chosen, world: RunWorld, *, run: str
    ) -> None:
        self._hosts = hosts
        self._identity: run_identity.Identity | None = None
        # Whether storage has had it since this program began.
        self._is_identified = False
        self._writer: Writer | None = None
        self.is_writer = False
        self._is_needed = chosen.persistent is not None and not chosen.is_read_only
        if self._is_needed and hosts.own == 0:
            assert chosen.persistent is not None
            self._directory = chosen.persistent.directory
            self._writer = Writer(self._directory, run=run, claimant=world.claimant)

    def begin(self, identity: run_identity.Identity | None) -> None:
        """Becomes the writer, or leaves it to `check` if storage is out of reach.

        Args:
          identity: of the run; None if it is not known.

        Raises:
          RunError: if another program writes.
          CheckpointError: if a record cannot be read.
        """
        self._identity = identity

        def begin(writer: Writer) -> None:
            with contextlib.suppress(*bucket_clients.failures()):
                self._begin(writer)

        self.is_writer = self._agreed("begin", begin) is not None

    def check(self) -> Claim | None:
        """Checks, before storage is written to, that it is still this run's.

        Returns:
          The claim of this world; None without storage.

        Raises:
          ReplacedError: if another program writes now, or the directory was removed.
          HostsFailedError: if storage is out of reach.
        """
        return self._agreed("check", self._begin)

    def claim(self, line: Line) -> Claim | None:
        """Records the line that steps are saved to from now on; as `check`."""

        def claim(writer: Writer) -> None:
            self._begin(writer)
            writer.claim(line)

        return self._agreed("claim", claim)

    def close(self) -> None:
        """Lets other programs write."""
        if self._writer is not None:
            self._writer.close()

    def _begin(self, writer: Writer) -> None:
        writer.begin()
        if self._identity is not None:
            is_first = not self._is_identified
            run_identity.keep(self._directory, self._identity, is_first=is_first)
            self._is_identified = True
        writer.check()

    def _agreed(self, name: str, act: Callable[[Writer], None]) -> Claim | None:
        # Has host 0 act; the claim that it has then. By name, since a backup and a
        # commit may ask at the same time.
        if not self._is_needed:
            return None
        kind, problem, claim = "", "", None
        if self._writer is not None:
            try:
                act(self._writer)
                claim = codec.encode(self._writer.own)
            except errors.ElasticCkptError as error:
                kind, problem = type(error).__name__, str(error)
            except bucket_clients.failures() as error:
                kind = type(error).__name__
                problem = f"the records in {self._directory} are out of reach: {error}"
        shared = self._hosts.share(f"writer/{name}", [kind, problem, claim])
        answer: Any = shared[0]
        kind, problem, claim = answer
        if kind in (errors.RunError.__name__, errors.ReplacedError.__name__):
            raise getattr(errors, kind)(problem)
        if kind:
            raise errors.HostsFailedError({0: problem})
        return codec.decode(Claim | None, claim)
