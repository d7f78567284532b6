"""Layouts one after another make what they make one by one."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.universal.rules.layout import Layout, LayoutError
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
    back = through(_with_ranks(second.inverse(), ranks), first.inverse())
    for made_by, tensors, targets in ((both, a, c), (back, c, a)):
        try:
            made = relayout(made_by, tensors, targets=targets)
        except LayoutError as error:
            plain = all(isinstance(n, Name) for each in two for n in each.dims)
            if plain or "regroup dim" not in str(error):
                raise
        else:
            assert_same(made, targets)


def test_a_dim_that_both_layouts_regroup_is_refused():
    turned = layout({"from": {"w": "a b"}, "to": {"w": "(b a)"}}, sizes={"a": 2})
    second = layout({"from": {"w": "(c d)"}, "to": {"w": "d c"}}, sizes={"c": 3})
    match = "w: both layouts of `through` regroup dim 0.*; write them as one"
    with pytest.raises(LayoutError, match=match):
        relayout(through(turned, second), {"w": numbered(2, 6)})


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
    with pytest.raises(LayoutError, match="no layout that ships is named"):
        Layout.load(tmp_path / "both.yml")
