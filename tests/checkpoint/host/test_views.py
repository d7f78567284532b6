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
DEVICE = jax.devices()[0]
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


def pointers(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def held_in_place(captured, array):
    """Whether a capture of one array holds views of it."""
    (part,) = captured.parts
    addresses = [values.ctypes.data for _, values in part.boxes]
    return addresses == pointers(array)


def content(captured):
    (part,) = captured.parts
    return b"".join(values.tobytes() for _, values in sorted(part.boxes))


def take(array, memory):
    return capture.capture({"w": array}, memory)


def take_again(array):
    """The second capture of an array, which the program keeps."""
    memory = capture.Memory()
    take(array, memory).release()
    return take(array, memory)


FOREIGN = {
    "device_put": lambda x: jax.device_put(x, DEVICE),
    "device_put to shards": lambda x: jax.device_put(x, sharding(8)),
    "device_put without aliases": lambda x: jax.device_put(x, DEVICE, may_alias=False),
    "asarray": jnp.asarray,
    "asarray of an array": lambda x: jnp.asarray(jax.device_put(x, DEVICE)),
    "device_put again": lambda x: jax.device_put(jax.device_put(x, DEVICE), DEVICE),
    "clone": lambda x: jax.device_put(x, DEVICE).clone(),
    "data of a shard": lambda x: jax.device_put(x, sharding(2)).addressable_data(0),
    "from_dlpack": jax.dlpack.from_dlpack,
    "callback": lambda x: jax.make_array_from_callback(
        x.shape, sharding(4), lambda index: x[index]
    ),
    "single arrays": lambda x: jax.make_array_from_single_device_arrays(
        x.shape, sharding(1), [jax.device_put(x, DEVICE)]
    ),
    "reshape": lambda x: jax.device_put(x, DEVICE).reshape(SIZE),
    "astype": lambda x: jax.device_put(x, DEVICE).astype(np.float32),
    "slice": lambda x: jax.device_put(x, DEVICE)[:],
    "handed on": lambda x: forward(jax.device_put(x, DEVICE))[0],
    "stop_gradient": lambda x: jax.lax.stop_gradient(jax.device_put(x, DEVICE)),
    "donated": lambda x: add_donated(jax.device_put(x, DEVICE)),
    "a tree": lambda x: jax.device_put({"w": x}, DEVICE)["w"],
}


@pytest.mark.parametrize("how", FOREIGN)
@pytest.mark.parametrize("calls", [1, 3])
def test_memory_that_others_may_change_is_copied(how, calls):
    # Programs that were called before are called by other ways.
    for _ in range(calls):
        memory = foreign()
        array = jax.block_until_ready(FOREIGN[how](memory))
    before = np.asarray(array).tobytes()
    captured = take_again(array)
    memory[:] = -1
    assert content(captured) == before


def test_memory_of_numpy_is_taken_over_as_it_is():
    # Or else the test above proves nothing.
    memory = foreign()
    array = jax.device_put(memory, DEVICE)
    assert array.unsafe_buffer_pointer() == memory.ctypes.data
    assert not capture.is_result_of_program(array)


def compiled(x):
    return add.lower(x).compile()(x)


PROGRAMS = {"add": add, "add_donated": add_donated, "compiled": compiled}


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("program", PROGRAMS)
def test_results_of_programs_are_held_and_not_copied(program, num_devices):
    for _ in range(3):
        array = PROGRAMS[program](jax.device_put(foreign(), sharding(num_devices)))
        assert held_in_place(take_again(array), array)


def deleted(array):
    array.delete()


def put_elsewhere(array):
    target = sharding(2) if len(array.devices()) == 1 else sharding(1)
    return jax.device_put(array, target, donate=True)


def compiled_with_donation(array):
    return add_donated.lower(array).compile()(array)


LOSSES = {
    "donated": add_donated,
    "donated to a compiled program": compiled_with_donation,
    "donated to a transfer": put_elsewhere,
    "deleted": deleted,
}


@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("calls", [1, 3])
def test_a_view_that_is_held_is_never_overwritten(loss, num_devices, calls):
    for _ in range(calls):
        array = made(num_devices)
        before = np.asarray(array).tobytes()
        captured = take_again(array)
        assert held_in_place(captured, array)
        result = LOSSES[loss](array)
        # Writes to the memory that is free now.
        for _ in range(4):
            result = jax.block_until_ready(add_donated(made(num_devices)))
        assert content(captured) == before
        captured.release()
        del result


def test_after_the_release_a_step_writes_in_place_again():
    array = made()
    captured = take_again(array)
    captured.release()
    before = pointers(array)
    assert pointers(add_donated(array)) == before


def saves(step, number):
    """Whether each of some saves held the array in place; `step` runs in between."""
    memory, array, in_place = capture.Memory(), made(8), []
    for _ in range(number):
        captured = take(array, memory)
        in_place.append(held_in_place(captured, array))
        array = jax.block_until_ready(step(array))
        captured.release()
    return in_place


@pytest.mark.parametrize("step", [add, add_donated])
def test_a_leaf_that_each_step_replaces_is_copied(step):
    # A view would keep the memory of the step before.
    assert saves(step, 4) == [False] * 4


def test_a_leaf_that_no_step_changes_is_copied_once():
    assert saves(lambda array: array, 4) == [False, True, True, True]


def test_an_array_that_is_gone_is_not_kept():
    memory, array = capture.Memory(), made()
    take(array, memory).release()
    gone = weakref.ref(array)
    del array
    assert gone() is None


def test_small_arrays_are_copied():
    array = add(jnp.zeros(16))
    assert not held_in_place(take_again(array), array)


def test_without_a_note_of_where_it_was_made_an_array_is_copied():
    class Array:
        traceback = None

    assert not capture.is_result_of_program(Array())
