"""Trees of all kinds: the same calls give the same with Orbax's checkpointer and ours.

Our checkpointer saves and loads each tree that Orbax saves and loads, whichever of the
two saved it. If Orbax refuses a tree or loses a leaf, ours raises in the call and names
the leaf.
"""

import collections
import contextlib

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

ALL = ocp.training.preservation_policies.PreserveAll()
Point = collections.namedtuple("Point", "x y")


def parts():
    """Trees with odd keys, nodes and numbers, by what is odd."""
    return {
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
        "empty containers": {"a": {}, "b": [], "c": (), "d": {"e": None}},
        "large numbers": {"i": 2**40, "u": 2**63, "f": float("inf"), "t": True},
        "another byte order": {"a": np.arange(3, dtype=">i4")},
        "small numbers": {"a": jnp.ones(4, jnp.int4), "b": jnp.ones(3, "float8_e5m2")},
        "arrays of JAX": {
            "bool": jnp.arange(3) > 1,
            "int8": jnp.int8(3),
            "complex": jnp.full((3, 1), 1j, jnp.complex64),
            "low": jnp.full((2, 3), 3, jnp.bfloat16),
            "keys": jax.random.split(jax.random.key(3), (3, 2)),
            "rbg": jax.random.key(3, impl="rbg"),
        },
        "arrays of NumPy": {
            "large": np.arange(3, dtype=np.uint64) + 2**63,
            "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)) / 3,
            "no dims": np.array(True),
            "strided": np.arange(9)[::3],
        },
        "nested": [{3: (1, [Point(None, {"a": ((), {})})])}, (jnp.ones(1),)],
        **{name: make() for name, make in TREES.items()},
    }


def saved():
    """A leaf of each kind, as it is saved."""
    over = NamedSharding(jax.make_mesh((4, 2), ("a", "b")), PartitionSpec("a", "b"))
    return {
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
        "w": jax.device_put(np.ones((8, 4)), over),
    }


def asked(**changes):
    """The same tree as it is asked for."""
    return {
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
        **changes,
    }


# By the step that each is saved as.
STEPS = {
    "parts of all kinds": parts,
    "leaves of all kinds": saved,
    "texts alone": lambda: {"a": "x", "b": {"c": ""}},
    "a number": lambda: 5,
    "an array": lambda: jnp.ones(3),
    "nothing": lambda: {"a": None},
    "tuples": lambda: ({"a": (1, 2)}, [Point(1, jnp.ones(2))]),
    "a named tuple": TREES["named tuples"],
    "a key of another generator": lambda: {"k": jax.random.key(3, impl="rbg")},
}
NUMBERS = {name: number for number, name in enumerate(STEPS)}


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


class Saved:
    """The trees as steps that we saved and that Orbax saved, and who reads them."""

    def __init__(self, directory, trees, stack):
        def open_ours(*tiers, **options):
            return stack.enter_context(
                frontend.Checkpointer(tiers, run="run", **options)
            )

        def open_orbax(path):
            return stack.enter_context(ocp.training.Checkpointer(path))

        self.trees = trees
        self.by_orbax = directory / "orbax"
        ours, stored = directory / "ours", Persistent(directory / "ours", every=1)
        self.ram = open_ours(Local(directory / "ram", keep=ALL), stored)
        self.orbax = open_orbax(self.by_orbax)
        for number, tree in enumerate(trees.values()):
            assert self.ram.save(number, tree)
            self.ram.wait()
            assert self.orbax.save(number, tree)
        self.storage = open_ours(stored, read_only=True)
        self.of_orbax = open_ours(Persistent(self.by_orbax), read_only=True)
        self.readers = [self.ram, self.storage, self.of_orbax, open_orbax(ours)]

    def check(self, name):
        """All read the same of a step, without a tree and with one."""
        number, tree = list(self.trees).index(name), self.trees[name]
        expected = bits(self.orbax.load(number)), bits(self.orbax.load(number, tree))
        for reader in self.readers:
            assert bits(reader.load(number)) == expected[0]
            assert bits(reader.load(number, tree)) == expected[1]
        for reader in (self.ram, self.of_orbax):
            metadata = reader.metadata(number).metadata
            assert bits(reader.load(number, metadata)) == expected[0]


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        trees = {name: make() for name, make in STEPS.items()}
        yield Saved(tmp_path_factory.mktemp("trees"), trees, stack)


