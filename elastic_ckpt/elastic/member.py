"""A process's place in a world; free of JAX, so that a launcher starts at once."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """A process's place in a world on this machine.

    Attributes:
      address: `127.0.0.1:port`, where host 0 runs JAX's coordination service.
      num_hosts: processes of the world.
      host: the number of this one.
    """

    address: str
    num_hosts: int
    host: int
