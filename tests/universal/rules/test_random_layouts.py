"""Random layouts: from A to B as each element's coordinates define it, and back.

`RANDOM_LAYOUTS=10000` tries as many layouts.
"""

import os

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.universal.rules.layout import Layout, LayoutError
from tests.universal.random_layouts import arrays_of, layout_of, relations, saved_of
from tests.universal.rules.relayout import assert_same, relayout


def many(test):
    """Tries as many examples as the environment asks for."""
    count = os.environ.get("RANDOM_LAYOUTS")
    return hypothesis.settings(max_examples=int(count))(test) if count else test


@many
@given(relations(), st.booleans(), st.data())
def test_tensors_go_from_one_layout_to_another_and_back(relation, ranked, data):
    values_of, sizes, both = relation
    tensors = saved_of(both[0], values_of, sizes, ranked)
    axes = {axis: n for each in both[0] for axis, n in each.axes.items()}
    b = arrays_of(both[1], values_of, sizes)
    # Some sizes are values of the checkpoint, and shapes tell one that is nowhere.
    values = {f"args/{name}": size for name, size in sizes.items()}
    written = {
        name: data.draw(st.sampled_from([size, {"value": ["x", f"args/{name}"]}]))
        for name, size in sizes.items()
    }
    if sizes and data.draw(st.booleans()):
        name = data.draw(st.sampled_from(sorted(sizes)))
        if data.draw(st.booleans()):
            del written[name]
        else:
            del values[f"args/{name}"]
    layout = layout_of(written, both, ranked, fill={"step": {"value": "step"}})
    layout = layout.with_values({**values, "step": 7})
    b["step"] = np.int32(7)
    made = relayout(layout, tensors, axes if ranked else {}, targets=b)
    assert_same(made, b)
    # Names without a rank have all of a dim.
    whole = saved_of(both[0], values_of, sizes, ranked, whole=ranked)
    a = {each.name: each.values for each in whole}
    back = layout.inverse().with_values(values)
    assert_same(relayout(back, made, targets=a), a)
    if ranked:
        back = layout_of(sizes, both, ranked).inverse()
        assert_same(relayout(back, arrays_of(both[1], values_of, sizes)), a)


@many
@given(relations(), st.data())
def test_nothing_is_left_out_without_an_error(relation, data):
    values_of, sizes, both = relation
    a, b = (arrays_of(side, values_of, sizes) for side in both)
    side = data.draw(st.sampled_from([a, b]))
    del side[data.draw(st.sampled_from(sorted(side)))]
    with pytest.raises(LayoutError):
        relayout(layout_of(sizes, both), a, targets=b)


@many
@given(relations("rst"))
def test_two_layouts_make_what_the_second_makes_of_the_first(relation):
    values_of, sizes, (one, two, three) = relation
    ranks = {axis: n for each in two for axis, n in each.axes.items()}
    first = layout_of(sizes, [one, two], ranks=ranks)
    second = layout_of(sizes, [two, three])
    back = layout_of(sizes, [three, two], ranks=ranks), layout_of(sizes, [two, one])
    a, c = (arrays_of(side, values_of, sizes) for side in (one, three))
    for layouts, tensors, targets in (((first, second), a, c), (back, c, a)):
        try:
            made = relayout(Layout(rules=(), through=layouts), tensors, targets=targets)
        except LayoutError as error:
            if "regroup a dim" not in str(error):
                raise
        else:
            assert_same(made, targets)
