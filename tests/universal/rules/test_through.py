"""Layouts one after another make what they make one by one."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.rules.layout_error import LayoutError
from tests.universal.rules.relayout import (
    assert_same,
    layout,
    numbered,
    relayout,
    saved,
)
from tests.universal.rules.test_random_layouts import (
    Name,
    arrays_of,
    layout_of,
    sides,
)


def through(*layouts):
    return Layout(rules=(), through=layouts)


@st.composite
def three_sides(draw):
    """The values of all parts, and tensors that have them in three ways."""
    count = draw(st.integers(0, 3))
    names = [Name(name, draw(st.integers(1, 4))) for name in "abcd"[:count]]
    parts = [
        Name(f"p{n}", draw(st.integers(1, 3)))
        for n in range(draw(st.sampled_from([0, 2, 3])))
    ]
    values_of, start = {}, 0
    for kept in ("x", "y2"):
        values_of[kept] = {}
        for part in parts or [None]:
            listed = [*names, *([part] if part else [])]
            shape = [each.size for each in listed]
            array = np.arange(start, start + math.prod(shape), dtype=np.float32)
            key = frozenset(each.name for each in listed)
            values_of[kept][key] = array.reshape(shape), [each.name for each in listed]
            start += array.size
    drawn = [draw(sides(names, parts, axis)) for axis in "rst"]
    return values_of, {each.name: each.size for each in [*names, *parts]}, drawn


@given(three_sides())
def test_two_layouts_make_what_the_second_makes_of_the_first(relation):
    values_of, sizes, (one, two, three) = relation
    # Without the `fill` of the test's layouts.
    first, second = (
        Layout.from_dict({"rules": _rules(sizes, each), "sizes": sizes})
        for each in ([one, two], [two, three])
    )
    a, c = arrays_of(one, values_of), arrays_of(three, values_of)
    ranks = {axis: n for each in two for axis, n in each.axes.items()}
    both = through(_with_ranks(first, ranks), second)
    assert_same(relayout(both, a, targets=c), c)
    back = through(_with_ranks(second.inverse(), ranks), first.inverse())
    assert_same(relayout(back, c, targets=a), a)


def _rules(sizes, both):
    text = layout_of(sizes, both)
    return [
        {
            "from": {each.name: each.dims for each in rule.source},
            "to": {each.name: each.dims for each in rule.target},
        }
        for rule in text.rules
    ]


def _with_ranks(made, ranks):
    return dataclasses.replace(made, ranks=ranks)


LLAMA = layout(
    {
        "from": {"model.{n}.q.weight": "(heads d) embed"},
        "to": {"layers/{n}/q": "embed heads d"},
    },
    {"from": {"model.{n}.norm.weight": "embed"}, "to": {"layers/{n}/norm": "embed"}},
    {
        "from": {"embed.weight": "(vocab + pad) embed"},
        "to": {"embed": "vocab embed"},
        "pad": {"pad": 0},
        "sizes": {"vocab": 5},
    },
    sizes={"heads": 2},
)
STACKED = layout(
    {
        "from": {"layers/{layer}/{leaf:path}": "..."},
        "to": {"layers/{leaf}": "layer ..."},
    },
    {"from": {"{other:path}": "..."}, "to": {"{other}": "..."}},
)


def test_a_models_layout_is_stacked_and_back():
    tensors = {f"model.{n}.q.weight": numbered(6, 4, start=n) for n in range(3)}
    tensors |= {f"model.{n}.norm.weight": numbered(4, start=n) for n in range(3)}
    padded = {**tensors, "embed.weight": numbered(5, 4)}
    both = through(LLAMA, STACKED)
    expected = {
        "layers/q": np.stack(
            [tensors[f"model.{n}.q.weight"].T.reshape(4, 2, 3) for n in range(3)]
        ),
        "layers/norm": np.stack([tensors[f"model.{n}.norm.weight"] for n in range(3)]),
        "embed": numbered(5, 4),
    }
    with_rows = {**padded, "embed.weight": numbered(7, 4)}
    assert_same(relayout(both, with_rows), expected)
    assert_same(relayout(both, with_rows, targets=expected), expected)
    made = relayout(both.inverse(), expected, targets=with_rows)
    with_rows["embed.weight"][5:] = 0
    assert_same(made, with_rows)


def test_arithmetic_and_replicas_of_the_first_stay():
    first = layout(
        {
            "from": {"w": {"dims": "x@tp y", "mean": ["dp"]}},
            "to": {"w": {"dims": "y x", "scale": 3}},
        }
    )
    second = layout(
        {"from": {"w": "y (a b)"}, "to": {"{a}/w": {"dims": "b y", "shift": 1}}},
        sizes={"a": 2},
    )
    tensors = [
        saved("w", numbered(2, 3, start=10 * tp + dp), tp=tp, dp=dp)
        for tp in range(2)
        for dp in range(2)
    ]
    made = relayout(through(first, second), tensors, {"tp": 2, "dp": 2})
    mean = np.concatenate(
        [numbered(2, 3, start=10 * tp) + np.float32(0.5) for tp in range(2)]
    )
    expected = 3 * mean.T.reshape(3, 2, 2) + 1
    assert_same(
        made, {f"{a}/w": np.ascontiguousarray(expected[:, a].T) for a in range(2)}
    )


def test_dims_that_are_regrouped_without_common_factors_are_cut():
    first = layout({"from": {"w": "a b"}, "to": {"w": "(a b)"}})
    second = layout({"from": {"w": "(c d)"}, "to": {"w": "d c"}}, sizes={"c": 4})
    values = numbered(6, 2)
    made = relayout(through(first, second), {"w": values})
    assert_same(made, {"w": values.reshape(4, 3).T})


def test_arithmetic_on_replicas_of_both_layouts_is_refused():
    second = layout({"from": {"w": {"dims": "a b", "mean": ["a"]}}, "to": {"w": "b"}})
    first = layout({"from": {"w": {"dims": "a b", "mean": ["dp"]}}, "to": {"w": "a b"}})
    tensors = [saved("w", numbered(2, 3), dp=dp) for dp in range(2)]
    with pytest.raises(LayoutError, match="write it as one layout"):
        relayout(through(first, second), tensors, {"dp": 2})


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
    (tmp_path / "both.yml").write_text("version: 1\nthrough: [nowhere]\nrules: []\n")
    with pytest.raises(LayoutError, match="`rules`, or layouts"):
        Layout.load(tmp_path / "both.yml")
