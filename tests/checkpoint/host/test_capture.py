"""What a save holds of each leaf: every box once, bit by bit, in memory of its own."""

import contextlib
import dataclasses
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.checkpoint.host import capture
from elastic_ckpt.core import boxes, errors
from elastic_ckpt.steps import manifest
from elastic_ckpt.tiers.captured import fetched
from elastic_ckpt.tiers.ram import local, ram_disk
from elastic_ckpt.tiers.ram.chunk_files import ChunkFiles


def random_bits(dtype, size, seed=0):
    """Values of every bit pattern: NaN payloads, zeros of both signs."""
    dtype = np.dtype(dtype)
    random = np.random.default_rng(seed)
    bits = random.integers(0, 256, size * dtype.itemsize, dtype=np.uint8)
    narrow = {"bool": 1, "int2": 3, "int4": 15, "float4_e2m1fn": 15}
    return (bits & narrow.get(dtype.name, 255)).view(dtype)


def mesh(*shape, devices=None):
    names = tuple("abc"[: len(shape)])
    some = devices if devices is not None else jax.devices()[: np.prod(shape)]
    return jax.sharding.Mesh(np.array(some).reshape(shape), names)


def sharded(values, over, *spec):
    return jax.device_put(values, NamedSharding(over, PartitionSpec(*spec)))


def joined(part):
    """The whole array of a captured leaf."""
    whole = np.zeros(part.leaf.shape, part.leaf.dtype)
    filled = np.zeros(part.leaf.shape, int)
    for box, values in part.boxes:
        place = boxes.relative(box, boxes.whole(part.leaf.shape))
        values = fetched(values)
        assert values.dtype == part.leaf.dtype
        assert values.shape == part.leaf.chunk == box.shape
        whole[place] = values
        filled[place] += 1
    assert (filled == 1).all()
    return whole


def taken(leaves, memory=None):
    """The captured leaves by path."""
    captured = capture.capture(leaves, memory or capture.Memory())
    return {part.leaf.path: part for part in captured.parts}


def test_every_storable_dtype_is_captured_bit_by_bit():
    values = {dtype: random_bits(dtype, 64) for dtype in capture.STORABLE}
    with jax.enable_x64(True):
        parts = taken({name: jnp.asarray(each) for name, each in values.items()})
    for dtype, part in parts.items():
        assert part.leaf.dtype == dtype
        assert joined(part).tobytes() == values[dtype].tobytes()


@pytest.mark.parametrize("reverse", [False, True])
def test_each_box_is_captured_once_under_any_sharding(reverse):
    over = mesh(2, 4, devices=jax.devices()[:: -1 if reverse else 1])
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    specs = [("a", "b"), ("b", None), (None, ("a", "b")), ()]
    arrays = {str(spec): sharded(values, over, *spec) for spec in specs}
    for name, part in taken(arrays).items():
        assert joined(part).tobytes() == values.tobytes()
        assert part.shard_shape == arrays[name].sharding.shard_shape((8, 8))


