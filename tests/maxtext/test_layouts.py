"""The shipped layouts of MaxText, against its own converters, both ways."""

import subprocess

import jax
import numpy as np
import pytest

from elastic_ckpt import universal
from elastic_ckpt.universal import shipped_layouts
from tests.maxtext import environment
from tests.universal.formats.fragment_values import values_of

pytestmark = pytest.mark.slow(minutes=1)

LAYOUTS = {
    "llama3.1-8b": "hf_llama_to_maxtext",
    "qwen3-0.6b": "hf_qwen3_to_maxtext",
    "qwen2.5-1.5b": "hf_qwen3_to_maxtext",
    "mixtral-8x7b": "hf_mixtral_to_maxtext",
    "qwen3-30b-a3b": "hf_qwen3_to_maxtext",
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The directory in which MaxText has converted each model and its conversion."""
    environment.set_up()
    directory = tmp_path_factory.mktemp("converted")
    python = environment.ENVIRONMENT / "bin/python"
    ended = subprocess.run(
        [python, "-m", "tests.maxtext.conversion", directory],
        cwd=environment.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-5000:]
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
    layout = shipped_layouts.load(LAYOUTS[model])
    expected = read(converted / model / "maxtext.safetensors")
    expected.pop("step")
    assert_loads(converted / model / "hf", layout, expected)


@pytest.mark.parametrize("model", LAYOUTS)
def test_parameters_from_maxtext_are_those_of_its_converter(converted, model):
    layout = shipped_layouts.load(LAYOUTS[model]).inverse()
    expected = read(converted / model / "hf_again")
    assert expected.keys() == read(converted / model / "hf").keys()
    assert_loads(converted / model / "maxtext.safetensors", layout, expected)