@pytest.mark.parametrize("name", STEPS)
def test_a_tree_comes_back_as_from_orbax(name, steps):
    steps.check(name)


@pytest.fixture(scope="module")
def checkpointer(tmp_path_factory):
    """Our checkpointer over RAM and storage."""
    directory = tmp_path_factory.mktemp("steps")
    tiers = [Local(directory / "ram"), Persistent(directory / "steps", every=1)]
    with frontend.Checkpointer(tiers, run="run") as opened:
        yield opened


def save_next(checkpointer, tree):
    """Saves a tree as the step after the newest; returns its number."""
    latest = checkpointer.latest
    number = 1 if latest is None else latest.step + 1
    assert checkpointer.save(number, tree)
    checkpointer.wait()
    return number


def test_orbax_loads_a_tree_of_arrays_without_elements_alone(checkpointer):
    # It does not save them itself.
    tree = {"a": jnp.ones((0, 4)), "b": np.ones((3, 0))}
    number = save_next(checkpointer, tree)
    assert bits(checkpointer.load()) == bits(tree)
    with ocp.training.Checkpointer(checkpointer.directory) as orbax:
        assert bits(orbax.load(number)) == bits(tree)


REFUSED = {
    "state/a": [
        lambda: {"a": np.float32(1)},
        lambda: {"a": np.int64(1)},
        lambda: {"a": np.bool_(True)},
        lambda: {"a": 1j},
        lambda: {"a": b"bytes"},
        lambda: {"a": object()},
        lambda: {"a": ...},
        lambda: {"a": jax.tree.structure({"b": 1})},
        lambda: {"a": np.array(["text"])},
        lambda: {"a": np.array([None])},
        lambda: {"a": np.array(["2020-01-01"], "datetime64[D]")},
        lambda: {"a": 2**70},
    ],
    "state/a/0/b": [lambda: {"a": [{"b": np.uint8(3)}]}],
    "'state/a/b' and 'state/a.b'": [
        lambda: {"a": {"b": 1}, "a.b": 2},
        lambda: {"a": {"b": jnp.ones(2)}, "a.b": jnp.zeros(3)},
        lambda: {"a": {"b": "x"}, "a.b": "y"},
    ],
    "'state/a/' and 'state/a/~1'": [lambda: {"a": {"": 1, "/": 2}}],
    "is not Unicode": [lambda: {"\ud800": 1}, lambda: {"a": "\ud800"}],
    "'state' is empty": [dict, list, lambda: None],
}


@pytest.mark.parametrize("leaf", REFUSED)
def test_a_tree_that_orbax_does_not_save_is_refused_in_the_call(leaf, checkpointer):
    before = save_next(checkpointer, {"w": jnp.ones(2)})
    for make in REFUSED[leaf]:
        with pytest.raises(errors.CheckpointError, match=leaf):
            checkpointer.save_async(before + 1, make())
    assert checkpointer.latest.step == before
    # The steps after it are saved and backed up.
    assert checkpointer.is_durable(save_next(checkpointer, {"w": jnp.ones(2)}))


NAMES = ["", ".", "..", "a/b", "metrics", "AUTO", "manifest-a.json", "\ud800"]


