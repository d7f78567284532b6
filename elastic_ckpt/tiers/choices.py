"""The tiers of a checkpointer, as values: where, how often, and what to keep."""

from __future__ import annotations

import dataclasses
import math
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar, get_args

from etils import epath

from elastic_ckpt.core import errors, storage, working_directory
from elastic_ckpt.steps import failure_domains
from elastic_ckpt.steps.retention import PreservationPolicy
from elastic_ckpt.tiers.peers import agent_url

T = TypeVar("T")

CaptureIn = Literal["auto", "host", "device", "wait"]


class SaveDecisionPolicy(Protocol):
    """Decides whether a step is saved, as Orbax's `save_decision_policies`."""

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        """Whether `step` is saved; every process must decide alike."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """PEM files for TLS between the agents of the machines.

    Attributes:
      certificate: the certificate of this machine's agent.
      key: the private key of that certificate.
      authority: the certificates of the authorities that sign agents' certificates.

    Raises:
      ConfigError: if one of them is not a path.
    """

    certificate: str
    key: str
    authority: str

    def __post_init__(self) -> None:
        for name in ("certificate", "key", "authority"):
            _check_path(self, name, "/etc/tls/agent.pem")


class Tier:
    """A place where steps are kept: `Local`, `Peers` or `Persistent`."""


@dataclasses.dataclass(frozen=True)
class Local(Tier):
    """The local tier: each host keeps its part of a step on its own RAM disk.

    Attributes:
      directory: a directory for this run alone, on a RAM disk, such as
        `/dev/shm/my_run`.
      every: steps between two saves.
      keep: the steps to keep in RAM, as one of Orbax's preservation policies; by
        default only the newest complete step, as memory is small and storage has older
        ones. A policy that ranks steps sees the metrics they were saved with; those
        that `record_metrics` adds later rank only the steps in storage. A step that is
        due in storage stays until that step or a later one is there.
      limit_bytes: the most bytes that the directory may hold; by default the size of
        its file system.

    Raises:
      ConfigError: if a setting is invalid, or the directory is in a bucket.
    """

    directory: str | os.PathLike[str]
    _: dataclasses.KW_ONLY
    every: int = 1
    keep: PreservationPolicy | None = None
    limit_bytes: int | None = None

    def __post_init__(self) -> None:
        _check_path(self, "directory", "/dev/shm/run")
        _check_count(self, "every", 1)
        if self.limit_bytes is not None:
            _check_count(self, "limit_bytes", 1)
        _check_keep(self)
        if not storage.is_local(self.directory):
            raise errors.ConfigError(
                f"Local({os.fspath(self.directory)!r}) is not a directory of this"
                " machine, which a RAM disk must be; give a path such as /dev/shm/run"
                " (local_checkpoint_directory in a configuration), and give buckets to"
                " ec.Persistent"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peers(Tier):
    """The peer tier: hosts keep copies of each other's parts in their RAM.

    Attributes:
      copies: how many other hosts keep what a host saved; one that has saved an equal
        replica counts.
      assume_data_parallelism: copies nothing, because each slice already has the whole
        model; for models too large to be kept twice.
      domain: kinds of failure domain that may be lost as a whole, largest first,
        separated by `;`. One copy is kept outside of the saving host's domain, of the
        first kind that every host has and whose largest domain has at most 60 % of the
        hosts; if there is none, of the last kind.
      domains: the names of this host's failure domains by kind, such as
        `{"rack": "r7"}`, in addition to `slice`, `host` and those in the environment
        variable `ELASTIC_CKPT_DOMAINS` (`rack=r7;zone=us-east5-a`).
      interface: the address at which the other hosts reach this machine's agent; by
        default `POD_IP`, or the address from which this host reaches JAX's coordinator.
      port: the port of the agent; 0 lets the system choose.
      known: URLs of agents of idle machines, whose copies are read too.
      backups: URLs of agents of backup hosts, which keep one more copy of everything.
      secret_file: a file with the secret of the run, which the backup hosts have too;
        None lets the hosts agree on a secret.
      max_bytes_per_sec: the most bytes a second of copies to this host; None sets no
        limit.
      timeout_secs: a peer that sends nothing for so long is regarded as failed, and is
        not asked for three times as long. If only that peer has a part, hosts wait for
        it as long, at the end of a run too.
      tls: the files for encryption; None sends in plain text.

    Raises:
      ConfigError: if a setting is invalid, `known` or `backups` contains anything but
        URLs of agents, or there are `backups` without a `secret_file`.
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
    timeout_secs: float = 10.0
    tls: TlsFiles | None = None

    def __post_init__(self) -> None:
        _check_count(self, "copies", 0)
        _check_count(self, "port", 0, most=65535)
        _check_kind(self, "assume_data_parallelism", bool, "True or False")
        _check_kind(self, "domain", str, 'a text such as "zone;rack"')
        _check_kind(self, "domains", Mapping, 'a mapping such as {"rack": "r7"}')
        if self.interface is not None:
            _check_path(self, "interface", "10.0.0.7")
        if self.secret_file is not None:
            _check_path(self, "secret_file", "/etc/secrets/run")
        if self.max_bytes_per_sec is not None:
            _check_positive(self, "max_bytes_per_sec")
        _check_positive(self, "timeout_secs")
        if self.tls is not None:
            _check_kind(self, "tls", TlsFiles, "TlsFiles(certificate, key, authority)")
        for name, urls in (("known", self.known), ("backups", self.backups)):
            if isinstance(urls, str) or not isinstance(urls, Sequence):
                raise errors.ConfigError(
                    f"Peers({name}={urls!r}): give a tuple of URLs"
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
class Persistent(Tier):
    """The persistent tier: Orbax checkpoints in storage that outlives all hosts.

    A program that saves gives exactly one of `every`, `every_minutes` and
    `save_decision_policy`; one that only reads needs none of them. With either of the
    first two, a step is also saved when the job is about to be preempted.

    Attributes:
      directory: a local path, an NFS mount or the URI of an object store.
      every: steps between two saves. If the loop does not save the step that is due,
        the next one that it saves takes its place.
      every_minutes: minutes between two saves. Beside a local tier, the next step that
        is saved there is the one that goes to storage.
      save_decision_policy: one of Orbax's policies.
      keep: the steps to keep, as one of Orbax's preservation policies; by default all.
      capture: where a step without a RAM disk that holds it is kept until it is in
        storage: in a copy in the memory of the `host`, or on the `device`s, while the
        training goes on; or nowhere, and the save has to `wait`. `auto` takes the first
        of them for which there is memory, and logs it if that is not the host's. In all
        of them at most 512 MiB pass through the host's memory at a time.

    Raises:
      ConfigError: if several of the three are given, or a setting is invalid. If none
        is given, a checkpointer that writes raises it.
    """

    directory: epath.PathLike
    _: dataclasses.KW_ONLY
    every: int | None = None
    every_minutes: float | None = None
    save_decision_policy: SaveDecisionPolicy | None = None
    keep: PreservationPolicy | None = None
    capture: CaptureIn = "auto"

    def __post_init__(self) -> None:
        _check_path(self, "directory", "gs://bucket/run")
        if self.capture not in get_args(CaptureIn):
            raise _refused(self, "capture", f"one of {list(get_args(CaptureIn))}")
        _check_keep(self)
        if len(_intervals(self)) > 1:
            raise _not_one_interval(self)
        if self.every is not None:
            _check_count(self, "every", 1)
        if self.every_minutes is not None:
            _check_positive(self, "every_minutes")
        if self.save_decision_policy is not None and not callable(
            getattr(self.save_decision_policy, "should_save", None)
        ):
            raise _refused(self, "save_decision_policy", "one of Orbax's")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """The tiers of a checkpointer, at most one of each kind.

    Attributes:
      local: the local tier; without it there is a persistent one, and no peers.
      peers: the peer tier.
      persistent: the persistent tier.
      is_read_only: whether nothing is written, so that another program may write.
      read_ram: the directory of a RAM disk that is only read; None if there is none.
    """

    local: Local | None
    peers: Peers | None
    persistent: Persistent | None
    is_read_only: bool = False
    read_ram: str | None = None

    @classmethod
    def from_choices(cls, tiers: Sequence[Tier], *, read_only: bool = False) -> Chosen:
        """The tiers by their kinds.

        Args:
          tiers: at most one of each kind.
          read_only: whether nothing will be saved, so that storage needs no interval.

        Raises:
          ConfigError: if they are no tiers, or do not fit together.
        """
        if isinstance(tiers, Tier):
            raise errors.ConfigError(
                f"tiers={type(tiers).__name__}(...) is one tier; give a list of tiers,"
                f" such as [ec.{type(tiers).__name__}(...)]"
            )
        if isinstance(tiers, str) or not isinstance(tiers, Sequence):
            raise errors.ConfigError(
                f"tiers={tiers!r} is not a list of tiers; give a list, such as"
                " [ec.Local(...), ec.Persistent(...)]"
            )
        for tier in tiers:
            if not isinstance(tier, Local | Peers | Persistent):
                raise errors.ConfigError(
                    f"tiers contains {tier!r}, which is not a tier; give"
                    " ec.Persistent(directory, ...), ec.Local(...) or ec.Peers(...)"
                )
        local = _only([tier for tier in tiers if isinstance(tier, Local)])
        peers = _only([tier for tier in tiers if isinstance(tier, Peers)])
        persistent = _only([tier for tier in tiers if isinstance(tier, Persistent)])
        if local is None and peers is not None:
            raise errors.ConfigError(
                "tiers contains ec.Peers(...) without ec.Local(...): peers copy the"
                " steps in the hosts' RAM; add ec.Local(directory, every=STEPS)"
            )
        if local is None and persistent is None:
            raise errors.ConfigError(
                "tiers is empty; give ec.Persistent(directory, every=STEPS), with or"
                " without ec.Local(...)"
            )
        if persistent is not None and not read_only and not _intervals(persistent):
            raise _not_one_interval(persistent)
        if local is not None and persistent is not None:
            _check_apart(local, persistent)
        return cls(local=local, peers=peers, persistent=persistent)

    def for_reading(self) -> Chosen:
        """The same tiers for a program that reads beside the one that writes.

        It takes no slot of the RAM disk, and asks no peers.
        """
        read_ram = None if self.local is None else os.fspath(self.local.directory)
        return Chosen(
            local=None,
            peers=None,
            persistent=self.persistent,
            is_read_only=True,
            read_ram=read_ram,
        )

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
            f"tiers contains {type(tiers[0]).__name__}(...) twice; give at most one"
            " tier of each kind"
        )
    return tiers[0] if tiers else None


