"""Which arrays a save holds views of, and that nothing changes what it holds."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.checkpoint.host import capture
from elastic_ckpt.core import host_memory

SIZE = 2**19
add = jax.jit(lambda x: x + 1)
add_donated = jax.jit(lambda x: x + 1, donate_argnums=0)
# Hands its argument on, beside another result.
forward = jax.jit(lambda x: (x, x + 1))


def foreign():
    """Memory of NumPy that JAX takes over as it is, float32 `[SIZE]`."""
    memory = host_memory.allocate(4 * SIZE).view(np.float32)
    memory[:] = np.arange(SIZE)
    return memory


def sharding(num_devices):
    mesh = jax.sharding.Mesh(jax.devices()[:num_devices], ("a",))
    return NamedSharding(mesh, PartitionSpec("a"))


def made(num_devices=1):
    """The result of a program."""
    return jax.block_until_ready(add(jax.device_put(foreign(), sharding(num_devices))))


def held_in_place(captured, array):
    """Whether a capture of one array holds views of it."""
    (part,) = captured.parts
    addresses = [values.ctypes.data for _, values in part.boxes]
    shards = array.addressable_shards
    return addresses == [shard.data.unsafe_buffer_pointer() for shard in shards]


def content(captured):
    (part,) = captured.parts
    return b"".join(values.tobytes() for _, values in sorted(part.boxes))


def take_again(array):
    """The second capture of an array, which the program keeps."""
    memory = capture.Memory()
    capture.capture({"w": array}, memory).release()
    return capture.capture({"w": array}, memory)


FOREIGN = {
    "device_put": lambda x: jax.device_put(x, jax.devices()[0]),
    "device_put to shards": lambda x: jax.device_put(x, sharding(8)),
    "asarray": jnp.asarray,
    "from_dlpack": jax.dlpack.from_dlpack,
    "callback": lambda x: jax.make_array_from_callback(
        x.shape, sharding(4), lambda index: x[index]
    ),
    "handed on": lambda x: forward(jnp.asarray(x))[0],
    "donated": lambda x: add_donated(jnp.asarray(x)),
}


@pytest.mark.parametrize("how", FOREIGN)
def test_memory_that_others_may_change_is_copied(how):
    # Programs that were called before are called by other ways.
    for _ in range(2):
        memory = foreign()
        array = jax.block_until_ready(FOREIGN[how](memory))
    if how == "device_put":
        # Or else the test proves nothing.
        assert array.unsafe_buffer_pointer() == memory.ctypes.data
    before = np.asarray(array).tobytes()
    captured = take_again(array)
    memory[:] = -1
    assert content(captured) == before


@pytest.mark.parametrize("num_devices", [1, 8])
def test_results_of_programs_are_held_and_a_view_is_never_overwritten(num_devices):
    losses = [add_donated, lambda x: add_donated.lower(x).compile()(x)]
    losses += [
        lambda x: jax.device_put(x, sharding(2), donate=True),
        lambda x: x.delete(),
    ]
    for loss in losses:
        array = made(num_devices)
        before = np.asarray(array).tobytes()
        captured = take_again(array)
        assert held_in_place(captured, array)
        result = loss(array)
        # Writes to the memory that is free now.
        for _ in range(3):
            result = jax.block_until_ready(add_donated(made(num_devices)))
        assert content(captured) == before
        captured.release()
        del result


@pytest.mark.parametrize("step", [add, add_donated, None])
def test_a_leaf_that_each_step_replaces_is_copied_and_any_other_once(step):
    memory, array, in_place = capture.Memory(), made(8), []
    for _ in range(3):
        captured = capture.capture({"w": array}, memory)
        in_place.append(held_in_place(captured, array))
        if step:
            array = jax.block_until_ready(step(array))
        captured.release()
    # A view would keep the memory of the step before.
    assert in_place == [False, step is None, step is None]
    gone = weakref.ref(array)
    del array
    # An array that is gone is not kept.
    assert gone() is None
