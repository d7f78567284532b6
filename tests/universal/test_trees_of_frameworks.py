"""Hugging Face weights in models of Flax NNX, Linen and Equinox, and back.

Layouts have the names that users of these libraries know.
"""

import dataclasses
import json
import pathlib
import re

import equinox as eqx
import flax.core
import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import elastic_ckpt as ec
from elastic_ckpt import universal
from elastic_ckpt.cli import main
from elastic_ckpt.core import errors
from elastic_ckpt.universal import shipped_layouts
from elastic_ckpt.universal.rules import name_pattern
from elastic_ckpt.universal.rules.layout import Layout
from tests.universal import framework_decoders as decoders
from tests.universal import safetensors_files
from tests.universal.safetensors_files import bits

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")
ROOT = pathlib.Path(__file__).parents[2]
MESH = jax.sharding.Mesh(jax.devices()[:4], ("data",))

NNX = "hf_llama3"
LINEN = """
version: 1
sizes: {heads: 4}
rules:
  - from: {"model.embed_tokens.weight": "vocab embed"}
    to: {"params/embed/embedding": "vocab embed"}
  - from: {"model.norm.weight": "embed"}
    to: {"params/final_norm/scale": "embed"}
  - from: {"lm_head.weight": "vocab embed"}
    to: {"params/head/kernel": "embed vocab"}
  - from: {"model.layers.{layer}.input_layernorm.weight": "embed"}
    to: {"params/layers_{layer}/attention_norm/scale": "embed"}
  - from: {"model.layers.{layer}.post_attention_layernorm.weight": "embed"}
    to: {"params/layers_{layer}/mlp_norm/scale": "embed"}
  - from: {"model.layers.{layer}.self_attn.q_proj.weight": "(heads d) embed"}
    to: {"params/layers_{layer}/attention/query/kernel": "embed heads d"}
  - from: {"model.layers.{layer}.self_attn.k_proj.weight": "(heads d) embed"}
    to: {"params/layers_{layer}/attention/key/kernel": "embed heads d"}
  - from: {"model.layers.{layer}.self_attn.v_proj.weight": "(heads d) embed"}
    to: {"params/layers_{layer}/attention/value/kernel": "embed heads d"}
  - from: {"model.layers.{layer}.self_attn.o_proj.weight": "embed (heads d)"}
    to: {"params/layers_{layer}/attention/out/kernel": "heads d embed"}
  - from: {"model.layers.{layer}.mlp.{part:gate|up|down}_proj.weight": "out in"}
    to: {"params/layers_{layer}/mlp/{part}/kernel": "in out"}
"""
# `nn.scan` stacks the layers.
SCANNED = re.sub(r'layers_\{layer\}(/[\w/{}]+": ")', r"layers\1layer ", LINEN)
EQUINOX = """
version: 1
rules:
  - from: {"model.embed_tokens.weight": "..."}
    to: {"embed/weight": "..."}
  - from: {"model.norm.weight": "..."}
    to: {"final_norm/weight": "..."}
  - from: {"lm_head.weight": "..."}
    to: {"head/weight": "..."}
  - from: {"model.layers.{layer}.input_layernorm.weight": "..."}
    to: {"layers/{layer}/attention_norm/weight": "..."}
  - from: {"model.layers.{layer}.post_attention_layernorm.weight": "..."}
    to: {"layers/{layer}/mlp_norm/weight": "..."}
  - from: {"model.layers.{layer}.self_attn.q_proj.weight": "..."}
    to: {"layers/{layer}/attention/query_proj/weight": "..."}
  - from: {"model.layers.{layer}.self_attn.k_proj.weight": "..."}
    to: {"layers/{layer}/attention/key_proj/weight": "..."}
  - from: {"model.layers.{layer}.self_attn.v_proj.weight": "..."}
    to: {"layers/{layer}/attention/value_proj/weight": "..."}
  - from: {"model.layers.{layer}.self_attn.o_proj.weight": "..."}
    to: {"layers/{layer}/attention/output_proj/weight": "..."}
  - from: {"model.layers.{layer}.mlp.{part:gate|up|down}_proj.weight": "..."}
    to: {"layers/{layer}/mlp/{part}/weight": "..."}
"""


@pytest.fixture(scope="module")
def tensors():
    return decoders.tensors()


@pytest.fixture
def source(tmp_path, tensors):
    """A directory as Hugging Face has it."""
    path = tmp_path / "hf"
    path.mkdir()
    safetensors_files.write(path / "model.safetensors", tensors)
    heads = ("num_attention_heads", "num_key_value_heads")
    config = dict.fromkeys(heads, decoders.HEADS)
    path.joinpath("config.json").write_text(json.dumps(config))
    return path