def test_leaves_are_ordered_by_path_and_say_what_the_whole_array_is():
    keys = jax.random.split(jax.random.key(7), 8)
    leaves = {
        "w": sharded(np.zeros((8, 4), np.float32), mesh(8), "a"),
        "rng": sharded(keys, mesh(8), "a"),
        "b/c": np.float16(3),
        "a": True,
        "big": np.ones(3, ">f4"),
        "strided": np.arange(6.0)[::2],
        "pinned": jax.device_put(
            np.arange(8.0, dtype=np.float32),
            NamedSharding(mesh(8), PartitionSpec("a"), memory_kind="pinned_host"),
        ),
        "none": jnp.zeros((0, 3)),
        "no elements": np.zeros((3, 0)),
    }
    captured = capture.capture(leaves, capture.Memory())
    listed = [(each.path, each.shape, each.dtype) for each in captured.leaves]
    assert listed == [
        ("a", (), "bool"),
        ("b/c", (), "float16"),
        ("big", (3,), "float32"),
        ("no elements", (3, 0), "float64"),
        ("none", (0, 3), "float32"),
        ("pinned", (8,), "float32"),
        ("rng", (8, 2), "uint32"),
        ("strided", (3,), "float64"),
        ("w", (8, 4), "float32"),
    ]
    sizes = {"a": 1, "b/c": 2, "big": 12, "pinned": 32, "rng": 64, "strided": 24}
    assert captured.num_bytes == sum(sizes.values()) + 128
    for part in captured.parts:
        name = part.leaf.path
        if name in ("none", "no elements"):
            assert part.boxes == ()
        elif name == "rng":
            assert (joined(part) == jax.random.key_data(keys)).all()
        else:
            assert (joined(part) == np.asarray(leaves[name])).all()
        if not isinstance(leaves[name], jax.Array) and part.boxes:
            # What is not of JAX is whole in every process.
            assert [box for box, _ in part.boxes] == [boxes.whole(part.leaf.shape)]


def test_what_cannot_be_stored_is_refused_by_name():
    for value, said in (
        ("text", "is a str"),
        (None, "is a NoneType"),
        (np.array([{}]), "has the dtype object"),
        (np.array(["text"]), "has the dtype str"),
        (2**70, "has the dtype object"),
        (np.zeros(3, ml_dtypes.uint4), "has the dtype uint4"),
        (np.zeros(3, "datetime64[s]"), "has the dtype datetime64"),
    ):
        with pytest.raises(errors.CheckpointError, match=f"leaf 'p/w' {said}"):
            taken({"p/v": 1, "p/w": value})


@pytest.mark.parametrize("num_devices", [1, 8])
def test_arrays_that_are_donated_afterwards_leave_the_capture_as_it_was(num_devices):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    values = np.arange(2**16, dtype=np.float32)
    array = step(sharded(values, mesh(num_devices), "a"))
    pointers = [x.data.unsafe_buffer_pointer() for x in array.addressable_shards]
    part = taken({"w": array})["w"]
    after = jax.block_until_ready(step(array))
    # The step wrote into the same memory: a capture does not keep it from that either.
    assert pointers == [
        x.data.unsafe_buffer_pointer() for x in after.addressable_shards
    ]
    assert joined(part).tobytes() == (values + 1).tobytes()


class FarMemory(capture.Memory):
    """Memory of a host whose devices send everything first."""

    def place(self, path, array):
        return super().place(path, array)._replace(is_far=True)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_large_arrays_are_copied_in_several_threads(num_threads):
    values = {f"w{n}": random_bits("uint8", 2**20 + n, seed=n) for n in range(8)}
    parts = taken(values, capture.Memory(num_threads=num_threads))
    for name, part in parts.items():
        assert joined(part).tobytes() == values[name].tobytes()