def test_checkpointables_have_names_that_can_be_directories(checkpointer):
    number = save_next(checkpointer, {"w": 1}) + 1
    for name in NAMES:
        with pytest.raises(errors.CheckpointError, match="cannot be used for a check"):
            checkpointer.save_checkpointables(number, {name: {"w": jnp.ones(2)}})
    with pytest.raises(errors.CheckpointError, match="no checkpointables were given"):
        checkpointer.save_checkpointables(number, {})
    for given, found in (
        (jnp.ones(2), "a ArrayImpl"),
        ([jnp.ones(2)], "a list"),
        ({1: jnp.ones(2)}, r"a dict with the keys \[1\]"),
    ):
        for verb in ("save", "load"):
            call = getattr(checkpointer, f"{verb}_checkpointables")
            message = rf"are a mapping of names .* and not {found}; save and load"
            with pytest.raises(errors.CheckpointError, match=message):
                call(number, given)
    for options in ({"metrics": {"loss": jnp.ones(2)}}, {"custom_metadata": object()}):
        with pytest.raises(errors.CheckpointError, match=r"are not JSON.* float\(loss"):
            checkpointer.save(number, {"w": jnp.ones(2)}, **options)
    assert checkpointer.save(number, {"w": jnp.ones(2)})


def forms():
    """Requests in which leaves have other forms than they were saved in."""
    abstract_key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
    low = jax.ShapeDtypeStruct((3,), jnp.bfloat16)
    arrays = {"a": np.zeros(3), "w": np.ndarray}
    as_saved = {"a": jax.Array, "w": jax.ShapeDtypeStruct, "k": abstract_key}
    as_lists = {"l": (int, {"z": jnp.zeros(2)}), "t": [int, int]}
    return [
        asked(),
        asked(i=0, f=0.0, b=False, s="another"),
        asked(i=float, b=int, **arrays),
        asked(**as_saved),
        asked(i=np.zeros((), np.int32), a=low, **as_lists),
        asked(**dict.fromkeys("anikse", ...)),
        asked(l=[..., {"z": ...}], t=(int, ...), **dict.fromkeys("ais")),
    ]


def test_leaves_are_restored_in_the_forms_that_orbax_takes(steps):
    number = NUMBERS["leaves of all kinds"]
    for wanted in forms():
        expected = bits(steps.orbax.load(number, wanted))
        assert bits(steps.storage.load(number, wanted)) == expected
        assert bits(steps.of_orbax.load(number, wanted)) == expected


@pytest.mark.parametrize("impl", ["unsafe_rbg", "threefry2x32"])
def test_a_key_of_another_generator_is_refused(steps, impl):
    # Orbax returns one of the saved generator, if its numbers have that shape.
    other = {"k": jax.random.key(3, impl=impl)}
    for tier in (steps.ram, steps.storage):
        with pytest.raises(errors.CheckpointError, match=r"was saved as key<rbg>, and"):
            tier.load(NUMBERS["a key of another generator"], other)


def test_a_part_is_restored_as_orbax_does(steps):
    number = NUMBERS["leaves of all kinds"]
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    with ocp.training.Checkpointer(steps.by_orbax, context=context) as orbax:
        for part in (
            {"a": asked()["a"]},
            {"i": int, "s": str, "none": None},
            {"f": float, "another": 7},
            asked(),
        ):
            expected = bits(orbax.load(number, part))
            for ours in (steps.ram, steps.of_orbax):
                assert bits(ours.load(number, part, partial=True)) == expected


REFUSED_FORMS = {
    "state/a cannot be restored as a bytes": [{"a": b""}],
    "state/a cannot be restored as a object": [{"a": object()}],
    "state/s was saved as": [{"s": int}],
    "state/i was saved as": [{"i": str}, {"i": "any"}],
    r"state/f was saved with the value 1.5 .*int64 would make 1;": [{"f": 0}],
    r"state/i was saved with the value .*bool would make True;": [{"i": bool}],
}


