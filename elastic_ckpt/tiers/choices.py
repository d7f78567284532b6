"""The tiers of a checkpointer, as values: where, how often, and what to keep."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TypeVar

from etils import epath

from elastic_ckpt.core import errors
from elastic_ckpt.manifests.retention import PreservationPolicy
from elastic_ckpt.tiers.peers import agent_url

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """PEM files with which agents prove who they are, and clients check it.

    Attributes:
      certificate: of this machine's agent.
      key: of that certificate.
      authority: certificates of those who may sign agents' certificates.
    """

    certificate: str
    key: str
    authority: str


@dataclasses.dataclass(frozen=True)
class Local:
    """The local tier: a RAM disk on each host.

    Attributes:
      directory: on a RAM disk, one a run: `/dev/shm/<run>`.
      every: steps between two saves.
      keep: Orbax's preservation policy; by default only the newest complete step.
      limit_bytes: the most that the directory may hold; by default what the file system
        has.
    """

    directory: str | os.PathLike[str]
    _: dataclasses.KW_ONLY
    every: int = 1
    keep: PreservationPolicy | None = None
    limit_bytes: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peers:
    """The peer tier: copies in the RAM of other hosts.

    Attributes:
      copies: holders of everything besides the host that saved it.
      assume_data_parallelism: copies nothing, for models of which no copy fits.
      domain: the kind of failure domain that goes as a whole.
      domains: this host's failure domains by kind, such as `{"rack": "r7"}`; `slice`
        and `host` are known without, and what the host's environment names (see
        `manifests.failure_domains`).
      interface: where this machine's agent listens: its address in the network that
        hosts share.
      port: of the agent; 0 lets the system choose.
      known: URLs of agents to ask besides those of the world's machines: of machines
        that idle.
      max_bytes_per_sec: of copies to this host.
      tls: encrypts what is sent.

    Raises:
      ConfigError: if `known` has something else than URLs of agents.
    """

    copies: int = 2
    assume_data_parallelism: bool = False
    domain: str = "slice"
    domains: Mapping[str, str] = dataclasses.field(default_factory=dict)
    interface: str = "127.0.0.1"
    port: int = 0
    known: tuple[str, ...] = ()
    max_bytes_per_sec: float | None = None
    tls: TlsFiles | None = None

    def __post_init__(self) -> None:
        if isinstance(self.known, str):
            raise errors.ConfigError(
                f"Peers(known={self.known!r}) is one string; give a tuple of URLs"
            )
        for url in self.known:
            agent_url.check(
                url, what="Peers(known=...)", needs_tls=self.tls is not None
            )


@dataclasses.dataclass(frozen=True)
class Persistent:
    """The persistent tier: Orbax checkpoints in storage that outlives all hosts.

    Attributes:
      directory: a local path, an NFS mount or an object store.
      every: steps between two backups; None if only minutes count.
      every_minutes: between two backups, each of the next step that is saved.
      keep: Orbax's preservation policy; by default all steps.
    """

    directory: epath.PathLike
    _: dataclasses.KW_ONLY
    every: int | None = None
    every_minutes: float | None = None
    keep: PreservationPolicy | None = None


TierChoice = Local | Peers | Persistent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """The tiers of a checkpointer, at most one of each kind.

    Attributes:
      local: the local tier; without it there is nothing but a persistent one.
      peers: the peer tier.
      persistent: the persistent tier.
    """

    local: Local | None
    peers: Peers | None
    persistent: Persistent | None

    @classmethod
    def of(cls, tiers: Sequence[TierChoice]) -> Chosen:
        """The tiers by their kinds.

        Raises:
          ConfigError: if they do not fit together.
        """
        local = _only([tier for tier in tiers if isinstance(tier, Local)])
        peers = _only([tier for tier in tiers if isinstance(tier, Peers)])
        persistent = _only([tier for tier in tiers if isinstance(tier, Persistent)])
        if local is None and (peers is not None or persistent is None):
            raise errors.ConfigError(
                "without a local tier a checkpointer has a persistent one, and no"
                " peers; add Local(directory)"
            )
        return cls(local=local, peers=peers, persistent=persistent)

    @property
    def run(self) -> str:
        """The identity of the run, if nobody says it: the local directory's name."""
        assert self.local is not None
        return os.path.basename(os.path.abspath(self.local.directory))


def _only(tiers: Sequence[T]) -> T | None:
    if len(tiers) > 1:
        raise errors.ConfigError(
            f"there are two tiers {type(tiers[0]).__name__}; give one of each kind"
        )
    return tiers[0] if tiers else None
