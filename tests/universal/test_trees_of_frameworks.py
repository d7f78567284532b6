"""Weights in the trees of Flax NNX, Linen and Equinox, and back.

Layouts have the names that users of these libraries know.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx, traverse_util
from flax.core import freeze
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import elastic_ckpt as ec
from elastic_ckpt import universal
from elastic_ckpt.cli import main
from elastic_ckpt.core import errors
from elastic_ckpt.universal.rules import names
from elastic_ckpt.universal.rules.layout import Layout
from tests.universal import safetensors_files
from tests.universal.safetensors_files import bits

LAYERS, EMBED, FF = 2, 4, 6
LAYOUT = """
version: 1
rules:
  - from: {"layers.{layer}.up.weight": "out in"}
    to: {"%slayers%s{layer}/up/kernel": "in out"}
  - from: {"layers.{layer}.norm.weight": "embed"}
    to: {"%slayers%s{layer}/norm/scale": "embed"}
"""
MESH = jax.sharding.Mesh(jax.devices()[:2], ("data",))


def tensors_of(seed=0):
    """In PyTorch's names and layout, [out, in]."""
    generator = np.random.default_rng(seed)
    shapes = {"norm": (EMBED,), "up": (FF, EMBED)}
    return {
        f"layers.{layer}.{name}.weight": generator.random(shape, np.float32)
        for layer in range(LAYERS)
        for name, shape in shapes.items()
    }


TENSORS = tensors_of()


@pytest.fixture
def source(tmp_path):
    safetensors_files.write(tmp_path / "w.safetensors", TENSORS)
    return tmp_path / "w.safetensors"


def sharded(tree):
    """An abstract tree whose first dims are sharded."""

    def with_sharding(leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        spec = PartitionSpec(*["data"][: len(leaf.shape)])
        return leaf.update(sharding=NamedSharding(MESH, spec))

    return jax.tree.map(with_sharding, tree)


def assert_same(loaded, known, abstract):
    """Nodes are of the types of the framework; values and shardings are as asked."""
    assert jax.tree.structure(loaded) == jax.tree.structure(abstract)
    leaves = (jax.tree.leaves(each) for each in (loaded, known, abstract))
    for made, wanted, asked in zip(*leaves, strict=True):
        assert made.sharding == asked.sharding
        assert np.asarray(made).tobytes() == np.ascontiguousarray(wanted).tobytes()


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(EMBED, rngs=rngs)
        self.up = nnx.Linear(EMBED, FF, use_bias=False, rngs=rngs)


def nnx_model():
    rngs = nnx.Rngs(0)
    return nnx.Sequential(*(NnxLayer(rngs) for _ in range(LAYERS)))


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x):
        # In a `LogicallyPartitioned`, and in a `Partitioned`.
        scale = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
        kernel = nn.with_partitioning(nn.initializers.ones, (None, "data"))
        normed = nn.RMSNorm(scale_init=scale, name="norm")(x)
        nn.Dense(FF, use_bias=False, kernel_init=kernel, name="up")(normed)
        return x


LINEN_MODEL = nn.Sequential([LinenLayer() for _ in range(LAYERS)])


def of_linen():
    return jax.eval_shape(LINEN_MODEL.init, jax.random.key(0), np.ones(EMBED))


def of_nnx():
    return nnx.state(nnx.eval_shape(nnx_model), nnx.Param)


def train_state():
    def new_state(key):
        params = LINEN_MODEL.init(key, np.ones(EMBED))["params"]
        parts = {"apply_fn": LINEN_MODEL.apply, "tx": optax.adamw(1e-2)}
        return TrainState.create(params=params, **parts)

    return jax.eval_shape(new_state, jax.random.key(0))


NNX, LINEN = LAYOUT % ("", "/", "", "/"), LAYOUT % ("params/", "_", "params/", "_")
# One rule leads each tensor and its moments; the steps are counted twice.
TRAIN = f"""{LAYOUT % ("", "_", "", "_")}
  - from: {{"step": ""}}
    to: {{"step": "", "opt_state/0/count": {{dims: "", copy: checked}}}}
    kind: parameter
states:
  parameter: {{from: "model/{{}}", to: "params/{{}}"}}
  first_moment: {{from: "exp_avg/{{}}", to: "opt_state/0/mu/{{}}"}}
  second_moment: {{from: "exp_avg_sq/{{}}", to: "opt_state/0/nu/{{}}"}}
"""
PARTS = {"model": TENSORS, "exp_avg": tensors_of(1), "exp_avg_sq": tensors_of(2)}
COUNT = np.asarray(7, np.int32)
SAVED = {**traverse_util.flatten_dict(PARTS, sep="/"), "step": COUNT}
# The leaves of Flax's trees, in their order.
WEIGHTS, *MOMENTS = [[each.T for each in part.values()] for part in PARTS.values()]
# Layouts and trees; then what is in the file, and the leaves.
TREES = {
    "state": (NNX, of_nnx, TENSORS, WEIGHTS),
    "module": (NNX, lambda: nnx.eval_shape(nnx_model), TENSORS, WEIGHTS),
    "pure dict": (NNX, lambda: nnx.to_pure_dict(of_nnx()), TENSORS, WEIGHTS),
    "boxes": (LINEN, of_linen, TENSORS, WEIGHTS),
    "frozen": (LINEN, lambda: freeze(nn.unbox(of_linen())), TENSORS, WEIGHTS),
    "train": (TRAIN, train_state, SAVED, [COUNT, WEIGHTS, COUNT, *MOMENTS]),
}


