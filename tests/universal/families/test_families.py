"""The layouts of families, with small models that Transformers writes and reads.

NumPy says what a layout has to make of a model; see `trees`.
"""

import json
import pathlib
import re
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest

from elastic_ckpt import universal
from elastic_ckpt.core import errors
from elastic_ckpt.universal import shipped_layouts
from elastic_ckpt.universal.writing import convert
from elastic_ckpt.universal.writing.conversion import Job
from tests.environments import ROOT
from tests.universal import safetensors_files
from tests.universal.families import forward, trees
from tests.universal.families.environment import TRANSFORMERS
from tests.universal.families.models import MODELS, QUANTIZED, SEEING, TOKENS

pytestmark = pytest.mark.slow

HERE = pathlib.Path(__file__).parent
# The kind of each layer, by what the stack of the kind is called.
ALL_ALIKE = {"layers": lambda _: True}
PAGE = ROOT / "configs/layouts/README.md"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The directory in which Transformers has written each model."""
    TRANSFORMERS.set_up()
    directory = tmp_path_factory.mktemp("written")
    TRANSFORMERS.run("tests.universal.families.write_models", directory)
    return directory


def rules(model):
    return str(HERE / model.layout) if model.layout.endswith(".yml") else model.layout


def converted(source, target, layout, *, to="safetensors", **more):
    """The tensors of `source`, converted by a layout."""
    job = Job(source=str(source), target=str(target), rules=layout, to=to, **more)
    convert.convert(job)
    return safetensors_files.read(target)


def written_back(tree, target, layout, model):
    """The tensors of a tree, as a model of Hugging Face like `model`."""
    return converted(tree, target, layout, is_reversed=True, to="hf", config=str(model))


def assert_same(made, expected):
    made, expected = map(safetensors_files.bits, (made, expected))
    assert made.keys() == expected.keys()
    for name, bits in expected.items():
        assert made[name] == bits, name


def test_a_model_becomes_the_tree_that_numpy_makes_and_comes_back(
    written, tmp_path, subtests
):
    back = tmp_path / "back"
    for name, model in MODELS.items():
        with subtests.test(name):
            stored = safetensors_files.read(written / name)
            tree = tmp_path / "tree" / name
            made = converted(written / name, tree, rules(model))
            assert_same(made, trees.of(model, stored))
            again = written_back(tree, back / name, rules(model), written / name)
            assert_same(again, stored)
    TRANSFORMERS.run("tests.universal.families.read_models", written, back)


def test_the_layout_of_its_family_fits_a_model_and_its_tree(
    written, tmp_path, subtests
):
    models = {each.layout: name for name, each in MODELS.items()}
    for layout in shipped_layouts.shipped():
        if layout not in models:
            continue
        with subtests.test(layout):
            name = models[layout]
            converted(written / name, tmp_path / name, layout)
            fitting = [
                shipped_layouts.fitting(universal.open_checkpoint(path).tensors)
                for path in (written / name, tmp_path / name)
            ]
            assert layout in fitting[0]
            assert f"{layout} (inverse)" in fitting[1]
            # Layouts that pass on any name are of no use alone.
            others = {"hf_fp8", "lora", "untied", "hf_language_model"}
            assert not others & {*fitting[0]}


def composed(tmp_path, *names, **sizes):
    """The path of a layout through others."""
    path = tmp_path / f"{'_'.join(names)}.yml"
    fields = {"version": 1, "through": names, "sizes": sizes}
    path.write_text(json.dumps(fields))
    return str(path)


def test_a_model_that_sees_has_the_language_model_of_its_family(
    written, tmp_path, subtests
):
    for name, model in SEEING.items():
        with subtests.test(name):
            layout = composed(tmp_path, "hf_language_model", model.layout)
            made = converted(written / name, tmp_path / name, layout)
            prefix = "language_model."
            stored = {
                each.removeprefix(prefix): values
                for each, values in safetensors_files.read(written / name).items()
                if each.startswith(prefix)
            }
            assert_same(made, trees.of(model, stored))


def test_quantized_weights_are_those_that_transformers_makes_of_them(
    written, tmp_path, subtests
):
    back = tmp_path / "back"
    for name, model in QUANTIZED.items():
        with subtests.test(name):
            layout = model.layout
            if model.quantized == "fp8":
                layout = composed(tmp_path, "hf_fp8", layout)
            tree = tmp_path / "tree" / name
            converted(written / name, tree, layout)
            written_back(tree, back / name, layout, written / name)
    TRANSFORMERS.run("tests.universal.families.read_models", written, back)


def test_the_last_blocks_of_fp8_are_shorter(tmp_path):
    # As DeepSeek's 576 rows of latent key and value, which Transformers refuses.
    rng = np.random.default_rng(0)
    rows, columns = 300, 192
    values = rng.normal(size=(rows, columns)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.normal(size=(3, 2)).astype(np.float32)
    norm = rng.normal(size=rows).astype(np.float32)
    (tmp_path / "source").mkdir()
    tensors = {"a.weight": values, "a.weight_scale_inv": scales, "norm.weight": norm}
    safetensors_files.write(tmp_path / "source/model.safetensors", tensors)
    made = converted(tmp_path / "source", tmp_path / "made", "hf_fp8")
    each = scales.repeat(128, 0)[:rows].repeat(128, 1)[:, :columns]
    product = (values.astype(np.float32) * each).astype(ml_dtypes.bfloat16)
    assert_same(made, {"a.weight": product, "norm.weight": norm})


def test_a_head_of_its_own_is_a_copy_of_the_embedding(written, tmp_path):
    stored = safetensors_files.read(written / "llama3_tied")
    layout = composed(tmp_path, "hf_llama3", "untied")
    made = converted(written / "llama3_tied", tmp_path / "tree", layout)
    tree = trees.of(MODELS["llama3_tied"], stored)
    head = np.ascontiguousarray(tree["embed/embedding"].T)
    assert_same(made, {**tree, "head/kernel": head})
    back = converted(tmp_path / "tree", tmp_path / "back", layout, is_reversed=True)
    assert_same(back, stored)


def test_a_head_that_was_trained_is_not_left_out(written, tmp_path):
    stored = safetensors_files.read(written / "llama3")
    tree = trees.of(MODELS["llama3"], stored)
    (tmp_path / "tree").mkdir()
    safetensors_files.write(tmp_path / "tree/model.safetensors", tree)
    layout = composed(tmp_path, "hf_llama3", "untied")
    with pytest.raises(errors.CheckpointError, match=r"embed/embedding.* differ"):
        converted(tmp_path / "tree", tmp_path / "back", layout, is_reversed=True)


def test_layers_are_stacked(written, tmp_path, subtests):
    for name in ("llama3", "mixtral", "gemma3"):
        with subtests.test(name):
            model = MODELS[name]
            stored = safetensors_files.read(written / name)
            layout = composed(tmp_path, model.layout, "stacked")
            tree = tmp_path / name
            made = converted(written / name, tree, layout)
            expected = stacked(trees.of(model, stored), ALL_ALIKE)
            assert_same(made, expected)
            back = tmp_path / f"{name}_back"
            assert_same(converted(tree, back, layout, is_reversed=True), stored)


def test_layers_of_two_kinds_are_stacked_apart(written, tmp_path, subtests):
    sizes = {
        "deepseek3": {"block": 1, "first": 2},
        "qwen3_next": {"first": 1, "second": 1},
        "llama4": {"first": 1, "second": 1},
    }
    for name, given in sizes.items():
        with subtests.test(name):
            model = MODELS[name]
            stored = safetensors_files.read(written / name)
            layout = composed(tmp_path, model.layout, "stacked_blocks", **given)
            tree = tmp_path / name
            made = converted(written / name, tree, layout)
            length, first = 4 // given.get("block", 2), given["first"]
            kinds = {
                "first_layers": lambda n, length=length, first=first: (
                    n % length < first
                ),
                "second_layers": lambda n, length=length, first=first: (
                    n % length >= first
                ),
            }
            expected = stacked(trees.of(model, stored), kinds)
            blocks = {
                path: leaf.reshape(4 // length, -1, *leaf.shape[1:])
                if path.partition("/")[0] in kinds
                else leaf
                for path, leaf in expected.items()
            }
            assert_same(made, blocks)
            back = tmp_path / f"{name}_back"
            assert_same(converted(tree, back, layout, is_reversed=True), stored)


def stacked(tree, kinds):
    """The tree with each leaf of the layers of a kind stacked, in their order."""
    stacks, made = {}, {}
    for path, leaf in tree.items():
        layers, _, rest = path.partition("/")
        if layers != "layers":
            made[path] = leaf
            continue
        number, _, rest = rest.partition("/")
        (kind,) = (kind for kind, has in kinds.items() if has(int(number)))
        stacks.setdefault(f"{kind}/{rest}", {})[int(number)] = leaf
    for path, leaves in stacks.items():
        made[path] = np.stack([leaves[number] for number in sorted(leaves)])
    return made


def test_the_layer_that_predicts_the_token_after_the_next_is_dropped(written, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(written / "deepseek3", source)
    stored = safetensors_files.read(source)
    model = MODELS["deepseek3"]
    last = "model.layers.3."
    extra = {
        name.replace(last, "model.layers.61."): values
        for name, values in stored.items()
        if name.startswith(last)
    }
    norm, embedding = stored["model.norm.weight"], stored["lm_head.weight"]
    extra |= {
        f"model.layers.61.{name}.weight": values
        for name, values in {
            "embed_tokens": embedding,
            "enorm": norm,
            "hnorm": norm,
            "eh_proj": np.concatenate([embedding, embedding], axis=1),
            "shared_head.norm": norm,
            "shared_head.head": embedding,
        }.items()
    }
    safetensors_files.write(source / "mtp.safetensors", extra)
    made = converted(source, tmp_path / "tree", model.layout)
    assert_same(made, trees.of(model, stored))


def test_layers_that_predict_further_tokens_are_dropped(written, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(written / "qwen3_next", source)
    stored = safetensors_files.read(source)
    extra = {"mtp.norm.weight": stored["model.norm.weight"]}
    safetensors_files.write(source / "mtp.safetensors", extra)
    model = MODELS["qwen3_next"]
    made = converted(source, tmp_path / "tree", model.layout)
    assert_same(made, trees.of(model, stored))


def nested(arrays):
    """The abstract tree of arrays by path."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree = {}
    for path, array in arrays.items():
        *outer, last = path.split("/")
        branch = tree
        for key in outer:
            branch = branch.setdefault(key, {})
        branch[last] = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=device)
    return tree


