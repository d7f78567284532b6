"""Each construct of the language, against the same written with NumPy."""

import dataclasses
import json

import numpy as np
import pytest

from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.rules.layout_error import LayoutError
from tests.universal.rules.relayout import assert_same, numbered, relayout, saved


def rule(source, target, **options):
    written = json.dumps({"from": source, "to": target, **options})
    return Layout.parse(f"version: 1\nrules: [{written}]")


def sharded(name, values, axis=0, **counts):
    """The parts of `values` along a dim, on the ranks of one axis of the mesh."""
    ((rank_axis, count),) = counts.items()
    parts = np.split(values, count, axis=axis)
    return [saved(name, part, **{rank_axis: n}) for n, part in enumerate(parts)]


def test_a_scalar_is_moved():
    made = relayout(rule({"step": ""}, {"count": ""}), {"step": np.int32(7)})
    assert_same(made, {"count": np.array(7, np.int32)})


def test_leading_zeros_are_a_number():
    tensors = {f"layer_{n:02}.w": numbered(3, start=n) for n in (0, 7, 10, 100)}
    made = relayout(rule({"layer_{n:02}.w": "x"}, {"{n}/w": "x"}), tensors)
    assert_same(made, {f"{n}/w": numbered(3, start=n) for n in (0, 7, 10, 100)})


def test_names_that_count_from_1_are_a_dim_and_back():
    tensors = {f"{n + 1}.w": numbered(2, start=10 * n) for n in range(11)}
    layout = rule({"{l+1}.w": "x"}, {"w": "l x"})
    made = relayout(layout, tensors)
    assert_same(made, {"w": np.stack(list(tensors.values()))})
    assert_same(relayout(layout.inverse(), made), tensors)
    with pytest.raises(LayoutError, match=r"0\.w"):
        relayout(layout, {"0.w": numbered(2), **tensors})


def test_stages_of_unequal_length_on_ranks():
    layout = rule(
        {"{local}.w": "x"},
        {"{layer}/w": "x"},
        index={"layer": {"by": ["pp", "local"], "values": [[0, 1, 2], [3, 4]]}},
    )
    stages = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    tensors = [
        saved(f"{local}.w", numbered(2, start=10 * layer), pp=pp)
        for layer, (pp, local) in enumerate(stages)
    ]
    expected = {f"{n}/w": numbered(2, start=10 * n) for n in range(5)}
    assert_same(relayout(layout, tensors, {"pp": 2}), expected)


def test_ranks_of_the_layout_are_those_of_target_names():
    layout = rule({"w": "x y"}, {"{rank}/w": "x y@rank"})
    w = numbered(3, 4)
    with pytest.raises(LayoutError, match=r"\{rank\} is not known"):
        relayout(layout, {"w": w})
    layout = dataclasses.replace(layout, ranks={"rank": 2})
    assert_same(relayout(layout, {"w": w}), {"0/w": w[:, :2], "1/w": w[:, 2:]})


def test_a_scanned_stack_of_each_stage_has_its_width():
    w = numbered(5, 2)
    tensors = [saved("w", w[:3], pp=0), saved("w", w[3:], pp=1)]
    layout = rule(
        {"w": "layer@pp x"}, {"{layer}": "x"}, widths={"layer": {"pp": [3, 2]}}
    )
    expected = {f"{n}": w[n] for n in range(5)}
    assert_same(relayout(layout, tensors, {"pp": 2}), expected)


def test_two_rules_that_make_one_tensor_are_refused():
    layout = Layout.parse(
        """
version: 1
rules: [{from: {a: x}, to: {k: x}}, {from: {b: x}, to: {k: x}}]
"""
    )
    tensors = {"a": numbered(2), "b": numbered(2)}
    with pytest.raises(LayoutError, match="k is made by another rule too"):
        relayout(layout, tensors)
    with pytest.raises(LayoutError, match="tensors are in several rules: k"):
        relayout(layout, tensors, targets={"k": numbered(2)})


