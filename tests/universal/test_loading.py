"""Whole loads: a checkpoint of another program, a layout or none, a sharded tree."""

import dataclasses
import itertools

import hypothesis
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

from elastic_ckpt import universal
from elastic_ckpt.core import errors
from elastic_ckpt.universal import loading, shipped
from elastic_ckpt.universal.formats.checkpoint import Checkpoint, StoredTensor
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.rules import matching
from elastic_ckpt.universal.rules.layout import Layout, LayoutError
from tests.universal import safetensors_files
from tests.universal.rules import relayout
from tests.universal.safetensors_files import bits

DTYPE = np.dtype(np.float32)
# Characters of patterns, and digits, which names have in common.
NAMES = st.lists(st.text("a{}*[]:0/", min_size=1, max_size=6), min_size=1, unique=True)


def test_a_float_of_8_bits_keeps_its_dtype_without_its_scales(tmp_path):
    weight = np.arange(24).reshape(4, 6).astype(ml_dtypes.float8_e4m3fn)
    tensors = {"w": weight, "w_scale": np.ones((2, 3), np.float32)}
    safetensors_files.write(tmp_path / "model.safetensors", tensors)
    rule = {"from": {"w": "out in"}, "to": {"w": "in out"}}
    layout = Layout.from_dict({"rules": [rule], "drop": ["*scale"]})
    wide = {"w": weight.T.astype(ml_dtypes.bfloat16)}
    with pytest.raises(LayoutError, match=r"is bfloat16 in the target, .* without"):
        universal.load(tmp_path, wide, layout=layout)
    tree = {"w": jnp.asarray(weight.T)}
    loaded = universal.load(tmp_path, tree, layout=layout, budget_bytes=7)
    assert bits(loaded) == bits({"w": weight.T})


@pytest.mark.parametrize("kinds", [("parameter",), ("parameter", "master", "step")])
def test_without_a_layout_whole_tensors_keep_their_names_after_their_kinds(kinds):
    names = ("a/b.0.w", "a/c.1.w", "a/c.02.w", "scale")
    tensors, expected = [], {}
    for number, (name, kind) in enumerate(itertools.product(names, kinds)):
        values = relayout.numbered(2, 3, start=number)
        tensors.append(relayout.saved(name, values, kind))
        expected[f"{kind}/{name}" if len(kinds) > 1 else name] = values
    layout = shipped.default_layout(Checkpoint(format="any", tensors=tensors))
    relayout.assert_same(relayout.relayout(layout, tensors), expected)


def test_shards_of_ranks_need_a_layout():
    shards = [relayout.saved("w", relayout.numbered(2), tp=rank) for rank in (0, 1)]
    for saved, problem in ((shards, "has per-rank shards"), ([], "has no tensors")):
        with pytest.raises(LayoutError, match=f"some format checkpoint {problem}"):
            shipped.default_layout(Checkpoint(format="some format", tensors=saved))


@hypothesis.given(NAMES, st.data())
def test_leaves_are_taken_by_name_whatever_characters_it_has(names, data):
    leaves = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    wanted = {name: TargetTensor(name=name, dtype=DTYPE, shape=(2,)) for name in leaves}
    tensors = [StoredTensor(name=name, dtype=DTYPE, shape=(2,)) for name in names]
    layout = loading.layout_of_leaves("path", tensors, wanted)
    moves = matching.moves(layout, tensors, {}, wanted).moves
    assert {names[each.source]: each.target for each in moves} == {
        name: name for name in leaves
    }
    with pytest.raises(errors.OtherModelError, match="path"):
        loading.layout_of_leaves("path", tensors[:-1], {names[-1]: wanted[leaves[0]]})
    kinds = ("first_moment", "parameter")
    of_kinds = [dataclasses.replace(t, kind=kind) for t in tensors for kind in kinds]
    layout = shipped.default_layout(Checkpoint(format="test", tensors=of_kinds))
    made = matching.moves(layout, of_kinds, {}, None)
    assert sorted(made.targets) == sorted(f"{k}/{n}" for k in kinds for n in names)


WEIGHTS = """
version: 1
states:
  parameter: {from: "params/{}", to: "params/{}"}
  first_moment: {from: "opt/0/mu/{}", to: "opt/0/mu/{}"}
rules:
  - {from: {"{name:path}": "..."}, to: {"{name}": "..."}}
  - {from: {"opt/{n}/count": ""}, to: {"opt/{n}/count": ""}, kind: step, optional: true}
"""


def test_weights_are_loaded_from_a_state_without_its_optimizer():
    w, layout = relayout.numbered(2, 3), Layout.parse(WEIGHTS)
    state = {"params/a/w": w, "opt/0/mu/a/w": -w, "opt/0/count": np.int32(3)}
    relayout.assert_same(relayout.relayout(layout, state), state)
    through = Layout(through=(layout, layout))
    for each in (layout, layout.inverse(), through):
        relayout.assert_same(
            relayout.relayout(each.weights(), state), {"params/a/w": w}
        )
