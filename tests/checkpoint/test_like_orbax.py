"""Trees of all kinds: the same calls give the same with Orbax's checkpointer and ours.

Our checkpointer saves and loads each tree that Orbax saves and loads, whichever of the
two saved it. If Orbax refuses a tree or loses a leaf, ours raises in the call and names
the leaf.
"""

import collections
import random

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as v0
import pytest
from google.protobuf import struct_pb2
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from elastic_ckpt import frontend
from elastic_ckpt.core import errors
from elastic_ckpt.tiers.choices import Local, Persistent
from tests.checkpoint.test_orbax_format import TREES

# Orbax warns about loads without a sharding.
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

Point = collections.namedtuple("Point", "x y")

MORE_TREES = {
    "keys with a slash": {"a/b": 1, "a": {"b": 2}, "c": {"/": jnp.ones(2)}},
    "texts with a slash": {"a/b": "x", "a": {"b": "y", "~1": "z"}, "n": 1},
    "dots": {"..": 1, ".": jnp.ones(2), "a": {"..": {"b": jnp.ones(3)}}},
    "an empty key": {"": jnp.ones(2), "a": {"": 2}},
    "tildes": {"~": 1, "~1": 2, "a~1b": jnp.ones(1), "~0": {"~": 3}},
    "keys that are no texts": {"i": {0: 1, 1: jnp.ones(2)}, "t": {(0, 1): 1}},
    "a long key": {"x" * 300: jnp.ones(2)},
    "strange letters": {"a\0b": 1, "日本": jnp.ones(1), "a b%2F": 2, "c?": 3},
    "names of files": {"zarr.json": jnp.ones(1), "c": {"0": 1}, "manifest": 2},
    "an array in an array": {"a": jnp.ones(2), "a/c/0": jnp.ones(4)},
    "texts alone": {"a": "x", "b": {"c": ""}},
    "a number": 5,
    "nothing": {"a": None},
    "empty containers": {"a": {}, "b": [], "c": (), "d": {"e": None}},
    "large numbers": {"i": 2**40, "u": 2**63, "f": float("inf"), "t": True},
    "another byte order": {"a": np.arange(3, dtype=">i4")},
    "small numbers": {"a": jnp.ones(4, jnp.int4), "b": jnp.ones(3, jnp.float8_e5m2)},
    "tuples": ({"a": (1, 2)}, [Point(1, jnp.ones(2))]),
}


LEAVES = [
    lambda n: jnp.arange(n + 1.0),
    lambda n: jnp.full((2, n), n, jnp.bfloat16),
    lambda n: jnp.arange(n) > 2,
    lambda n: jnp.int8(n),
    lambda n: jnp.full((n, 1), 1j, jnp.complex64),
    lambda n: np.arange(n, dtype=np.uint64) + 2**63,
    lambda n: np.asfortranarray(np.arange(6.0).reshape(2, 3)) / n,
    lambda n: np.array(n % 2 == 0),
    lambda n: np.arange(3 * n)[::3],
    jax.random.key,
    lambda n: jax.random.split(jax.random.key(n), (n, 2)),
    lambda n: jax.random.key(n, impl="rbg"),
    lambda n: n % 2 == 0,
    lambda n: -n,
    lambda n: 1 / n,
    lambda n: "x" * n,
    lambda _: None,
    lambda _: {},
    lambda _: [],
    lambda _: (),
]


def random_tree(seed):
    """A tree of some depth, with leaves and nodes of the kinds that Orbax saves."""
    generator = random.Random(seed)

    def node(depth):
        if generator.random() < depth / 4:
            return generator.choice(LEAVES)(generator.randint(1, 5))
        children = [node(depth + 1) for _ in range(generator.randint(1, 4))]
        kind = generator.choice(["dict", "list", "tuple", "named", "numbered"])
        if kind == "dict":
            return {f"k{n}": child for n, child in enumerate(children)}
        if kind == "numbered":
            return {3 * n: child for n, child in enumerate(children)}
        if kind == "named":
            return Point(children[0], children[-1])
        return children if kind == "list" else tuple(children)

    return {"all": node(0), "one": jnp.ones(2)}