def sharding(leaf):
    """Shards the first dim that four devices can share."""
    spec = [None] * len(leaf.shape)
    for dim, size in enumerate(leaf.shape):
        if size % MESH.size == 0:
            spec[dim] = "data"
            break
    return NamedSharding(MESH, PartitionSpec(*spec))


def is_abstract(leaf):
    return isinstance(leaf, jax.ShapeDtypeStruct)


def sharded(tree):
    """An abstract tree with shardings."""

    def with_sharding(leaf):
        return leaf.update(sharding=sharding(leaf)) if is_abstract(leaf) else leaf

    return jax.tree.map(with_sharding, tree)


def placed(tree):
    """A tree with its arrays sharded."""
    arrays, others = eqx.partition(tree, lambda leaf: hasattr(leaf, "shape"))
    return eqx.combine(
        jax.tree.map(lambda leaf: jax.device_put(leaf, sharding(leaf)), arrays), others
    )


def assert_same(loaded, known, abstract):
    """The types of nodes, metadata, values and shardings are those of the models."""
    structure = jax.tree.structure(known)
    assert jax.tree.structure(loaded) == jax.tree.structure(abstract) == structure
    leaves = (jax.tree.leaves(each) for each in (loaded, known, abstract))
    for made, wanted, asked in zip(*leaves, strict=True):
        assert (made.dtype, made.shape) == (asked.dtype, asked.shape)
        assert made.sharding == asked.sharding
        assert np.asarray(made).tobytes() == np.asarray(wanted).tobytes()


def assert_back(state, layout, tmp_path, tensors):
    """A step of the library's own becomes the file that it came from."""
    with ec.Checkpointer([ec.Persistent(tmp_path / "run", every=1)]) as checkpointer:
        checkpointer.save(3, state)
    options = ["--reverse", "--to", "safetensors"]
    step, back = str(tmp_path / "run" / "3"), tmp_path / "back"
    assert main.main(["convert", step, str(back), "--rules", layout, *options]) == 0
    assert bits(safetensors_files.read(back)) == bits(tensors)


def file_of(tmp_path, text):
    path = tmp_path / "layout.yml"
    path.write_text(text)
    return str(path)


def known_nnx(tensors):
    model = decoders.NnxDecoder(nnx.Rngs(0))
    model.eval()
    params = nnx.state(model, nnx.Param)
    nnx.replace_by_pure_dict(params, decoders.nnx_weights(tensors))
    nnx.update(model, placed(params))
    return model


def abstract_nnx():
    model = nnx.eval_shape(lambda: decoders.NnxDecoder(nnx.Rngs(0)))
    model.eval()
    return model


@pytest.mark.slow
def test_nnx(source, tmp_path, tensors):
    known = known_nnx(tensors)
    graph, abstract, _ = nnx.split(abstract_nnx(), nnx.Param, ...)
    abstract = sharded(abstract)
    loaded = universal.load(source, abstract, layout=NNX)
    assert isinstance(loaded, nnx.State)
    assert isinstance(loaded["layers"][1]["mlp"]["up"]["kernel"], nnx.Param)
    assert_same(loaded, nnx.state(known, nnx.Param), abstract)

    model = nnx.merge(graph, loaded, nnx.state(known, nnx.RngState))
    np.testing.assert_array_equal(model(decoders.TOKENS), known(decoders.TOKENS))
    assert_back(loaded, NNX, tmp_path, tensors)


def test_a_whole_nnx_model_and_its_pure_dict(source, tensors):
    known = known_nnx(tensors)
    # The states of its random numbers are keys and counts.
    names = [f"layers/{n}/mlp/dropout/rngs" for n in range(decoders.LAYERS)]
    fill = {f"{name}/{part}": 0 for name in names for part in ("key", "count/value")}
    layout = dataclasses.replace(shipped_layouts.load(NNX), fill=fill)
    model = universal.load(source, sharded(abstract_nnx()), layout=layout)
    assert isinstance(model, decoders.NnxDecoder)
    np.testing.assert_array_equal(model(decoders.TOKENS), known(decoders.TOKENS))
    model.train()
    assert model(decoders.TOKENS).shape == (len(decoders.TOKENS), decoders.VOCAB)

    pure = nnx.to_pure_dict(sharded(nnx.state(abstract_nnx(), nnx.Param)))
    loaded = universal.load(source, pure, layout=NNX)
    assert_same(loaded, nnx.to_pure_dict(nnx.state(known, nnx.Param)), pure)