def test_a_tensor_without_elements_has_no_moves():
    made = relayout(rule({"w": "x y"}, {"w": "y x"}), {"w": np.ones((0, 3))})
    assert_same(made, {"w": np.ones((3, 0))})


def test_a_dim_is_sharded_over_two_axes():
    w = numbered(12)
    tensors = [
        saved("w", w[6 * dp + 3 * tp :][:3], tp=tp, dp=dp)
        for dp in range(2)
        for tp in range(2)
    ]
    made = relayout(rule({"w": "x@(dp tp)"}, {"w": "x"}), tensors, {"tp": 2, "dp": 2})
    assert_same(made, {"w": w})


def test_shards_are_named_by_their_rank_in_both_directions():
    w = numbered(6, 2)
    layout = rule({"{tp}.w": "x@tp y"}, {"{rank}/w": "x y@rank"})
    tensors = {f"{n}.w": part for n, part in enumerate(np.split(w, 3))}
    wanted = {f"{n}/w": part for n, part in enumerate(np.split(w, 2, axis=1))}
    made = relayout(layout, tensors, targets=wanted)
    assert_same(made, wanted)
    assert_same(relayout(layout.inverse(), made, targets=tensors), tensors)


def test_a_padded_dim_is_cut_and_filled():
    w = numbered(6, 2)
    padded = np.concatenate([w[:5], np.full((1, 2), 9, np.float32)])
    layout = rule(
        {"w": "(vocab + rows)@tp x"},
        {"w": "x vocab"},
        pad={"rows": 9},
        sizes={"vocab": 5, "rows": 1},
    )
    made = relayout(layout, sharded("w", padded, tp=2), {"tp": 2})
    assert_same(made, {"w": w[:5].T})
    assert_same(relayout(layout.inverse(), made), {"w": padded})


def test_padding_inside_of_a_product_is_filled():
    w = numbered(3, 2, 2)
    layout = rule(
        {"w": "h d x"},
        {"w": "(h (d + more)) (x + last)"},
        pad={"more": -1, "last": -2},
        sizes={"more": 1, "last": 1},
    )
    made = relayout(layout, {"w": w})["w"].reshape(3, 3, 3)
    assert (made[:, :2, :2] == w).all()
    assert (made[:, 2, :2] == -1).all()
    assert (made[:, :2, 2] == -2).all()


@pytest.mark.parametrize("key", ["replicated", "unchecked"])
def test_a_replicated_tensor_is_taken_once(key):
    w = numbered(4)
    tensors = [
        saved("w", part, tp=tp, dp=dp)
        for tp, part in enumerate(np.split(w, 2))
        for dp in range(3)
    ]
    layout = rule({"w": {"dims": "x@tp", key: ["dp"]}}, {"w": "x"})
    assert_same(relayout(layout, tensors, {"tp": 2, "dp": 3}), {"w": w})


def test_only_the_first_of_unchecked_tensors_is_read():
    tensors = [saved("w", numbered(4, start=n), dp=n) for n in range(3)]
    layout = rule({"w": {"dims": "x", "unchecked": ["dp"]}}, {"w": "x"})
    assert_same(relayout(layout, tensors, {"dp": 3}), {"w": numbered(4)})


def test_ranks_are_averaged_or_added():
    tensors = [saved("w", numbered(4, start=2 * n), dp=n) for n in range(3)]
    for key, expected in (("mean", numbered(4, start=2)), ("sum", numbered(4) * 3 + 6)):
        layout = rule({"w": {"dims": "x", key: ["dp"]}}, {"w": "x"})
        assert_same(relayout(layout, tensors, {"dp": 3}), {"w": expected})


def test_a_mean_needs_all_ranks():
    tensors = [saved("w", numbered(4), dp=n) for n in range(2)]
    layout = rule({"w": {"dims": "x", "mean": ["dp"]}}, {"w": "x"})
    with pytest.raises(LayoutError, match="2 times of 3 over dp"):
        relayout(layout, tensors, {"dp": 3})


