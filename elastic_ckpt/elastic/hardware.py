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
