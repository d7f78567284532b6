import gc
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.checkpoint.host import capture
from elastic_ckpt.core import boxes, errors
from elastic_ckpt.steps import manifest
from elastic_ckpt.tiers.ram.chunk_files import ChunkFiles

DTYPES = sorted(capture.STORABLE)


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
        assert values.dtype == part.leaf.dtype
        assert values.shape == part.shard_shape == box.shape
        whole[place] = values
        filled[place] += 1
    assert (filled == 1).all()
    return whole


def only(captured):
    (part,) = captured.parts
    return part


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_storable_dtype_is_captured_bit_by_bit(dtype):
    values = random_bits(dtype, 64)
    with jax.enable_x64(True):
        part = only(capture.capture({"w": jnp.asarray(values)}, capture.Memory()))
    assert part.leaf.dtype == dtype
    assert joined(part).tobytes() == values.tobytes()


@pytest.mark.parametrize("spec", [("a", "b"), ("b", None), (None, ("a", "b")), ()])
@pytest.mark.parametrize("reverse", [False, True])
def test_each_box_is_captured_once_under_any_sharding(spec, reverse):
    devices = jax.devices()[:: -1 if reverse else 1]
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    array = sharded(values, mesh(2, 4, devices=devices), *spec)
    part = only(capture.capture({"w": array}, capture.Memory()))
    assert joined(part).tobytes() == values.tobytes()
    assert part.shard_shape == array.sharding.shard_shape(array.shape)


def test_what_is_not_of_jax_is_whole_in_every_process():
    leaves = {"array": np.arange(6.0)[::2], "big": np.ones(3, ">f4"), "n": 3, "x": 0.5}
    captured = capture.capture(leaves, capture.Memory())
    for part in captured.parts:
        assert [box for box, _ in part.boxes] == [boxes.whole(part.leaf.shape)]
        assert (joined(part) == leaves[part.leaf.path]).all()


def test_random_keys_are_captured_as_their_data():
    key = jax.random.split(jax.random.key(7), 8)
    array = sharded(key, mesh(8), "a")
    part = only(capture.capture({"rng": array}, capture.Memory()))
    assert (part.leaf.shape, part.leaf.dtype) == ((8, 2), "uint32")
    assert (joined(part) == jax.random.key_data(key)).all()


