"""Options of rules together, scales, optional rules, and layouts of weights alone."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import elastic_ckpt as ec
from elastic_ckpt.core import errors
from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.rules.rule import Rule, TensorPattern, side
from tests.universal import safetensors_files
from tests.universal.rules.relayout import (
    assert_same,
    layout,
    numbered,
    relayout,
    rule,
    saved,
)


def loaded(tmp_path, made_by, tensors, **expected):
    """The leaves of a real load, by their names, of these shapes and dtypes."""
    safetensors_files.write(tmp_path / "model.safetensors", tensors)
    tree = {
        name: jax.ShapeDtypeStruct(shape, dtype)
        for name, (shape, dtype) in expected.items()
    }
    found = ec.universal.load(tmp_path, tree, layout=made_by)
    return {name: np.asarray(values) for name, values in found.items()}


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        ({"{n}.w": "l x"}, {"{n}/k.{l}": "x"}),
        ({"{n}.w": "(p + q) x"}, {"{n}/k.{p}": "x", "{n}/j.{q}": "x"}),
    ],
)
def test_a_tensor_whose_targets_are_not_there_is_not_left_out(source, targets):
    sizes = {"p": 1} if "p" in str(source) else {}
    made_by = layout(rule(source, targets), sizes=sizes)
    tensors = {"a.w": numbered(2, 3), "b.w": numbered(2, 3)}
    every = relayout(made_by, tensors)
    for name in ("b/k", "b/j"):
        some = {each: array for each, array in every.items() if name not in each}
        if len(some) < len(every):
            with pytest.raises(LayoutError, match=r"that the target lacks: b\.w"):
                relayout(made_by, tensors, targets=some)


def test_elements_that_only_missing_ranks_have_are_not_left_out():
    target = {"k.{tp}": {"dims": "(kv rep)@tp d", "replicated": ["rep"]}}
    made_by = layout(
        rule({"w": "kv d"}, target), sizes={"rep": 4, "kv": 2}, ranks={"tp": 4}
    )
    targets = {f"k.{n}": np.zeros((2, 3), np.float32) for n in range(2)}
    with pytest.raises(LayoutError, match=r"not used: w \(3 of 6 elements\)"):
        relayout(made_by, {"w": numbered(2, 3)}, targets=targets)


def test_a_weight_has_several_factors(tmp_path):
    source = {"w": {"dims": "a b", "times": {"s": "a", "g": ""}}}
    made_by = layout(rule(source, {"w": {"dims": "b a", "dtype": "float32"}}))
    tensors = {"w": numbered(2, 3), "s": numbered(2), "g": np.float32(100)}
    expected = (tensors["w"] * tensors["s"][:, None] * 100).T
    assert_same(relayout(made_by, tensors), {"w": np.ascontiguousarray(expected)})
    made = loaded(tmp_path, made_by, tensors, w=((3, 2), np.float32))
    np.testing.assert_array_equal(made["w"], expected)


@pytest.mark.parametrize("at", ["w", "s"])
def test_replicas_that_would_not_be_compared_are_refused(at):
    main, factor = {"dims": "a"}, {"dims": ""}
    {"w": main, "s": factor}[at]["replicated"] = ["tp"]
    made_by = layout(rule({"w": {**main, "times": {"s": factor}}}, {"k": "a"}))
    tensors = [
        saved("w", [1.0], **({"tp": 0} if at == "w" else {})),
        saved("s", 2.0, **({"tp": 0} if at == "s" else {})),
        saved(at, [7.0] if at == "w" else 7.0, tp=1),
    ]
    with pytest.raises(LayoutError, match=rf"'{at}' is there 2 times.* `unchecked`"):
        relayout(made_by, tensors)
    del {"w": main, "s": factor}[at]["replicated"]
    {"w": main, "s": factor}[at]["unchecked"] = ["tp"]
    made_by = layout(rule({"w": {**main, "times": {"s": factor}}}, {"k": "a"}))
    assert relayout(made_by, tensors)["k"] == 2


@pytest.mark.parametrize("option", ["mean", "sum"])
def test_means_and_products_are_not_combined(option):
    for other in ({"times": {"s": ""}}, {"copy": "checked"}):
        with pytest.raises(LayoutError, match=f"`{option}` cannot be combined"):
            layout(rule({"w": {"dims": "a", option: ["dp"], **other}}, {"k": "a"}))


def test_an_unchecked_dim_of_a_target_is_repeated(tmp_path):
    made_by = layout(
        rule({"w": "d"}, {"e{x}": {"dims": "d", "unchecked": ["x"]}}), sizes={"x": 2}
    )
    pair = {"e0": ((2,), np.float32), "e1": ((2,), np.float32)}
    made = loaded(tmp_path, made_by, {"w": numbered(2)}, **pair)
    assert_same(made, dict.fromkeys(pair, numbered(2)))


@pytest.mark.parametrize(
    ("dims", "to", "size", "fits"),
    [("(a t)", "t a", 3, False), ("(a t)", "t a", 4, True), ("(g t h)", "t g h", 4, 1)],
)
def test_halves_of_bytes_stay_together_or_are_refused(tmp_path, dims, to, size, fits):
    numbers = np.arange(24) % 16
    packed = (numbers[::2] | (numbers[1::2] << 4)).astype(np.uint8)
    made_by = layout(
        rule(
            {"w": {"dims": dims, "as": "uint4"}}, {"k": {"dims": to, "dtype": "int32"}}
        ),
        sizes={"t": size, "h": 2} if "h" in dims else {"t": size},
    )
    if not fits:
        with pytest.raises(LayoutError, match=r"w, which becomes k: .* half a byte"):
            relayout(made_by, {"w": packed})
        return
    shape = (-1, size) if "h" not in dims else (-1, size, 2)
    expected = np.moveaxis(numbers.reshape(shape), 1, 0)
    made = loaded(tmp_path, made_by, {"w": packed}, k=(expected.shape, np.int32))
    np.testing.assert_array_equal(made["k"], expected)


@pytest.mark.parametrize(
    ("value", "dtype", "target", "options"),
    [
        (2**40 + 5, "int64", "int32", {}),
        (200, "uint8", "int8", {}),
        (200, "uint8", "uint8", {"scale": 2}),
        (300.0, "float32", "int8", {"dtype": "int8"}),
        (1.5, "float32", "int32", {"dtype": "int32"}),
        (np.nan, "float32", "int64", {"dtype": "int64"}),
        (2.0**63, "float64", "int64", {"dtype": "int64"}),
        (2, "int32", "bool", {"dtype": "bool"}),
        (2**53 + 1, "int64", "int64", {"scale": 1.5}),
        (1e30, "float32", "float16", {}),
        (-1e300, "float64", "float32", {}),
        (500.0, "bfloat16", "float8_e4m3fn", {}),
    ],
)
def test_integers_that_do_not_fit_are_refused(tmp_path, value, dtype, target, options):
    made_by = layout(rule({"w": "a"}, {"k": {"dims": "a", **options}}))
    tensors = {"w": np.array([0, value], dtype)}
    with pytest.raises(errors.CheckpointError, match=r"k: .* is no |cannot be scaled"):
        loaded(tmp_path, made_by, tensors, k=((2,), np.dtype(target)))
    near = {"float16": 65519, "float8_e4m3fn": 448}.get(target, 2)
    tensors = {
        "w": np.array([-np.inf, near] if "float1" in target else [0, near], dtype)
    }
    if target != "bool":
        loaded(tmp_path, made_by, tensors, k=((2,), np.dtype(target)))


def test_sums_of_integers_are_exact_or_refused(tmp_path):
    made_by = layout(rule({"w{r}": {"dims": "a", "sum": ["r"]}}, {"k": "a"}))
    jax.config.update("jax_enable_x64", val=True)
    try:
        tensors = {"w0": np.array([2**53 + 1]), "w1": np.array([2])}
        made = loaded(tmp_path, made_by, tensors, k=((1,), np.int64))
        assert made["k"] == 2**53 + 3
        tensors["w1"] += 2**63 - 3
        with pytest.raises(errors.CheckpointError, match=r"k: \d+ is no int64"):
            loaded(tmp_path, made_by, tensors, k=((1,), np.int64))
    finally:
        jax.config.update("jax_enable_x64", val=False)


@pytest.mark.parametrize("option", ["dtype", "as"])
@pytest.mark.parametrize("dtype", ["O", "str", "f4,f4", "a,,b[[", "V4", "datetime64"])
def test_only_dtypes_of_elements_can_be_written(option, dtype):
    source, target = {"dims": "a"}, {"dims": "a"}
    (source if option == "as" else target)[option] = dtype
    with pytest.raises(LayoutError, match="is no dtype of elements; the nearest is"):
        layout(rule({"w": source}, {"k": target}))


@pytest.mark.parametrize("place", ["file", "rule", "option"])
def test_a_size_that_no_rule_uses_is_refused(place):
    rules = rule({"w.{l+1}": "(heads d) x"}, {"k": "l heads d x"})
    match = "no rule uses the size 'haeds'; the nearest name is 'heads'"
    sizes = {"haeds": 2}
    made = {
        "file": lambda: layout(rules, sizes=sizes),
        "rule": lambda: layout({**rules, "sizes": sizes}),
        "option": lambda: layout(rules).with_sizes(sizes),
    }
    with pytest.raises(LayoutError, match=match):
        made[place]()
    for name in ("l", "heads", "d", "x"):
        layout(rules).with_sizes({name: 2})
    layout(rules, sizes={"d": "n ** 2", "n": 2})


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("option", ["replicated", "unchecked"])
def test_heads_that_are_repeated_over_ranks_are_read_once(tp, option):
    source = {"k": {"dims": "(kv rep)@tp d", option: ["rep"]}}
    made_by = layout(rule(source, {"k": "kv d"}), sizes={"rep": 4})
    heads = np.repeat(numbered(2, 3), 4, axis=0)
    tensors = [
        saved("k", part, tp=rank) for rank, part in enumerate(np.split(heads, tp))
    ]
    assert_same(relayout(made_by, tensors, {"tp": tp}), {"k": numbered(2, 3)})
    if tp == 4:
        tensors[1] = saved("k", tensors[1].values + 1, tp=1)
        made = relayout(made_by, tensors, {"tp": tp})
        assert_same(made, {"k": numbered(2, 3)})


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


WEIGHTS = """
version: 1
states:
  {weights}: {{from: "{{}}", to: "params/{{}}"}}
  first_moment: {{from: "{{}}", to: "mu/{{}}"}}
