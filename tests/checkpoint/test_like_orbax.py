"""Orbax's checkpointer and ours: the same calls give the same, with trees of all kinds.

Our checkpointer saves and loads each tree that Orbax saves and loads, whichever of the
two saved it. If Orbax refuses a tree or loses a leaf, ours raises in the call and names
the leaf.
"""

import collections
import contextlib
import dataclasses
import functools
import inspect
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as v0
import pytest
from google.protobuf import struct_pb2
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from elastic_ckpt import frontend
from elastic_ckpt.checkpoint import structure
from elastic_ckpt.checkpoint.host.answers import CheckpointMetadata
from elastic_ckpt.core import errors
from elastic_ckpt.steps import manifest
from elastic_ckpt.tiers.choices import Local, Persistent
from tests.checkpoint import stock_program
from tests.sidecar import simulated_hosts

ALL = ocp.training.preservation_policies.PreserveAll()
Point = collections.namedtuple("Point", "x y")
Nothing = collections.namedtuple("Nothing", "")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    weight: object
    bias: object


class Pair:
    """A custom node without names of its children."""

    def __init__(self, *children):
        self.children = children


jax.tree_util.register_pytree_node(
    Pair, lambda pair: (pair.children, None), lambda _, children: Pair(*children)
)


def sharded(value, *spec):
    mesh = jax.make_mesh((2, 4), ("slice", "fsdp"))
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*spec)))


def ones(*shape):
    return jnp.ones(shape)


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
        "complex numbers": jnp.full((3, 1), 1j, jnp.complex64),
        "order of elements": np.asfortranarray(np.arange(6.0).reshape(2, 3)) / 3,
        "strided": np.arange(9)[::3],
        "nested": [{3: (1, [Point(None, {"a": ((), {})})])}, (jnp.ones(1),)],
        "dataclasses": {"layers": [Layer(ones(2), np.ones(3))]},
        "custom nodes": {"pair": Pair(ones(1), np.ones(2))},
        "optimizers": optax.adamw(1e-3).init({"w": ones(4)}),
        "nothing": {"none": None, "empty": [(), [], Nothing(), None], "w": ones(1)},
        "numpy": {"a": np.ones((2, 3)), "zero": np.zeros(()), "c": np.ones(2) * 1j},
        "random keys": {
            "one": jax.random.key(0),
            "some": jax.random.split(jax.random.key(1), (3, 2)),
            "rbg": jax.random.key(0, impl="rbg"),
            "over devices": sharded(jax.random.split(jax.random.key(2), 8), "fsdp"),
            "everywhere": sharded(jax.random.split(jax.random.key(3), 2)),
        },
        "shardings": {
            "both": sharded(ones(8, 8), "slice", "fsdp"),
            "joined": sharded(ones(8, 8), ("slice", "fsdp"), None),
            "replicated": sharded(ones(3)),
            "low": sharded(jnp.ones((4, 4), jnp.bfloat16), None, "fsdp"),
        },
    }


def saved():
    """A leaf of each kind, as it is saved."""
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
        "w": sharded(np.ones((8, 4)), "slice", "fsdp"),
    }


def asked(**changes):
    """The same tree as it is asked for."""
    types = {"i": int, "f": float, "b": bool, "s": str, "t": (int, int)}
    arrays = {"n": np.zeros(3, int), "l": [0, {"z": jnp.zeros(2)}]}
    arrays["a"] = jax.ShapeDtypeStruct((3,), np.float32)
    arrays["w"] = jax.ShapeDtypeStruct((8, 4), np.float32)
    return {**saved(), "k": jax.random.key(0), **types, **arrays, **changes}


def weak():
    """Leaves that are weakly typed, and one that is not."""
    return {
        "rate": jnp.asarray(0.5),
        "count": jnp.asarray(7),
        "z": jnp.asarray(1j),
        "many": jnp.full((2, 3), jnp.nan),
        "over devices": sharded(jnp.full(8, 0.1), "fsdp"),
        "strong": jnp.ones(()),
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
    "a named tuple": lambda: Point(x=jnp.ones(2), y={"z": [np.ones(2)]}),
    "a key of another generator": lambda: {"k": jax.random.key(3, impl="rbg")},
    "weak": weak,
}
NUMBERS = {name: number for number, name in enumerate(STEPS)}


