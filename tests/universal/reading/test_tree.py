"""Trees of arrays that are read from files, compared with NumPy bit for bit."""

import threading

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.checkpoint.host import trees
from elastic_ckpt.core import errors
from elastic_ckpt.universal import loading
from elastic_ckpt.universal.formats.checkpoint import Checkpoint
from elastic_ckpt.universal.moves import Fill, Matched
from tests.universal.reading.files import Files, layouts
from tests.universal.reading.test_engine import drawn
from tests.universal.safetensors_files import bits

MESH = jax.make_mesh((2, 2, 2), ("a", "b", "c"))
F32 = np.dtype("float32")


def read_tree(tensors, moves, abstract, *, fills=(), **options):
    """The tree that moves make of tensors."""
    matched = Matched(
        moves=moves,
        derived=[],
        fills=fills,
        targets=loading.targets_of(abstract),
        rules=[],
    )
    checkpoint = Checkpoint(format="test", tensors=tensors)
    return loading.read_tree(checkpoint, matched, abstract, **options)


@st.composite
def shardings(draw, shape):
    axes = ["a", "b", "c", ("a", "b"), None]
    spec, taken = [], set()
    for size in shape:
        axis = draw(st.sampled_from(axes))
        names = {axis} if isinstance(axis, str) else set(axis or ())
        if names & taken or size % 2 ** len(names):
            axis = None
        taken |= names if axis else set()
        spec.append(axis)
    return NamedSharding(MESH, PartitionSpec(*spec))


@given(data=st.data())
def test_a_tree_is_bit_equal_under_any_sharding(tmp_path_factory, data):
    tensors, moves, expected = data.draw(layouts(tmp_path_factory.mktemp("files")))
    abstract = {
        name: jax.ShapeDtypeStruct(
            values.shape, values.dtype, sharding=data.draw(shardings(values.shape))
        )
        for name, values in expected.items()
    }
    budget_bytes = data.draw(st.sampled_from([1, 100, 2**20]))
    read = read_tree(tensors, moves, abstract, budget_bytes=budget_bytes)
    assert bits(read) == bits(expected)
    for name, wanted in abstract.items():
        assert read[name].sharding == wanted.sharding


def test_padding_is_filled_and_typed_keys_numbers_and_functions_are_there(tmp_path):
    files = Files(tmp_path)
    arrays = {
        "rng": np.array([[1, 2], [3, 4]], np.uint32),
        "step": np.array(7, np.int32),
        "embedding": drawn(3, 2),
    }
    for name, array in arrays.items():
        files.add(array, name=name)
    fill = Fill(target="embedding", start=(3, 0), stop=(4, 2), value=5)
    sharding = NamedSharding(MESH, PartitionSpec("a"))
    abstract = {
        "rng": jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2)),
        "step": 0,
        "embedding": jax.ShapeDtypeStruct((4, 2), F32, sharding=sharding),
        "activation": jax.nn.relu,
    }
    read = read_tree(files.tensors, files.moves(), abstract, fills=[fill])
    assert jax.random.key_data(read["rng"]).tolist() == [[1, 2], [3, 4]]
    assert read["step"] == 7
    assert type(read["step"]) is int
    assert read["activation"] is jax.nn.relu
    expected = np.concatenate([drawn(3, 2), np.full((1, 2), 5, np.float32)])
    assert np.asarray(read["embedding"]).tobytes() == expected.tobytes()


def test_a_leaf_of_another_kind_is_refused():
    with pytest.raises(
        errors.CheckpointError, match="w cannot be restored as a object"
    ):
        loading.targets_of({"w": object()})


def test_no_thread_reads_on_while_an_error_of_a_leaf_is_handled(tmp_path, monkeypatch):
    files = Files(tmp_path)
    for name in "abcd":
        files.add(drawn(100, 10), name=name)
    abstract = {name: jax.ShapeDtypeStruct((100, 10), F32) for name in "abcd"}

    def fail(_, values):
        raise ValueError(f"full after {len(values)}")

    monkeypatch.setattr(trees.WantedLeaf, "make", fail)
    with pytest.raises(ValueError, match="full") as kept:
        read_tree(files.tensors, files.moves(), abstract, budget_bytes=1)
    assert kept.tb is not None
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("relayout") for name in names)
