"""The identity of a process in a world; does not import JAX, for a fast launcher."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """The identity of a process in a world on this machine.

    Attributes:
      address: `127.0.0.1:port`, at which host 0 runs JAX's coordination service.
      num_hosts: the number of processes in the world.
      host: the number of this process.
    """

    address: str
    num_hosts: int
    host: int
