"""An elastic run on several machines: the supervisor of each leads it, or follows.

The same command is started on each machine. The supervisors agree on a leader
(`elastic.machines`). It keeps the journal of the run, decides, and has the others
start hosts. When it is lost, the next leader continues the run, as a new start of it
would; so does one that comes back, if no other machine is there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import socket
import time
from collections.abc import Mapping

from elastic_ckpt.application import (
    elastic_run,
    journal,
    listeners,
    local_world,
    run_directory,
)
from elastic_ckpt.config import keys, schema
from elastic_ckpt.core import errors, events, storage
from elastic_ckpt.elastic import faults, local_slices, processes, termination
from elastic_ckpt.elastic.machines import follower, followers, handover, membership
from elastic_ckpt.elastic.machines.follower import Over

_POLL_SECS = 0.05
_NUMBER_VARIABLES = ("NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX")
# Keys that may differ between machines.
_OWN_KEYS = (
    "elastic_machine",
    "peer_interface",
    "peer_port",
    "peer_domains",
    "peer_tls_certificate",
    "peer_tls_key",
    "peer_tls_ca",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The place of this machine among those of the run.

    Attributes:
      number: of this machine.
      addresses: of all, `host:port`.
      num_slices: of each.
      pod_address: of the pod that this machine is; None elsewhere.
    """

    number: int
    addresses: tuple[str, ...]
    num_slices: int
    pod_address: str | None = None

    @property
    def interface(self) -> str:
        """The address by which the other machines reach this one."""
        # The name of a pod is in the DNS only some time after its start.
        return self.pod_address or socket.gethostbyname(
            self.addresses[self.number].rpartition(":")[0]
        )

    @property
    def slices(self) -> range:
        """The numbers of the slices of this machine."""
        first = self.number * self.num_slices
        return range(first, first + self.num_slices)


def place(config: schema.Config, environment: Mapping[str, str]) -> Place:
    """The place that is configured for this machine.

    Raises:
      ConfigError: if it is not, or contradicts other keys.
    """
    section, world = config.elastic, config.world
    addresses = tuple(each.strip() for each in section.elastic_machines.split(";"))
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise errors.ConfigError(
                f"elastic_machines has the address {address!r}; write it as host:port,"
                " and separate addresses by ;"
            )
    if len(set(addresses)) < len(addresses):
        raise errors.ConfigError(
            f"elastic_machines={section.elastic_machines!r} has an address twice; each"
            " machine has its own"
        )
    if not section.elastic_enabled:
        raise errors.ConfigError(
            "elastic_machines needs elastic_enabled=true: otherwise an outer launcher"
            " starts the hosts; set it, or leave elastic_machines empty"
        )
    if not config.checkpoint.enable_checkpointing:
        raise errors.ConfigError(
            "elastic_machines needs enable_checkpointing=true: machines that cannot"
            " reach each other claim the next world in the run's storage; set it"
        )
    if len(addresses) < 2 or world.enable_single_controller:
        raise errors.ConfigError(
            f"elastic_machines={section.elastic_machines!r} is for two machines or more"
            " whose hosts are processes; leave it empty for one machine, or with"
            " enable_single_controller=true"
        )
    if world.hosts % world.slices or world.slices % len(addresses):
        raise errors.ConfigError(
            f"slices={world.slices} on hosts={world.hosts} cannot be dealt evenly to"
            f" {len(addresses)} machines; set slices to a multiple of the machines, and"
            " hosts to a multiple of slices"
        )
    return Place(
        number=_own_number(section.elastic_machine, len(addresses), environment),
        addresses=addresses,
        num_slices=world.slices // len(addresses),
        pod_address=environment.get("POD_IP"),
    )


def run(config: schema.Config, own: Place, show: events.Emit) -> bool:
    """Supervises the hosts of this machine until the run has ended.

    Args:
      config: of the run; the files of its data exist.
      own: the place of this machine.
      show: called for the events of the run while this machine leads.

    Returns:
      Whether the run, or this machine, was asked to end before the last step.

    Raises:
      RunError: with the first failure of the run; or if no leader can be reached.
    """
    section = config.elastic
    logs = os.path.join(run_directory.path_of(config), run_directory.LOGS)
    members = membership.Membership(
        own.number,
        own.addresses,
        log=os.path.join(logs, f"membership-{own.number}.log"),
        lost_secs=section.elastic_machine_timeout_seconds,
    )
    slices = local_slices.LocalSlices(
        config.world,
        log_directory=logs,
        memory=local_world.memory(config),
        limits=local_world.limits(config),
        numbers=own.slices,
        interface=own.interface,
    )
    machine = _Machine(config, own, slices, members, show)
    with contextlib.closing(slices), contextlib.closing(members):
        while True:
            over = machine.lead() if members.is_leader else machine.follow()
            if over is not None:
                return over.is_stopped


