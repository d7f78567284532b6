"""Whether this program is the writer of storage, as all of its processes agree."""

from __future__ import annotations

from collections.abc import Callable

from etils import epath

from elastic_ckpt.checkpoint.hosts import Hosts
from elastic_ckpt.checkpoint.run_world import RunWorld
from elastic_ckpt.core import bucket_clients, errors
from elastic_ckpt.tiers import run_identity
from elastic_ckpt.tiers.choices import Chosen
from elastic_ckpt.tiers.persistent.writer import Writer


class Writing:
    """The writer of storage; every process that drives the hosts makes one, alike.

    Args:
      hosts: of the world.
      chosen: the tiers; without storage there is nothing to do.
      world: among those of the run.
    """

    def __init__(self, hosts: Hosts, chosen: Chosen, world: RunWorld) -> None:
        self._hosts = hosts
        self._is_needed = chosen.persistent is not None and not chosen.is_read_only
        # Claims decide between several starts of a run that has them.
        self._has_claims = world.claimant is not None
        self._identity: run_identity.Identity | None = None
        # Whether storage has had it since this program began.
        self._is_identified = False
        self._directory: epath.PathLike = ""
        self._writer: Writer | None = None
        if self._is_needed and hosts.own == 0:
            assert chosen.persistent is not None
            self._directory = chosen.persistent.directory
            self._writer = Writer(self._directory, claimant=world.claimant)

    def begin(self, identity: run_identity.Identity | None) -> None:
        """Becomes the writer, or leaves it to `check` if storage is out of reach.

        Args:
          identity: of the run; None if it is not known.

        Raises:
          RunError: if another program writes.
          CheckpointError: if a record of writers, or of the run, cannot be read.
        """
        self._identity = identity
        kind, problem = self._agreed(self._begin)
        if kind in (errors.RunError.__name__, errors.CheckpointError.__name__):
            raise getattr(errors, kind)(problem)

    def check(self) -> None:
        """Checks, before storage is written to, that it is still this run's.

        Raises:
          ReplacedError: if another program writes now, or the directory was removed.
          HostsFailedError: if storage is out of reach.
        """
        kind, problem = self._agreed(self._check)
        if kind == errors.ReplacedError.__name__:
            raise errors.ReplacedError(problem)
        if kind:
            raise errors.HostsFailedError({0: problem})

    def close(self) -> None:
        """Lets other programs write."""
        if self._writer is not None:
            self._writer.close()

    def _begin(self, writer: Writer) -> None:
        writer.begin()
        if self._identity is not None and not self._is_identified:
            run_identity.create(self._directory, self._identity)
            self._is_identified = True

    def _check(self, writer: Writer) -> None:
        self._begin(writer)
        if self._is_identified:
            assert self._identity is not None
            run_identity.check(self._directory, self._identity)
        if not self._has_claims:
            writer.check()

    def _agreed(self, act: Callable[[Writer], None]) -> tuple[str, str]:
        # The class of the error that host 0 has met, and the problem; empty if none.
        if not self._is_needed:
            return "", ""
        kind = problem = ""
        if self._writer is not None:
            try:
                act(self._writer)
            except (errors.ElasticCkptError, *bucket_clients.failures()) as error:
                kind, problem = type(error).__name__, str(error)
        kind, problem = self._hosts.share("writer", [kind, problem])[0]
        return kind, problem
