"""The shipped layouts of MaxText, against its own converters, and by its logits."""

import json
import re

import jax
import numpy as np
import pytest

from elastic_ckpt import universal
from elastic_ckpt.cli import main
from elastic_ckpt.universal import shipped_layouts
from tests.maxtext import conversion, environment, small_models
from tests.universal import safetensors_files
from tests.universal.formats.fragment_values import values_of

pytestmark = pytest.mark.night

# Of Hugging Face's Transformers, by `hf_logits`.
HF_LOGITS = environment.ROOT / "tests/golden/hf_logits.npz"
LAYOUTS = {
    "llama3.1-8b": "hf_llama_to_maxtext",
    "qwen3-0.6b": "hf_qwen3_to_maxtext",
    "qwen2.5-1.5b": "hf_qwen3_to_maxtext",
    "mixtral-8x7b": "hf_mixtral_to_maxtext",
    "qwen3-30b-a3b": "hf_qwen3_to_maxtext",
}
# And those of `small_models`.
LAYOUTS |= {
    model: small_models.MODELS[name][2][0] for model, name in conversion.SMALL.items()
}
# What has to be chosen, and what a `config.json` would say. By what Gemma 2 divides the
# query, the converter takes the elements of a head.
_PADDED = small_models.PADDED - small_models.VOCAB
_D = {"d": small_models.HEAD_DIM}
SIZES = {
    "llama3.1-8b": {"interleave": 2},
    "gemma2-2b": {"pad": _PADDED, "scalar": small_models.HEAD_DIM, **_D},
    "gemma3-4b": {"vocab": small_models.VOCAB},
    "olmo3-7b-pt": _D,
    "gpt-oss-20b": _D,
    "deepseek2-16b": {"dense": 1, "heads": small_models.HEADS},
    "qwen3-next-80b-a3b": {"rest": 0},
}


def load(model):
    return shipped_layouts.load(LAYOUTS[model], sizes=SIZES.get(model))


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The directory in which MaxText has converted each model and its conversion."""
    environment.set_up()
    directory = tmp_path_factory.mktemp("converted")
    environment.run("tests.maxtext.conversion", directory)
    return directory


def read(path):
    opened = universal.open_checkpoint(path)
    return {tensor.name: values_of(tensor) for tensor in opened.tensors}


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


def assert_loads(path, layout, expected):
    tree = universal.load(path, nested(expected), layout=layout)
    for leaf_path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(leaf_path, simple=True, separator="/")
        assert np.asarray(leaf).tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("model", LAYOUTS)
def test_parameters_for_maxtext_are_those_of_its_converter(converted, model):
    layout = load(model)
    expected = read(converted / model / "maxtext.safetensors")
    expected.pop("step")
    assert_loads(converted / model / "hf", layout, expected)


@pytest.mark.parametrize("model", LAYOUTS)
def test_parameters_from_maxtext_are_those_of_its_converter(converted, model):
    layout = load(model).inverse()
    given = read(converted / model / "hf")
    # Without a way back of MaxText's, tensors have to be as they were.
    is_one_way = model in conversion.WITHOUT_WAY_BACK
    expected = given if is_one_way else read(converted / model / "hf_again")
    assert expected.keys() == given.keys()
    assert_loads(converted / model / "maxtext.safetensors", layout, expected)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("form", ["", "_unscanned"])
def test_maxtext_computes_the_logits_of_hugging_face(tmp_path, form):
    environment.set_up()
    for name, (_, _, (layout, sizes)) in small_models.MODELS.items():
        source = tmp_path / "hf" / name
        source.mkdir(parents=True)
        config = json.dumps(small_models.hf_config(name))
        (source / "config.json").write_text(config)
        tensors = small_models.tensors(name)
        safetensors_files.write(source / "model.safetensors", tensors)
        given = [source, tmp_path / name / "0", "--rules", layout + form]
        for size, number in sizes.items():
            given += ["--size", f"{size}={number}"]
        assert main.main(["convert", *map(str, given)]) == 0
    environment.run("tests.maxtext.logits", tmp_path, form, *small_models.MODELS)
    for name, expected in np.load(HF_LOGITS).items():
        # Either side may have padding.
        made = np.load(tmp_path / f"{name}.npy")[..., : small_models.VOCAB]
        expected = expected[..., : small_models.VOCAB]
        np.testing.assert_allclose(made, expected, rtol=0, atol=5e-4, err_msg=name)


def test_every_model_of_the_page_is_among_those_whose_logits_are_compared():
    page = (environment.ROOT / "configs/layouts/README.md").read_text()
    row = r"^\| `(hf_\w+_to_maxtext\w*)` \|.*?\|.*?\|(.*?)\|"
    rows = re.findall(row, page, re.MULTILINE)
    named = {each.strip() for _, models in rows for each in models.split(",")}
    assert named == {
        *("LLaMA 2", "3", "3.1", "3.3"),
        *("Mixtral", "Qwen 2.5", "Qwen 3", "Qwen 3 with experts", "Qwen 3-Next"),
        *("Gemma 2", "Gemma 3", "OLMo 3", "GPT-OSS", "DeepSeek V2", "DeepSeek V3"),
        *("Llama 4 Scout", "Llama 4 Maverick"),
    }
    assert len(small_models.MODELS) == len(named)
