"""Trees: leaves by their paths, and arrays made of boxes in whatever form is wanted."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt.checkpoint import structure
from elastic_ckpt.checkpoint.host import trees
from elastic_ckpt.core import errors
from elastic_ckpt.steps import manifest

P = PartitionSpec
Point = collections.namedtuple("Point", "x y")


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("a", "b"))


def restored(abstract, saved, **options):
    """`abstract` made of saved NumPy arrays by path, as the trees ask for them."""
    wanted = trees.wanted({"state": abstract}, **options)
    made = {
        leaf.path: leaf.make(
            [
                np.array(saved[leaf.path][(*map(slice, box.start, box.stop), ...)])
                for box in leaf.boxes
            ]
        )
        for leaf in wanted
    }
    return trees.rebuilt(abstract, "state", made)


def test_leaves_are_named_by_checkpointable_and_path():
    tree = {"params": [1, (2, None)], "point": Point(3, {"a/b": 4, "~": 5})}
    assert trees.leaves({"state": tree, "rng": 5}) == {
        "state/params/0": 1,
        "state/params/1/0": 2,
        "state/point/x": 3,
        "state/point/y/a~1b": 4,
        "state/point/y/~0": 5,
        "rng": 5,
    }


SPECS = [P("a", "b"), P(("a", "b")), P(None, "b"), P()]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_an_array_is_made_under_any_sharding_of_each_box_once(mesh, spec):
    sharding = NamedSharding(mesh, spec)
    for dtype in ("float32", "bfloat16", "int8", "bool"):
        values = np.arange(64).reshape(8, 8).astype(jnp.dtype(dtype))
        wanted = jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding)
        (leaf,) = trees.wanted({"state": wanted})
        assert len(leaf.boxes) == len(set(leaf.boxes))
        assert sum(box.volume for box in leaf.boxes) == values.size
        tree = restored(wanted, {"state": values})
        assert tree.sharding.is_equivalent_to(sharding, 2)
        assert tree.dtype == values.dtype
        assert np.asarray(tree).tobytes() == values.tobytes()


def test_another_dtype_is_cast_after_reading(mesh):
    values = np.linspace(-3, 3, 16, dtype=np.float32)
    sharding = NamedSharding(mesh, P("a"))
    tree = restored(
        jax.ShapeDtypeStruct((16,), jnp.bfloat16, sharding=sharding), {"state": values}
    )
    assert tree.dtype == jnp.bfloat16
    expected = values.astype(jnp.bfloat16)
    assert np.asarray(tree).tobytes() == expected.tobytes()


@pytest.mark.parametrize("shape", [(), (4,)])
def test_typed_keys_come_back_as_keys(mesh, shape):
    key = jax.random.split(jax.random.key(7, impl="rbg"), shape)
    sharding = NamedSharding(mesh, P(*["a"] * len(shape)))
    numbers = np.asarray(jax.random.key_data(key))
    wanted = jax.ShapeDtypeStruct(shape, key.dtype, sharding=sharding)
    tree = restored(wanted, {"state": numbers})
    assert tree.dtype == key.dtype
    assert tree.shape == shape
    assert np.asarray(jax.random.key_data(tree)).tobytes() == numbers.tobytes()
    assert restored(key, {"state": numbers}).dtype == key.dtype


def test_numbers_and_numpy_arrays_come_back_as_such():
    wanted = {"f": 0.5, "n": 1, "on": True, "a": np.zeros(3, np.int16)}
    saved = {
        "state/f": np.array(2.5),
        "state/n": np.array(7),
        "state/on": np.array(False),
        "state/a": np.array([1, 2, 3], np.int16),
    }
    tree = restored(wanted, saved)
    assert {name: type(value) for name, value in tree.items()} == {
        "f": float,
        "n": int,
        "on": bool,
        "a": np.ndarray,
    }
    assert (tree["f"], tree["n"], tree["on"]) == (2.5, 7, False)
    assert tree["a"].tolist() == [1, 2, 3]


def test_a_step_of_another_model_is_refused_and_a_part_of_one_is_not():
    saved = {"b": np.zeros(3, np.float32), "w": np.zeros((8, 8), np.float32)}
    contents = manifest.Contents(
        leaves=(
            manifest.Leaf(path="state/b", shape=(3,), dtype="float32"),
            manifest.Leaf(path="state/w", shape=(8, 8), dtype="float32"),
        ),
        trees=structure.to_json({"state": saved}),
    )

    def resolve(tree, *, partial):
        structure.resolve({"state": tree}, contents, step=3, partial=partial)

    part = {"w": np.zeros((8, 8))}
    resolve(part, partial=True)
    with pytest.raises(errors.OtherModelError, match=r"state/b: saved \[3\], now noth"):
        resolve(part, partial=False)
    with pytest.raises(errors.CheckpointError) as caught:
        resolve({"w": np.zeros((8, 4)), "b": np.zeros(3), "c": 1}, partial=False)
    assert str(caught.value) == (
        "step 3 is a checkpoint of another model: its tree differs from the one that"
        " was requested (state/c: saved nothing, now []; state/w: saved [8, 8], now"
        " [8, 4]); request the saved shapes and types, or start a new run in another"
        " directory (with another run_name in a configuration)"
    )


@pytest.mark.parametrize("most_bytes", [24, 1000])
def test_a_large_box_is_made_piece_by_piece_on_its_device(mesh, most_bytes):
    values = np.arange(24 * 8, dtype=np.float32).reshape(24, 8)
    for spec in (P("a", "b"), P(None, "a")):
        sharding = NamedSharding(mesh, spec)
        wanted = jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding)
        made = restored({"w": wanted}, {"state/w": values}, most_bytes=most_bytes)["w"]
        assert made.sharding == sharding
        assert np.asarray(made).tobytes() == values.tobytes()
        (leaf,) = trees.wanted({"state": {"w": wanted}}, most_bytes=most_bytes)
        assert all(4 * box.volume <= most_bytes for box in leaf.boxes)


def test_an_array_is_made_in_the_memory_that_its_sharding_names(mesh):
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    for kind in ("pinned_host", "unpinned_host"):
        sharding = NamedSharding(mesh, P("a"), memory_kind=kind)
        wanted = jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding)
        made = restored({"w": wanted}, {"state/w": values})["w"]
        assert made.sharding.memory_kind == kind
        assert np.asarray(made).tobytes() == values.tobytes()
    abstract = jax.ShapeDtypeStruct((8, 8), np.float32)
    assert restored(abstract, {"state": values}).devices() == {jax.local_devices()[0]}


def as_dtype(values, dtype):
    return trees.cast("/state/w", np.asarray(values), np.dtype(dtype))


@pytest.mark.parametrize(
    ("saved", "dtype", "expected"),
    [
        (np.float32([0.1, np.inf, np.nan]), jnp.bfloat16, [0.1, np.inf, np.nan]),
        (jnp.bfloat16([1.5, -2]), np.float32, [1.5, -2]),
        (np.int32([7, -1]), np.int8, [7, -1]),
        (np.int64([3]), np.float16, [3]),
        (np.float64([4.0]), np.int32, [4]),
        (np.bool_([True, False]), np.uint8, [1, 0]),
        (np.complex64([2.5]), np.float16, [2.5]),
    ],
)
def test_values_that_a_dtype_has_are_cast(saved, dtype, expected):
    made = as_dtype(saved, dtype)
    assert made.dtype == dtype
    assert made.tobytes() == np.array(expected, dtype).tobytes()


@pytest.mark.parametrize(
    ("saved", "dtype", "value"),
    [
        (np.float32([1, 0.5]), np.int32, 0.5),
        (np.float32([np.nan]), np.int32, "nan"),
        (np.int32([1, 300]), np.int8, 300),
        (np.int32([-1]), np.uint64, -1),
        (np.int32([2**24 + 1]), np.float32, 2**24 + 1),
        (jnp.bfloat16([3e38]), np.float16, "3.*e.38"),
        (np.float32([1e30]), jnp.float8_e4m3fn, "1.*e.30"),
        (np.int32([2]), np.bool_, 2),
        (np.complex64([1 + 1j]), np.float32, "1.*1j"),
    ],
)
def test_a_value_that_a_cast_would_change_is_refused_by_name(saved, dtype, value):
    with pytest.raises(
        errors.CheckpointError, match=f"^state/w was .* value .*{value}"
    ):
        as_dtype(saved, dtype)
