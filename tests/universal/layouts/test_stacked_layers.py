"""The shipped layouts of MaxText's stacked layers, against the same with NumPy."""

import fnmatch

import numpy as np
import pytest

from elastic_ckpt.universal import shipped_layouts
from tests.universal.layouts import hf_models as hf
from tests.universal.layouts.test_maxtext_layouts import CHOSEN, MODELS, SCALED, maxtext
from tests.universal.rules.relayout import assert_same, numbered, relayout

STAGES, LOCAL = 2, 3
STATES = ("params", "opt_state/0/mu", "opt_state/0/nu")


@pytest.fixture(params=MODELS)
def scanned(request, monkeypatch):
    """The state of a model of six layers."""
    monkeypatch.setattr(hf, "LAYERS", STAGES * LOCAL)
    parameters = maxtext(request.param, hf.model(*MODELS[request.param][1]))
    tree = {"step": np.int32(7), "opt_state/0/count": np.int32(5)}
    for place, shape in {"": (), "layers/self_attention/": (STAGES * LOCAL,)}.items():
        path = f"nnx_aux/model/decoder/{place}rngs/dropout"
        tree[f"{path}/key"] = numbered(*shape, 4, dtype=np.uint32)
        tree[f"{path}/count"] = numbered(*shape, dtype=np.uint32)
    for number, state in enumerate(STATES):
        for path, array in parameters.items():
            tree[path.replace("params", state, 1)] = array + np.float32(number)
    return tree


def unstacked(scanned, name, part):
    """The tree with other tensors for each of layers.

    Args:
      scanned: the tree with all layers along the second dim.
      name: of the parts; `{}` stands for the number.
      part: the layers of each part, an array for each.
    """
    tree = {}
    for path, array in scanned.items():
        before, layers, after = path.partition("decoder/layers/")
        if not layers:
            tree[path] = array
            continue
        for number, numbers in enumerate(part):
            is_parameter = not before.startswith("nnx_aux")
            of_part = np.moveaxis(array, int(is_parameter), 0)[numbers]
            if is_parameter and name.endswith("scanned_layers"):
                of_part = np.moveaxis(of_part, 1, 2)
            tree[f"{before}decoder/{name.format(number)}/{after}"] = of_part
    return {path: np.array(array, order="C") for path, array in tree.items()}


def form(layout):
    layers = np.arange(STAGES * LOCAL)
    return {
        "maxtext_unscanned_to_scanned": ("layers_{}", list(layers)),
        "maxtext_stages_to_scanned": (
            "pipeline_module/layers/layers_{}",
            list(layers.reshape(STAGES, LOCAL).T),
        ),
        "maxtext_circular_to_scanned": (
            "pipeline_module/layers",
            [layers.reshape(LOCAL, STAGES)],
        ),
        "maxtext_scanned_stages_to_scanned": (
            "pipeline_module/layers/scanned_layers",
            [layers.reshape(STAGES, LOCAL)],
        ),
    }[layout]


def dropped(path, layout):
    return any(fnmatch.fnmatch(path, each) for each in layout.drop_inverse)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in shipped_layouts.shipped()
        if name.startswith("maxtext_") and name.endswith("_to_scanned")
    ],
)
def test_layers_are_stacked_and_taken_apart(name, scanned):
    layout = shipped_layouts.load(name)
    # The states of random numbers that scanned layers alone have.
    both = {path: scanned[path] for path in scanned if not dropped(path, layout)}
    tree = unstacked(both, *form(name))
    assert_same(relayout(layout, tree, targets=both), both)
    assert_same(relayout(layout.inverse(), scanned, targets=tree), tree)
    parameters = {path: tree[path] for path in tree if path.startswith("params/")}
    expected = {path: scanned[path] for path in scanned if path.startswith("params/")}
    assert_same(relayout(layout, parameters), expected)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_of_hugging_face_becomes_layers_that_are_not_stacked(model):
    name, blocks = MODELS[model]
    arrays = hf.model(*blocks)
    parts = "layers_{}", list(np.arange(hf.LAYERS))
    expected = unstacked(maxtext(model, arrays), *parts)
    layout = shipped_layouts.load(f"{name}_unscanned", sizes=CHOSEN.get(model))
    assert_same(relayout(layout, arrays, targets=expected), expected)
    rest = {"step": np.int32(7), "nnx_aux/model/decoder/rngs/aqt/count": np.uint32(1)}
    made = relayout(layout.inverse(), {**expected, **rest}, targets=arrays)
    for path, array in arrays.items():
        if model in SCALED and path.endswith(hf.QUERY):
            np.testing.assert_array_max_ulp(made[path], array, maxulp=1)
            made[path] = array
    assert_same(made, arrays)
