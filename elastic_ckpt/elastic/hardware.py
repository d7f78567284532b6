"""The hosts of a run and their devices; does not import JAX, for a fast launcher."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """All hosts that a run may have, and the devices of each.

    Attributes:
      hosts: their number, all slices together.
      slices: that they are divided into.
      devices_per_host: on CPUs and GPUs.
      jax_cache_dir: of JAX's compilation cache; empty uses none.
      hardware: `cpu`, `gpu` or `tpu`.
    """

    hosts: int = 1
    slices: int = 1
    devices_per_host: int = 1
    jax_cache_dir: str = ""
    hardware: str = "cpu"

    def gpus(self, slot: int) -> range | None:
        """The GPUs of a host, numbered as CUDA_VISIBLE_DEVICES leaves them.

        Args:
          slot: the number of the host on its machine.

        Returns:
          None for all GPUs of the machine.
        """
        return range(slot * self.devices_per_host, (slot + 1) * self.devices_per_host)
