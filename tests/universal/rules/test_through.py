"""Layouts one after another make what they make one by one."""

import numpy as np
import pytest

from elastic_ckpt.universal.rules.layout import Layout, LayoutError
from tests.universal.rules.relayout import (
    assert_same,
    layout,
    numbered,
    relayout,
    rule,
    saved,
)


def through(*layouts):
    return Layout(rules=(), through=layouts)


FUSED = {"{n}.qkv": "(q + k) x"}
SPLIT = {"{n}/q": "x q", "{n}/k": {"dims": "x k", "scale": 2, "shift": 1}}
SECOND = {"{layer}/{leaf}": {"dims": "...", "shift": 3}}


def test_scales_padding_and_repetitions_go_through_both():
    first = layout(rule(FUSED, SPLIT), sizes={"q": 4})
    stacked = layout(rule(SECOND, {"{leaf}": {"dims": "layer ...", "scale": 5}}))
    tensors = {f"{n}.qkv": numbered(6, 3, start=n) for n in range(2)}
    made = relayout(through(first, stacked), tensors)
    assert_same(made, relayout(stacked, relayout(first, tensors)))
    back = through(stacked.inverse(), first.inverse())
    for name, array in relayout(back, made).items():
        np.testing.assert_allclose(array, tensors[name], atol=1e-6)
    padded = layout(rule({"w": "a b"}, {"w": "(a + more) b"}, pad={"more": 7}))
    padded = padded.with_sizes({"more": 1})
    turned = {"dims": "(b half) (rep a)", "replicated": ["rep"], "scale": 2}
    second = layout(
        rule({"w": "a (b half)"}, {"k": turned}), sizes={"half": 1, "rep": 2}
    )
    tensors = {"w": numbered(2, 3)}
    expected = relayout(second, relayout(padded, tensors))
    assert_same(relayout(through(padded, second), tensors), expected)


KEPT = rule({"s": ""}, {"s": ""})
TURNED = layout(rule({"w": "a b"}, {"w": "(b a)"}), KEPT, sizes={"a": 2})
REGROUPED = layout(rule({"w": "(c d)"}, {"w": "d c"}), KEPT, sizes={"c": 3})
SCALED = layout(rule({"w": {"dims": "c", "times": {"s": ""}}}, {"w": "c"}))
WRONG = Layout.from_dict({"rules": [rule({"v": "x"}, {"w": "x"})]}, name="the first")


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (TURNED, REGROUPED, "both layouts regroup a dim of w, of which w"),
        (TURNED, SCALED, "only the first layout"),
        (WRONG, TURNED, r"the first does not fit(?s:.)* in no rule: [sw]"),
    ],
)
def test_what_cannot_be_one_move_is_refused(first, second, message):
    tensors = {"w": numbered(2, 6), "s": np.float32(2)}
    with pytest.raises(LayoutError, match=message):
        relayout(through(first, second), tensors)


def test_replicas_are_compared_before_another_layout():
    first = layout(rule({"w": {"dims": "a b", "mean": ["dp"]}}, {"w": "a b"}))
    second = layout(rule({"w": "a b"}, {"k": "b a"}))
    tensors = [saved("w", numbered(2, 3, start=2 * dp), dp=dp) for dp in range(2)]
    made = relayout(through(first, second), tensors, {"dp": 2})
    assert_same(made, {"k": np.ascontiguousarray(numbered(2, 3, start=1).T)})


def test_a_file_leads_through_files_and_layouts_that_ship(tmp_path):
    (tmp_path / "first.yml").write_text(
        "version: 1\nrules: [{from: {'{n:path}.w': '...'}, to: {'{n}': '...'}}]\n"
    )
    (tmp_path / "both.yml").write_text(
        "version: 1\nthrough: [first.yml, second.yml]\nsizes: {a: 2}\n"
    )
    (tmp_path / "second.yml").write_text(
        "version: 1\nrules: [{from: {x: (a b)}, to: {y: b a}}]\n"
    )
    made = relayout(Layout.load(tmp_path / "both.yml"), {"x.w": numbered(6)})
    assert_same(made, {"y": numbered(6).reshape(2, 3).T})
    (tmp_path / "second.yml").write_text("version: 1\nthrough: [both.yml]\n")
    with pytest.raises(LayoutError, match=r"both\.yml.*leads through itself"):
        Layout.load(tmp_path / "both.yml")
