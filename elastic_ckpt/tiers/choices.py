"""The tiers of a checkpointer, as values: where, how often, and what to keep."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from etils import epath

from elastic_ckpt.core import errors, storage, working_directory
from elastic_ckpt.manifests import failure_domains
from elastic_ckpt.manifests.retention import PreservationPolicy
from elastic_ckpt.tiers.peers import agent_url

T = TypeVar("T")


class SaveDecisionPolicy(Protocol):
    """Decides whether a step is saved, as Orbax's `save_decision_policies`."""

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        """Whether `step` is saved; every process must decide alike."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """PEM files with which agents authenticate, and clients verify them.

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
      keep: Orbax's preservation policy; by default only the newest complete step, as
        memory is small and older steps are in storage. It ranks steps by the metrics of
        their saves; evaluations that are recorded later rank steps in storage alone.
        Steps that are due in storage stay until they are there or a later one is.
      limit_bytes: the most that the directory may hold; by default what the file system
        has.

    Raises:
      ConfigError: if the directory is in a bucket.
    """

    directory: str | os.PathLike[str]
    _: dataclasses.KW_ONLY
    every: int = 1
    keep: PreservationPolicy | None = None
    limit_bytes: int | None = None

    def __post_init__(self) -> None:
        if not storage.is_local(self.directory):
            raise errors.ConfigError(
                f"the RAM disk of a host is on its machine, not at {self.directory};"
                " set Local(directory), which is local_checkpoint_directory in a"
                " configuration, to a path such as /dev/shm/run, and name buckets as"
                " persistent storage"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peers:
    """The peer tier: copies in the RAM of other hosts.

    Attributes:
      copies: holders of everything besides the host that saved it.
      assume_data_parallelism: copies nothing, for models of which no copy fits.
      domain: the kinds of failure domain that may be lost as a whole, from large to
        small, separated by `;`; `manifests.failure_domains` chooses one for each world.
      domains: this host's failure domains by kind, such as `{"rack": "r7"}`; `slice`
        and `host` are known without, and what the host's environment names (see
        `manifests.failure_domains`).
      interface: the address of this machine's agent in the network that the hosts
        share; by default `POD_IP`, or the address that reaches JAX's coordinator.
      port: of the agent; 0 lets the system choose.
      known: URLs of agents of idle machines, read besides the world's machines.
      backups: URLs of agents of backup hosts, which hold one more copy of everything.
      secret_file: with the run's secret, which backup hosts have, too; None lets the
        hosts choose one.
      max_bytes_per_sec: of copies to this host.
      tls: encrypts what is sent.

    Raises:
      ConfigError: if `known` or `backups` has something else than URLs of agents, or
        backup hosts could not know the secret.
    """

    copies: int = 2
    assume_data_parallelism: bool = False
    domain: str = failure_domains.DEFAULT
    domains: Mapping[str, str] = dataclasses.field(default_factory=dict)
    interface: str | None = None
    port: int = 0
    known: tuple[str, ...] = ()
    backups: tuple[str, ...] = ()
    secret_file: str | None = None
    max_bytes_per_sec: float | None = None
    tls: TlsFiles | None = None

    def __post_init__(self) -> None:
        for name, urls in (("known", self.known), ("backups", self.backups)):
            if isinstance(urls, str):
                raise errors.ConfigError(
                    f"Peers({name}={urls!r}) is one string; give a tuple of URLs"
                )
            for url in urls:
                agent_url.check(
                    url, what=f"Peers({name}=...)", needs_tls=self.tls is not None
                )
        if self.backups and self.secret_file is None:
            raise errors.ConfigError(
                "Peers(backups=...) needs secret_file: backup hosts are in no world, in"
                " which hosts agree on a secret; give a file that they have, too"
            )


@dataclasses.dataclass(frozen=True)
class Persistent:
    """The persistent tier: Orbax checkpoints in storage that outlives all hosts.

    Exactly one of `every`, `every_minutes` and `save_decision_policy` is given. A step
    is also due when the job is about to be preempted, unless a policy decides.

    Attributes:
      directory: a local path, an NFS mount or an object store.
      every: steps between two saves.
      every_minutes: between two saves: beside a local tier, of the next step that is
        saved there.
      save_decision_policy: Orbax's.
      keep: Orbax's preservation policy; by default all steps.

    Raises:
      ConfigError: if none or several of the three are given, or one is not positive.
    """

    directory: epath.PathLike
    _: dataclasses.KW_ONLY
    every: int | None = None
    every_minutes: float | None = None
    save_decision_policy: SaveDecisionPolicy | None = None
    keep: PreservationPolicy | None = None

    def __post_init__(self) -> None:
        given = {
            name: value
            for name in ("every", "every_minutes", "save_decision_policy")
            if (value := getattr(self, name)) is not None
        }
        if len(given) != 1:
            raise errors.ConfigError(
                f"Persistent({os.fspath(self.directory)!r}) has"
                f" {', '.join(given) or 'no interval'}; give one of every=STEPS,"
                " every_minutes=MINUTES and save_decision_policy=POLICY"
            )
        for name, value in given.items():
            if name != "save_decision_policy" and not value > 0:
                raise errors.ConfigError(
                    f"Persistent({name}={value!r}): give a positive number"
                )


TierChoice = Local | Peers | Persistent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """The tiers of a checkpointer, at most one of each kind.

    Attributes:
      local: the local tier; without it there is a persistent one, and no peers.
      peers: the peer tier.
      persistent: the persistent tier.
    """

    local: Local | None
    peers: Peers | None
    persistent: Persistent | None

    @classmethod
    def from_choices(cls, tiers: Sequence[TierChoice]) -> Chosen:
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
        """The name of the local tier's directory, or of the persistent one's."""
        tier = self.local or self.persistent
        assert tier is not None
        return storage.absolute(tier.directory).name

    def ram_directory(self) -> str:
        """The directory of the RAM disk; without a local tier, a name for a new one."""
        if self.local is not None:
            return os.fspath(self.local.directory)
        return working_directory.new_path()


def _only(tiers: Sequence[T]) -> T | None:
    if len(tiers) > 1:
        raise errors.ConfigError(
            f"there are two tiers {type(tiers[0]).__name__}; give one of each kind"
        )
    return tiers[0] if tiers else None