MORE_TREES |= {f"random {seed}": random_tree(seed) for seed in range(29)}
# A few of the random ones are among the default tests.
LONG = {f"random {seed}" for seed in range(1, 29)}


def bits(tree):
    """A tree as plain containers, its leaves as type, dtype, shape, bytes and place."""

    def leaf_bits(leaf):
        if not isinstance(leaf, jax.Array | np.ndarray):
            return type(leaf), repr(leaf)
        numbers, place = leaf, None
        if isinstance(leaf, jax.Array):
            place = leaf.sharding
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                numbers = jax.random.key_data(leaf)
        numbers = np.asarray(numbers)
        return type(leaf), str(leaf.dtype), leaf.shape, numbers.tobytes(), place

    leaves, structure = jax.tree.flatten(tree)
    return structure, [leaf_bits(leaf) for leaf in leaves]


@pytest.fixture
def make(tmp_path):
    made = []

    def make(local="ram", steps="steps"):
        tiers = [Local(tmp_path / local), Persistent(tmp_path / steps, every=1)]
        made.append(frontend.Checkpointer(tiers, run="run"))
        return made[-1]

    yield make
    for checkpointer in made:
        checkpointer.close()


@pytest.fixture
def stock(tmp_path):
    """Saves a tree with Orbax, and returns the tree that Orbax loads."""

    def load(tree, *arguments):
        with ocp.training.Checkpointer(tmp_path / "stock") as checkpointer:
            if checkpointer.latest is None:
                assert checkpointer.save(1, tree)
            return bits(checkpointer.load(1, *arguments))

    return load


@pytest.mark.parametrize(
    "name",
    [
        *TREES,
        *(
            pytest.param(name, marks=pytest.mark.slow if name in LONG else ())
            for name in MORE_TREES
        ),
    ],
)
def test_a_tree_comes_back_as_from_orbax(name, make, stock, tmp_path):
    tree = TREES[name]() if name in TREES else MORE_TREES[name]
    checkpointer = make()
    assert checkpointer.save(1, tree)
    checkpointer.wait()
    expected = stock(tree), stock(tree, tree)
    assert (bits(checkpointer.load()), bits(checkpointer.load(1, tree))) == expected
    metadata = checkpointer.metadata(1).metadata
    assert bits(checkpointer.load(1, metadata)) == expected[0]
    checkpointer.close()
    from_storage = make("other ram")
    assert (bits(from_storage.load()), bits(from_storage.load(1, tree))) == expected
    with ocp.training.Checkpointer(tmp_path / "steps") as orbax:
        assert (bits(orbax.load()), bits(orbax.load(1, tree))) == expected
    of_orbax = make("third ram", "stock")
    assert (bits(of_orbax.load()), bits(of_orbax.load(1, tree))) == expected
    metadata = of_orbax.metadata(1).metadata
    assert bits(of_orbax.load(1, metadata)) == expected[0]


def test_orbax_loads_a_tree_of_arrays_without_elements_alone(make, tmp_path):
    # It does not save them itself.
    tree = {"a": jnp.ones((0, 4)), "b": np.ones((3, 0))}
    checkpointer = make()
    assert checkpointer.save(1, tree)
    checkpointer.wait()
    assert bits(checkpointer.load()) == bits(tree)
    with ocp.training.Checkpointer(tmp_path / "steps") as orbax:
        assert bits(orbax.load()) == bits(tree)


def test_a_number_of_numpy_that_is_a_float_is_one(make, stock):
    checkpointer = make()
    checkpointer.save(1, {"a": np.float64(1.5)})
    assert (
        bits(checkpointer.load()) == bits({"a": 1.5}) == stock({"a": np.float64(1.5)})
    )


