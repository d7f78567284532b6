"""The places of machines among those of a run, and their addresses."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping, Sequence

from elastic_ckpt.core import errors

_NUMBER_VARIABLES = ("NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX")


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


def place(
    addresses: Sequence[str],
    number: int | None,
    *,
    slices: int,
    environment: Mapping[str, str],
    names: tuple[str, str] = ("machines", "machine"),
) -> Place:
    """The place of this machine.

    Args:
      addresses: of all machines, `host:port`.
      number: of this one; None to find it in the environment.
      slices: of the run.
      environment: of this process.
      names: of the addresses and of the number, for people.

    Raises:
      ConfigError: if the addresses or the number cannot be.
    """
    of_all, _ = names
    addresses = tuple(addresses)
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise errors.ConfigError(
                f"{of_all} contains {address!r}, which is not an address; write"
                " host:port"
            )
    if len(set(addresses)) < len(addresses):
        raise errors.ConfigError(
            f"{of_all} contains an address twice, in {list(addresses)}; give each"
            " machine its own"
        )
    if len(addresses) < 2:
        raise errors.ConfigError(
            f"{of_all}={list(addresses)} names one machine; name two or more, or leave"
            " it empty"
        )
    if slices % len(addresses):
        raise errors.ConfigError(
            f"slices={slices} cannot be divided evenly among {len(addresses)}"
            " machines; set slices to a multiple of the number of machines"
        )
    return Place(
        number=_own_number(number, len(addresses), environment, names),
        addresses=addresses,
        num_slices=slices // len(addresses),
        pod_address=environment.get("POD_IP"),
    )


def _own_number(
    number: int | None,
    num_machines: int,
    environment: Mapping[str, str],
    names: tuple[str, str],
) -> int:
    of_all, of_this = names
    given = {
        name: environment[name] for name in _NUMBER_VARIABLES if name in environment
    }
    if number is not None:
        given = {of_this: str(number)}
    if not given:
        raise errors.ConfigError(
            f"{of_this} is not set, and the environment has none of"
            f" {', '.join(_NUMBER_VARIABLES)}; set it to this machine's number in"
            f" {of_all}, from 0"
        )
    name, text = next(iter(given.items()))
    if not text.isdecimal() or int(text) >= num_machines:
        raise errors.ConfigError(
            f"{name}={text} is not the number of one of the {num_machines} machines"
            f" in {of_all}; it is from 0 to {num_machines - 1}"
        )
    return int(text)