rules:
  - from: {{"{{layer}}.w": "x"}}
    to: {{"w": "layer x"}}
  - from: {{"{{name:path}}": {{dims: "", replicated: [name]}}}}
    to: {{"count": ""}}
    kind: step
"""
OF_TWO_LAYERS = [
    saved(f"{layer}.{name}", np.full(3, 10 * layer + power), kind=kind)
    for layer in range(2)
    for power, (name, kind) in enumerate(
        (("w", "master"), ("w", "first_moment"), ("w", "parameter"))
    )
] + [saved(f"{layer}/step", np.int32(7), kind="step") for layer in range(2)]


@pytest.mark.parametrize(("kind", "power"), [("master", 0), ("parameter", 2)])
def test_moments_and_steps_are_dropped(kind, power):
    other = {"master", "parameter"} - {kind}
    tensors = [each for each in OF_TWO_LAYERS if each.kind not in other]
    layout = Layout.parse(WEIGHTS.format(weights=kind)).weights()
    arrays = relayout(layout, tensors)
    assert list(arrays) == ["params/w"]
    np.testing.assert_array_equal(
        arrays["params/w"], [[power] * 3, [10 + power] * 3], strict=False
    )


def test_a_layout_without_weights_is_refused():
    with pytest.raises(LayoutError, match="`parameter` or `master`"):
        Layout.parse(WEIGHTS.format(weights="momentum")).weights()


KINDS = ("parameter", "master", "first_moment", "second_moment")
scales = st.floats(0.01, 100) | st.floats(-100, -0.01)


def scaled_layout(scale, shift, kind):
    text = f"""
