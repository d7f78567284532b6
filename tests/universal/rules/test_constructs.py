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


def test_a_renamed_tensor_keeps_its_values():
    w = numbered(2, 3)
    made = relayout(rule({"a.w": "x y"}, {"b/w": "x y"}), {"a.w": w})
    assert_same(made, {"b/w": w})


def test_a_transposed_tensor_is_that_of_numpy():
    w = numbered(2, 3, 4)
    made = relayout(rule({"w": "x y z"}, {"w": "z x y"}), {"w": w})
    assert_same(made, {"w": w.transpose(2, 0, 1)})


def test_a_reshaped_tensor_is_that_of_numpy():
    w = numbered(6, 4)
    layout = rule({"w": "(a b) c"}, {"w": "1 a (b c)"}, sizes={"a": 2})
    assert_same(relayout(layout, {"w": w}), {"w": w.reshape(1, 2, 12)})


def test_rotary_halves_are_interleaved():
    w = numbered(3 * 4 * 2, 5)
    layout = rule(
        {"w": "(heads two half) embed"},
        {"w": "embed heads (half two)"},
        sizes={"heads": 3, "two": 2},
    )
    split = w.reshape(3, 2, 4, 5)
    expected = split.transpose(3, 0, 2, 1).reshape(5, 3, 8)
    assert_same(relayout(layout, {"w": w}), {"w": expected})


def test_a_scalar_is_moved():
    made = relayout(rule({"step": ""}, {"count": ""}), {"step": np.int32(7)})
    assert_same(made, {"count": np.array(7, np.int32)})


def test_captures_become_a_dim():
    layers = {f"layers.{n}.w": numbered(2, 3, start=10 * n) for n in range(12)}
    made = relayout(rule({"layers.{l}.w": "x y"}, {"w": "y l x"}), layers)
    assert_same(made, {"w": np.stack([w.T for w in layers.values()], axis=1)})


def test_a_dim_becomes_captures():
    w = numbered(3, 4, 2)
    made = relayout(rule({"w": "x l y"}, {"layers_{l}/w": "y x"}), {"w": w})
    assert_same(made, {f"layers_{n}/w": w[:, n].T for n in range(4)})


def test_a_kept_capture_has_shapes_of_its_value():
    tensors = {"a.w": numbered(2, 3), "b.w": numbered(4, 1), "10.w": numbered(1, 1)}
    made = relayout(rule({"{x}.w": "i o"}, {"{x}/k": "o i"}), tensors)
    assert_same(made, {f"{name[:-2]}/k": w.T for name, w in tensors.items()})


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


def test_names_that_count_from_2_keep_their_number():
    tensors = {f"{n + 2}.w": numbered(3, start=n) for n in (0, 7, 98)}
    layout = rule({"{n+2}.w": "x"}, {"{n:02}/w": "x"})
    made = relayout(layout, tensors)
    assert_same(made, {f"{n:02}/w": numbered(3, start=n) for n in (0, 7, 98)})
    assert_same(relayout(layout.inverse(), made), tensors)


def test_a_product_in_names_that_count_from_1():
    tensors = {f"{n + 1}.w": numbered(2, start=10 * n) for n in range(6)}
    layout = rule({"{(a b)+1}.w": "x"}, {"w": "b x a"}, sizes={"a": 3})
    made = relayout(layout, tensors)
    stacked = np.stack(list(tensors.values())).reshape(3, 2, 2)
    assert_same(made, {"w": stacked.transpose(1, 2, 0)})
    assert_same(relayout(layout.inverse(), made), tensors)


def test_a_stack_of_stages_of_unequal_length():
    layout = rule(
        {"{stage}.{local}.w": "x"},
        {"w": "layer x"},
        index={"layer": {"by": ["stage", "local"], "values": [[0, 3], [1, 2, 4]]}},
    )
    numbers = {"0.0.w": 0, "0.1.w": 3, "1.0.w": 1, "1.1.w": 2, "1.2.w": 4}
    tensors = {name: numbered(2, start=10 * n) for name, n in numbers.items()}
    expected = {"w": np.stack([numbered(2, start=10 * n) for n in range(5)])}
    made = relayout(layout, tensors)
    assert_same(made, expected)
    assert_same(relayout(layout.inverse(), made), tensors)