class _Machine:
    """This machine, which leads or follows."""

    def __init__(
        self,
        config: schema.Config,
        own: Place,
        slices: local_slices.LocalSlices,
        members: membership.Membership,
        show: events.Emit,
    ) -> None:
        self._config = config
        self._own = own
        self._slices = slices
        self._members = members
        self._show = show
        self._configured = _digest(config)
        # Since when there is no leader that can be reached.
        self._since_secs = time.monotonic()

    def lead(self) -> Over | None:
        """Runs the run, and returns its end; None if this machine leads no more."""
        config = self._config
        others = followers.Followers(
            self._members,
            self._slices,
            configured=self._configured,
            needs_majority=config.elastic.elastic_machine_majority,
        )
        with contextlib.closing(others):
            try:
                with journal.kept(
                    config,
                    self._show,
                    listening=listeners.of_supervisor(config),
                    # A leader that is cut off, or frozen, would hold it.
                    is_locked=False,
                ) as emit:
                    try:
                        self._run(others, emit)
                    except handover.HandedOverError:
                        # The others look for the next leader when the links end.
                        return Over(is_stopped=True)
                    except followers.LeadershipLostError:
                        return None
                    except SystemExit:
                        # SIGTERM between two worlds.
                        if not self._go_on(others):
                            raise
                        return Over(is_stopped=True)
                    is_stopped = emit.is_stopped
            except errors.ReplacedError:
                others.replaced()
                raise
            except (errors.StoppedError, KeyboardInterrupt, SystemExit):
                others.end(is_stopped=True)
                raise
            except Exception as error:
                others.end(is_stopped=False, failure=str(error) or repr(error))
                raise
            others.end(is_stopped=is_stopped)
            return Over(is_stopped=is_stopped)

    def follow(self) -> Over | None:
        """Follows the leader, and returns the run's end; None if there is no leader."""
        self._members.poll()
        listener = json.loads(self._members.values.get(followers.LISTENER, "null"))
        link = None
        if listener is not None and not self._members.is_leader:
            link = follower.connected(
                self._members, self._slices, listener, self._configured
            )
        if link is None:
            secs = self._config.elastic.elastic_timeout_seconds
            if time.monotonic() - self._since_secs > secs:
                raise errors.RunError(
                    f"machine {self._own.number} has reached no leader of the run for"
                    f" {secs} s; check that each address in elastic_machines can be"
                    " reached from all machines, at any port"
                )
            time.sleep(_POLL_SECS)
            return None
        leader = self._members.leader
        self._show("leader_found", machine=self._own.number, leader=leader)
        following = follower.Follower(
            link,
            self._slices,
            follower.Functions(
                train=functools.partial(local_world.train, self._config),
                compile_ahead=functools.partial(
                    local_world.compile_ahead, self._config
                ),
            ),
            self._members,
        )
        try:
            with termination.Notice() as notice:
                over = following.run(notice)
            if over is None:
                self._slices.forget(listener["agents"])
            return over
        finally:
            self._since_secs = time.monotonic()

    def _run(self, others: followers.Followers, emit: events.Emit) -> None:
        number = self._own.number

        def report(name: str, **fields: storage.Json) -> None:
            if name == "world_claimed":
                self._members.claimed()
            elif name == "waiting_for_slices":
                self._members.short()
            emit(name, **fields)

        emit("leader_found", machine=number, leader=number)
        others.await_all(self._members.lost_secs)
        cluster = processes.Processes.of_machines(
            self._slices,
            others,
            injected=faults.parse(self._config.elastic.faults),
            emit=emit,
        )
        with contextlib.closing(cluster):
            elastic_run.run(
                self._config,
                cluster,
                local_world.train,
                groups=elastic_run.groups(self._config),
                compile_ahead=local_world.compile_ahead,
                emit=report,
            )

    def _go_on(self, others: followers.Followers) -> bool:
        # Whether the others have enough slices without this machine.
        groups = elastic_run.groups(self._config)
        policy = elastic_run.policy(self._config, groups)
        return others.may_go_on() and len(others.slices()) >= policy.min_slices


def _own_number(
    configured: int, num_machines: int, environment: Mapping[str, str]
) -> int:
    given = {
        name: environment[name] for name in _NUMBER_VARIABLES if name in environment
    }
    if configured >= 0:
        given = {"elastic_machine": str(configured)}
    if not given:
        raise errors.ConfigError(
            "elastic_machine is not set, and the environment has none of"
            f" {', '.join(_NUMBER_VARIABLES)}; set it to this machine's number in"
            " elastic_machines, from 0"
        )
    name, number = next(iter(given.items()))
    if not number.isdecimal() or int(number) >= num_machines:
        raise errors.ConfigError(
            f"{name}={number} is not the number of one of the {num_machines} machines"
            f" in elastic_machines; it is from 0 to {num_machines - 1}"
        )
    return int(number)


def _digest(config: schema.Config) -> str:
    values = keys.values(config)
    shared = {name: values[name] for name in sorted(values) if name not in _OWN_KEYS}
    return hashlib.sha256(storage.canonical_json(shared)).hexdigest()