REFUSED = {
    "state/a": [
        {"a": np.float32(1)},
        {"a": np.int64(1)},
        {"a": np.bool_(True)},
        {"a": 1j},
        {"a": b"bytes"},
        {"a": object()},
        {"a": ...},
        {"a": jax.tree.structure({"b": 1})},
        {"a": np.array(["text"])},
        {"a": np.array([None])},
        {"a": np.array(["2020-01-01"], "datetime64[D]")},
        {"a": 2**70},
    ],
    "state/a/0/b": [{"a": [{"b": np.uint8(3)}]}],
    "'state/a/b' and 'state/a.b'": [
        {"a": {"b": 1}, "a.b": 2},
        {"a": {"b": jnp.ones(2)}, "a.b": jnp.zeros(3)},
        {"a": {"b": "x"}, "a.b": "y"},
    ],
    "'state/a/' and 'state/a/~1'": [{"a": {"": 1, "/": 2}}],
    "is not Unicode": [{"\ud800": 1}, {"a": "\ud800"}],
    "'state' is empty": [{}, [], None],
}


@pytest.mark.parametrize(
    ("leaf", "tree"),
    [(leaf, tree) for leaf, trees in REFUSED.items() for tree in trees],
)
def test_a_tree_that_orbax_does_not_save_is_refused_in_the_call(leaf, tree, make):
    checkpointer = make()
    for _ in range(2):
        with pytest.raises(errors.CheckpointError, match=leaf):
            checkpointer.save(1, tree)
    assert checkpointer.latest is None
    # The steps after it are saved and backed up.
    assert checkpointer.save(2, {"w": jnp.ones(2)})
    checkpointer.close()
    assert make("other ram").latest.step == 2


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "a/b", "metrics", "AUTO", "manifest-a.json", "preserve", "\ud800"],
)
def test_a_checkpointable_that_cannot_be_a_directory_is_refused(name, make):
    checkpointer = make()
    with pytest.raises(
        errors.CheckpointError, match="cannot be used for a checkpointable"
    ):
        checkpointer.save_checkpointables(1, {name: {"w": jnp.ones(2)}})
    with pytest.raises(errors.CheckpointError, match="no checkpointables were given"):
        checkpointer.save_checkpointables(1, {})


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (jnp.ones(2), "got a ArrayImpl"),
        (np.ones(2), "got a ndarray"),
        ([jnp.ones(2)], "got a list"),
        ({1: jnp.ones(2)}, r"got a mapping with the keys \[1\]"),
    ],
)
def test_checkpointables_are_given_by_name(given, found, make):
    checkpointer = make()
    for verb, alone in (("save", r"save\(step, tree\)"), ("load", r"load\(step, tree")):
        call = getattr(checkpointer, f"{verb}_checkpointables")
        message = rf"{verb}_checkpointables takes a mapping of names .*{found}; {alone}"
        with pytest.raises(errors.CheckpointError, match=message):
            call(1, given)
    assert checkpointer.save(1, {"w": jnp.ones(2)})


@pytest.mark.parametrize(
    "options",
    [{"metrics": {"loss": jnp.ones(2)}}, {"custom_metadata": {"a": object()}}],
)
def test_what_is_added_to_a_step_and_is_not_json_is_refused(options, make):
    checkpointer = make()
    with pytest.raises(errors.CheckpointError, match=r"are not JSON.* float\(loss"):
        checkpointer.save(1, {"w": jnp.ones(2)}, **options)
    assert checkpointer.save(2, {"w": jnp.ones(2)})


