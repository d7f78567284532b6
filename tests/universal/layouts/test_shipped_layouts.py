"""Shipped layouts are listed, loaded and recommended by name."""

import os
import re
import subprocess
import zipfile

import pytest

from elastic_ckpt.universal import shipped_layouts
from elastic_ckpt.universal.rules.layout_error import LayoutError
from tests.universal.layouts import hf_models as hf
from tests.universal.layouts.test_maxtext_layouts import MODELS, maxtext
from tests.universal.rules.relayout import saved, stored

# Trees have no ranks.
OF_RANKS = {"megatron_ranks_to_hf", "deepspeed_example"}
DIRECTORY = shipped_layouts._IN_CHECKOUT


def fitting(arrays):
    tensors = [saved(name, values) for name, values in arrays.items()]
    return shipped_layouts.fitting(stored(tensors))


def test_the_page_lists_every_layout():
    page = (DIRECTORY / "README.md").read_text()
    assert (
        sorted(re.findall(r"^\| `(\w+)` \|", page, re.M)) == shipped_layouts.shipped()
    )


@pytest.mark.parametrize("name", sorted({*shipped_layouts.shipped()} - OF_RANKS))
def test_a_layout_is_its_own_inverse_inverted(name):
    layout = shipped_layouts.load(name)
    assert layout.inverse().inverse() == layout


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_model_fits_its_layout(model):
    name, blocks = MODELS[model]
    arrays = hf.model(*blocks)
    assert name in fitting(arrays)
    assert f"{name} (inverse)" in fitting(maxtext(model, arrays))


def test_a_tensor_without_a_rule_fits_no_layout():
    _, blocks = MODELS["llama"]
    arrays = hf.model(*blocks)
    assert fitting({**arrays, "model.other.weight": arrays["model.norm.weight"]}) == []


def test_an_unknown_name_is_refused_with_the_names_that_ship():
    with pytest.raises(LayoutError, match=r"'llama'.* hf_llama_to_maxtext"):
        shipped_layouts.load("llama")


def test_sizes_are_added_to_those_of_the_file():
    layout = shipped_layouts.load("hf_llama_to_maxtext", sizes={"d": 64})
    plain = shipped_layouts.load("hf_llama_to_maxtext")
    assert layout.sizes == {**plain.sizes, "d": 64}


@pytest.mark.slow
def test_the_wheel_has_the_layouts(tmp_path):
    uv = os.environ.get("UV", "uv")
    subprocess.run(
        [uv, "build", "--wheel", "--out-dir", tmp_path, DIRECTORY.parents[1]],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    files = {path.name for path in DIRECTORY.iterdir()}
    assert {
        name.rpartition("/")[2]
        for name in zipfile.ZipFile(wheel).namelist()
        if name.startswith("elastic_ckpt/universal/layouts/")
    } == files