def test_nnx_with_stacked_layers(source, tmp_path, tensors):
    class Scanned(decoders.NnxDecoder):
        def __init__(self, rngs):
            super().__init__(rngs)
            keys = jax.random.split(rngs.params(), decoders.LAYERS)
            self.layers = nnx.vmap(lambda key: decoders.NnxLayer(nnx.Rngs(key)))(keys)

    abstract = nnx.eval_shape(lambda: Scanned(nnx.Rngs(0)))
    abstract = sharded(nnx.state(abstract, nnx.Param))
    layout = file_of(tmp_path, f"version: 1\nthrough: [{NNX}, stacked]\n")
    loaded = universal.load(source, abstract, layout=layout)
    weights = decoders.linen_weights(tensors, is_scanned=True)["params"]
    assert_same(nnx.to_pure_dict(loaded), weights, nnx.to_pure_dict(abstract))
    assert_back(loaded, layout, tmp_path, tensors)


def test_annotated_shardings(source):
    names, inputs, outputs = (None, "data"), decoders.EMBED, decoders.VOCAB

    def of_nnx():
        init = nnx.with_partitioning(nnx.initializers.ones, names)
        options = {"use_bias": False, "kernel_init": init}
        return nnx.Linear(inputs, outputs, **options, rngs=nnx.Rngs(0))

    def load(abstract, prefix=""):
        to = {f"{prefix}kernel": "in out"}
        rule = {"from": {"lm_head.weight": "out in"}, "to": to}
        layout = Layout.from_dict({"rules": [rule], "drop": ["model.*"]})
        return universal.load(source, abstract, layout=layout)

    _, abstract = nnx.get_abstract_model(of_nnx, MESH)
    kernels = [load(abstract)["kernel"][...]]
    with jax.set_mesh(MESH):
        kernels.append(load(nnx.state(nnx.eval_shape(of_nnx)))["kernel"][...])

    init = nn.with_partitioning(nn.initializers.ones, names)
    model = nn.Dense(outputs, use_bias=False, kernel_init=init)
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.ones(inputs))
    abstract = jax.tree.map(
        lambda sharding, box: jax.tree.map(
            lambda leaf: leaf.update(sharding=sharding), box
        ),
        nn.get_sharding(shapes, MESH),
        shapes,
    )
    kernels.append(load(abstract, "params/")["params"]["kernel"].value)
    wanted = NamedSharding(MESH, PartitionSpec(*names))
    assert [kernel.sharding for kernel in kernels] == [wanted] * 3


def test_a_step_of_nnx_is_one_of_plain_dicts_too(tmp_path, tensors, capsys):
    same = {"{name:path}": "..."}
    layout = Layout.from_dict({"rules": [{"from": same, "to": same}]})
    state = nnx.state(known_nnx(tensors), nnx.Param)
    abstract = sharded(nnx.state(abstract_nnx(), nnx.Param))
    for name, saved, asked in (
        ("boxed", state, nnx.to_pure_dict(abstract)),
        ("plain", nnx.to_pure_dict(state), abstract),
        ("same", state, abstract),
    ):
        steps = tmp_path / name
        with ec.Checkpointer([ec.Persistent(steps, every=1)]) as checkpointer:
            checkpointer.save(0, saved)
            of_step = checkpointer.load(0, asked, layout=layout)
        for loaded in (of_step, universal.load(steps / "0", asked)):
            assert jax.tree.structure(loaded) == jax.tree.structure(asked)
            for one, other in zip(*map(jax.tree.leaves, (loaded, state)), strict=True):
                assert np.array_equal(one, other)
        assert main.main(["convert", str(steps / "0"), "--list"]) == 0
        assert "\nlayers/{0-1}/mlp/up/kernel  [16, 32] " in capsys.readouterr().out


def boxed(abstract, weights):
    """Weights in the boxes that abstract variables have."""
    is_box = nn.meta.AxisMetadata
    return jax.tree.map(
        lambda box, value: (
            box.replace_boxed(value) if isinstance(box, is_box) else value
        ),
        abstract,
        weights,
        is_leaf=lambda node: isinstance(node, is_box),
    )