MESH = jax.make_mesh((4, 2), ("a", "b"))
SAVED = {
    "a": jnp.arange(3.0),
    "n": np.arange(3),
    "i": 5,
    "f": 1.5,
    "b": True,
    "s": "x",
    "k": jax.random.key(3),
    "l": [1, {"z": jnp.ones(2)}],
    "none": None,
    "e": {},
    "t": (1, 2),
    "w": jax.device_put(np.ones((8, 4)), NamedSharding(MESH, PartitionSpec("a", "b"))),
}
ASKED = {
    "a": jax.ShapeDtypeStruct((3,), np.float32),
    "n": np.zeros(3, int),
    "i": int,
    "f": float,
    "b": bool,
    "s": str,
    "k": jax.random.key(0),
    "l": [0, {"z": jnp.zeros(2)}],
    "none": None,
    "e": {},
    "t": (int, int),
    "w": jax.ShapeDtypeStruct((8, 4), np.float32),
}
CHANGES = {
    "types": {},
    "numbers": {"i": 0, "f": 0.0, "b": False},
    "an int as a float": {"i": float},
    "a float as an int": {"f": 0},
    "a bool as an int": {"b": int},
    "an int as a bool": {"i": bool},
    "an int as an array of NumPy": {"i": np.zeros((), np.int32)},
    "an array as one of NumPy": {"a": np.zeros(3), "w": np.ndarray},
    "an array as it was saved": {"a": jax.Array, "w": jax.ShapeDtypeStruct},
    "another dtype": {"a": jax.ShapeDtypeStruct((3,), jnp.bfloat16)},
    "a text by a text": {"s": "another"},
    "an abstract key": {"k": jax.ShapeDtypeStruct((), jax.random.key(0).dtype)},
    "placeholders": {"a": ..., "n": ..., "i": ..., "k": ..., "s": ..., "e": ...},
    "placeholders in a list": {"l": [..., {"z": ...}], "t": (int, ...)},
    "nothing in the place of a leaf": {"a": None, "i": None, "s": None},
    "a list as a tuple": {"l": (int, {"z": jnp.zeros(2)}), "t": [int, int]},
}
PARTS = {
    "a leaf": {"a": ASKED["a"]},
    "numbers and texts": {"i": int, "s": str, "none": None},
    "one that was not saved": {"f": float, "another": 7},
    "all": ASKED,
}
REFUSED_FORMS = {
    "state/a: saved": [{**ASKED, "a": jax.ShapeDtypeStruct((5,), np.float32)}],
    "state/a cannot be restored as a bytes": [{**ASKED, "a": b""}],
    "state/a cannot be restored as a object": [{**ASKED, "a": object()}],
    "state/s was saved as": [{**ASKED, "s": int}],
    "state/i was saved as": [{**ASKED, "i": str}, {**ASKED, "i": "any"}],
    "state/extra: saved nothing": [{**ASKED, "extra": 1}],
    "state/l/1/z: saved": [{**ASKED, "l": None}, {**ASKED, "l": ...}],
    "state/s: saved": [{key: ASKED[key] for key in ASKED if key != "s"}],
    "state/i: saved": [{key: ASKED[key] for key in ASKED if key != "i"}],
}


@pytest.mark.parametrize("change", CHANGES)
def test_leaves_are_restored_in_the_forms_that_orbax_takes(change, make, stock):
    asked = {**ASKED, **CHANGES[change]}
    checkpointer = make()
    checkpointer.save(1, SAVED)
    expected = stock(SAVED, asked)
    assert bits(checkpointer.load(1, asked)) == expected
    assert bits(make("other ram", "stock").load(1, asked)) == expected


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_restored_as_orbax_does(part, make, tmp_path):
    checkpointer = make()
    checkpointer.save(1, SAVED)
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with ocp.training.Checkpointer(tmp_path / "stock", context=context) as stock:
        stock.save(1, SAVED)
        expected = bits(stock.load(1, PARTS[part]))
    assert bits(checkpointer.load(1, PARTS[part], partial=True)) == expected
    of_orbax = make("other ram", "stock")
    assert bits(of_orbax.load(1, PARTS[part], partial=True)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("why", "asked"),
    [(why, asked) for why, forms in REFUSED_FORMS.items() for asked in forms],
)
def test_a_form_that_orbax_does_not_restore_is_refused(why, asked, make, stock):
    checkpointer = make()
    checkpointer.save(1, SAVED)
    with pytest.raises(errors.CheckpointError, match=why):
        checkpointer.load(1, asked)
    assert bits(checkpointer.load(1, ASKED)) == stock(SAVED, ASKED)


