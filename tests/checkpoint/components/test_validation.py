"""Copies that should be equal are compared, wherever they are, and named if not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import elastic_ckpt as ec
from elastic_ckpt.checkpoint.components import device_digests
from elastic_ckpt.checkpoint.host import capture
from tests.checkpoint.components.flipped import flipped, with_leaf

P = PartitionSpec
DIGESTS = ("tensor", "full")


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 2, 2), ("slice", "fsdp", "tp"))


def placed(values, mesh, *spec):
    values = np.asarray(values)
    sharding = NamedSharding(mesh, P(*spec))
    return jax.make_array_from_callback(
        values.shape, sharding, lambda index: values[index]
    )


def train_state(mesh):
    """Weights, an optimizer's state of named tuples, a key, and a counter."""
    params = {
        "embedding": placed(np.arange(96, dtype=np.float32).reshape(12, 8), mesh),
        "layers": [
            {"kernel": placed(np.ones((4, 6), np.float32), mesh, "fsdp")},
            {"bias": placed(np.full(5, 0.5, jnp.bfloat16), mesh)},
        ],
    }
    return {
        "params": params,
        "opt_state": optax.ScaleByAdamState(
            count=placed(np.int32(7), mesh), mu=params, nu=params
        ),
        "rng": jax.device_put(jax.random.key(3), NamedSharding(mesh, P())),
        "host": {"epoch": 3, "mean": np.float64(0.5), "name": "tiny"},
    }


def test_a_flipped_bit_of_a_replica_is_found_wherever_it_is(mesh):
    state = train_state(mesh)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    generator = np.random.default_rng(0)
    chosen = [n for n, (_, leaf) in enumerate(leaves) if hasattr(leaf, "sharding")]
    for number in chosen:
        path, leaf = leaves[number]
        if leaf.dtype == jax.random.key(0).dtype:
            continue
        device = jax.devices()[generator.integers(8)]
        part = leaf.addressable_shards[0].data
        bit = int(generator.integers(8 * part.dtype.itemsize))
        element = int(generator.integers(part.size))
        spoilt = flipped(leaf, device, bit, element=element)
        changed = with_leaf(state, number, lambda _, spoilt=spoilt: spoilt)
        for level in DIGESTS:
            (finding,) = ec.components.validate(changed, level=level)
            assert finding.leaf == jax.tree_util.keystr(
                path, simple=True, separator="/"
            )
            assert finding.is_certain
            assert finding.devices == (device.id,)
            assert finding.hosts == (0,)
            assert level == "tensor" or finding.differing == 1
    for level in ("none", "quick", *DIGESTS):
        assert ec.components.validate(state, level=level) == []