def test_jax_computes_the_logits_of_transformers(written, tmp_path, subtests):
    trees_of = {
        "llama3": (MODELS["llama3"].layout, {}),
        "qwen3_moe": (MODELS["qwen3_moe"].layout, {}),
        "llama3, stacked": (composed(tmp_path, "hf_llama3", "stacked"), ALL_ALIKE),
    }
    for case, (layout, kinds) in trees_of.items():
        with subtests.test(case):
            name = case.partition(",")[0]
            model = MODELS[name]
            expected = trees.of(model, safetensors_files.read(written / name))
            like = nested(stacked(expected, kinds) if kinds else expected)
            tree = universal.load(written / name, like, layout=layout)
            with jax.default_matmul_precision("highest"):
                made = forward.logits(tree, model.config, np.array(TOKENS))
            expected = np.load(written / f"{name}.npy")
            np.testing.assert_allclose(made, expected, rtol=0, atol=1e-4)


def test_the_page_lists_the_layouts_whose_models_are_tested():
    row = r"^\| `(hf_\w+)` \| Hugging Face \| a plain tree \|"
    listed = re.findall(row, PAGE.read_text(), re.MULTILINE)
    tested = {each.layout for each in MODELS.values()}
    assert {*listed} == {each for each in tested if not each.endswith(".yml")}
    assert {*listed} <= {*shipped_layouts.shipped()}
