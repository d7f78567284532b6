"""States come back with the same bits and types; what cannot be saved is named."""

import collections
import dataclasses
import io
import json
import math
import pathlib
import struct

import jax
import jax.numpy as jnp
import jsonschema
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elastic_ckpt.checkpoint.components import encoding
from elastic_ckpt.core import errors

SCHEMAS = pathlib.Path(encoding.__file__).parent / "schemas"
Point = collections.namedtuple("Point", "x y")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Params:
    w: object
    b: object


def turned(state, current=None):
    """A state that went through a file."""
    return encoding.decode(encoding.load(io.BytesIO(content(state))), current)


def content(state):
    file = io.BytesIO()
    encoding.dump(encoding.encode(state), file)
    return file.getvalue()


def same(one, other):
    """Fails unless two states have equal types, and equal bits."""
    assert type(one) is type(other), (one, other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key, value in one.items():
            same(value, other[key])
    elif isinstance(one, Params):
        same(vars(one), vars(other))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for value, another in zip(one, other, strict=True):
            same(value, another)
    elif isinstance(one, jax.Array) and jax.dtypes.issubdtype(
        one.dtype, jax.dtypes.prng_key
    ):
        assert one.dtype == other.dtype
        same(jax.random.key_data(one), jax.random.key_data(other))
    elif isinstance(one, np.ndarray | np.generic | jax.Array):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    elif isinstance(one, float):
        assert struct.pack("d", one) == struct.pack("d", other)
    else:
        assert one == other


def leaves():
    """A value of each kind, by its kind."""
    return {
        "none": None,
        "bool": True,
        "int": 2**70,
        "negative zero": -0.0,
        "infinite": -math.inf,
        "nan": struct.unpack(">d", bytes.fromhex("fff8000000000abc"))[0],
        "text": "é\n\ud800",
        "bytes": b"\0\xff",
        "empty": [{}, [], ()],
        "numpy": np.arange(6, dtype=">i2").reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "no dims": np.array(3.5, np.float32),
        "no elements": np.zeros((0, 3), np.uint8),
        "texts": np.array(["a", "bcd"]),
        "scalar": np.float64(0.1),
        "bfloat16 scalar": ml_dtypes.bfloat16(1.5),
        "bfloat16": np.array([1.5, -0.0, math.nan], ml_dtypes.bfloat16),
        "int4": np.array([-8, 7], ml_dtypes.int4),
        "float8": jnp.array([1.0, 448.0], jnp.float8_e4m3fn),
        "array": jnp.arange(4, dtype=jnp.bfloat16),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(3, impl="rbg"), 2),
        "dict": {"b": 1, "a": (2, [3.0, None]), 7: True},
    }


def test_a_value_of_each_kind_comes_back_with_its_bits_and_type(tmp_path):
    same(turned(leaves()), leaves())
    # Equal states have equal bytes, and NumPy reads them without pickle.
    first, second = (content(leaves()) for _ in range(2))
    assert first == second
    path = tmp_path / "global.npz"
    path.write_bytes(first)
    with np.load(path, allow_pickle=False) as archive:
        assert archive["0"].tolist() == leaves()["numpy"].tolist()
        tree = json.loads(archive["state"].tobytes())
    jsonschema.validate(tree, json.loads((SCHEMAS / "state.json").read_text()))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.booleans(), inner)
    ),
    max_leaves=10,
)


@given(json_values)
def test_any_nesting_comes_back(state):
    same(turned(state), state)


def test_nodes_of_a_pytree_are_made_of_those_of_the_current_state():
    state = optax.ScaleByAdamState(
        count=jnp.int32(3), mu={"w": jnp.ones(3)}, nu={"w": jnp.zeros(3)}
    )
    saved = ((state, optax.EmptyState()), Point(1, None), Params(w=jnp.ones(2), b=[3]))
    other = optax.ScaleByAdamState(count=jnp.int32(0), mu={"w": None}, nu={"w": None})
    current = ((other, optax.EmptyState()), Point(0, 4), Params(w=None, b=[0]))
    same(turned(saved, current), saved)


def test_a_node_that_the_current_state_lacks_is_named():
    for current in (None, (0, 0), {"x": 0}, Params(w=0, b=0)):
        with pytest.raises(
            errors.CheckpointError, match=r"state/p was saved as a .*Point"
        ):
            turned({"p": Point(1, 2)}, {"p": current})
    with pytest.raises(errors.CheckpointError, match="current state has nothing"):
        turned({"p": Point(1, 2)}, {})


def test_a_value_that_cannot_be_saved_is_named():
    for value in (object(), np.array([object()]), {1.5: 0}, {(1, 2): 0}, 1j, {1, 2}):
        with pytest.raises(errors.CheckpointError, match="the state/a/1 is"):
            encoding.encode({"a": [0, value]})


def test_arrays_take_the_sharding_of_the_current_state():
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    sharded = NamedSharding(mesh, PartitionSpec("d"))
    replicated = NamedSharding(mesh, PartitionSpec())
    saved = {"w": jnp.arange(8), "k": jax.random.key(1), "n": jnp.arange(3)}
    current = {
        "w": jax.device_put(jnp.zeros(8), sharded),
        "k": jax.device_put(jax.random.key(0), replicated),
        "n": jnp.zeros(5),
    }
    state = turned(saved, current)
    same(state, saved)
    assert state["w"].sharding == sharded
    assert state["k"].sharding == replicated