def bits(tree):
    """A tree as plain containers, its leaves as type, dtype, shape, bytes and place."""

    def leaf_bits(leaf):
        if not isinstance(leaf, jax.Array | np.ndarray):
            return type(leaf), repr(leaf)
        values, place = stock_program.data(leaf), getattr(leaf, "sharding", None)
        return type(leaf), str(leaf.dtype), values.shape, values.tobytes(), place

    leaves, structure = jax.tree.flatten(tree)
    return structure, [leaf_bits(leaf) for leaf in leaves]


class Saved:
    """The trees as steps that we saved and that Orbax saved, and who reads them."""

    def __init__(self, directory, stack):
        def open_ours(*tiers, **options):
            opened = frontend.Checkpointer(tiers, run="run", **options)
            return stack.enter_context(opened)

        def open_orbax(path):
            return stack.enter_context(ocp.training.Checkpointer(path))

        self.trees = {name: make() for name, make in STEPS.items()}
        self.by_orbax = directory / "orbax"
        stored = Persistent(directory / "ours", every=1)
        self.ram = open_ours(Local(directory / "ram", keep=ALL), stored)
        self.orbax = open_orbax(self.by_orbax)
        for name, tree in self.trees.items():
            assert self.ram.save(NUMBERS[name], tree)
            assert self.orbax.save(NUMBERS[name], tree)
            self.ram.wait()
        self.storage = open_ours(stored, read_only=True)
        self.of_orbax = open_ours(Persistent(self.by_orbax), read_only=True)
        stock = open_orbax(directory / "ours")
        machines = stack.enter_context(simulated_hosts.Machines())
        world = simulated_hosts.world(machines, 2)
        self.remote, *_ = stack.enter_context(world)
        self.readers = [self.ram, self.storage, self.of_orbax, stock]


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        yield Saved(tmp_path_factory.mktemp("trees"), stack)


@pytest.mark.parametrize("name", STEPS)
def test_a_tree_comes_back_as_from_orbax(name, steps):
    number, tree = NUMBERS[name], steps.trees[name]
    expected = bits(steps.orbax.load(number)), bits(steps.orbax.load(number, tree))
    for reader in steps.readers:
        assert bits(reader.load(number)) == expected[0]
        assert bits(reader.load(number, tree)) == expected[1]
    for reader in (steps.ram, steps.of_orbax):
        metadata = reader.metadata(number).metadata
        assert bits(reader.load(number, metadata)) == expected[0]


def test_a_leaf_is_as_weakly_typed_as_it_is_asked_for_or_was_saved(steps):
    def weak_types(tree):
        return jax.tree.map(lambda leaf: leaf.weak_type, tree)

    def opposite_of(leaf):
        weak_type = not leaf.weak_type
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak_type)

    number, tree = NUMBERS["weak"], weak()
    opposite, classes = jax.tree.map(opposite_of, tree), dict.fromkeys(tree, jax.Array)
    assert steps.remote.save(number, tree)
    for reader in (steps.ram, steps.storage, steps.remote, steps.of_orbax):
        # Orbax saves no weak types.
        of_saved = [] if reader is steps.of_orbax else [(None, tree), (classes, tree)]
        for target, like in [(tree, tree), (opposite, opposite), *of_saved]:
            loaded = reader.load(number, target)
            assert bits(loaded) == bits(tree)
            # A compiled function does not ask the array itself.
            for each in (loaded, jax.tree.map(jax.jit(lambda leaf: leaf), loaded)):
                assert weak_types(each) == weak_types(like)


@pytest.fixture
def checkpointer(make):
    return make()


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


def test_a_tree_is_saved_after_one_that_it_cannot_be_compared_with(checkpointer):
    for make in (
        lambda n: {(1, 2) if n == 1 else np.int64(3): np.full(2, n)},
        lambda n: {1 if n == 1 else True: np.full(2, n)},
        lambda n: [np.full(2, n)] if n == 1 else (np.full(2, n), {}, []),
    ):
        for n in (1, 2, 3):
            number = save_next(checkpointer, make(n))
            stored = ocp.load(checkpointer.directory / str(number), make(n))
            for loaded in (stored, checkpointer.load(number, make(n))):
                np.testing.assert_array_equal(jax.tree.leaves(loaded), [[n, n]])