def test_a_key_is_of_the_generator_that_it_was_saved_with(make, stock):
    saved, asked = (
        {"k": jax.random.key(3, impl=impl)} for impl in ("rbg", "unsafe_rbg")
    )
    checkpointer = make()
    checkpointer.save(1, saved)
    assert bits(checkpointer.load(1, asked)) == stock(saved, asked) == bits(saved)


def test_checkpointables_are_chosen_as_in_orbax(make, tmp_path):
    parts = {"state": SAVED, "ema": {"w": jnp.ones(2), "n": None}}
    checkpointer = make()
    checkpointer.save_checkpointables(1, parts)
    choices = [None, {}, {"state": None}, {"ema": None, "state": ASKED}]
    choices += [{"ema": {"w": ..., "n": None}}]
    with ocp.training.Checkpointer(tmp_path / "stock") as stock:
        stock.save_checkpointables(1, parts)
        for chosen in choices:
            expected = bits(stock.load_checkpointables(1, chosen))
            assert bits(checkpointer.load_checkpointables(1, chosen)) == expected
    with pytest.raises(errors.CheckpointError, match="contains no "):
        checkpointer.load_checkpointables(1, {"none": None})


def by_orbax(directory, **saving):
    context = ocp.Context()
    for option, value in saving.items():
        setattr(context.array.saving, option, value)
    with ocp.training.Checkpointer(directory, context=context) as checkpointer:
        checkpointer.save(1, SAVED)


def by_orbax_v0(directory, **arguments):
    with v0.CheckpointManager(directory) as manager:
        manager.save(1, args=v0.args.Composite(**arguments))


FORMATS = {
    "without OCDBT": lambda path: by_orbax(path, use_ocdbt=False),
    "zarr 2": lambda path: by_orbax(path, use_zarr3=False),
    "zarr 2 without OCDBT": lambda path: by_orbax(
        path, use_zarr3=False, use_ocdbt=False
    ),
    "uncompressed": lambda path: by_orbax(path, use_compression=False),
    "by Orbax v0": lambda path: by_orbax_v0(path, state=v0.args.PyTreeSave(SAVED)),
    "by Orbax v0, with JSON": lambda path: by_orbax_v0(
        path, state=v0.args.PyTreeSave(SAVED), more=v0.args.JsonSave({"a": [1, None]})
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_all_formats_that_orbax_writes_are_read(name, make, tmp_path):
    FORMATS[name](tmp_path / "steps")
    checkpointer = make()
    with ocp.training.Checkpointer(tmp_path / "steps") as stock:
        for wanted in (None, {"state": None}, {"state": ASKED}):
            expected = bits(stock.load_checkpointables(1, wanted))
            assert bits(checkpointer.load_checkpointables(1, wanted)) == expected


def test_a_message_that_orbax_saved_is_read_by_its_class(make, tmp_path):
    message = struct_pb2.Struct()
    message["a"] = 5
    with ocp.training.Checkpointer(tmp_path / "steps") as stock:
        stock.save_checkpointables(1, {"state": {"b": True}, "config": message})
    asked = {"state": {"b": False}, "config": struct_pb2.Struct}
    loaded = make().load_checkpointables(1, asked)
    assert loaded == {"state": {"b": True}, "config": message}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"b": b"", "s": str}, "cannot be read as it is requested .*; compare the req"),
        ({"b": str, "s": str}, r"b: saved \[3\], now a text"),
        ({"b": jnp.ones(3), "s": 1}, "s: saved a text, now a number"),
        ({"b": jax.ShapeDtypeStruct((), np.float32), "s": str}, r"b: saved \[3\], now"),
    ],
)
def test_a_good_step_of_orbax_is_not_blamed_for_a_wrong_request(
    asked, why, make, tmp_path
):
    with ocp.training.Checkpointer(tmp_path / "steps") as stock:
        stock.save(1, {"b": jnp.ones(3), "s": "x"})
    with pytest.raises(errors.CheckpointError, match=why):
        make().load(1, asked)
