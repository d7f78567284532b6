"""The place of a machine among those of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from elastic_ckpt.core import errors

_NUMBER_VARIABLES = ("NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """The place of this machine among those of the run.

    Attributes:
      number: of this machine, from 0.
      num_machines: of the run.
      num_slices: of each.
      interface: the address by which the other machines reach this one.
    """

    number: int
    num_machines: int
    num_slices: int
    interface: str

    @property
    def slices(self) -> range:
        """The numbers of the slices of this machine."""
        first = self.number * self.num_slices
        return range(first, first + self.num_slices)


def place(
    num_machines: int,
    number: int | None,
    *,
    slices: int,
    interface: str,
    environment: Mapping[str, str],
    names: tuple[str, str] = ("machines", "machine"),
) -> Place:
    """The place of this machine.

    Args:
      num_machines: of the run.
      number: of this one; None to find it in the environment.
      slices: of the run.
      interface: the address of this machine; by default `POD_IP`, or the address of its
        default route.
      environment: of this process.
      names: of the number of machines and of that of this one, for people.

    Raises:
      ConfigError: if the numbers cannot be.
    """
    # It imports JAX.
    from elastic_ckpt.core import addresses

    of_all, of_this = names
    if slices % num_machines:
        raise errors.ConfigError(
            f"slices={slices} cannot be divided evenly among {of_all}={num_machines};"
            " set slices to a multiple of the number of machines"
        )
    given = {name: environment.get(name) for name in _NUMBER_VARIABLES}
    if number is not None:
        given = {of_this: str(number)}
    name, text = next((each for each in given.items() if each[1]), ("", ""))
    if text is None or not text:
        raise errors.ConfigError(
            f"{of_this} is not set, and the environment has none of"
            f" {', '.join(_NUMBER_VARIABLES)}; set it to the number of this machine,"
            f" from 0 to {num_machines - 1}"
        )
    if not text.isdecimal() or int(text) >= num_machines:
        raise errors.ConfigError(
            f"{name}={text} is not the number of one of the {num_machines} machines of"
            f" {of_all}; it is from 0 to {num_machines - 1}"
        )
    return Place(
        number=int(text),
        num_machines=num_machines,
        num_slices=slices // num_machines,
        # The name of a pod is in the DNS only some time after its start.
        interface=interface or environment.get("POD_IP") or addresses.of_the_head(),
    )