def test_interleaved_stages_of_ranks():
    tensors = [
        saved(f"{vp}.{local}.w", numbered(2, start=100 * vp + 10 * pp + local), pp=pp)
        for vp in range(2)
        for pp in range(3)
        for local in range(2)
    ]
    made = relayout(rule({"{vp}.{l}.w": "x"}, {"w": "(vp pp l) x"}), tensors, {"pp": 3})
    assert_same(made, {"w": np.stack([each.values for each in tensors])})


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


def test_a_table_serves_only_rules_that_need_it():
    layout = Layout.parse(
        """
version: 1
index: {layer: {by: [local], values: [1, 0]}}
rules:
  - {from: {"{local}.w": "x"}, to: {"w": "layer x"}}
  - {from: {"{layer}.norm": "x"}, to: {"norm_{layer}": "x"}}
"""
    )
    tensors = {
        "0.w": numbered(2),
        "1.w": numbered(2, start=5),
        "0.norm": numbered(2),
        "1.norm": numbered(3),
    }
    expected = {
        "w": np.stack([tensors["1.w"], tensors["0.w"]]),
        "norm_0": numbered(2),
        "norm_1": numbered(3),
    }
    assert_same(relayout(layout, tensors), expected)


def test_ranks_of_the_layout_are_those_of_target_names():
    layout = rule({"w": "x y"}, {"{rank}/w": "x y@rank"})
    w = numbered(3, 4)
    with pytest.raises(LayoutError, match=r"\{rank\} is not known"):
        relayout(layout, {"w": w})
    layout = dataclasses.replace(layout, ranks={"rank": 2})
    assert_same(relayout(layout, {"w": w}), {"0/w": w[:, :2], "1/w": w[:, 2:]})


def test_layers_of_stages_get_consecutive_numbers():
    layout = rule({"{l}.w": "x"}, {"layers_{(pp l)}": "x"})
    tensors = [
        saved(f"{n}.w", numbered(2, start=10 * pp + n), pp=pp)
        for pp in range(2)
        for n in range(3)
    ]
    expected = {f"layers_{n}": each.values for n, each in enumerate(tensors)}
    assert_same(relayout(layout, tensors, {"pp": 2}), expected)


def test_a_scanned_stack_of_each_stage_has_its_width():
    w = numbered(5, 2)
    tensors = [saved("w", w[:3], pp=0), saved("w", w[3:], pp=1)]
    layout = rule(
        {"w": "layer@pp x"}, {"{layer}": "x"}, widths={"layer": {"pp": [3, 2]}}
    )
    expected = {f"{n}": w[n] for n in range(5)}
    assert_same(relayout(layout, tensors, {"pp": 2}), expected)


def test_the_first_and_the_last_stage_have_the_embedding():
    tensors = [saved("w", numbered(3), pp=pp) for pp in (0, 3)]
    layout = rule({"w": {"dims": "x", "replicated": ["pp"]}}, {"w": "x"})
    assert_same(relayout(layout, tensors, {"pp": 4}), {"w": numbered(3)})


def test_layers_of_two_kinds_become_one_stack():
    dense = {f"dense.{n}.w": numbered(2, start=n) for n in range(2)}
    sparse = {f"sparse.{n}.w": numbered(2, start=10 + n) for n in range(3)}
    layout = rule({"dense.{a}.w": "x", "sparse.{b}.w": "x"}, {"w": "(a + b) x"})
    expected = {"w": np.stack([*dense.values(), *sparse.values()])}
    made = relayout(layout, {**sparse, **dense})
    assert_same(made, expected)
    layout = rule(
        {"dense.{a}.w": "x", "sparse.{b}.w": "x"}, {"w": "(a + b) x"}, sizes={"a": 2}
    )
    assert_same(relayout(layout.inverse(), made), {**dense, **sparse})


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


def test_the_number_of_a_layer_is_split_into_stage_and_layer():
    tensors = {f"{n}.w": numbered(2, start=n) for n in range(6)}
    layout = rule({"{(s l)}.w": "x"}, {"{s}/w": "l x"}, sizes={"s": 2})
    made = relayout(layout, tensors)
    stacked = np.stack(list(tensors.values()))
    assert_same(made, {"0/w": stacked[:3], "1/w": stacked[3:]})
    assert_same(relayout(layout.inverse(), made), tensors)


