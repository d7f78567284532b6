"""The layouts of families, with small models that Transformers and PEFT write and read.

Before a release: what the layouts make of them is what Transformers computes with. That
they make the same of a fixed model is tested by digests (`tests/universal/layouts`).
"""

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from elastic_ckpt import universal
from elastic_ckpt.core import errors
from elastic_ckpt.universal.rules.layout import LayoutError
from elastic_ckpt.universal.writing import convert
from elastic_ckpt.universal.writing.convert import Job
from tests.environments import ROOT, Environment
from tests.universal import safetensors_files
from tests.universal.families import forward, models

pytestmark = pytest.mark.night
TRANSFORMERS = Environment(
    ROOT / ".venv-families", pathlib.Path(__file__).parent / "pyproject.toml", "3.11"
)
PROGRAMS = "tests.universal.families.programs"


@pytest.fixture(scope="module", params=["write_models"])
def written(request, tmp_path_factory):
    """The directory in which Transformers has written models, or PEFT adapters."""
    TRANSFORMERS.set_up()
    directory = tmp_path_factory.mktemp(request.param)
    TRANSFORMERS.run(PROGRAMS, request.param, directory)
    return directory


def converted(source, target, layout=None, *, to="safetensors", **more):
    """The tensors of `source`, converted by a layout."""
    job = Job(source=str(source), target=str(target), rules=layout, to=to, **more)
    convert.convert(job)
    return safetensors_files.read(target)


def assert_same(made, expected):
    assert safetensors_files.bits(made) == safetensors_files.bits(expected)


def composed(tmp_path, *names):
    """The path of a layout through others."""
    path = tmp_path / f"{'_'.join(names)}.yml"
    path.write_text(json.dumps({"version": 1, "through": names}))
    return str(path)


def test_a_model_becomes_a_tree_and_comes_back_to_transformers(
    written, tmp_path, subtests
):
    back = tmp_path / "back"
    for name, model in (models.MODELS | models.QUANTIZED).items():
        with subtests.test(name):
            layout, tree = model.layout, tmp_path / "tree" / name
            if model.quantized == "fp8":
                layout = composed(tmp_path, "hf_fp8", layout)
            converted(written / name, tree, layout)
            given = {"is_reversed": True, "to": "hf", "config": str(written / name)}
            again = converted(tree, back / name, layout, **given)
            if not model.quantized:
                assert_same(again, safetensors_files.read(written / name))
    TRANSFORMERS.run(PROGRAMS, "compare_models", written, back)


def test_a_model_that_sees_has_the_language_model_of_its_family(
    written, tmp_path, subtests
):
    for name, model in models.SEEING.items():
        with subtests.test(name):
            layout = composed(tmp_path, "hf_language_model", model.layout)
            made = converted(written / name, tmp_path / name, layout)
            alone = tmp_path / f"{name}_alone"
            alone.mkdir()
            tensors = safetensors_files.read(written / name)
            of_language = {
                each.removeprefix("language_model."): values
                for each, values in tensors.items()
                if each.startswith("language_model.")
            }
            safetensors_files.write(alone / "model.safetensors", of_language)
            config = json.dumps(model.config["text_config"])
            (alone / "config.json").write_text(config)
            target = tmp_path / f"{name}_expected"
            assert_same(made, converted(alone, target, model.layout))


def test_a_head_of_its_own_is_a_copy_of_the_embedding(written, tmp_path):
    layout = composed(tmp_path, "hf_llama3", "untied")
    made = converted(written / "llama3_tied", tmp_path / "tree", layout)
    assert_same({"": made["head/kernel"]}, {"": made["embed/embedding"].T.copy()})
    back = converted(tmp_path / "tree", tmp_path / "back", layout, is_reversed=True)
    assert_same(back, safetensors_files.read(written / "llama3_tied"))
    converted(written / "llama3", tmp_path / "trained", "hf_llama3")
    with pytest.raises(errors.CheckpointError, match=r"embed/embedding.* differ"):
        converted(tmp_path / "trained", tmp_path / "x", layout, is_reversed=True)


@pytest.mark.parametrize("name", ["deepseek3", "qwen3_next"])
def test_layers_that_predict_further_tokens_are_dropped(written, tmp_path, name):
    source = tmp_path / "source"
    shutil.copytree(written / name, source)
    stored = safetensors_files.read(source)
    norm, embedding = stored["model.norm.weight"], stored["lm_head.weight"]
    extra = {"mtp.norm.weight": norm}
    if name == "deepseek3":
        last, further = "model.layers.3.", "model.layers.61."
        extra = {
            each.replace(last, further): values
            for each, values in stored.items()
            if each.startswith(last)
        }
        names = ("embed_tokens", "shared_head.head")
        extra |= {f"{further}{each}.weight": embedding for each in names}
        names = ("enorm", "hnorm", "shared_head.norm")
        extra |= {f"{further}{each}.weight": norm for each in names}
        extra[f"{further}eh_proj.weight"] = np.concatenate([embedding] * 2, axis=1)
    safetensors_files.write(source / "mtp.safetensors", extra)
    layout = models.MODELS[name].layout
    made = converted(source, tmp_path / "tree", layout)
    assert_same(made, converted(written / name, tmp_path / "expected", layout))


def test_jax_computes_the_logits_of_transformers(written, tmp_path, subtests):
    layouts = {
        "llama3": "hf_llama3",
        "qwen3_moe": models.MODELS["qwen3_moe"].layout,
        "llama3, stacked": composed(tmp_path, "hf_llama3", "stacked"),
    }
    for case, layout in layouts.items():
        with subtests.test(case):
            name = case.partition(",")[0]
            made = converted(written / name, tmp_path / case, layout)
            like = {path: jnp.asarray(array) for path, array in made.items()}
            like = traverse_util.unflatten_dict(like, sep="/")
            tree = universal.load(written / name, like, layout=layout)
            with jax.default_matmul_precision("highest"):
                made = forward.logits(
                    tree, models.MODELS[name].config, np.array(models.TOKENS)
                )
            expected = np.load(written / f"{name}.npy")
            np.testing.assert_allclose(made, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("written", ["write_adapters"], indirect=True)
def test_an_adapter_is_merged_as_peft_does_it(written, tmp_path, subtests):
    base = safetensors_files.read(written / "base")
    for name in models.MERGED:
        with subtests.test(name):
            made = converted(written / name / "adapter", tmp_path / name, to="hf")
            expected = safetensors_files.read(written / name / "merged")
            assert made.keys() == expected.keys()
            for each, values in expected.items():
                np.testing.assert_allclose(made[each], values, 1e-6, 1e-6, err_msg=each)
            assert any((values != made[each]).any() for each, values in base.items())
    for name, options in models.REFUSED.items():
        (key,) = options
        place = "config/tie_word_embeddings" if "tied" in name else f"adapter/{key}"
        with subtests.test(name), pytest.raises(LayoutError, match=place):
            converted(written / name / "adapter", tmp_path / name, to="hf")
