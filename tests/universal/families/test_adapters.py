"""Adapters that PEFT writes become the weights that PEFT merges them to."""

import json

import numpy as np
import pytest

from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.writing import convert
from elastic_ckpt.universal.writing.conversion import Job
from tests.universal import safetensors_files
from tests.universal.families.environment import TRANSFORMERS

pytestmark = pytest.mark.slow

MERGED = ["plain", "rslora", "ranks", "saved", "embeddings"]
OTHERS = {
    "dora": "adapter/use_dora in the checkpoint is True",
    "alphas": "adapter/alpha_pattern in the checkpoint is 3 at .*/q_proj",
    "pissa": "adapter/init_lora_weights in the checkpoint is 'pissa'",
    "biases": "adapter/lora_bias in the checkpoint is True",
    "tokens": r"adapter/trainable_token_indices in the checkpoint is \[1, 2\]",
    "tied": "config/tie_word_embeddings in the checkpoint is True",
    "tied_saved": "config/tie_word_embeddings in the checkpoint is True",
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The directory in which PEFT has written the adapters."""
    TRANSFORMERS.set_up()
    directory = tmp_path_factory.mktemp("written")
    TRANSFORMERS.run("tests.universal.families.write_adapters", directory)
    return directory


def converted(source, target, *through, to="safetensors"):
    rules = None
    if through:
        path = target.with_suffix(".yml")
        path.write_text(json.dumps({"version": 1, "through": through}))
        rules = str(path)
    convert.convert(Job(source=str(source), target=str(target), rules=rules, to=to))
    return safetensors_files.read(target)


def assert_near(made, expected):
    assert made.keys() == expected.keys()
    for name, values in expected.items():
        assert made[name].dtype == values.dtype, name
        np.testing.assert_allclose(made[name], values, 1e-6, 1e-6, err_msg=name)


@pytest.mark.parametrize("name", MERGED)
def test_an_adapter_is_merged_as_peft_does_it(written, tmp_path, name):
    made = converted(written / name / "adapter", tmp_path / "made", to="hf")
    assert_near(made, safetensors_files.read(written / name / "merged"))
    base = safetensors_files.read(written / "base")
    assert any((values != made[each]).any() for each, values in base.items())
    tree = ("hf_llama3", "stacked")
    stacked = converted(written / name / "adapter", tmp_path / "one", "lora", *tree)
    assert_near(stacked, converted(written / name / "merged", tmp_path / "two", *tree))


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_more_than_a_product_is_refused(written, tmp_path, name):
    with pytest.raises(LayoutError, match=OTHERS[name]):
        converted(written / name / "adapter", tmp_path / "made", to="hf")