version: 1
states: {{{kind}: {{from: "{{}}", to: "{{}}"}}}}
rules: [{{from: {{w: x}}, to: {{w: x}}}}]
"""
    target = TensorPattern(name="", dims="x", scale=scale, shift=shift)
    rules = (Rule(source=side({"w": "x"}), target=side({"w": target})),)
    return Layout(rules=rules, states=Layout.parse(text).states)


@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1),
    scales,
    st.sampled_from(KINDS),
    st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_scaled_values_return_within_one_ulp(listed, scale, kind, dtype):
    # The arithmetic of the oracle is in float64, which is wider than these.
    w = np.array(listed, np.dtype(dtype))
    w = w[abs(w.astype(np.float64)) > 1e-2]
    layout = scaled_layout(scale if dtype != "float16" else abs(scale) ** 0.1, 0, kind)
    made = relayout(layout, [saved("w", w, kind)])
    (back,) = relayout(layout.inverse(), [saved("w", made["w"], kind)]).values()
    ulps = np.spacing(np.abs(w)).astype(np.float64)
    difference = back.astype(np.float64) - w.astype(np.float64)
    assert (abs(difference) <= ulps).all()


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1), scales, scales)
def test_shifted_values_return_within_one_ulp_of_the_largest_term(listed, scale, shift):
    w = np.array(listed, np.float32)
    layout = scaled_layout(scale, shift, "parameter")
    made = relayout(layout, {"w": w})["w"]
    back = relayout(layout.inverse(), {"w": made})["w"]
    # Rounding of the shifted value is undone with it.
    largest = np.maximum(abs(w), abs(made.astype(np.float64) / scale)).astype(
        np.float32
    )
    assert (abs(back.astype(np.float64) - w) <= np.spacing(largest) * 1.0).all()


@given(scales, scales, scales, scales)
def test_both_sides_may_be_scaled(a, b, c, d):
    one = TensorPattern(name="", dims="x", scale=a, shift=b)
    other = TensorPattern(name="", dims="x", scale=c, shift=d)
    rules = (Rule(source=side({"w": one}), target=side({"w": other})),)
    w = np.linspace(-2, 2, 5)
    made = relayout(Layout(rules=rules), {"w": a * w + b})["w"]
    np.testing.assert_allclose(made, c * w + d, rtol=1e-9, atol=1e-9 * abs(c * b / a))