def test_a_form_that_orbax_does_not_restore_is_refused(steps):
    number = NUMBERS["leaves of all kinds"]
    for why, forms in REFUSED_FORMS.items():
        for form in forms:
            with pytest.raises(errors.CheckpointError, match=why):
                steps.storage.load(number, asked(**form))


def test_checkpointables_are_chosen_as_in_orbax(checkpointer, tmp_path):
    trees = {"state": saved(), "ema": {"w": jnp.ones(2), "n": None}}
    number = save_next(checkpointer, {"w": 1}) + 1
    checkpointer.save_checkpointables(number, trees)
    choices = [None, {}, {"state": None}, {"ema": None, "state": asked()}]
    choices += [{"ema": {"w": ..., "n": None}}]
    with ocp.training.Checkpointer(tmp_path / "stock") as stock:
        stock.save_checkpointables(number, trees)
        for chosen in choices:
            expected = bits(stock.load_checkpointables(number, chosen))
            loaded = checkpointer.load_checkpointables(number, chosen)
            assert bits(loaded) == expected
    with pytest.raises(errors.CheckpointError, match="contains no "):
        checkpointer.load_checkpointables(number, {"none": None})


def test_all_formats_that_orbax_writes_are_read(tmp_path):
    tree = {"a": jnp.arange(3.0), "k": jax.random.key(3), "s": "x"}
    formats = [
        {"use_ocdbt": False},
        {"use_zarr3": False},
        {"use_zarr3": False, "use_ocdbt": False},
        {"use_compression": False},
    ]
    for number, saving in enumerate(formats, start=1):
        context = ocp.Context()
        for option, value in saving.items():
            setattr(context.array.saving, option, value)
        with ocp.training.Checkpointer(tmp_path, context=context) as stock:
            stock.save(number, tree)
    message = struct_pb2.Struct()
    message["a"] = 5
    with ocp.training.Checkpointer(tmp_path) as stock:
        stock.save_checkpointables(5, {"state": tree, "config": message})
        with frontend.Checkpointer([Persistent(tmp_path)], read_only=True) as ours:
            for number in range(1, 5):
                for wanted in (None, {"state": tree}):
                    expected = bits(stock.load_checkpointables(number, wanted))
                    assert bits(ours.load_checkpointables(number, wanted)) == expected
            # A message is read by its class.
            wanted = {"state": tree, "config": struct_pb2.Struct}
            assert ours.load_checkpointables(5, wanted)["config"] == message


@pytest.mark.parametrize("more", [{}, {"more": {"a": [1, None]}}])
def test_steps_of_orbax_v0_are_read(tmp_path, more):
    more = {name: v0.args.JsonSave(value) for name, value in more.items()}
    with v0.CheckpointManager(tmp_path) as manager:
        args = v0.args.Composite(state=v0.args.PyTreeSave(saved()), **more)
        manager.save(1, args=args)
    with (
        ocp.training.Checkpointer(tmp_path) as stock,
        frontend.Checkpointer([Persistent(tmp_path)], read_only=True) as ours,
    ):
        for wanted in (None, {"state": asked()}):
            expected = bits(stock.load_checkpointables(1, wanted))
            assert bits(ours.load_checkpointables(1, wanted)) == expected


def test_an_nnx_module_with_a_list_is_restored(checkpointer):
    # Its `nnx.List` has the keys of items and of attributes.
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, seed):
            rngs = nnx.Rngs(seed)
            self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs) for _ in range(11)])

    model = Model(0)
    number = save_next(checkpointer, model)
    restored = checkpointer.load(number, Model(1))
    assert isinstance(restored, Model)
    assert bits(jax.tree.leaves(restored)) == bits(jax.tree.leaves(model))
    layer = checkpointer.load(number)["layers"]["10"]
    assert np.array_equal(layer["kernel"]["value"], model.layers[10].kernel[...])
    metadata = checkpointer.metadata(number).metadata
    assert metadata["layers"]["10"]["kernel"]["value"].shape == (2, 3)
