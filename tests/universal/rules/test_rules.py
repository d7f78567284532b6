"""Constructs of the language against NumPy, or what is said of their misuse."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest

from elastic_ckpt.universal.formats import checkpoint
from elastic_ckpt.universal.rules.layout import Layout, LayoutError
from tests.universal.rules.relayout import (
    assert_same,
    layout,
    layout_of_one,
    numbered,
    relayout,
    rule,
    saved,
)


def both_ways(made_by, tensors, expected, **sizes):
    """A layout makes these arrays, with targets and without, and back."""
    assert_same(relayout(made_by, tensors), expected)
    assert_same(relayout(made_by, tensors, targets=expected), expected)
    back = made_by.inverse().with_sizes(sizes)
    assert_same(relayout(back, expected, targets=tensors), tensors)


def test_the_rule_that_matches_fewer_names_counts():
    tensors = {"a.w": numbered(2, 3), "b.w": numbered(2, 3), "norm.w": numbered(5)}
    made_by = layout(
        rule({"{name:path}.w": "i o"}, {"{name}/kernel": "o i"}),
        rule({"norm.w": "n"}, {"norm/scale": "n"}),
    )
    expected = {
        "a/kernel": tensors["a.w"].T,
        "b/kernel": tensors["b.w"].T,
        "norm/scale": tensors["norm.w"],
    }
    both_ways(made_by, tensors, expected)


def test_two_rules_that_match_alike_are_ambiguous_and_both_are_named():
    made_by = layout(
        rule({"{a}.w": "x"}, {"{a}/k": "x"}), rule({"{b}.w": "x"}, {"{b}/l": "x"})
    )
    with pytest.raises(LayoutError, match=r"several rules: q\.w .*\[0\] and .*\[1\]"):
        relayout(made_by, {"q.w": numbered(2)})


def test_one_of_several_texts_is_a_name_or_a_position():
    parts = {f"a.{x}.w": numbered(2, 3, start=n) for n, x in enumerate("qkv")}
    others = {"a.o.w": numbered(5)}
    renamed = layout(
        rule({"a.{x:q|k|v}.w": "i o"}, {"{x}/kernel": "o i"}),
        rule({"a.{x}.w": "n"}, {"{x}": "n"}),
    )
    expected = {f"{x}/kernel": parts[f"a.{x}.w"].T for x in "qkv"}
    both_ways(renamed, {**parts, **others}, {**expected, "o": numbered(5)})
    fused = layout(rule({"a.{x:q|k|v}.w": "i o"}, {"qkv": "i x o"}))
    both_ways(fused, parts, {"qkv": np.stack([*parts.values()], axis=1)})


def test_a_tied_embedding_becomes_an_untied_head_too():
    embedding = numbered(5, 3)
    made_by = layout(
        rule(
            {"embed.w": "vocab d"},
            {"embed": "vocab d", "head": {"dims": "d vocab", "copy": "checked"}},
        )
    )
    expected = {"embed": embedding, "head": embedding.T}
    both_ways(made_by, {"embed.w": embedding}, expected)
    changed = {"embed": embedding, "head": embedding.T + 1}
    with pytest.raises(AssertionError):
        relayout(made_by.inverse(), changed)
    unchecked = Layout.parse(
        json.dumps(
            {
                "version": 1,
                "rules": [
                    rule(
                        {"embed.w": "vocab d"},
                        {
                            "embed": "vocab d",
                            "head": {"dims": "d vocab", "copy": "unchecked"},
                        },
                    )
                ],
            }
        )
    )
    assert_same(relayout(unchecked.inverse(), changed), {"embed.w": embedding})


def test_keys_are_repeated_for_all_heads_and_the_first_is_read_on_the_way_back():
    key = numbered(2 * 3, 5)
    made_by = layout(
        rule(
            {"k": "(kv d) embed"},
            {"k": {"dims": "embed (kv rep d)", "replicated": ["rep"]}},
        ),
        sizes={"rep": 4, "kv": 2},
    )
    expected = np.repeat(key.reshape(2, 1, 3, 5), 4, axis=1)
    expected = expected.transpose(3, 0, 1, 2).reshape(5, -1)
    both_ways(made_by, {"k": key}, {"k": expected})
    differing = expected.copy()
    differing[0, 3] += 1
    assert_same(relayout(made_by.inverse(), {"k": differing}), {"k": key})


@pytest.mark.parametrize("option", ["unchecked", "mean"])
def test_repeated_dims_are_left_or_averaged(option):
    values = numbered(2, 4, 3)
    made_by = layout(
        rule({"w": {"dims": "a rep b", option: ["rep"]}}, {"w": "a b"}),
    )
    expected = values[:, 0] if option == "unchecked" else values.mean(axis=1)
    assert_same(relayout(made_by, {"w": values}), {"w": expected})


def test_sizes_that_one_rule_knows_are_known_in_the_others():
    tensors = {"q": numbered(6, 4), "bias": numbered(6)}
    made_by = layout(
        rule({"q": "(heads d) embed"}, {"q": "heads d embed"}),
        rule({"bias": "(heads d)"}, {"bias": "d heads"}),
        sizes={},
    )
    with pytest.raises(LayoutError, match="sizes of d, heads are not determined"):
        relayout(made_by, tensors)
    targets = {"q": tensors["q"].reshape(2, 3, 4), "bias": numbered(6).reshape(2, 3).T}
    assert_same(relayout(made_by, tensors, targets=targets), targets)
    partly = layout(
        rule({"q": "(heads d) embed"}, {"q": "heads d embed"}, sizes={"heads": 2}),
        rule({"bias": "(heads d)"}, {"bias": "d heads"}),
    )
    assert_same(relayout(partly, tensors), targets)


def test_a_rule_can_hold_in_one_direction():
    made_by = layout(
        rule({"w": "x"}, {"w": {"dims": "x", "scale": 2}}, only="forward"),
        rule({"w": "x"}, {"w": "x"}, only="inverse"),
    )
    assert_same(relayout(made_by, {"w": numbered(3)}), {"w": 2 * numbered(3)})
    assert_same(relayout(made_by.inverse(), {"w": numbered(3)}), {"w": numbered(3)})


def test_a_block_scaled_weight_is_multiplied_by_its_scales():
    weight = numbered(5, 7).astype(ml_dtypes.float8_e4m3fn)
    scales = np.array([[0.5, 2, 4], [8, 1, 3]], np.float32)
    made_by = layout(
        rule(
            {
                "{n}.weight": {
                    "dims": "(ob o)~ (ib i)~",
                    "times": {"{n}.weight_scale_inv": "ob ib"},
                }
            },
            {"{n}/kernel": {"dims": "(ib i)~ (ob o)~", "dtype": "float32"}},
        ),
        sizes={"o": 3, "i": 3},
    )
    whole = np.repeat(np.repeat(scales, 3, axis=0), 3, axis=1)[:5, :7]
    expected = (weight.astype(np.float32) * whole).T
    tensors = {"a.weight": weight, "a.weight_scale_inv": scales}
    assert_same(relayout(made_by, tensors), {"a/kernel": expected})
    plain = {"a.weight": numbered(5, 7)}
    assert_same(relayout(made_by, plain), {"a/kernel": numbered(5, 7).T})
    with pytest.raises(LayoutError, match="made of float8_e4m3fn without scales"):
        relayout(made_by, {"a.weight": weight})
    with pytest.raises(LayoutError, match="made of int8 without scales"):
        relayout(made_by, {"a.weight": weight.astype(np.int8)})


@pytest.mark.parametrize(
    ("required", "fitting", "others"),
    [
        ("silu", ["silu"], [None, "gelu", ["silu"]]),
        ([2, None], [2, 2.0, None, []], [3, "2", {"a": 1}, [2]]),
        (False, [False], [True, None]),
        (None, [None, [], {}], [0, "", {"a": None}, {"a": {"b": 1}}]),
    ],
)
def test_a_layout_requires_values(required, fitting, others):
    made_by = layout(rule({"x": "n"}, {"k": "n"}), require={"config/act": required})
    for value in fitting:
        made_by.with_values(checkpoint.flatten({"config": {"act": value}}))
    for value in others:
        values = checkpoint.flatten({"config": {"act": value}})
        with pytest.raises(LayoutError, match="layout: config/act"):
            made_by.with_values(values)
        with pytest.raises(LayoutError, match=", and has to be "):
            dataclasses.replace(made_by, rules=(), through=(made_by,)).with_values(
                values
            )
        made_by.inverse().with_values(values)


def test_a_rule_requires_values_where_it_is_used():
    made_by = layout(
        rule({"x": "n"}, {"k": "n"}, optional=True, require={"config/act": "silu"}),
        rule({"y": "n"}, {"l": "n"}),
    )
    both = {"x": numbered(3), "y": numbered(2)}
    expected = {"k": both["x"], "l": both["y"]}
    fitting, other = ({"config/act": act} for act in ("silu", "gelu"))
    assert_same(relayout(made_by.with_values(fitting), both), expected)
    for values in (other, {}):
        one = relayout(made_by.with_values(values), {"y": both["y"]})
        assert_same(one, {"l": both["y"]})
        with pytest.raises(LayoutError, match=r"x \(.*rules\[0\]: config/act in the"):
            relayout(made_by.with_values(values), both)
        with pytest.raises(LayoutError, match=r"k \(.*rules\[0\]: config/act in the"):
            relayout(made_by.inverse().with_values(values), expected)


def test_a_rule_does_not_match_names_that_it_excepts():
    made_by = layout(
        rule({"{n:path}": "..."}, {"{n}": "..."}, **{"except": ["add.*", "*.step"]}),
        rule({"add.{n:path}": "x"}, {"{n}.added": "x"}),
    )
    tensors = {"a.b": numbered(2), "add": numbered(1), "add.a": numbered(3)}
    expected = {"a.b": numbered(2), "add": numbered(1), "a.added": numbered(3)}
    both_ways(made_by, tensors, expected)
    with pytest.raises(LayoutError, match=r"in no rule: a\.step"):
        relayout(made_by, {**tensors, "a.step": numbered(1)})


def test_a_tensor_of_optional_rules_that_all_lack_others_is_refused():
    merged = {"dims": "out in", "plus": {"add.{n}.B": "out r", "add.{n}.A": "r in"}}
    made_by = layout(
        rule({"{n}.w": merged}, {"{n}.w": "out in"}, optional=True),
        rule(
            {"add.{n:path}": "...", "{n}": {"dims": "...", "copy": "unchecked"}},
            {"{n}": "..."},
            optional=True,
        ),
        rule(
            {"{n:path}": "..."}, {"{n}": "..."}, optional=True, **{"except": ["add.*"]}
        ),
    )
    weight, b, a = numbered(4, 3), numbered(4, 2), numbered(2, 3)
    tensors = {"x.w": weight, "y.w": weight, "add.x.B": b, "add.x.A": a}
    expected = {"x.w": weight + b @ a, "y.w": weight}
    assert_same(relayout(made_by, tensors), expected)
    saved_whole = {**tensors, "add.y.w": -weight}
    assert_same(relayout(made_by, saved_whole), {**expected, "y.w": -weight})
    for lacking, left_over in (("add.x.B", "add.x.A"), ("y.w", "add.y.w")):
        held = {name: each for name, each in saved_whole.items() if name != lacking}
        with pytest.raises(LayoutError, match=f"all that it needs: {left_over} "):
            relayout(made_by, held)


def test_a_scale_is_rounded_as_a_dtype_has_it():
    made_by = layout(
        rule({"w": "v d"}, {"w": {"dims": "v d", "scale": "bfloat16(d ** 0.5)"}})
    )
    scale = np.float32(ml_dtypes.bfloat16(3**0.5))
    assert_same(relayout(made_by, {"w": numbered(2, 3)}), {"w": numbered(2, 3) * scale})


def test_an_error_about_a_pattern_that_matches_nothing_names_the_nearest_tensor():
    made_by = layout(
        rule({"model.norms.weight": "x"}, {"norm": "x"}),
        rule({"head": "x"}, {"head": "x"}),
    )
    with pytest.raises(LayoutError) as caught:
        relayout(made_by, {"model.norm.weight": numbered(2), "head": numbered(2)})
    text = str(caught.value)
    assert "1 patterns match no tensor" in text
    assert "the nearest is 'model.norm.weight'" in text


@pytest.mark.parametrize(
    ("size", "fits"), [(2, False), (3, True), (4, True), (5, False)]
)
def test_a_size_of_blocks_that_the_scales_contradict_is_refused(size, fits):
    tensors = {
        "w": numbered(7).astype(ml_dtypes.float8_e4m3fn),
        "s": numbered({2: 3, 3: 3, 4: 2, 5: 3}[size]),
    }
    made_by = layout(
        rule({"w": {"dims": "(b i)~", "times": {"s": "b"}}}, {"w": "(b i)~"}),
        sizes={"i": size},
    )
    if fits:
        assert list(relayout(made_by, tensors)) == ["w"]
    else:
        with pytest.raises(LayoutError, match=rf"i={size}|shape"):
            relayout(made_by, tensors)


@pytest.mark.parametrize("size", ["2 * a", "a // 2", "2 ** a", "a * a"])
@pytest.mark.parametrize("names", ["ab", "ba"])
def test_shapes_tell_whether_a_computed_size_is_right(size, names):
    made_by = layout(
        rule({f"w{x}": x for x in names}, {"t": "(a + b)"}, sizes={"b": size})
    )
    right = eval(size, {}, {"a": 8})
    tensors = {"wa": numbered(8), "wb": numbered(right)}
    expected = {"t": np.concatenate([*tensors.values()])}
    assert_same(relayout(made_by, tensors), expected)
    with pytest.raises(LayoutError, match=r"dim 0 of '.*' is \d+, |which is \d"):
        relayout(made_by, {"wa": numbered(8), "wb": numbered(right + 1)})


def sharded(name, values, axis=0, **counts):
    """The parts of `values` along a dim, on the ranks of one axis of the mesh."""
    ((rank_axis, count),) = counts.items()
    parts = np.split(values, count, axis=axis)
    return [saved(name, part, **{rank_axis: n}) for n, part in enumerate(parts)]


def test_a_scalar_is_moved():
    made = relayout(layout_of_one({"step": ""}, {"count": ""}), {"step": np.int32(7)})
    assert_same(made, {"count": np.array(7, np.int32)})


def test_leading_zeros_are_a_number():
    tensors = {f"layer_{n:02}.w": numbered(3, start=n) for n in (0, 7, 10, 100)}
    made = relayout(layout_of_one({"layer_{n:02}.w": "x"}, {"{n}/w": "x"}), tensors)
    assert_same(made, {f"{n}/w": numbered(3, start=n) for n in (0, 7, 10, 100)})


def test_names_that_count_from_1_are_a_dim_and_back():
    tensors = {f"{n + 1}.w": numbered(2, start=10 * n) for n in range(11)}
    layout = layout_of_one({"{l+1}.w": "x"}, {"w": "l x"})
    made = relayout(layout, tensors)
    assert_same(made, {"w": np.stack(list(tensors.values()))})
    assert_same(relayout(layout.inverse(), made), tensors)
    with pytest.raises(LayoutError, match=r"0\.w"):
        relayout(layout, {"0.w": numbered(2), **tensors})


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
    made = relayout(layout_of_one({"w": "x y"}, {"w": "y x"}), {"w": np.ones((0, 3))})
    assert_same(made, {"w": np.ones((3, 0))})


def test_shards_are_named_by_their_rank_in_both_directions():
    w = numbered(6, 2)
    layout = layout_of_one({"{tp}.w": "x@tp y"}, {"{rank}/w": "x y@rank"})
    tensors = {f"{n}.w": part for n, part in enumerate(np.split(w, 3))}
    wanted = {f"{n}/w": part for n, part in enumerate(np.split(w, 2, axis=1))}
    made = relayout(layout, tensors, targets=wanted)
    assert_same(made, wanted)
    assert_same(relayout(layout.inverse(), made, targets=tensors), tensors)


def test_a_padded_dim_is_cut_and_filled():
    w = numbered(6, 2)
    padded = np.concatenate([w[:5], np.full((1, 2), 9, np.float32)])
    layout = layout_of_one(
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
    layout = layout_of_one(
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
    layout = layout_of_one({"w": {"dims": "x@tp", key: ["dp"]}}, {"w": "x"})
    assert_same(relayout(layout, tensors, {"tp": 2, "dp": 3}), {"w": w})


def test_only_the_first_of_unchecked_tensors_is_read():
    tensors = [saved("w", numbered(4, start=n), dp=n) for n in range(3)]
    layout = layout_of_one({"w": {"dims": "x", "unchecked": ["dp"]}}, {"w": "x"})
    assert_same(relayout(layout, tensors, {"dp": 3}), {"w": numbered(4)})


def test_ranks_are_averaged_or_added():
    tensors = [saved("w", numbered(4, start=2 * n), dp=n) for n in range(3)]
    for key, expected in (("mean", numbered(4, start=2)), ("sum", numbered(4) * 3 + 6)):
        layout = layout_of_one({"w": {"dims": "x", key: ["dp"]}}, {"w": "x"})
        assert_same(relayout(layout, tensors, {"dp": 3}), {"w": expected})


def test_a_mean_needs_all_ranks():
    tensors = [saved("w", numbered(4), dp=n) for n in range(2)]
    layout = layout_of_one({"w": {"dims": "x", "mean": ["dp"]}}, {"w": "x"})
    with pytest.raises(LayoutError, match="2 times of 3 over dp"):
        relayout(layout, tensors, {"dp": 3})


def test_a_replicated_capture_is_one_tensor_and_back():
    tensors = {f"zero/{name}/step": np.int64(5) for name in ("a.w", "b.w")}
    layout = layout_of_one(
        {"zero/{name:path}/step": {"dims": "", "replicated": ["name"]}}, {"step": ""}
    )
    made = relayout(layout, tensors)
    assert_same(made, {"step": np.array(5)})
    tensors = {name: np.asarray(value) for name, value in tensors.items()}
    assert_same(relayout(layout.inverse(), made, targets=tensors), tensors)


def test_a_cast_is_to_the_dtype_of_the_rule():
    layout = layout_of_one({"w": "x"}, {"w": {"dims": "x", "dtype": "bfloat16"}})
    made = relayout(layout, {"w": numbered(4)})
    assert made["w"].dtype.name == "bfloat16"
    assert made["w"].astype(np.float32).tolist() == [0, 1, 2, 3]


def test_another_category_of_dtypes_needs_to_be_written():
    layout = layout_of_one({"w": "x"}, {"w": "x"})
    wanted = {"w": np.zeros(4, np.int32)}
    with pytest.raises(LayoutError, match="write `dtype: int32`"):
        relayout(layout, {"w": numbered(4)}, targets=wanted)
    layout = layout_of_one({"w": "x"}, {"w": {"dims": "x", "dtype": "int32"}})
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
    layout = Layout.parse(STATES).weights()
    tensors = [saved("w", numbered(2, 4, 3), kind) for kind in layout.states]
    assert relayout(layout, tensors).keys() == {"p/k"}


def test_a_format_without_kinds_has_states_by_name():
    layout = Layout.parse(STATES)
    tensors = [saved("w", numbered(2, 4, 3), kind) for kind in layout.states]
    made = relayout(layout, tensors)
    back = relayout(layout.inverse().weights(), made)
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


@pytest.mark.parametrize("count", [5, 8, 12])
def test_layers_of_two_kinds_come_back_without_a_tree(count):
    layers = {f"layers.{n}.w": numbered(2, start=10 * n) for n in range(count)}
    made_by = layout(
        rule(
            {"layers.{(block (local + global))~}.w": "x"},
            {"local": "(block local)~ x", "global": "(block global)~ x"},
        ),
        sizes={"local": 3, "global": 1},
    )
    made = relayout(made_by, layers)
    assert_same(relayout(made_by.inverse(), made), layers)
