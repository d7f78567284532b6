"""What a save holds of each leaf, bit by bit, and arrays made of that in any form."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elastic_ckpt.checkpoint.host import capture, trees
from elastic_ckpt.core import background, boxes, errors
from elastic_ckpt.steps import manifest
from elastic_ckpt.tiers.captured import fetched
from elastic_ckpt.tiers.ram.chunk_files import ChunkFiles


def random_bits(dtype, size):
    """Values of every bit pattern: NaN payloads, zeros of both signs."""
    dtype = np.dtype(dtype)
    random = np.random.default_rng(0)
    bits = random.integers(0, 256, size * dtype.itemsize, dtype=np.uint8)
    narrow = {"bool": 1, "int2": 3, "int4": 15, "float4_e2m1fn": 15}
    return (bits & narrow.get(dtype.name, 255)).view(dtype)


def over(*spec, devices=None):
    """A sharding over a mesh of the axes `a` and `b`."""
    devices = np.array(devices or jax.devices()).reshape(-1, 4)
    return NamedSharding(Mesh(devices, ("b", "a")), PartitionSpec(*spec))


def joined(array):
    """The whole array of a captured leaf, which has each of its boxes once."""
    whole = np.zeros(array.leaf.shape, array.leaf.dtype)
    filled = np.zeros(array.leaf.shape, np.uint8)
    for box, values in array.boxes:
        place = boxes.relative(box, boxes.whole(array.leaf.shape))
        values = fetched(values)
        assert values.dtype == array.leaf.dtype
        assert values.shape == array.leaf.chunk == box.shape
        whole[place] = values
        filled[place] += 1
    assert (filled == 1).all()
    return whole


SPECS = [("a", "b"), ("b", None), (None, ("a", "b")), ()]
OTHERS = {
    "a": True,
    "b/c": np.float16(3),
    "big": np.ones(3, ">f4"),
    "empty": jnp.zeros((0, 3)),
    "no elements": np.zeros((3, 0)),
    "strided": np.arange(6.0)[::2],
}


@pytest.mark.parametrize("reverse", [False, True])
def test_each_box_is_captured_once_and_restored_under_any_sharding(reverse):
    devices = jax.devices()[:: -1 if reverse else 1]
    shardings = [over(*spec, devices=devices) for spec in SPECS]
    with jax.enable_x64(True):
        values = {name: random_bits(name, 64) for name in sorted(capture.STORABLE)}
        values["keys"] = jax.random.split(jax.random.key(7, impl="rbg"), 64)
        leaves = {
            name: jax.device_put(each.reshape(8, 8), shardings[n % 4])
            for n, (name, each) in enumerate(values.items())
        }
        pinned = shardings[0].with_memory_kind("pinned_host")
        leaves["pinned"] = jax.device_put(leaves["float32"], pinned)
        leaves |= OTHERS
        with jax.transfer_guard("disallow"):
            captured = capture.capture(leaves, capture.Memory())
        assert [leaf.path for leaf in captured.leaves] == sorted(leaves)
        for number, array in enumerate(captured.arrays):
            value, whole = leaves[array.leaf.path], joined(array)
            numbers = np.asarray(capture.numbers(value))
            assert array.leaf.dtype == numbers.dtype.name
            assert whole.tobytes() == numbers.astype(whole.dtype).tobytes()
            if array.leaf.path in OTHERS:
                assert array.shard_shape == whole.shape
                continue
            # Back under another sharding, in pieces.
            sharding = shardings[number % 4] if array.leaf.path != "pinned" else pinned
            abstract = jax.ShapeDtypeStruct((8, 8), value.dtype, sharding=sharding)
            most_bytes = 4 * whole.itemsize
            (leaf,) = trees.wanted({"w": abstract}, most_bytes=most_bytes)
            places = [(*map(slice, box.start, box.stop), ...) for box in leaf.boxes]
            assert sum(whole[place].size for place in places) == whole.size
            largest = max(whole[place].nbytes for place in places)
            assert largest <= most_bytes or array.leaf.path == "pinned"
            with jax.transfer_guard("disallow"):
                made = leaf.make([whole[place].copy() for place in places])
            assert (made.dtype, made.sharding) == (value.dtype, sharding)
            assert np.asarray(capture.numbers(made)).tobytes() == whole.tobytes()
    assert captured.num_bytes == sum(joined(each).nbytes for each in captured.arrays)
    held = [
        (array.leaf.path, box) for array in captured.arrays for box, _ in array.boxes
    ]
    assert captured.holders(num_hosts=4) == dict.fromkeys(held, (0, 1, 2, 3))


def test_values_that_a_dtype_has_are_cast_and_others_are_refused_by_name():
    for saved, dtype, expected in (
        (np.float32([0.1, np.inf, np.nan]), jnp.bfloat16, [0.1, np.inf, np.nan]),
        (jnp.bfloat16([1.5, -2]), np.float32, [1.5, -2]),
        (np.int32([7, -1]), np.int8, [7, -1]),
        (np.complex64([2.5]), np.float16, [2.5]),
        (np.float32([1, 0.5]), np.int32, "0.5"),
        (np.int32([-1]), np.uint64, "-1"),
        (np.int32([2**24 + 1]), np.float32, "16777217"),
        (np.float32([1e30]), jnp.float8_e4m3fn, "1.*e.30"),
        (np.complex64([1 + 1j]), np.float32, "1.*1j"),
    ):
        if isinstance(expected, str):
            said = f"^state/w was .* value .*{expected}"
            with pytest.raises(errors.CheckpointError, match=said):
                trees.cast("/state/w", saved, np.dtype(dtype))
        else:
            made = trees.cast("/state/w", np.asarray(saved), np.dtype(dtype))
            assert made.dtype == dtype
            assert made.tobytes() == np.array(expected, dtype).tobytes()


@pytest.mark.parametrize("num_devices", [4, 8])
def test_arrays_that_are_donated_afterwards_leave_the_capture_as_it_was(num_devices):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    values, devices = np.arange(2**20, dtype=np.float32), jax.devices()[:num_devices]
    array = step(jax.device_put(values, over("a", devices=devices)))
    pointers = [x.data.unsafe_buffer_pointer() for x in array.addressable_shards]
    captured = capture.capture({"w": array}, capture.Memory(num_threads=4))
    after = jax.block_until_ready(step(array))
    # The step wrote into the same memory: a capture does not keep it from that either.
    again = [x.data.unsafe_buffer_pointer() for x in after.addressable_shards]
    assert pointers == again
    (of_w,) = captured.arrays
    assert joined(of_w).tobytes() == (values + 1).tobytes()


class FarMemory(capture.Memory):
    """Memory of a host whose devices send everything first."""

    def place(self, path, array):
        return super().place(path, array)._replace(is_far=True)


@pytest.mark.parametrize(
    ("num_bytes", "pinned_bytes", "where"),
    [
        # In several waves, and of several chunks.
        (2**27 + 2**24, 0, "auto"),
        (2**26 + 2**20, 0, "device"),
        (2**22, 2**29, "auto"),
        (2**22, 2**29, "refused"),
        (2**22, 2**29, "host"),
        (2**22, 0, "host"),
        (2**22, 0, "wait"),
    ],
)
def test_what_accelerators_hold_is_captured(
    tmp_path, monkeypatch, num_bytes, pinned_bytes, where
):
    values = np.arange(num_bytes // 8, dtype=np.complex64).reshape(64, -1)
    expected = values.copy()
    expected[:, 0] += 1
    arrays = jax.device_put(values[:8], over("a")), jnp.asarray(values)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(*xs):
        # Each row changes, and it takes no time.
        return [jax.lax.dynamic_update_slice(x, 1 + x[:, :1], (0, 0)) for x in xs]

    arrays = step(*arrays)
    if where == "refused":
        where, refused = "auto", jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
        monkeypatch.setattr(jax, "device_put", mock.Mock(side_effect=refused))
    files = None if where == "wait" else ChunkFiles(tmp_path)
    memory = FarMemory(files, where, pinned_bytes=pinned_bytes)
    captured = capture.capture({"a": arrays[0], "w": arrays[1]}, memory)
    assert captured.is_lent == (where == "wait")
    # The devices of a CPU do not tell that they have room.
    assert bool(memory.notice) == (where == "auto" and not pinned_bytes)
    if not captured.is_lent:
        # The memory of the state is overwritten.
        jax.block_until_ready(step(*arrays))
    for array in captured.arrays:
        assert (joined(array) == expected[: array.leaf.shape[0]]).all()
    captured.release()
    # What was released twice is given back once.
    captured.release()
    assert captured.arrays == ()


def test_pinned_memory_is_made_ahead_for_what_accelerators_hold(monkeypatch):
    made = []
    monkeypatch.setattr(capture, "Memory", FarMemory)
    monkeypatch.setattr(background, "in_thread", lambda call, **_: made.append(call()))
    for pinned_bytes, num_bytes in ((2**21, 2**21), (2**29, 2**22)):
        capture.prepare({"w": jnp.ones((2, 2**19))}, mock.Mock(), pinned_bytes)
        kind = made[-1].sharding.memory_kind
        assert (made[-1].nbytes, kind) == (num_bytes, "pinned_host")


def test_values_that_no_other_code_changes_are_not_copied():
    values, box = random_bits("float32", 8), boxes.whole((8,))
    leaf = manifest.Leaf(path="w", shape=(8,), dtype="float32")
    for kept in (False, True):
        shards = {"w": capture.Shards(leaf, (8,), ((box, values),), kept)}
        (array,) = capture.capture(shards, capture.Memory()).arrays
        assert np.shares_memory(array.boxes[0][1], values) == kept
        assert joined(array).tobytes() == values.tobytes()
