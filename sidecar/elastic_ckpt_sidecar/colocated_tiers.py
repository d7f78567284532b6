"""The tiers of a host under a single controller."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax

from elastic_ckpt.host.endpoint import HostTiers
from elastic_ckpt.host.world import HostConfig, HostWorld
from elastic_ckpt_sidecar.host_arrays import HostArrays


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostChoice(HostConfig):
    """The configuration of a host, from the head.

    Its agent uses the local address from which the host reaches the head; `interface`
    of the peer tier is an address of the head.

    Attributes:
      device_ids: of its CPU devices.
    """

    device_ids: tuple[int, ...]


class ColocatedTiers(HostTiers):
    """A host's tiers, and its part of the arrays of the head.

    Args:
      world: the host among the others.
      device_ids: of its CPU devices.
      devices: all CPU devices of the world, by id.
    """

    def __init__(
        self,
        world: HostWorld,
        *,
        device_ids: tuple[int, ...],
        devices: Mapping[int, jax.Device],
    ) -> None:
        super().__init__(world)
        self.arrays = HostArrays(
            self.saver, self.reader, own=device_ids, devices=devices
        )