@pytest.mark.parametrize(
    ("num_bytes", "pinned_bytes", "where"),
    [
        # In several waves, and of several chunks.
        (2**27 + 2**24, 0, "auto"),
        (2**27, 0, "device"),
        (2**22, 2**29, "auto"),
        (2**22, 2**29, "host"),
        (2**22, 0, "host"),
        (2**22, 0, "wait"),
    ],
)
def test_what_accelerators_hold_is_captured_whatever_memory_there_is(
    tmp_path, num_bytes, pinned_bytes, where
):
    step = jax.jit(lambda *xs: [x + 1 for x in xs], donate_argnums=(0, 1))
    values = np.arange(num_bytes // 4, dtype=np.uint32).reshape(64, -1)
    leaves = {"first": sharded(values[:8], mesh(8), "a"), "w": jnp.asarray(values)}
    leaves = dict(zip(leaves, step(*leaves.values()), strict=True))
    files = None if where == "wait" else ChunkFiles(tmp_path)
    memory = FarMemory(files, where, pinned_bytes=pinned_bytes)
    captured = capture.capture(leaves, memory)
    assert captured.is_lent == (where == "wait")
    # The devices of a CPU do not tell that they have room.
    assert bool(memory.notice) == (where == "auto" and not pinned_bytes)
    if not captured.is_lent:
        # The memory of the state is overwritten.
        jax.block_until_ready(step(*leaves.values()))
    for part, expected in zip(captured.parts, (values[:8], values), strict=True):
        assert joined(part).tobytes() == (expected + 1).tobytes()
    captured.release()


@pytest.mark.parametrize("pinned_bytes", [2**21, 2**29])
def test_pinned_memory_is_made_ahead_for_what_accelerators_hold(
    tmp_path, monkeypatch, pinned_bytes
):
    sent, device_put = [], jax.device_put

    def put(values, place):
        sent.append((values.nbytes, place.memory_kind))
        return device_put(values, place)

    disk = ram_disk.RamDisk(tmp_path, run="run-7")
    leaves = {"w": jnp.ones((2, 2**19)), "b": jnp.ones(3)}
    monkeypatch.setattr(capture, "Memory", FarMemory)
    monkeypatch.setattr(jax, "device_put", put)
    with contextlib.closing(local.LocalHost(disk, slot=0, domains={}, number=0)) as own:
        capture.prepare(leaves, own, pinned_bytes)
        deadline = time.monotonic() + 600
        while not sent:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert sent == [(min(pinned_bytes, 2**22 + 12), "pinned_host")]


def test_what_finds_no_pinned_memory_goes_through_ordinary_memory(
    tmp_path, monkeypatch
):
    def refused(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: pinned memory")

    values = random_bits("float32", 2**20).reshape(64, -1)
    leaves = {"w": jnp.asarray(values)}
    monkeypatch.setattr(jax, "device_put", refused)
    part = taken(leaves, FarMemory(ChunkFiles(tmp_path)))["w"]
    assert joined(part).tobytes() == values.tobytes()


def test_the_memory_of_a_capture_is_one_piece_that_the_next_one_uses_again():
    memory = capture.Memory()
    leaves = {"a": np.ones(3, np.int8), "b": np.ones((4, 5)), "c": np.float32(1)}
    addresses = set()
    for _ in range(3):
        captured = capture.capture(leaves, memory)
        values = [values for part in captured.parts for _, values in part.boxes]
        assert all(each.ctypes.data % 64 == 0 for each in values)
        assert all(each.flags.c_contiguous for each in values)
        addresses.add(tuple(each.ctypes.data for each in values))
        captured.release()
        # What was released twice is given back once.
        captured.release()
        assert captured.parts == ()
    assert len(addresses) == 1
    assert memory.take(64) is not memory.take(64)


@pytest.mark.parametrize("kept", [False, True])
def test_what_a_host_holds_of_an_array_is_copied_unless_it_is_nobody_elses(kept):
    values = random_bits("float32", 8).reshape(2, 4)
    box = boxes.Box(start=(2, 0), stop=(4, 4))
    leaf = manifest.Leaf(path="w", shape=(4, 4), dtype="float32")
    nothing = manifest.Leaf(path="x", shape=(4,), dtype="int8")
    leaves = {
        "w": capture.Shards(
            leaf=leaf, shard_shape=(2, 4), boxes=((box, values),), kept=kept
        ),
        "x": capture.Shards(leaf=nothing, shard_shape=(2,), boxes=(), kept=False),
    }
    captured = capture.capture(leaves, capture.Memory())
    ((captured_box, copy),) = captured.parts[0].boxes
    assert captured_box == box
    assert np.shares_memory(copy, values) == kept
    assert copy.tobytes() == values.tobytes()
    # A host that holds nothing of an array knows of it.
    assert captured.leaves == (
        dataclasses.replace(leaf, chunk=(2, 4)),
        dataclasses.replace(nothing, chunk=(2,)),
    )
    assert captured.num_bytes == values.nbytes