def test_an_array_without_elements_has_no_boxes():
    leaves = {"jax": jnp.zeros((0, 3)), "numpy": np.zeros((3, 0))}
    captured = capture.capture(leaves, capture.Memory())
    assert [part.boxes for part in captured.parts] == [(), ()]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("text", "leaf 'p/w' is a str"),
        (None, "leaf 'p/w' is a NoneType"),
        (np.array([{}]), "leaf 'p/w' has the dtype object"),
        (np.array(["text"]), "leaf 'p/w' has the dtype str"),
        (2**70, "leaf 'p/w' has the dtype object"),
        (np.zeros(3, ml_dtypes.uint4), "leaf 'p/w' has the dtype uint4"),
        (np.zeros(3, "datetime64[s]"), "leaf 'p/w' has the dtype datetime64"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(value, said):
    with pytest.raises(errors.CheckpointError, match=said):
        capture.capture({"p/v": 1, "p/w": value}, capture.Memory())


@pytest.mark.parametrize("num_devices", [1, 8])
def test_arrays_that_are_donated_afterwards_leave_the_capture_as_it_was(num_devices):
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    values = np.arange(2**16, dtype=np.float32)
    array = step(sharded(values, mesh(num_devices), "a"))
    pointers = [x.data.unsafe_buffer_pointer() for x in array.addressable_shards]
    captured = capture.capture({"w": array}, capture.Memory())
    after = jax.block_until_ready(step(array))
    # The step wrote into the same memory: a capture does not keep it from that either.
    assert pointers == [
        x.data.unsafe_buffer_pointer() for x in after.addressable_shards
    ]
    assert joined(only(captured)).tobytes() == (values + 1).tobytes()


@pytest.mark.slow
def test_small_arrays_have_the_bits_that_their_program_computes():
    @jax.jit
    def later(values):
        # It runs on while the capture begins.
        busy = jax.lax.fori_loop(0, 200, lambda _, x: x @ x, jnp.eye(256))
        is_done = busy[0, 0] == 1
        return jax.tree.map(lambda x: jnp.where(is_done, x, jnp.zeros_like(x)), values)

    values = {
        f"{dtype}-{'x'.join(map(str, shape))}": jnp.asarray(
            np.arange(math.prod(shape)).reshape(shape) % 2, dtype
        )
        for dtype in sorted(capture.STORABLE - {"float64", "complex128"})
        for shape in [(), (5,), (2, 3)]
        if "64" not in dtype or "complex" in dtype
    }
    for _ in range(2):
        captured = capture.capture(later(values), capture.Memory())
        for part in captured.parts:
            expected = np.asarray(values[part.leaf.path])
            assert joined(part).tobytes() == expected.tobytes()
            assert joined(part).dtype == expected.dtype


class FarMemory(capture.Memory):
    """Memory of a host whose devices send everything first."""

    def place(self, path, array):
        return super().place(path, array)._replace(is_far=True, is_direct=False)


@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_large_arrays_are_copied_in_several_threads(num_threads):
    values = {f"w{n}": random_bits("uint8", 2**20 + n, seed=n) for n in range(8)}
    memory = capture.Memory(num_threads=num_threads)
    captured = capture.capture(values, memory)
    for part in captured.parts:
        assert joined(part).tobytes() == values[part.leaf.path].tobytes()


def test_what_is_in_pinned_host_memory_is_captured_as_well():
    values = random_bits("float32", 64).reshape(8, 8)
    sharding = NamedSharding(mesh(8), PartitionSpec("a"), memory_kind="pinned_host")
    array = jax.device_put(values, sharding)
    part = only(capture.capture({"w": array}, capture.Memory()))
    assert joined(part).tobytes() == values.tobytes()


@pytest.mark.parametrize(
    "num_bytes", [2**12, 2**20, 2**27, pytest.param(2**29, marks=pytest.mark.slow)]
)
def test_what_devices_send_comes_in_waves(num_bytes):
    values = random_bits("uint8", num_bytes).reshape(64, -1)
    leaves = {"first": sharded(values[:8], mesh(8), "a"), "w": jnp.asarray(values)}
    captured = capture.capture(leaves, FarMemory())
    for part, expected in zip(captured.parts, (values[:8], values), strict=True):
        for box, copy in part.boxes:
            place = (*map(slice, box.start, box.stop),)
            assert np.array_equal(copy, expected[place])


@pytest.mark.slow
def test_what_devices_send_goes_through_pinned_memory_into_files(tmp_path):
    values = {
        "alone": random_bits("float32", 2**22).reshape(64, -1),
        "cut": random_bits("uint8", 2**28, seed=1).reshape(2**14, -1),
        "packed": random_bits("int4", 2**22, seed=2).reshape(2**11, -1),
        "transposed": random_bits("float32", 2**22, seed=3).reshape(2**10, -1).T,
    }
    leaves = {name: jnp.asarray(each) for name, each in values.items()}
    captured = capture.capture(leaves, FarMemory(ChunkFiles(tmp_path)))
    for part in captured.parts:
        assert part.files
        for box, copy in part.boxes:
            place = (*map(slice, box.start, box.stop),)
            assert copy.tobytes() == values[part.leaf.path][place].tobytes()
    captured.release()


def test_what_finds_no_pinned_memory_goes_through_ordinary_memory(
    tmp_path, monkeypatch
):
    def refused(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: pinned memory")

    values = random_bits("float32", 2**22).reshape(64, -1)
    leaves = {"w": jnp.asarray(values)}
    monkeypatch.setattr(jax, "device_put", refused)
    part = only(capture.capture(leaves, FarMemory(ChunkFiles(tmp_path))))
    assert part.files
    assert joined(part).tobytes() == values.tobytes()


def test_the_memory_of_a_capture_is_one_piece_that_the_next_one_uses_again():
    memory = capture.Memory()
    leaves = {"a": np.ones(3, np.int8), "b": np.ones((4, 5)), "c": np.float32(1)}
    addresses = set()
    for _ in range(3):
        captured = capture.capture(leaves, memory)
        captured_values = [
            values for part in captured.parts for _, values in part.boxes
        ]
        assert all(values.ctypes.data % 64 == 0 for values in captured_values)
        assert all(values.flags.c_contiguous for values in captured_values)
        addresses.add(tuple(values.ctypes.data for values in captured_values))
        captured.release()
    assert len(addresses) == 1


@pytest.mark.parametrize("kept", [False, True])
def test_what_a_host_holds_of_an_array_is_copied_unless_it_is_nobody_elses(kept):
    values = random_bits("float32", 8).reshape(2, 4)
    box = boxes.Box(start=(2, 0), stop=(4, 4))
    shards = capture.Shards(
        leaf=manifest.Leaf(path="w", shape=(4, 4), dtype="float32"),
        shard_shape=(2, 4),
        boxes=((box, values),),
        kept=kept,
    )
    captured = capture.capture({"w": shards}, capture.Memory())
    ((captured_box, copy),) = only(captured).boxes
    assert captured_box == box
    assert np.shares_memory(copy, values) == kept
    assert copy.tobytes() == values.tobytes()
    assert captured.leaves == (shards.leaf,)
    assert captured.num_bytes == values.nbytes


def test_a_host_that_holds_nothing_of_an_array_knows_of_it():
    leaf = manifest.Leaf(path="w", shape=(4,), dtype="int8")
    shards = capture.Shards(leaf=leaf, shard_shape=(2,), boxes=(), kept=False)
    captured = capture.capture({"w": shards}, capture.Memory())
    assert captured.leaves == (leaf,)
    assert captured.num_bytes == 0


def test_garbage_is_collected_again_after_a_capture_that_failed():
    with pytest.raises(errors.CheckpointError):
        capture.capture({"w": "text"}, capture.Memory())
    assert gc.isenabled()


def test_memory_that_was_released_twice_is_given_back_once():
    memory = capture.Memory()
    captured = capture.capture({"w": np.ones(8)}, memory)
    captured.release()
    captured.release()
    assert captured.parts == ()
    assert memory.take(64) is not memory.take(64)


def test_leaves_are_ordered_by_path_and_say_what_the_whole_array_is():
    captured = capture.capture(
        {
            "w": sharded(np.zeros((8, 4), np.float32), mesh(8), "a"),
            "b/c": np.float16(3),
            "a": True,
        },
        capture.Memory(),
    )
    assert [(each.path, each.shape, each.dtype) for each in captured.leaves] == [
        ("a", (), "bool"),
        ("b/c", (), "float16"),
        ("w", (8, 4), "float32"),
    ]
    assert captured.num_bytes == 1 + 2 + 128