def test_a_tree_that_orbax_does_not_save_is_refused_in_the_call(checkpointer):
    before = save_next(checkpointer, {"w": 1})
    unsaved = [np.float32(1), np.bool_(True), 1j, b"bytes", object(), ..., 2**70]
    unsaved += [np.array(["x"]), np.array([None]), np.array(["2020"], "datetime64[D]")]
    unsaved += [jax.tree.structure({"b": 1})]
    for leaf, trees in {
        "state/a": [{"a": value} for value in unsaved],
        "state/a/0/b": [{"a": [{"b": np.uint8(3)}]}],
        "'state/a/b' and 'state/a.b'": [
            {"a": {"b": np.ones(2)}, "a.b": np.zeros(3)},
            {"a": {"b": "x"}, "a.b": "y"},
        ],
        "'state/a/' and 'state/a/~1'": [{"a": {"": 1, "/": 2}}],
        "is not valid Unicode": [{"\ud800": 1}, {"a": "\ud800"}],
        "'state' is empty": [{}, [], None],
    }.items():
        for tree in trees:
            with pytest.raises(errors.CheckpointError, match=leaf):
                checkpointer.save_async(before + 1, tree)
    assert checkpointer.latest.step == before
    # The steps after it are saved and backed up.
    assert checkpointer.is_durable(save_next(checkpointer, {"w": 1}))


def test_names_that_cannot_be_directories_and_what_is_no_json_are_refused(checkpointer):
    number = save_next(checkpointer, {"w": 1}) + 1
    names = ["", ".", "..", "a/b", "metrics", "AUTO", "manifest-a.json", "\ud800"]
    names += ["a\\b", "a%2Fb", "a.__lock"]
    refused = [({name: {"w": 1}}, "cannot be the name of a check") for name in names]
    mapping = "a mapping from names to values.* not "
    refused += [
        ({}, "no checkpointables were passed"),
        (jnp.ones(2), f"{mapping}ArrayImpl"),
        ([jnp.ones(2)], f"{mapping}list"),
        ({1: jnp.ones(2)}, rf"{mapping}dict with the keys \[1\]"),
    ]
    for given, why in refused:
        with pytest.raises(errors.CheckpointError, match=why):
            checkpointer.save_checkpointables(number, given)
    with pytest.raises(errors.CheckpointError, match=f"{mapping}list"):
        checkpointer.load_checkpointables(number, [jnp.ones(2)])
    for options in ({"metrics": {"loss": jnp.ones(2)}}, {"custom_metadata": object()}):
        with pytest.raises(errors.CheckpointError, match=r"encoded as JSON.* float\(l"):
            checkpointer.save(number, {"w": 1}, **options)


def context_with(option, value):
    context = ocp.Context()
    *groups, last = option.split(".")
    setattr(functools.reduce(getattr, groups, context), last, value)
    return context


PARTIAL = context_with("pytree.loading.partial_load", True)


def test_leaves_and_checkpointables_are_restored_in_the_forms_that_orbax_takes(steps):
    number = NUMBERS["leaves of all kinds"]
    key = jax.ShapeDtypeStruct((), jax.random.key(0).dtype)
    low = jax.ShapeDtypeStruct((3,), jnp.bfloat16)
    as_lists = {"l": (int, {"z": jnp.zeros(2)}), "t": [int, int]}
    for wanted in (
        asked(),
        asked(i=0, f=0.0, b=False, s="another"),
        asked(i=float, b=int, a=np.zeros(3), w=np.ndarray),
        asked(a=jax.Array, w=jax.ShapeDtypeStruct, k=key),
        asked(i=np.zeros((), np.int32), a=low, **as_lists),
        asked(**dict.fromkeys("anikse", ...)),
        asked(l=[..., {"z": ...}], t=(int, ...), **dict.fromkeys("ais")),
    ):
        expected = bits(steps.orbax.load(number, wanted))
        assert bits(steps.storage.load(number, wanted)) == expected
        assert bits(steps.of_orbax.load(number, wanted)) == expected
    with ocp.training.Checkpointer(steps.by_orbax, context=PARTIAL) as orbax:
        for part in (
            {"a": asked()["a"]},
            {"i": int, "s": str, "none": None},
            {"f": float, "another": 7},
        ):
            expected = bits(orbax.load(number, part))
            for ours in (steps.ram, steps.of_orbax):
                assert bits(ours.load(number, part, partial=True)) == expected