def _intervals(persistent: Persistent) -> list[str]:
    names = ("every", "every_minutes", "save_decision_policy")
    return [name for name in names if getattr(persistent, name) is not None]


def _not_one_interval(persistent: Persistent) -> errors.ConfigError:
    return errors.ConfigError(
        f"Persistent({os.fspath(persistent.directory)!r}) has"
        f" {' and '.join(_intervals(persistent)) or 'no interval'}; give one of"
        " every=STEPS, every_minutes=MINUTES and save_decision_policy=POLICY"
    )


def _refused(choice: Any, name: str, wanted: str) -> errors.ConfigError:
    kind, value = type(choice).__name__, getattr(choice, name)
    return errors.ConfigError(f"{kind}({name}={value!r}): give {wanted}")


def _check_path(choice: Any, name: str, example: str) -> None:
    value = getattr(choice, name)
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not (isinstance(path, str) and path.strip()):
        raise _refused(choice, name, f"one such as {example}")


def _check_count(
    choice: Any, name: str, least: int, *, most: int | None = None
) -> None:
    # An integer of any type becomes an int.
    value = getattr(choice, name)
    try:
        count = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        count = least - 1
    if count < least or (most is not None and count > most):
        wanted = f"an integer from {least}" + ("" if most is None else f" to {most}")
        raise _refused(choice, name, wanted)
    object.__setattr__(choice, name, count)


def _check_positive(choice: Any, name: str) -> None:
    value = getattr(choice, name)
    try:
        is_positive = not isinstance(value, bool | str) and 0 < float(value) < math.inf
    except (TypeError, ValueError):
        is_positive = False
    if not is_positive:
        raise _refused(choice, name, "a positive number")


def _check_kind(choice: Any, name: str, kind: type, wanted: str) -> None:
    if not isinstance(getattr(choice, name), kind):
        raise _refused(choice, name, wanted)


def _check_keep(choice: Local | Persistent) -> None:
    keep = choice.keep
    if keep is not None and not callable(getattr(keep, "should_preserve", None)):
        raise _refused(
            choice,
            "keep",
            "one of Orbax's preservation_policies, such as LatestN(3)",
        )


def _check_apart(local: Local, persistent: Persistent) -> None:
    if not storage.is_local(persistent.directory):
        return
    ram, stored = (
        os.path.realpath(os.fspath(tier.directory)) for tier in (local, persistent)
    )
    if os.path.commonpath([ram, stored]) == ram:
        raise errors.ConfigError(
            f"Persistent({stored!r}) is inside Local({ram!r}), and would be lost with"
            " the host's memory; give another directory (base_output_directory in a"
            " configuration)"
        )
