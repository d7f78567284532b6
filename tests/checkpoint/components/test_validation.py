"""Copies that should be equal are compared, wherever they are, and named if not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint.components import device_digests
from elastic_ckpt.checkpoint.components.validation import validate
from elastic_ckpt.checkpoint.host import capture
from elastic_ckpt.core import errors, metrics
from elastic_ckpt.training import run_saver
from elastic_ckpt.training.validation_schedule import ValidationSchedule
from tests.checkpoint.test_checkpointer import stored
from tests.recorded_events import RecordedEvents

DIGESTS = ("tensor", "full")


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("slice", "fsdp", "tp"))


def flipped(array, device, bit):
    """`array`, or random keys, with a bit flipped of the part that `device` holds."""
    parts = []
    for shard in array.addressable_shards:
        part = shard.data
        if shard.device == device:
            is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
            values = np.array(jax.random.key_data(part) if is_key else part)
            values.reshape(-1).view(np.uint8)[bit // 8] ^= np.uint8(1 << bit % 8)
            part = jax.device_put(values, device)
            part = jax.random.wrap_key_data(part) if is_key else part
        parts.append(part)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def placed(values, mesh, *spec):
    return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))


def test_a_flipped_bit_of_a_replica_is_found_wherever_it_is(mesh):
    kernel = placed(np.ones((4, 6), np.float32), mesh, "fsdp")
    bias = placed(np.full(5, 0.5, jnp.bfloat16), mesh)
    key = placed(jax.random.split(jax.random.key(3), 3), mesh)
    count = placed(np.int32(7), mesh)
    state = {
        "host": {"epoch": 3, "mean": np.float64(0.5), "name": "tiny"},
        "layers": [{"kernel": kernel}, {"bias": bias}],
        "opt": optax.ScaleByAdamState(count=count, mu=key, nu=None),
    }
    for level in ("none", "quick", *DIGESTS):
        assert validate(state, level=level) == []
    leaves, structure = jax.tree.flatten(state)
    paths = ["layers/0/kernel", "layers/1/bias", "opt/count", "opt/mu"]
    generator = np.random.default_rng(0)
    for number, path in enumerate(paths, start=3):
        leaf, device = leaves[number], jax.devices()[generator.integers(8)]
        bit = int(generator.integers(8 * leaf.addressable_data(0).nbytes))
        spoilt = [*leaves[:number], flipped(leaf, device, bit), *leaves[number + 1 :]]
        for level in DIGESTS:
            (finding,) = validate(structure.unflatten(spoilt), level=level)
            assert (finding.leaf, finding.is_certain) == (path, True)
            assert (finding.hosts, finding.devices) == ((0,), (device.id,))
            assert finding.differing == (1 if level == "full" else None)


def test_bits_of_every_dtype_count(mesh):
    # TensorStore's names of those that take less than a byte.
    small = {"bool": 1, "int2": 2, "int4": 4, "float4_e2m1fn": 4}
    values = np.arange(6).reshape(3, 2) % 2
    with jax.enable_x64(True):
        clean = {
            name: placed(values.astype(jnp.dtype(name)), mesh)
            for name in sorted(capture.STORABLE)
        }
        assert validate(clean) == []
        # The first bit of the first element, and the last bit of another one.
        for place in (0, 4):
            changed = {}
            for name, leaf in clean.items():
                size = 8 * leaf.dtype.itemsize
                bit = place * size + (small.get(name, size) - 1) * (place > 0)
                changed[name] = flipped(leaf, jax.devices()[5], bit)
            found = [(each.leaf, each.devices) for each in validate(changed)]
            assert found == [(name, (5,)) for name in changed]
        # One for each way to compare bits: these are compiled one by one.
        chosen = ("bool", "complex64", "float16", "float64", "int4")
        findings = validate({name: changed[name] for name in chosen}, level="full")
        assert [(f.leaf, f.devices, f.differing) for f in findings] == [
            (name, (5,), 1) for name in chosen
        ]


def test_only_devices_that_hold_the_same_box_are_compared_on_each_mesh(mesh):
    line, devices = Mesh(np.array(jax.devices()), ("x",)), jax.devices()
    values = np.arange(32, dtype=np.float32).reshape(4, 8)
    clean = {
        "empty": placed(np.ones((0, 3), np.float32), mesh),
        "single": jax.device_put(values, SingleDeviceSharding(devices[3])),
        "whole": placed(values.T, line, "x"),
    }
    spoilt = {
        "[0:4, 0:8]": placed(values, line),
        "[2:4, 0:8]": placed(values, mesh, "slice"),
        "[0:4, 6:8]": placed(values, mesh, None, ("tp", "slice")),
        "[2:4, 4:8]": placed(values, mesh, "fsdp", "tp"),
    }
    for level in ("quick", *DIGESTS):
        assert validate(clean | spoilt, level=level) == []
        changed = {box: flipped(each, devices[7], 3) for box, each in spoilt.items()}
        findings = validate(clean | changed, level=level)
        assert [finding.box for finding in findings] == sorted(spoilt)
        for each in findings:
            assert each.leaf == each.box
            # Of two copies that differ none is the suspect.
            assert each.is_certain == each.box.endswith("0:8]")
            assert each.is_certain == (each.devices == (7,)) == (len(each.devices) == 1)
            assert each.is_certain != ("any of them may be right" in str(each))


def test_a_swap_of_two_elements_changes_the_digest():
    values = np.random.default_rng(0).integers(0, 2**32, 120, np.uint32)
    swapped = np.tile(values, (119, 1))
    swapped[:, 0] = values[1:]
    np.fill_diagonal(swapped[:, 1:], values[0])
    digest = jax.jit(jax.vmap(device_digests.part_digest))
    assert len({*digest(swapped.reshape(119, 40, 3)).tolist()}) == 119


def test_it_is_due_at_saves_and_intervals_as_they_are_chosen():
    cases = (True, 0, [2, 4, 6]), (True, 3, [2, 3, 4, 6]), (False, 3, [3, 6])
    for at_saves, interval, expected in cases:
        options = {"at_saves": at_saves, "interval": interval}
        schedule = ValidationSchedule(level="quick", emit=print, **options)
        due = [s for s in range(1, 7) if schedule.is_due(s, is_saving=s % 2 == 0)]
        assert due == expected


def test_a_finding_is_an_event_and_may_stop_a_run(recorded, mesh):
    values, emit = placed(np.arange(6.0), mesh), RecordedEvents()
    # The first replica is the one that differs.
    bad = flipped(values, jax.devices()[0], 20)
    schedule = ValidationSchedule(level="full", emit=emit)
    assert schedule.run(2, values) == []
    (finding,) = schedule.run(4, bad, components={"same": values})
    (event,) = emit.named("replicas_differ")
    expected = {"step": 4, "leaf": "", "hosts": [0], "devices": [0]}
    assert event == {**expected, "is_certain": True, "why": str(finding)}
    validated = emit.named("validated")
    assert [(each["step"], each["findings"]) for each in validated] == [(2, 0), (4, 1)]
    assert recorded[metrics.VALIDATION_FINDINGS] == [1]
    assert len(recorded[metrics.VALIDATION]) == 2
    schedule.stops = True
    said = r"after step 6, .*: \[0:6\] of device 0 of host 0 .* 7 identical copies, in"
    with pytest.raises(errors.RunError, match=said):
        schedule.run(6, bad)
    assert len(emit.named("validated")) == 3


def test_the_newest_step_from_before_a_finding_stays_once(make, tmp_path, mesh):
    values = placed(np.arange(6.0), mesh)
    bad = flipped(values, jax.devices()[4], 20)
    latest = ocp.training.preservation_policies.LatestN(1)

    def run(steps, *, restored=None):
        """The steps that are preserved while some are compared and saved."""
        emit = RecordedEvents()
        with make(ram=None, keep=latest) as opened:
            schedule = ValidationSchedule(
                level="tensor",
                emit=emit,
                preserve=lambda step: run_saver.preserve_newest(opened, up_to=step),
                equal_step=restored,
            )
            for step, state in steps.items():
                schedule.run(step, {"w": state})
                # The backup of the step before may not be done yet.
                assert opened.save_async(step, {"w": state})
        return [each["step"] for each in emit.named("step_preserved")]

    assert run({1: values, 2: values, 3: bad, 4: bad}) == [2]
    assert stored(tmp_path) == [2, 4]
    # Replicas of a step that was restored are equal, whatever was saved in it.
    assert run({5: bad, 6: values, 7: bad}, restored=4) == [4, 6]
    assert stored(tmp_path) == [2, 4, 6, 7]