@pytest.mark.parametrize("form", TREES)
def test_a_tree_of_flax_is_loaded_and_becomes_the_file_again(tmp_path, form):
    text, make, tensors, known = TREES[form]
    abstract, path = sharded(make()), tmp_path / "w.safetensors"
    safetensors_files.write(path, tensors)
    loaded = universal.load(path, abstract, layout=Layout.parse(text))
    assert type(loaded) is type(abstract)
    assert_same(loaded, known, abstract)
    (tmp_path / "layout.yml").write_text(text)
    saved = nnx.state(loaded) if form == "module" else loaded
    with ec.Checkpointer([ec.Persistent(tmp_path / "run", every=1)]) as checkpointer:
        checkpointer.save(3, saved)
    given = (tmp_path / "run" / "3", tmp_path / "back", "--to", "safetensors")
    given += ("--rules", tmp_path / "layout.yml", "--reverse")
    assert main.main(["convert", *map(str, given)]) == 0
    assert bits(safetensors_files.read(tmp_path / "back")) == bits(tensors)


def test_a_step_of_nnx_is_one_of_plain_dicts_too(tmp_path, capsys):
    same = {"{name:path}": "..."}
    layout = Layout.from_dict({"rules": [{"from": same, "to": same}]})
    state, abstract = nnx.state(nnx_model(), nnx.Param), sharded(of_nnx())
    pure = [nnx.to_pure_dict(each) for each in (state, abstract)]
    for saved, asked in ((state, pure[1]), (pure[0], abstract)):
        steps = tmp_path / type(saved).__name__
        with ec.Checkpointer([ec.Persistent(steps, every=1)]) as checkpointer:
            checkpointer.save(0, saved)
            assert_same(checkpointer.load(0, asked, layout=layout), state, asked)
        assert_same(universal.load(steps / "0", asked), state, asked)
        assert main.main(["convert", str(steps / "0"), "--list"]) == 0
        assert "layers/{0-1}/up/kernel  [4, 6] " in capsys.readouterr().out


def layout_of_one(dims, name):
    rule = {"from": {"layers.0.up.weight": dims}, "to": {name: dims[::-1]}}
    return Layout.from_dict({"rules": [rule], "drop": ["*norm*", "layers.1.*"]})


def test_shardings_that_modules_are_annotated_with(source):
    layout = layout_of_one("o i", "kernel")

    def annotated():
        init = nnx.with_partitioning(nnx.initializers.ones, (None, "data"))
        options = {"use_bias": False, "kernel_init": init}
        return nnx.Linear(EMBED, FF, **options, rngs=nnx.Rngs(0))

    _, abstract = nnx.get_abstract_model(annotated, MESH)
    loaded = [universal.load(source, abstract, layout=layout)]
    with jax.set_mesh(MESH):
        state = nnx.state(nnx.eval_shape(annotated))
        loaded.append(universal.load(source, state, layout=layout))
    sharding = NamedSharding(MESH, PartitionSpec(None, "data"))
    assert [each["kernel"][...].sharding for each in loaded] == [sharding] * 2


class EquinoxMlp(eqx.Module):
    up: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    activation: Callable

    def __init__(self):
        self.up = eqx.nn.Linear(EMBED, FF, use_bias=False, key=jax.random.key(0))
        self.dropout, self.activation = eqx.nn.Dropout(0.1), jax.nn.silu


def test_a_module_of_equinox_keeps_its_functions(source):
    layout = layout_of_one("...", "up/weight")
    whole = sharded(eqx.filter_eval_shape(EquinoxMlp))
    # The rate of a dropout is a number among the leaves.
    with pytest.raises(universal.LayoutError, match="dropout/p"):
        universal.load(source, whole, layout=layout)
    abstract = eqx.filter(
        whole, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct) or callable(leaf)
    )
    loaded = universal.load(source, abstract, layout=layout)
    assert isinstance(loaded, EquinoxMlp)
    assert loaded.activation is whole.activation
    np.testing.assert_array_equal(loaded.up.weight, TENSORS["layers.0.up.weight"])
    with pytest.raises(errors.CheckpointError, match=r"^axis_name cannot be"):
        universal.load(source, {"m": abstract, "axis_name": "batch"}, layout=layout)


@pytest.mark.parametrize(
    ("given", "shorter"),
    [
        (["a/kernel/value", "a/bias"], {"a/kernel/value": "a/kernel"}),
        (["a/value", "ab/value"], {"a/value": "a", "ab/value": "ab"}),
        *((["a/value", other], {}) for other in ("a/key", "a/b/c", "a")),
    ],
)
def test_a_value_is_its_box_only_if_it_is_alone(given, shorter):
    assert names.unboxed(given) == shorter
