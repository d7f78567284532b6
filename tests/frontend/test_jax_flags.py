"""Batches, saves and loads are the same under JAX's flags, axes and meshes."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import elastic_ckpt as ec
from elastic_ckpt.data import sharded_data
from tests import pipelines
from tests.checkpoint.test_like_orbax import bits

FLAGS = {
    "jax_check_tracer_leaks": True,
    "jax_debug_infs": True,
    "jax_debug_nans": True,
    "jax_default_prng_impl": "rbg",
    "jax_disable_jit": True,
    "jax_enable_checks": True,
    "jax_enable_x64": True,
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_threefry_partitionable": False,
    "jax_transfer_guard_device_to_device": "disallow",
    "jax_transfer_guard_device_to_host": "disallow",
    "jax_transfer_guard_host_to_device": "disallow",
}
SPEC = PartitionSpec("data")


def run(mesh, state, place):
    """The batches and states of a run that loads from RAM, then from storage."""
    local, stored = ec.Local(place / "ram"), ec.Persistent(place / "steps", every=1)
    found = []
    for tiers in ([local, stored], [stored]):
        data = sharded_data.sharded(
            lambda shard: pipelines.packed(shard, 4), num_shards=4, pipeline="packed"
        )
        batches = ec.batches(data, mesh=mesh, spec=SPEC, global_batch_size=4)
        rng = ec.components.Rng(state["key"])
        schedule = ec.components.Component({"rate": state["rate"], "w": state["w"]})
        parts = {"state": state, "data": batches, "rng": rng, "schedule": schedule}
        opened = ec.Checkpointer(tiers, run="run", read_only=local not in tiers)
        with contextlib.closing(batches), opened:
            if not found:
                found.append([next(batches), rng.next()])
                assert opened.save_checkpointables(1, parts)
            for target in (state, None):
                loaded = opened.load_checkpointables(1, parts | {"state": target})
                found += [loaded["state"], schedule.state, rng.next(), next(batches)]
    return [bits(each) for each in found]


@pytest.mark.slow
def test_each_flag_of_jax_changes_no_batch_save_or_load(tmp_path):
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
        # Flags that look for NaNs and infinities let those of a state pass.
        values = np.array([[1.5, np.nan, np.inf, -0.0]] * 8, np.float32)
        low = values.astype(jnp.bfloat16)
        state = {
            **jax.device_put({"w": values, "low": low}, NamedSharding(mesh, SPEC)),
            "rate": jnp.asarray(np.inf),
            "key": jax.random.key(3, impl="threefry2x32"),
            "here": np.array([1, np.nan]),
            "n": 3,
        }
        for is_set in (False, True):
            places = (tmp_path / f"{axis_type}-{is_set}-{n}" for n in range(14))
            with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
                expected = run(mesh, state, next(places))
                for name, value in FLAGS.items():
                    # For all threads, as a program does.
                    before = getattr(jax.config, name)
                    jax.config.update(name, value)
                    try:
                        assert run(mesh, state, next(places)) == expected, name
                    finally:
                        jax.config.update(name, before)