def test_grouped_query_key_value_over_ranks_is_split():
    kv, d, embed = 4, 2, 5
    parts = {
        name: numbered(kv, n, d, embed, start=100 * n)
        for name, n in (("q", 3), ("k", 1), ("v", 1))
    }
    fused = np.concatenate(list(parts.values()), axis=1).reshape(-1, embed)
    made = relayout(
        rule(
            {"{layer}.qkv": "(kv@tp (q + k + v) d) embed"},
            {
                "query": "embed layer (kv q) d",
                "key": "embed layer (kv k) d",
                "value": "embed layer (kv v) d",
            },
            sizes={"kv": kv, "q": 3, "k": 1, "v": 1},
        ),
        sharded("0.qkv", fused, tp=2),
        {"tp": 2},
    )
    names = {"query": "q", "key": "k", "value": "v"}
    expected = {
        name: parts[short].transpose(3, 0, 1, 2).reshape(embed, 1, -1, d)
        for name, short in names.items()
    }
    assert_same(made, expected)


def test_gate_and_up_are_fused_on_each_rank():
    gate, up = numbered(6, 2), numbered(6, 2, start=50)
    halves = zip(np.split(gate, 2), np.split(up, 2), strict=True)
    ranks = [saved("w", np.concatenate(pair), tp=n) for n, pair in enumerate(halves)]
    layout = rule(
        {"w": "(gate@tp + up@tp) x"}, {"0": "x gate", "1": "x up"}, sizes={"up": 6}
    )
    assert_same(relayout(layout, ranks, {"tp": 2}), {"0": gate.T, "1": up.T})


def test_experts_are_local_numbers_of_ranks():
    experts = numbered(4, 2, 3)
    tensors = [
        saved(f"{n % 2}.w", expert, ep=n // 2) for n, expert in enumerate(experts)
    ]
    made = relayout(rule({"{e}.w": "i o"}, {"w": "(ep e) o i"}), tensors, {"ep": 2})
    assert_same(made, {"w": experts.transpose(0, 2, 1)})


def test_fused_experts_are_split_along_a_dim():
    w = numbered(3 * 4, 2)
    made = relayout(rule({"w": "(e x) y"}, {"{e}.w": "x y"}, sizes={"e": 3}), {"w": w})
    assert_same(made, {f"{n}.w": w[4 * n : 4 * n + 4] for n in range(3)})


def test_two_dims_are_sharded_over_two_axes():
    w = numbered(4, 6)
    tensors = [
        saved("w", w[2 * tp : 2 * tp + 2, 2 * ep : 2 * ep + 2], tp=tp, ep=ep)
        for tp in range(2)
        for ep in range(3)
    ]
    made = relayout(rule({"w": "x@tp y@ep"}, {"w": "y x"}), tensors, {"tp": 2, "ep": 3})
    assert_same(made, {"w": w.T})


def test_a_dim_is_sharded_over_two_axes():
    w = numbered(12)
    tensors = [
        saved("w", w[6 * dp + 3 * tp :][:3], tp=tp, dp=dp)
        for dp in range(2)
        for tp in range(2)
    ]
    made = relayout(rule({"w": "x@(dp tp)"}, {"w": "x"}), tensors, {"tp": 2, "dp": 2})
    assert_same(made, {"w": w})


def test_a_product_is_sharded_in_the_middle_of_a_row():
    w = numbered(3, 4, 2)
    layout = rule({"w": "(a b)@tp c"}, {"w": "b c a"}, sizes={"a": 3})
    tensors = sharded("w", w.reshape(12, 2), tp=2)
    assert_same(relayout(layout, tensors, {"tp": 2}), {"w": w.transpose(1, 2, 0)})


def test_a_product_of_shards_is_sharded_again():
    w = numbered(4, 6)
    tensors = [
        saved("w", w[2 * tp : 2 * tp + 2].reshape(-1)[4 * dp :][:4], tp=tp, dp=dp)
        for tp in range(2)
        for dp in range(3)
    ]
    layout = rule({"w": "(a@tp b)@dp"}, {"w": "b a"}, sizes={"a": 4})
    assert_same(relayout(layout, tensors, {"tp": 2, "dp": 3}), {"w": w.T})


def test_a_dim_is_sharded_by_widths():
    w = numbered(8, 2)
    tensors = [saved("w", w[:3], tp=0), saved("w", w[3:], tp=1)]
    layout = rule({"w": "x@tp y"}, {"w": "y x"}, widths={"x": {"tp": [3, 5]}})
    assert_same(relayout(layout, tensors, {"tp": 2}), {"w": w.T})


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
