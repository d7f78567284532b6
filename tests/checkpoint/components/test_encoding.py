"""States come back with the same bits and types; what cannot be saved is named."""

import collections
import dataclasses
import enum
import functools
import io
import json
import math
import pathlib
import re
import struct
import tempfile

import flax
import hypothesis
import jax
import jax.numpy as jnp
import jsonschema
import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.checkpoint.components import encoding
from elastic_ckpt.core import errors
from tests.checkpoint.components.test_component import Component, Turns, load, save

SCHEMAS = pathlib.Path(encoding.__file__).parent / "schemas"
Nothing = collections.namedtuple("Nothing", "")
Point = collections.namedtuple("Point", "x y")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Params:
    w: object
    b: object


@flax.struct.dataclass
class Cell:
    value: object


def turned(state, current=None):
    """A state that went through a file."""
    return encoding.decode(encoding.load(io.BytesIO(content(state))), current)


def content(state):
    file = io.BytesIO()
    encoding.dump(encoding.encode(state), file)
    return file.getvalue()


def exact(value):
    """The types and bits of a state, as values that can be compared."""
    kind = type(value)
    value = vars(value) if kind in (Params, Cell) else value
    if isinstance(value, dict):
        return kind, [(type(key), key, exact(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return kind, [*map(exact, value)]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
        bits = np.asarray(jax.random.key_data(value) if is_key else value).tobytes()
        weak_type = getattr(value, "weak_type", False) and jax.jit(abs)(value).weak_type
        return kind, value.dtype, value.shape, bits, weak_type
    return kind, struct.pack("d", value) if kind is float else value


def same(one, other):
    """Fails unless two states have equal types, and equal bits."""
    assert exact(one) == exact(other)


def leaves():
    """Values of each kind, by their kind."""
    nan = struct.unpack(">d", bytes.fromhex("fff8000000000abc"))[0]
    small = np.array([1.5, -0.0, nan], ml_dtypes.bfloat16)
    column = np.arange(6.0).reshape(2, 3).T
    return {
        "plain": [None, True, 2**70, 0.1, -0.0, -math.inf, nan, "é\n\ud800", b"\0\xff"],
        "numpy": [np.arange(6, dtype=">i2"), column, np.array(["a", "bc"])],
        "odd shapes": [np.array(3.5, np.float32), np.zeros((0, 3), np.uint8)],
        "small": [small, small[0], np.array([-8, 7], ml_dtypes.int4), np.float64(0.1)],
        "jax": [jnp.array([1.0, 448.0], jnp.float8_e4m3fn), jnp.arange(4)],
        "weak": [jnp.asarray(0.5), jnp.asarray(1j), jnp.full((2, 1), -3)],
        "keys": [jax.random.key(3), jax.random.split(jax.random.key(3, impl="rbg"), 2)],
        "nested": {"b": {"": [[-7]]}, "a": (3, [3.0, (None,)]), 7: {}, False: [[], ()]},
    }


def test_a_value_of_each_kind_comes_back_with_its_bits_and_type(tmp_path):
    same(turned(leaves()), leaves())
    # Equal states have equal bytes, and NumPy reads them without pickle.
    assert content(leaves()) == content(leaves())
    path = tmp_path / "global.npz"
    path.write_bytes(content(leaves()))
    with np.load(path, allow_pickle=False) as archive:
        assert archive["0"].tolist() == [*range(6)]
        tree = json.loads(archive["state"].tobytes())
    jsonschema.validate(tree, json.loads((SCHEMAS / "state.json").read_text()))


def test_nodes_and_shardings_are_those_of_the_current_state():
    mesh = jax.make_mesh((8,), ("d",))
    sharded, replicated = (NamedSharding(mesh, PartitionSpec(*d)) for d in ("d", ""))
    key = jax.random.key(1)
    saved = (Nothing(), Point(1, None)), Params(w=jnp.arange(8), b=[3, key, np.ones(3)])
    w, rng = jax.device_put(jnp.zeros(8), sharded), jax.device_put(key, replicated)
    current = (Nothing(), Point(0, 4)), Params(w=w, b=[0, rng, np.ones(5)])
    state = turned(saved, current)
    same(state, saved)
    assert state[1].w.sharding == sharded
    assert state[1].b[1].sharding == replicated
    said = r"state/p was saved as type .*Point"
    for lacking in ({}, *({"p": each} for each in (None, (0, 0), current[1]))):
        with pytest.raises(errors.CheckpointError, match=said) as raised:
            turned({"p": Point(1, 2)}, lacking)
        assert ("current state has nothing" in str(raised.value)) == (not lacking)


def values_of(dtype):
    """Arrays and scalars of any bits."""
    bits = st.binary(min_size=6 * dtype.itemsize, max_size=6 * dtype.itemsize)
    arrays = bits.map(lambda drawn: np.frombuffer(drawn, dtype).reshape(2, 3))
    return st.one_of(arrays, arrays.map(lambda array: array[1, 2]))


DTYPES = [*"?bBhHiIlLefdgFDG", ">i4", "m8[s]", [("a", "i2"), ("b", "f8")]]
DTYPES += [ml_dtypes.bfloat16, ml_dtypes.float8_e3m4, ml_dtypes.int4]
UNSAVED = [1j, enum.IntEnum("Color", "RED").RED, {1}, object(), Params, Point(1, 2)]
UNSAVED += [msgspec.defstruct("Struct", [])(), {1.5: 0}, {(1, 2): 0}, np.str_("a\0")]
UNSAVED += [np.array([None]), np.zeros(2, [("a", ml_dtypes.bfloat16)])]
UNSAVED += [np.rec.array([(1,)], [("a", "i2")])[0]]
LEAVES = [each for listed in leaves().values() for each in listed]
LEAVES = st.sampled_from(LEAVES) | st.integers() | st.floats() | st.text() | st.binary()
LEAVES |= st.sampled_from(DTYPES).flatmap(lambda each: values_of(np.dtype(each)))
TREES = st.recursive(
    LEAVES | st.sampled_from(UNSAVED),
    lambda below: st.one_of(
        st.lists(below, max_size=3),
        st.lists(below, max_size=3).map(tuple),
        st.dictionaries(st.text() | st.integers() | st.none(), below, max_size=3),
        *(st.builds(Point, below, below), st.builds(Cell, below)),
    ),
    max_leaves=5,
)


def at_start(tree):
    """The state of a program that starts: its lists are empty."""
    if isinstance(tree, dict):
        return {key: at_start(each) for key, each in tree.items()}
    children, structure = jax.tree.flatten(tree, is_leaf=lambda each: each is not tree)
    if type(tree) is list or any(each is tree for each in children):
        return []
    return structure.unflatten(map(at_start, children))


@hypothesis.given(tree=TREES)
def test_a_state_is_loaded_by_any_number_of_hosts_or_refused_by_path(tree):
    saved = {"a": tree}
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as place:
        turns = Turns(patch)
        try:
            turns.run(4, lambda _: save(Component(saved), place))
        except errors.CheckpointError as error:
            told = str(error)
        else:
            told = ""
            for num_hosts in (1, 3):
                start = Component(at_start(saved))
                turns.run(num_hosts, lambda _, start=start: load(start, place))
                same(start.state, saved)
        assert re.match(r"(?s)the state/a.* is .* component cannot save|$", told)


def test_a_value_that_cannot_be_saved_is_named():
    deep = functools.reduce(lambda below, _: [below], range(200), 0)
    for value in (*UNSAVED, 2**20000, deep):
        with pytest.raises(errors.CheckpointError, match=r"^the state/a/1.* is "):
            encoding.encode({"a": [0, value]})