def test_a_replicated_capture_is_one_tensor_and_back():
    tensors = {f"zero/{name}/step": np.int64(5) for name in ("a.w", "b.w")}
    layout = rule(
        {"zero/{name:path}/step": {"dims": "", "replicated": ["name"]}}, {"step": ""}
    )
    made = relayout(layout, tensors)
    assert_same(made, {"step": np.array(5)})
    tensors = {name: np.asarray(value) for name, value in tensors.items()}
    assert_same(relayout(layout.inverse(), made, targets=tensors), tensors)


def test_a_cast_is_to_the_dtype_of_the_rule():
    layout = rule({"w": "x"}, {"w": {"dims": "x", "dtype": "bfloat16"}})
    made = relayout(layout, {"w": numbered(4)})
    assert made["w"].dtype.name == "bfloat16"
    assert made["w"].astype(np.float32).tolist() == [0, 1, 2, 3]


def test_another_category_of_dtypes_needs_to_be_written():
    layout = rule({"w": "x"}, {"w": "x"})
    wanted = {"w": np.zeros(4, np.int32)}
    with pytest.raises(LayoutError, match="write `dtype: int32`"):
        relayout(layout, {"w": numbered(4)}, targets=wanted)
    layout = rule({"w": "x"}, {"w": {"dims": "x", "dtype": "int32"}})
    made = relayout(layout, {"w": numbered(4)}, targets=wanted)
    assert_same(made, {"w": np.arange(4, dtype=np.int32)})


STATES = """
version: 1
states:
  parameter: {from: "{}", to: "p/{}"}
  master: {from: "{}", to: "w/{}"}
  first_moment: {from: "{}", to: "m/{}"}
  second_moment: {from: "{}", to: "v/{}"}
rules:
  - from: {"w": "heads d x"}
    to: {"k": {dims: "x (heads d)", scale: "d ** 0.5", shift: -1}}
    sizes: {d: 4}
"""


def test_moments_follow_a_scaled_and_shifted_parameter():
    w = numbered(2, 4, 3)
    kinds = {"parameter": "p", "master": "w", "first_moment": "m", "second_moment": "v"}
    layout = Layout.parse(STATES)
    tensors = [saved("w", w, kind) for kind in kinds]
    flat = w.reshape(8, 3).T
    expected = {
        "p/k": flat * 2 - 1,
        "w/k": flat * 2 - 1,
        "m/k": flat / 2,
        "v/k": flat / 4,
    }
    assert_same(relayout(layout, tensors), expected)


def test_states_without_target_are_dropped():
    layout = Layout.parse(STATES).only(["parameter"])
    tensors = [saved("w", numbered(2, 4, 3), kind) for kind in layout.states]
    assert relayout(layout, tensors).keys() == {"p/k"}


def test_a_format_without_kinds_has_states_by_name():
    layout = Layout.parse(STATES)
    tensors = [saved("w", numbered(2, 4, 3), kind) for kind in layout.states]
    made = relayout(layout, tensors)
    back = relayout(layout.inverse().only(["master"]), made)
    assert_same(back, {"w": numbered(2, 4, 3)})


def test_an_optional_rule_may_match_nothing():
    layout = Layout.parse(
        """
version: 1
rules:
  - {from: {"w": "x"}, to: {"k": "x"}}
  - {from: {"b": "x"}, to: {"bias": "x"}, optional: true}
"""
    )
    w = numbered(2)
    assert_same(relayout(layout, {"w": w}), {"k": w})
    assert_same(relayout(layout, {"w": w, "b": w}), {"k": w, "bias": w})


def test_dropped_tensors_are_not_used():
    layout = Layout.parse(
        """
version: 1
rules: [{from: {"w": "x"}, to: {"k": "x"}}]
drop: ["*.inv_freq"]
"""
    )
    w = numbered(2)
    assert_same(relayout(layout, {"w": w, "rope.inv_freq": w}), {"k": w})