def test_a_form_that_orbax_does_not_restore_is_refused(steps):
    for why, form in {
        "state/a cannot be restored as bytes": {"a": b""},
        "state/a cannot be restored as object": {"a": object()},
        "state/s was saved as": {"s": int},
        "state/i was saved as": {"i": "any"},
        r"state/f was saved with the value 1.5 .* 1 as the requested int64;": {"f": 0},
        r"state/i was saved with the value .* True as the requested bool;": {"i": bool},
    }.items():
        with pytest.raises(errors.CheckpointError, match=why):
            steps.storage.load(NUMBERS["leaves of all kinds"], asked(**form))
    # Orbax returns a key of the saved generator, if its numbers have that shape.
    for impl in ("unsafe_rbg", "threefry2x32"):
        other = {"k": jax.random.key(3, impl=impl)}
        with pytest.raises(errors.CheckpointError, match=r"was saved as key<rbg> but"):
            steps.ram.load(NUMBERS["a key of another generator"], other)


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
    with pytest.raises(errors.CheckpointError, match="contains no pytrees named"):
        checkpointer.load_checkpointables(number, {"none": None})


def test_all_formats_that_orbax_writes_are_read(tmp_path):
    tree, message = saved(), struct_pb2.Struct()
    message["a"] = 5
    for number, use_ocdbt in enumerate((True, False), start=1):
        context = ocp.Context()
        context.array.saving.use_zarr3 = False
        context.array.saving.use_ocdbt = use_ocdbt
        with ocp.training.Checkpointer(tmp_path, context=context) as stock:
            stock.save_checkpointables(number, {"state": tree, "config": message})
    with v0.CheckpointManager(tmp_path) as manager:
        more = v0.args.JsonSave({"a": [1, None]})
        args = v0.args.Composite(state=v0.args.PyTreeSave(tree), more=more)
        manager.save(3, args=args)
    requests = [(n, {"state": each}) for n in (1, 2, 3) for each in (None, asked())]
    # A message is read by its class.
    requests += [(3, None), (1, {"state": tree, "config": struct_pb2.Struct})]
    with (
        ocp.training.Checkpointer(tmp_path) as stock,
        frontend.Checkpointer([Persistent(tmp_path)], read_only=True) as ours,
    ):
        for request in requests:
            expected = bits(stock.load_checkpointables(*request))
            assert bits(ours.load_checkpointables(*request)) == expected


def test_an_nnx_module_with_a_list_is_restored(checkpointer):
    # Its `nnx.List` has the keys of items and of attributes.
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, value):
            self.layers = nnx.List([nnx.Param(jnp.full(2, value)) for _ in range(11)])

    number = save_next(checkpointer, Model(5.0))
    restored = checkpointer.load(number, Model(1.0))
    assert isinstance(restored, Model)
    assert bits(jax.tree.leaves(restored)) == bits([jnp.full(2, 5.0)] * 11)
    assert checkpointer.load(number)["layers"]["10"]["value"][0] == 5.0


def test_a_context_has_parts_loaded(checkpointer):
    number = save_next(checkpointer, {"a": 1, "b": {"c": 2, "d": 3}})
    part, expected = {"b": {"d": 0}}, {"b": {"d": 3}}
    with PARTIAL:
        # Also in the thread of a load in the background.
        response = checkpointer.load_async(number, part)
    assert response.result() == expected
    # A context of the checkpointer.
    tiers = [Persistent(checkpointer.directory)]
    with frontend.Checkpointer(tiers, context=PARTIAL, read_only=True) as opened:
        assert opened.load(number, part) == expected


