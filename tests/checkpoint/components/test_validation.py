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
from elastic_ckpt.core import errors
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
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    opt_state = jax.jit(optimizer.init)(params)
    opt_state = jax.tree.map(
        lambda leaf: placed(np.asarray(leaf), mesh, *_spec(leaf)), opt_state
    )
    return {
        "params": params,
        "opt_state": opt_state,
        "rng": jax.device_put(jax.random.key(3), NamedSharding(mesh, P())),
        "step": placed(np.int32(7), mesh),
        "host": {"epoch": 3, "mean": np.float64(0.5), "name": "tiny"},
    }


def _spec(leaf):
    return ("fsdp",) if leaf.ndim == 2 and leaf.shape[0] == 4 else ()


def flips(state, number, *, seed=0):
    """Random (path, device, the state with a flipped bit)."""
    generator = np.random.default_rng(seed)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    able = [
        n
        for n, (_, leaf) in enumerate(leaves)
        if isinstance(leaf, jax.Array) and leaf.dtype != jax.random.key(0).dtype
    ]
    for _ in range(number):
        chosen = int(generator.choice(able))
        path, leaf = leaves[chosen]
        device = jax.devices()[generator.integers(8)]
        part = leaf.addressable_shards[0].data
        element = int(generator.integers(part.size))
        bit = int(generator.integers(8 * part.dtype.itemsize))
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        yield (
            name,
            device,
            with_leaf(
                state,
                chosen,
                lambda leaf, device=device, bit=bit, element=element: flipped(
                    leaf, device, bit, element=element
                ),
            ),
        )


def check_flips(state, number):
    for name, device, changed in flips(state, number):
        for level in DIGESTS:
            (finding,) = ec.components.validate(changed, level=level)
            assert finding.leaf == name
            assert finding.is_certain
            assert finding.devices == (device.id,)
            assert finding.hosts == (0,)
            if level == "full":
                assert finding.differing == 1


def test_a_flipped_bit_of_a_replica_is_found_wherever_it_is(mesh):
    check_flips(train_state(mesh), 10)


@pytest.mark.slow
def test_two_hundred_of_two_hundred_flipped_bits_are_found(mesh):
    check_flips(train_state(mesh), 200)


@pytest.mark.parametrize("level", ["none", "quick", "tensor", "full"])
def test_a_clean_state_has_no_finding(mesh, level):
    assert ec.components.validate(train_state(mesh), level=level) == []


@pytest.mark.slow
def test_a_thousand_of_a_thousand_clean_states_have_no_finding(mesh):
    state = train_state(mesh)
    draw = jax.jit(
        lambda seed: jax.tree.map(
            lambda leaf: jax.random.bits(
                jax.random.key(seed), leaf.shape, jnp.uint32
            ).astype(leaf.dtype),
            state["params"],
        ),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, state["params"]),
    )
    for seed in range(1000):
        drawn = {**state, "params": draw(seed)}
        level = ("quick", "tensor", "full")[seed % 3]
        assert ec.components.validate(drawn, level=level) == []


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
            for bit in sorted({0, bits // 2, bits - 1}):
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


def test_arrays_in_the_memory_of_hosts_are_compared(mesh):
    clean = placed(np.ones(3, np.float32), mesh)
    kinds = {memory.kind for memory in jax.devices()[0].addressable_memories()}
    (other,) = {"pinned_host"} & kinds - {jax.devices()[0].default_memory().kind}
    changed = flipped(clean, jax.devices()[2], 1)
    parts = [
        jax.device_put(
            shard.data, SingleDeviceSharding(shard.device, memory_kind=other)
        )
        for shard in changed.addressable_shards
    ]
    in_host = jax.make_array_from_single_device_arrays(
        clean.shape, NamedSharding(mesh, P(), memory_kind=other), parts
    )
    for level in ("quick", *DIGESTS):
        (finding,) = ec.components.validate([in_host], level=level)
        assert finding.devices == (2,)


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


def test_differences_within_the_tolerance_are_no_findings(mesh):
    for dtype in (np.float32, jnp.bfloat16, np.complex64):
        clean = placed(np.full(3, 100, dtype), mesh)
        changed = flipped(clean, jax.devices()[1], 0)
        for tolerance, number in ((0.0, 1), (1e-9, 1), (0.01, 0)):
            findings = ec.components.validate(
                [changed], level="full", tolerance=tolerance
            )
            assert len(findings) == number
    counter = flipped(placed(np.full(3, 100, np.int32), mesh), jax.devices()[1], 0)
    assert ec.components.validate([counter], level="full", tolerance=0.1)
    nan = placed(np.full(3, np.nan, np.float32), mesh)
    assert not ec.components.validate([nan], level="full", tolerance=0.1)


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


def test_what_cannot_be_compared_is_named():
    with pytest.raises(errors.CheckpointError, match="'a/b' is a object"):
        ec.components.validate({"a": {"b": object()}})
    with pytest.raises(errors.ConfigError, match="none, quick, tensor, full"):
        ec.components.validate({}, level="all")
