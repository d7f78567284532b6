"""Suite `validation`: what a comparison of the replicas of a state costs.

Every device holds the whole state: some large leaves, and many small ones. Sides take
turns, and a ratio is that of two turns of a round.

* `tensor_ratio_read`: the digests of all leaves on all devices, over a read of the same
  leaves by the same devices: the sums of their bits.
* `tensor_ms`, `quick_ms`: `ec.components.validate` at level tensor and quick.
* `full_ratio_read`: `ec.components.validate` at level full, over a read.

It runs on the accelerators that JAX has, else on two devices of the processor. With a
single device there is nothing to compare, and level full is the same as tensor.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import elastic_ckpt as ec
from benchmarks import report
from elastic_ckpt.checkpoint.components import device_digests
from elastic_ckpt.core import topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The size of the state, and how often it is compared.

    Attributes:
      num_large: leaves of `large_mib`.
      large_mib: of each of them.
      num_small: leaves of 4 KiB.
      rounds: that are counted; one before them is not.
    """

    num_large: int = 16
    large_mib: int = 32
    num_small: int = 200
    rounds: int = 9


SMALL = Size(num_large=2, large_mib=1, num_small=3, rounds=2)


def measure(size: Size = Size()) -> dict[str, report.Figure]:
    """Runs the suite."""
    if jax.default_backend() == "cpu" and len(jax.devices()) < 2:
        raise RuntimeError("set JAX_NUM_CPU_DEVICES=2, so that there are two replicas")
    report.runs_on(jax.devices())
    mesh = Mesh(np.array(jax.devices()), ("replica",))
    leaves = _leaves(size, mesh)
    read = _read(mesh)
    sides: dict[str, Callable[[], Any]] = {
        "read": lambda: np.asarray(read(leaves)),
        "digest": lambda: device_digests.look(leaves, "tensor"),
        "quick": lambda: ec.components.validate(leaves, level="quick"),
        "tensor": lambda: ec.components.validate(leaves, level="tensor"),
        "full": lambda: ec.components.validate(leaves, level="full"),
    }
    secs: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(size.rounds + 1):
        for name, side in sides.items():
            gc.collect()
            began = time.perf_counter()
            side()
            secs[name].append(time.perf_counter() - began)
    secs = {name: samples[1:] for name, samples in secs.items()}
    read_secs = secs["read"]
    against = "a jitted sum of the bits of the same leaves on the same devices"
    gib = len(jax.devices()) * sum(leaf.nbytes for leaf in leaves) / 2**30
    rates = [gib / each for each in read_secs]
    return {
        "tensor_ratio_read": report.ratio(
            secs["digest"], read_secs, f"at most 1.5; {against}"
        ),
        "full_ratio_read": report.ratio(secs["full"], read_secs, against),
        "quick_ms": _millis(secs["quick"], "no bound"),
        "tensor_ms": _millis(secs["tensor"], "no bound"),
        "read_gib_per_sec": report.figure("GiB/s", "all devices together", rates),
    }


def _millis(secs: list[float], against: str) -> report.Figure:
    return report.figure("ms", against, [1000 * each for each in secs])


def _leaves(size: Size, mesh: Mesh) -> list[jax.Array]:
    large = (size.large_mib * 256, 1024)
    shapes = [large] * size.num_large + [(32, 32)] * size.num_small

    generator = np.random.default_rng(0)
    drawn = [generator.random(shape, np.float32) for shape in shapes]
    return jax.block_until_ready(jax.device_put(drawn, topology.replicated(mesh)))


def _read(mesh: Mesh) -> Callable[[list[jax.Array]], jax.Array]:
    def of_device(parts: list[jax.Array]) -> jax.Array:
        sums = [
            lax.bitcast_convert_type(part, jnp.uint32).sum(dtype=jnp.uint32)
            for part in parts
        ]
        return jnp.stack(sums)[None]

    return jax.jit(
        jax.shard_map(
            of_device,
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec("replica"),
            check_vma=False,
        )
    )