@pytest.mark.parametrize("form", ["boxes", "dicts", "frozen dicts"])
@pytest.mark.parametrize("is_scanned", [False, True])
def test_linen(source, tmp_path, tensors, is_scanned, form):
    model = decoders.LinenDecoder(is_scanned=is_scanned)
    abstract = jax.eval_shape(model.init, jax.random.key(0), decoders.TOKENS)
    abstract = sharded(abstract)
    known = boxed(abstract, decoders.linen_weights(tensors, is_scanned=is_scanned))
    if form != "boxes":
        abstract, known = nn.unbox((abstract, known))
    if form == "frozen dicts":
        abstract, known = flax.core.freeze(abstract), flax.core.freeze(known)
    known = placed(known)
    layout = file_of(tmp_path, SCANNED if is_scanned else LINEN)
    loaded = universal.load(source, abstract, layout=layout)
    assert type(loaded) is (flax.core.FrozenDict if form == "frozen dicts" else dict)
    assert_same(loaded, known, abstract)
    kernel = loaded["params"]["head"]["kernel"]
    assert isinstance(kernel, nn.Partitioned) == (form == "boxes")
    np.testing.assert_array_equal(
        model.apply(loaded, decoders.TOKENS), model.apply(known, decoders.TOKENS)
    )
    assert_back(loaded, layout, tmp_path, tensors)


# One rule leads each tensor and its moments; the steps are counted twice.
STATES = """
states:
  parameter: {{from: "model/{{}}", to: "{weights}{{}}"}}
  first_moment: {{from: "exp_avg/{{}}", to: "{adam}/mu/{{}}"}}
  second_moment: {{from: "exp_avg_sq/{{}}", to: "{adam}/nu/{{}}"}}
"""
COUNTS = """
  - from: {{"step": ""}}
    to:
      "{step}": {{dims: "", dtype: {dtype}}}
      "{adam}/count": {{dims: "", dtype: int32, copy: {copy}}}
    kind: parameter
"""


@pytest.fixture
def trained(tmp_path, tensors):
    """Weights and moments, and the directory of their file."""
    parts = {"model": tensors, "exp_avg": decoders.tensors(1)}
    parts["exp_avg_sq"] = {
        name: values**2 for name, values in decoders.tensors(2).items()
    }
    saved = {
        f"{part}/{name}": values
        for part, each in parts.items()
        for name, values in each.items()
    }
    path = tmp_path / "trained"
    path.mkdir()
    saved["step"] = np.asarray(7, np.int64)
    safetensors_files.write(path / "model.safetensors", saved)
    return parts, saved, path


