"""Scaled and shifted values return within one ulp."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.rules.rule import Rule, TensorPattern, side
from tests.universal.rules.relayout import relayout, saved

KINDS = ("parameter", "master", "first_moment", "second_moment")
scales = st.floats(0.01, 100) | st.floats(-100, -0.01)


def layout_of(scale, shift, kind):
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
    layout = layout_of(scale if dtype != "float16" else abs(scale) ** 0.1, 0, kind)
    made = relayout(layout, [saved("w", w, kind)])
    (back,) = relayout(layout.inverse(), [saved("w", made["w"], kind)]).values()
    ulps = np.spacing(np.abs(w)).astype(np.float64)
    difference = back.astype(np.float64) - w.astype(np.float64)
    assert (abs(difference) <= ulps).all()


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1), scales, scales)
def test_shifted_values_return_within_one_ulp_of_the_largest_term(listed, scale, shift):
    w = np.array(listed, np.float32)
    layout = layout_of(scale, shift, "parameter")
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
