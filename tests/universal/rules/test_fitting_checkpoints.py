"""One layout serves checkpoints that differ in ranks, spelling and kinds of states."""

import numpy as np
import pytest

from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.rules.layout_error import LayoutError
from tests.universal.rules.relayout import assert_same, numbered, relayout, saved

STAGES = Layout.parse(
    """
version: 1
rules:
  - from: {"layers.{local}.w": "x@tp y"}
    to: {"layers/{(pp local)}/w": "y x"}
  - from: {"norm.w": {dims: y, replicated: [pp, tp]}}
    to: {"norm": y}
"""
)
TWO_SPELLINGS = Layout.parse(
    """
version: 1
rules:
  - {from: {"fused.norm.w": x}, to: {norm: x}, optional: true}
  - {from: {"norm.w": x}, to: {norm: x}, optional: true}
"""
)
WEIGHTS_ALONE = Layout.parse(
    """
version: 1
states:
  parameter: {from: "{}", to: "{}"}
  master: {from: "{}", to: null}
rules:
  - {from: {"{name}.w": x}, to: {"{name}/w": x}}
"""
)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("pp", [1, 2])
def test_an_axis_that_a_checkpoint_lacks_has_one_rank(tp, pp):
    layers = [numbered(4, 3, start=12 * n) for n in range(2)]
    norm = numbered(3)
    tensors = []
    axes = {axis: n for axis, n in {"tp": tp, "pp": pp}.items() if n > 1}
    for stage, rank in np.ndindex(pp, tp):
        ranks = {"tp": rank, "pp": stage}
        ranks = {axis: ranks[axis] for axis in axes}
        tensors.append(saved("norm.w", norm, **ranks))
        for local, layer in enumerate(layers[stage * 2 // pp : (stage + 1) * 2 // pp]):
            shard = np.split(layer, tp)[rank]
            tensors.append(saved(f"layers.{local}.w", shard, **ranks))
    expected = {f"layers/{n}/w": layer.T for n, layer in enumerate(layers)}
    expected = {name: np.ascontiguousarray(each) for name, each in expected.items()}
    assert_same(relayout(STAGES, tensors, axes), {**expected, "norm": norm})


@pytest.mark.parametrize("name", ["fused.norm.w", "norm.w"])
def test_of_optional_rules_for_one_tensor_that_with_a_source_fills_it(name):
    expected = {"norm": numbered(5)}
    made = relayout(TWO_SPELLINGS, {name: expected["norm"]}, targets=expected)
    assert_same(made, expected)


SPELLINGS = """
version: 1
rules:
  - from: {"norm.w": "x", "dense.w": "x y"}
    to: {"{0}norm": "x", "{0}dense": "x y"}
    optional: true
  - from: {"norm.w": "x", "sparse.w": "x y"}
    to: {"{0}norm": "x", "{0}sparse": "x y"}
    optional: true
  - from: {"norm.w": "x", "sparse.w": "x y"}
    to: {"other": "x", "{0}sparse": "x y"}
    optional: true
""".replace("{0}", "a/")


@pytest.mark.parametrize(
    ("block", "norm"), [("dense", "a/norm"), ("sparse", "a/norm"), ("sparse", "other")]
)
def test_the_first_optional_rule_counts_that_has_all_of_its_tensors(block, norm):
    layout = Layout.parse(SPELLINGS)
    tensors = {"norm.w": numbered(2), f"{block}.w": numbered(2, 3)}
    expected = {norm: numbered(2), f"a/{block}": numbered(2, 3)}
    assert_same(relayout(layout, tensors, targets=expected), expected)
    assert_same(relayout(layout.inverse(), expected), tensors)
    if norm == "a/norm":
        assert_same(relayout(layout, tensors), expected)
    with pytest.raises(LayoutError, match=r"norm\.w .*rules\[0\] and .*rules\[1\]"):
        relayout(layout, {"norm.w": numbered(2)})
