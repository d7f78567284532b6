"""A checkpointer's tiers as values: where to save, how often, and what to keep."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

from etils import epath

from elastic_ckpt.core import errors, storage, working_directory
from elastic_ckpt.steps import owners
from elastic_ckpt.steps.retention import PreservationPolicy
from elastic_ckpt.tiers.peers import agent

CaptureIn = Literal["auto", "host", "device", "wait"]
PINNED_BYTES = 2**29
# Settings that may differ between hosts, because they belong to a machine.
_OF_MACHINE = frozenset(
    {
        "Local.directory",
        "Local.limit_bytes",
        "Local.pinned_bytes",
        "Peers.domains",
        "Peers.interface",
        "Peers.known",
        "Peers.max_bytes_per_sec",
        "Peers.port",
        "Peers.secret_file",
        "Peers.tls",
    }
)
# In the text of a policy: where a function or an object is in memory.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_POLICY = "one of Orbax's preservation_policies, such as LatestN(3)"


class SaveDecisionPolicy(Protocol):
    """Decides whether a step is saved, like Orbax's `save_decision_policies`."""

    def should_save(self, step: Any, previous_steps: Any, *, context: Any) -> bool:
        """Whether to save `step`; must return the same in every process."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """PEM files for TLS between the machines' agents.

    Attributes:
      certificate: the certificate of this machine's agent.
      key: the private key of that certificate.
      authority: the certificates of the authorities that sign agents' certificates.
    """

    certificate: str
    key: str
    authority: str

    def __post_init__(self) -> None:
        _make_absolute(self, "certificate", "key", "authority")


class Tier:
    """A place to store steps: `Local`, `Peers` or `Persistent`."""


@dataclasses.dataclass(frozen=True)
class Local(Tier):
    """The local tier: each host keeps its parts of a step on its own RAM disk.

    Attributes:
      directory: a directory on a RAM disk that only this run uses, such as
        `/dev/shm/my_run`.
      every: steps between saves.
      keep: one of Orbax's preservation policies, which determines which steps to keep
        in RAM; by default only the newest complete step, because memory is small and
        storage has older steps. A policy that ranks steps sees the metrics that they
        were saved with; metrics that `record_metrics` adds later rank only the steps in
        storage. A step that is due to be saved to storage stays in RAM until that step
        or a later one is stored.
      limit_bytes: the maximum size of the directory; by default the size of its file
        system.
      pinned_bytes: the maximum pinned host memory that a save uses on GPUs and TPUs. A
        state of at most this size is copied there in one piece; a larger state is
        copied in device memory, if there is room. In both cases, training continues
        immediately.

    Raises:
      ConfigError: if a setting is invalid, or the directory is in a bucket.
    """

    directory: str | os.PathLike[str]
    _: dataclasses.KW_ONLY
    every: int = 1
    keep: PreservationPolicy | None = None
    limit_bytes: int | None = None
    pinned_bytes: int = PINNED_BYTES

    def __post_init__(self) -> None:
        _make_absolute(self, "directory")
        _check_positive(self, "every", "limit_bytes", "pinned_bytes")
        _check(self, _POLICY, lambda each: hasattr(each, "should_preserve"), "keep")
        if not storage.is_local(self.directory):
            raise errors.ConfigError(
                f"Local({os.fspath(self.directory)!r}) is not a directory on this"
                " machine, as a RAM disk must be; pass a path such as /dev/shm/run"
                " (local_checkpoint_directory in a configuration), and pass buckets to"
                " ec.Persistent"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peers(Tier):
    """The peer tier: hosts keep copies of each other's parts in their RAM.

    Attributes:
      copies: the number of other hosts that keep the parts that a host saved, including
        hosts that saved an identical replica.
      assume_data_parallelism: whether to make no copies, because each slice already has
        the whole model; for models too large to keep twice.
      domain: kinds of failure domain that may be lost as a whole, largest first,
        separated by `;`. One copy is kept outside the saving host's domain, whose kind
        is the first one that every host has and whose largest domain has at most 60%
        of the hosts; if there is none, the last one.
      domains: the names of this host's failure domains, keyed by kind, such as
        `{"rack": "r7"}`, in addition to `slice`, `host` and the domains in the
        environment variable `ELASTIC_CKPT_DOMAINS` (`rack=r7;zone=us-east5-a`).
      interface: the address at which other hosts reach this machine's agent; by default
        `POD_IP`, or the address from which this host reaches JAX's coordinator.
      port: the agent's port; 0 lets the system choose.
      known: URLs of idle machines' agents, from which copies are also read.
      backups: URLs of backup hosts' agents. Together, the backup hosts keep one more
        copy of everything.
      secret_file: a file with the run's secret, which the backup hosts must also have;
        None lets the hosts agree on a secret.
      max_bytes_per_sec: the maximum rate, in bytes per second, at which this host
        receives copies; None sets no limit.
      timeout_secs: the seconds of silence after which a peer counts as failed; it is
        then skipped for three times as long.
      tls: the files for encryption; None sends data unencrypted.

    Raises:
      ConfigError: if a setting is invalid, `known` or `backups` contains anything but
        agent URLs, or there are `backups` without a `secret_file`.
    """

    copies: int = 2
    assume_data_parallelism: bool = False
    domain: str = owners.DEFAULT_DOMAIN
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
        _make_absolute(self, "secret_file")
        _check(self, "a non-negative integer", lambda number: number >= 0, "copies")
        _check_positive(self, "max_bytes_per_sec", "timeout_secs")
        for url in (*self.known, *self.backups):
            what = "Peers(known=(URL, ...), backups=(URL, ...)) (or peer_urls)"
            agent.check_url(url, what=what, needs_tls=self.tls is not None)
        if self.backups and self.secret_file is None:
            raise errors.ConfigError(
                "Peers(backups=...) needs secret_file (peer_secret_file in a"
                " configuration): backup hosts are not in any world, so they cannot"
                " agree on a secret with the other hosts; pass a file that the backup"
                " hosts also have"
            )


@dataclasses.dataclass(frozen=True)
class Persistent(Tier):
    """The persistent tier: Orbax checkpoints in storage that outlives all hosts.

    A program that saves must set exactly one of `every`, `every_minutes` and
    `save_decision_policy`; a program that only reads need not set any of them. With
    either of the first two, a step is also saved when the job is about to be preempted.

    Attributes:
      directory: a local path, an NFS mount or an object store URI.
      every: steps between saves. If the loop does not save the step that is due, the
        next step that it saves takes its place.
      every_minutes: minutes between saves. With a local tier, the next step that is
        saved there goes to storage.
      save_decision_policy: one of Orbax's save decision policies.
      keep: one of Orbax's preservation policies, which determines which steps to keep;
        by default all steps.
      capture: where to keep a step that is not on a RAM disk until it is in storage: as
        a copy in the memory of the `host` or the `device`s, while training continues,
        or nowhere, so that training has to `wait`. `auto` uses the accelerators if they
        have room, and otherwise the host; if neither has room, it logs that training
        has to wait. At most 512 MiB pass through host memory at a time.

    Raises:
      ConfigError: if a setting is invalid. A checkpointer that writes also raises it
        unless exactly one of the three intervals is set.
    """

    directory: epath.PathLike
    _: dataclasses.KW_ONLY
    every: int | None = None
    every_minutes: float | None = None
    save_decision_policy: SaveDecisionPolicy | None = None
    keep: PreservationPolicy | None = None
    capture: CaptureIn = "auto"

    def __post_init__(self) -> None:
        _make_absolute(self, "directory")
        _check_positive(self, "every", "every_minutes")
        _check(self, _POLICY, lambda each: hasattr(each, "should_preserve"), "keep")
        _check(
            self,
            "one of Orbax's save_decision_policies",
            lambda each: hasattr(each, "should_save"),
            "save_decision_policy",
        )
        places = get_args(CaptureIn)
        _check(self, f"one of {places}", places.__contains__, "capture")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """The tiers of a checkpointer, at most one of each kind.

    Attributes:
      local: the local tier; without it, there are no peers and there is a persistent
        tier.
      is_read_only: whether this program only reads, so that another program may write.
      read_ram: a RAM disk directory that is only read; None if there is none.
    """

    local: Local | None
    peers: Peers | None
    persistent: Persistent | None
    is_read_only: bool = False
    read_ram: str | None = None

    @classmethod
    def from_choices(cls, tiers: Sequence[Tier], *, read_only: bool = False) -> Chosen:
        """Sorts tiers by kind.

        Raises:
          ConfigError: if an element is not a tier, or the tiers cannot be combined.
        """
        local = next((each for each in tiers if isinstance(each, Local)), None)
        peers = next((each for each in tiers if isinstance(each, Peers)), None)
        persistent = next(
            (each for each in tiers if isinstance(each, Persistent)), None
        )
        taken = [each for each in (local, peers, persistent) if each is not None]
        if len(taken) != len(tiers) or (local is None and taken != [persistent]):
            kinds = ", ".join(type(each).__name__ for each in tiers) or "nothing"
            raise errors.ConfigError(
                f"tiers contains {kinds}; pass one ec.Local(directory, ...), one"
                " ec.Persistent(directory, every=STEPS), or both. ec.Peers(...) may"
                " only be added to ec.Local(...), whose steps it copies"
            )
        given = [
            name
            for name in ("every", "every_minutes", "save_decision_policy")
            if getattr(persistent, name, None) is not None
        ]
        if persistent is not None and not read_only and len(given) != 1:
            raise errors.ConfigError(
                f"Persistent({os.fspath(persistent.directory)!r}) has"
                f" {' and '.join(given) or 'no interval'}; pass exactly one of"
                " every=STEPS, every_minutes=MINUTES and save_decision_policy=POLICY"
            )
        if local is not None and persistent is not None:
            ram, stored = (
                pathlib.Path(each.directory).resolve() for each in (local, persistent)
            )
            if storage.is_local(persistent.directory) and stored.is_relative_to(ram):
                raise errors.ConfigError(
                    f"Persistent({str(stored)!r}) is inside Local({str(ram)!r}) and"
                    " would be lost with the host's memory; set a different directory"
                    " (base_output_directory in a configuration)"
                )
        return cls(local=local, peers=peers, persistent=persistent)

    def for_reading(self) -> Chosen:
        """The same tiers for a program that reads while another program writes.

        The reading program does not take a RAM disk slot or ask peers.
        """
        return Chosen(
            local=None,
            peers=None,
            persistent=self.persistent,
            is_read_only=True,
            read_ram=None if self.local is None else os.fspath(self.local.directory),
        )

    @property
    def run(self) -> str:
        """The local directory's name, or the persistent one's without a local tier."""
        tier = self.local or self.persistent
        assert tier is not None
        return storage.absolute(tier.directory).name

    @property
    def shared(self) -> dict[str, str]:
        """What must be the same on all hosts: settings as text, keyed by name."""
        tiers = [each for each in (self.local, self.peers, self.persistent) if each]
        settings = {
            f"{type(tier).__name__}.{field.name}": getattr(tier, field.name)
            for tier in tiers
            for field in dataclasses.fields(tier)
        }
        return {
            "tiers": " + ".join(type(tier).__name__ for tier in tiers),
            "read_only": str(self.is_read_only),
            "encryption": str(bool(self.peers and self.peers.tls)),
            **{
                name: _ADDRESS.sub("", repr(value))
                for name, value in settings.items()
                if name not in _OF_MACHINE
            },
        }

    def ram_directory(self) -> str:
        """The RAM disk directory; without a local tier, a new path."""
        if self.local is not None:
            return os.fspath(self.local.directory)
        return working_directory.new_path()


def _check(
    choice: Any, wanted: str, is_right: Callable[[Any], object], *names: str
) -> None:
    # None means that a setting was omitted.
    for name in names:
        value = getattr(choice, name)
        if value is not None and not is_right(value):
            raise errors.ConfigError(
                f"{type(choice).__name__}({name}={value!r}): pass {wanted}"
            )


def _check_positive(choice: Tier, *names: str) -> None:
    _check(choice, "a positive number", lambda number: number > 0, *names)


def _make_absolute(choice: Any, *names: str) -> None:
    # The program may change its working directory.
    _check(choice, "a path", lambda path: os.fspath(path).strip(), *names)
    for name in names:
        path = getattr(choice, name)
        if path is not None:
            path = os.path.abspath(path) if storage.is_local(path) else os.fspath(path)
            object.__setattr__(choice, name, path)