def test_what_orbax_has_is_there():
    for name, theirs in vars(ocp.training.Checkpointer).items():
        if name.startswith("_"):
            continue
        ours = getattr(frontend.Checkpointer, name)
        assert isinstance(ours, property) == isinstance(theirs, property)
        if isinstance(theirs, property) or hasattr(theirs, "__deprecated__"):
            continue
        wanted, takes = (
            dict(inspect.signature(each).parameters) for each in (theirs, ours)
        )
        takes_more = any(each.kind is each.VAR_KEYWORD for each in takes.values())
        for parameter in wanted.values():
            if parameter.kind is parameter.KEYWORD_ONLY and takes_more:
                continue
            mine = takes[parameter.name]
            assert (mine.kind, mine.default) == (parameter.kind, parameter.default)
        by_place = [
            [n for n, each in given.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
            for given in (wanted, takes)
        ]
        assert by_place[0] == by_place[1], name
    of_step = {n for n in dir(ocp.training.CheckpointMetadata) if n[0] != "_"}
    fields = CheckpointMetadata.__dataclass_fields__
    assert of_step <= {*fields, *dir(CheckpointMetadata)}


@pytest.mark.parametrize("ram", [None, "ram"])
def test_what_goes_on_in_the_background_comes_to_the_same(make, ram):
    ours = make(ram=ram)
    for step in (1, 2, 3):
        # By a former name.
        assert ours.save_pytree_async(step, {"n": step}).result()
        ours.wait()
    seen = []
    response = ours.load_async(2, {"n": 0})
    response.on_complete(seen.append)
    assert response.result(60) == {"n": 2}
    assert ours.load_checkpointables_async(1).result() == {"state": {"n": 1}}
    assert ours.load_pytree() == {"n": 3}
    assert ours.load_pytree_async(1).result() == {"n": 1}
    assert ours.pytree_metadata(2).metadata == {"n": 0}
    assert ours.delete_async(2).result()
    assert [each.step for each in ours.checkpoints] == [1, 3]
    assert not ours.delete_async(2, missing_ok=True).result()
    with pytest.raises(errors.CheckpointError, match="'state' of step 3 cannot be del"):
        ours.delete(3, checkpointable_name="state")
    ours.cancel(3)
    assert ours.latest.step == 1
    ours.wait()
    assert seen == [{"n": 2}]


def test_options_that_would_be_ignored_are_refused_by_name_and_others_are_taken(make):
    ours = make()
    assert ours.save(1, {"n": 1})

    def save():
        return ours.save(2, {"n": 2})

    layout = ocp.options.CheckpointLayout.SAFETENSORS
    to_delete = "deletion.gcs_deletion_options.todelete_full_path"
    for option, value, call in (
        ("array.saving.use_zarr3", False, save),
        ("array.saving.storage_options.dtype", "float16", save),
        ("file.path_class", pathlib.Path, save),
        ("multiprocessing.primary_host", None, save),
        ("checkpoint_layout", layout, save),
        ("checkpoint_layout", layout, ours.load_async),
        ("array.loading.enable_padding_and_truncation", True, ours.load_async),
        (to_delete, "trash", lambda: ours.delete(1)),
    ):
        context = context_with(option, value)
        named = option.replace(".", ".*")
        with context, pytest.raises(errors.CheckpointError, match=named):
            call()
    with context_with("memory.write_concurrent_bytes", 2**20):
        assert save()
        assert ours.load(2) == {"n": 2}
        assert ours.delete(2)


def saved_trees(text, path, shape, dtype):
    leaf = manifest.Leaf(path=path, shape=shape, dtype=dtype)
    contents = manifest.Contents(leaves=(leaf,), components={}, trees=text)
    return structure.saved_trees(contents)


def test_the_text_of_some_trees_and_shardings_over_devices_that_are_gone():
    over = NamedSharding(jax.make_mesh((4, 2), ("a", "b")), PartitionSpec("a"))
    array = jax.device_put(jnp.ones(4), over)
    keys = jax.device_put(jax.random.split(jax.random.key(0), 4), over)
    tree = {
        "w": array,
        "again": array,
        "here": [jnp.ones(1), 0.5, True, np.ones(2)],
        "keys": [jax.random.key(0), keys],
        "text": "two words",
        "nothing": [None, (), [], {}],
    }
    described = json.loads(structure.to_json({"state": tree, "n": 3}))
    assert described["trees"] == {
        "n": "int",
        "state": {
            "w": "array 0",
            "again": "array 0",
            "here": ["array", "float", "bool", "numpy"],
            "keys": ["key threefry2x32", "key threefry2x32 0"],
            "text": "text two words",
            "nothing": [None, "()", [], {}],
        },
    }
    assert [each["partition_spec"] for each in described["shardings"]] == [["a"]]
    text = structure.to_json({"w": array})
    assert saved_trees(text, "w", (4,), "float32")["w"].sharding == over
    elsewhere = text.replace('{"id":7}', '{"id":70}')
    assert saved_trees(elsewhere, "w", (4,), "float32")["w"].sharding is None


def test_a_text_of_another_kind_is_one_clear_error():
    for text in (
        "{}",
        '{"shardings":[],"trees":[]}',
        '{"shardings":[],"trees":{"w":"array"}}',
        '{"shardings":[{}],"trees":{}}',
        '{"shardings":[],"trees":{"n":"array 3"}}',
        '{"shardings":[],"trees":{"n":"key nonsense"}}',
        '{"shardings":[],"trees":{"n":7}}',
    ):
        with pytest.raises(errors.CheckpointError, match="trees that cannot be read"):
            saved_trees(text, "n", (2,), "uint32")