@pytest.mark.slow
def test_linen_with_an_optimizer(trained, tmp_path):
    parts, saved, source = trained
    model = decoders.LinenDecoder()

    def new_state(key):
        variables = model.init(key, decoders.TOKENS)
        return TrainState.create(
            apply_fn=model.apply, params=variables["params"], tx=optax.adamw(1e-2)
        )

    abstract = sharded(jax.eval_shape(new_state, jax.random.key(0)))
    params, mu, nu = (
        boxed(abstract.params, decoders.linen_weights(each, is_scanned=False)["params"])
        for each in parts.values()
    )
    adam, *others = abstract.opt_state
    count = np.asarray(7, np.int32)
    adam = adam._replace(count=count, mu=mu, nu=nu)
    known = placed(
        abstract.replace(step=count, params=params, opt_state=(adam, *others))
    )
    names = {"weights": "params/", "adam": "opt_state/0", "step": "step"}
    text = LINEN.replace("params/", "") + COUNTS.format(
        **names, dtype="int32", copy="checked"
    )
    layout = file_of(tmp_path, text + STATES.format(**names))
    loaded = universal.load(source, abstract, layout=layout)
    assert isinstance(loaded, TrainState)
    assert_same(loaded, known, abstract)

    @jax.jit
    def step(state):
        def loss_of(params):
            logits = state.apply_fn({"params": params}, decoders.TOKENS)
            return (logits**2).mean()

        return state.apply_gradients(grads=jax.grad(loss_of)(state.params))

    for one, other in zip(
        *(jax.tree.leaves(step(each)) for each in (loaded, known)), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    widened = saved | {"step": saved["step"].astype(np.int32)}
    assert_back(loaded, layout, tmp_path, widened)


@pytest.mark.slow
def test_nnx_with_an_optimizer(trained, tmp_path):
    parts, saved, source = trained
    wrt = nnx.Param

    def new_state():
        model = decoders.NnxDecoder(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=wrt)

    def state_of(model, optimizer):
        return {"model": nnx.state(model, wrt), "optimizer": nnx.state(optimizer)}

    model, optimizer = nnx.eval_shape(new_state)
    abstract = sharded(state_of(model, optimizer))
    names = {
        "weights": "model/",
        "adam": "optimizer/opt_state/0",
        "step": "optimizer/step",
    }
    text = (ROOT / f"configs/layouts/{NNX}.yml").read_text()
    counts = COUNTS.format(**names, dtype="uint32", copy="unchecked")
    text = text.replace("drop:", f"{counts}drop:") + STATES.format(**names)
    layout = file_of(tmp_path, text)
    loaded = universal.load(source, abstract, layout=layout)
    assert jax.tree.structure(loaded) == jax.tree.structure(abstract)
    moments = loaded["optimizer"]["opt_state"][0]
    for found, given in zip(
        (loaded["model"], moments["mu"], moments["nu"]), parts.values(), strict=True
    ):
        weights = decoders.nnx_weights(given)
        found = nnx.to_pure_dict(found)
        assert jax.tree.structure(found) == jax.tree.structure(weights)
        for one, other in zip(*map(jax.tree.leaves, (found, weights)), strict=True):
            np.testing.assert_array_equal(one, other)

    model, optimizer = new_state()
    nnx.update(model, loaded["model"])
    nnx.update(optimizer, loaded["optimizer"])
    assert (optimizer.step[...], moments["count"][...]) == (7, 7)
    optimizer.update(model, nnx.state(model, wrt))
    assert optimizer.step[...] == 8
    widened = saved | {"step": saved["step"].astype(np.uint32)}
    assert_back(loaded, layout, tmp_path, widened)


@pytest.mark.slow
def test_equinox(source, tmp_path, tensors):
    whole = sharded(eqx.filter_eval_shape(decoders.EquinoxDecoder, jax.random.key(0)))
    initial = decoders.EquinoxDecoder(jax.random.key(1))
    known = placed(decoders.equinox_weights(initial, tensors))
    layout = file_of(tmp_path, EQUINOX)
    # The rate of a dropout is a number among the leaves.
    message = r"(?s)leave those of the target out .*: layers/0/attention/dropout/p"
    with pytest.raises(universal.LayoutError, match=message):
        universal.load(source, whole, layout=layout)
    abstract, others = eqx.partition(whole, is_abstract)
    loaded = universal.load(source, abstract, layout=layout)
    assert isinstance(loaded, decoders.EquinoxDecoder)
    assert_same(loaded, eqx.filter(known, eqx.is_array), abstract)
    model = eqx.combine(loaded, others)
    np.testing.assert_array_equal(model(decoders.TOKENS), known(decoders.TOKENS))
    assert_back(loaded, layout, tmp_path, tensors)


def test_functions_of_equinox_stay(tmp_path, tensors):
    prefix = "model.layers.0.mlp."
    of_mlp = {name: each for name, each in tensors.items() if name.startswith(prefix)}
    safetensors_files.write(tmp_path / "model.safetensors", of_mlp)
    rule = {
        "from": {f"{prefix}{{part}}_proj.weight": "out in"},
        "to": {"{part}/weight": "out in"},
    }
    layout = Layout.from_dict({"rules": [rule]})
    abstract = eqx.filter_eval_shape(decoders.EquinoxMlp, jax.random.key(0))
    model = universal.load(tmp_path, abstract, layout=layout)
    assert isinstance(model, decoders.EquinoxMlp)
    assert model.activation is abstract.activation
    np.testing.assert_array_equal(model.up.weight, of_mlp[f"{prefix}up_proj.weight"])
    assert model(np.ones(decoders.EMBED)).shape == (decoders.EMBED,)

    abstract = {"mlp": abstract, "axis_name": "batch"}
    message = "axis_name cannot be restored as a str; .* or None to leave it out"
    with pytest.raises(errors.CheckpointError, match=f"^{message}"):
        universal.load(tmp_path, abstract, layout=layout)


@pytest.mark.parametrize(
    ("names", "shorter"),
    [
        (["a/kernel/value", "a/bias"], {"a/kernel/value": "a/kernel"}),
        (["a/value", "a/key"], {}),
        (["a/value", "a/b/c"], {}),
        (["a/value", "a"], {}),
        (["a/value", "ab/value"], {"a/value": "a", "ab/value": "ab"}),
        (["a/value/value"], {"a/value/value": "a/value"}),
        (["value", "a.value"], {}),
    ],
)
def test_a_value_is_its_box_only_if_it_is_alone(names, shorter):
    assert name_pattern.unboxed(names) == shorter


def test_an_attribute_of_the_name_value_has_both_names(tmp_path):
    # Which is the one that the user of a module without a box knows.
    safetensors_files.write(tmp_path / "w.safetensors", {"w": np.ones(3, np.float32)})
    for name in ("scale/value", "scale"):
        rule = {"from": {"w": "x"}, "to": {name: "x"}}
        abstract = {"scale": {"value": jax.ShapeDtypeStruct((3,), np.float32)}}
        layout = Layout.from_dict({"rules": [rule]})
        loaded = universal.load(tmp_path / "w.safetensors", abstract, layout=layout)
        assert np.all(loaded["scale"]["value"] == 1)