def test_bits_of_every_dtype_count(mesh):
    # TensorStore's names of those that take less than a byte.
    small = {"bool": 1, "int2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}
    values = np.arange(6).reshape(3, 2) % 2
    with jax.enable_x64(True):
        clean = {
            name: placed(values.astype(jnp.dtype(name)), mesh)
            for name in sorted(capture.STORABLE)
        }
        assert ec.components.validate(clean) == []
        changed = dict(clean)
        for name, leaf in clean.items():
            bits = small.get(name, 8 * leaf.dtype.itemsize)
            for bit in sorted({0, bits - 1}):
                changed[name] = flipped(leaf, jax.devices()[5], bit, element=bit % 6)
                (finding,) = ec.components.validate(clean | {name: changed[name]})
                assert (finding.leaf, finding.devices) == (name, (5,))
        # One for each way to compare bits: these are compiled one by one.
        chosen = ("bool", "complex64", "float16", "float64", "int4")
        some = {name: changed[name] for name in chosen}
        findings = ec.components.validate(some, level="full")
        assert [finding.leaf for finding in findings] == list(chosen)
        assert {(f.devices, f.differing) for f in findings} == {((5,), 1)}


def test_a_random_key_counts(mesh):
    keys = jax.random.split(jax.random.key(0), 3)
    clean = jax.device_put(keys, NamedSharding(mesh, P()))
    other = jax.device_put(jax.random.split(jax.random.key(1), 3), clean.sharding)
    parts = [shard.data for shard in clean.addressable_shards]
    parts[2] = other.addressable_shards[2].data
    changed = jax.make_array_from_single_device_arrays(
        clean.shape, clean.sharding, parts
    )
    for level in DIGESTS:
        assert ec.components.validate({"rng": clean}, level=level) == []
        (finding,) = ec.components.validate({"rng": changed}, level=level)
        assert (finding.leaf, finding.devices) == ("rng", (2,))


@pytest.mark.parametrize(
    ("spec", "box"),
    [
        ((), "[0:4, 0:8]"),
        (("slice",), "[2:4, 0:8]"),
        ((None, ("tp", "slice")), "[0:4, 6:8]"),
        (("fsdp", "tp"), "[2:4, 4:8]"),
    ],
)
def test_only_devices_that_hold_the_same_box_are_compared(mesh, spec, box):
    clean = placed(np.arange(32, dtype=np.float32).reshape(4, 8), mesh, *spec)
    changed = flipped(clean, jax.devices()[7], 3)
    for level in DIGESTS:
        assert ec.components.validate([clean], level=level) == []
        (finding,) = ec.components.validate([changed], level=level)
        assert finding.box == box
        assert 7 in finding.devices


def test_arrays_with_one_holder_and_arrays_on_other_meshes_are_taken(mesh):
    whole = Mesh(np.array(jax.devices()), ("x",))
    tree = {
        "sharded": placed(np.arange(8.0, dtype=np.float32), whole, "x"),
        "empty": placed(np.ones((0, 3), np.float32), mesh),
        "single": jax.device_put(np.ones(3), SingleDeviceSharding(jax.devices()[3])),
        "a": flipped(placed(np.ones(3, np.int32), mesh), jax.devices()[0], 1),
        "b": flipped(placed(np.ones(3, np.int32), whole), jax.devices()[1], 1),
    }
    for level in ("quick", *DIGESTS):
        findings = ec.components.validate(tree, level=level)
        assert [(f.leaf, f.devices) for f in findings] == [("a", (0,)), ("b", (1,))]


def test_of_two_copies_that_differ_none_is_the_suspect():
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    changed = flipped(placed(np.ones(3, np.float32), mesh), jax.devices()[0], 9)
    for level in DIGESTS:
        (finding,) = ec.components.validate({"w": changed}, level=level)
        assert not finding.is_certain
        assert finding.devices == (0, 1)
        assert "either may be right" in str(finding)


def test_the_first_replica_is_named_if_it_is_the_one_that_differs(mesh):
    changed = flipped(placed(np.ones(3, np.float32), mesh), jax.devices()[0], 9)
    (finding,) = ec.components.validate({"w": changed}, level="full")
    assert finding.devices == (0,)
    assert str(finding) == (
        "w[0:3] of device 0 of host 0 differs from 7 equal copies, in 1 element"
    )


def test_a_structure_of_many_leaves_is_compiled_once(mesh):
    device_digests._compiled.cache_clear()
    for value in range(3):
        leaves = [placed(np.full(n, value, np.float32), mesh) for n in range(1, 30)]
        assert ec.components.validate(leaves) == []
    assert device_digests._compiled.cache_info().misses == 1
    (program,) = device_digests._compiled.cache_info()[:1]
    assert program == 2


def test_a_swap_of_two_elements_changes_the_digest():
    digest = jax.jit(device_digests.part_digest)
    values = np.random.default_rng(0).integers(0, 2**32, (40, 3), np.uint32)
    digests = set()
    for other in range(1, 120):
        swapped = values.copy().reshape(-1)
        swapped[[0, other]] = swapped[[other, 0]]
        digests.add(int(digest(swapped.reshape(40, 3))))
    assert len(digests) == 119
