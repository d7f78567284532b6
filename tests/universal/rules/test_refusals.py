"""A layout that does not fit is refused, with the names of tensors and rules."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.rules.rule import Rule, TensorPattern, side
from tests.universal.rules import decoder
from tests.universal.rules.relayout import numbered, relayout, saved

LAYOUT = Layout.parse(decoder.TEXT, file="decoder.yml")


def refusal(layout, tensors=None, targets=None):
    with pytest.raises(LayoutError) as caught:
        relayout(
            layout() if callable(layout) else layout,
            list(decoder.tensors()) if tensors is None else tensors,
            decoder.AXES,
            targets=decoder.targets() if targets is None else targets,
        )
    return str(caught.value)


def with_rule(number, *rules):
    """The layout with other rules instead of one."""
    kept = LAYOUT.rules
    return dataclasses.replace(
        LAYOUT, rules=(*kept[:number], *rules, *kept[number + 1 :])
    )


numbers = st.integers(0, len(LAYOUT.rules) - 1)


def test_the_layout_fits_as_it_is():
    relayout(LAYOUT, list(decoder.tensors()), decoder.AXES, targets=decoder.targets())


@given(numbers)
def test_a_removed_rule_leaves_its_tensors_over_on_both_sides(number):
    text = refusal(with_rule(number))
    rule = LAYOUT.rules[number]
    assert rule.source[0].name.replace("{layer}", "0") in text
    assert f"params/{rule.target[0].name}" in text
    assert "nearest" in text


@given(numbers)
def test_a_doubled_rule_is_named_twice(number):
    rule = LAYOUT.rules[number]
    other = dataclasses.replace(rule, place="the other rule")
    text = refusal(with_rule(number, rule, other))
    assert f"{rule.place} and the other rule" in text


@st.composite
def changed_rules(draw):
    """A rule with a change on one side that breaks cover or shapes."""
    number = draw(numbers)
    rule = LAYOUT.rules[number]
    key = draw(st.sampled_from(["source", "target"]))
    listed = list(getattr(rule, key))
    at = draw(st.integers(0, len(listed) - 1))
    pattern = listed[at]
    words = re.findall(r"\w+", pattern.dims)
    word = draw(st.sampled_from([word for word in words if word != "tp"]))
    changes = [
        {"name": pattern.name + "s"},
        {"name": "x" + pattern.name},
        {"dims": re.sub(rf"\b{word}\b", "other", pattern.dims)},
        {"dims": pattern.dims + " 1"},
        {"dims": f"(1 + {pattern.dims.split()[0]}) {pattern.dims}"},
        {"dims": " ".join([*pattern.dims.split(), "more"])},
        {"dims": pattern.dims + " embed"},
        {"dims": re.sub(r"@tp\b", "", pattern.dims) if "@" in pattern.dims else "x"},
        {"replicated": (), "dims": pattern.dims + "  1"},
        {"dims": pattern.dims.replace("layer", "1") if "layer" in words else "1"},
        {"dtype": "int32" if key == "target" else "float33"},
    ]
    listed[at] = dataclasses.replace(pattern, **draw(st.sampled_from(changes)))
    return number, dataclasses.replace(rule, **{key: tuple(listed)})


@given(changed_rules())
def test_a_changed_rule_is_named(changed):
    number, rule = changed
    text = refusal(lambda: with_rule(number, rule))
    names = [pattern.name for pattern in (*rule.source, *rule.target)]
    assert rule.place in text or any(name in text for name in names)
    assert len(text) < 4000


def test_a_replicated_axis_has_to_be_listed():
    rule = LAYOUT.rules[4]
    (norm,) = rule.source
    source = (dataclasses.replace(norm, replicated=()),)
    text = refusal(with_rule(4, dataclasses.replace(rule, source=source)))
    assert "'layers.0.norm.weight' is there for several tp" in text
    assert "list tp in `replicated`" in text


def test_a_missing_layer_is_named():
    tensors = [each for each in decoder.tensors() if each.name != "layers.1.fc2.weight"]
    text = refusal(LAYOUT, tensors)
    assert "decoder.yml, line 17: rules[3]" in text
    assert (
        "elements that no tensor fills: params/layers/wo (layer 1:2, mlp 0:4)" in text
    )


def test_a_missing_rank_is_named():
    tensors = [
        each
        for each in decoder.tensors()
        if (each.name, each.ranks) != ("head.weight", (("tp", 1),))
    ]
    text = refusal(LAYOUT, tensors)
    assert "params/head/kernel (vocab 5:10)" in text


def test_a_last_layer_that_is_missing_contradicts_the_target():
    tensors = [each for each in decoder.tensors() if ".2.fc2." not in each.name]
    text = refusal(LAYOUT, tensors)
    assert "the number of values of {layer}" in text
    assert "rules[3].from['layers.{layer}.fc2.weight'] is 2, not 3" in text


def test_a_tensor_of_a_wrong_shape_is_named_with_its_dims():
    tensors = [
        dataclasses.replace(each, values=numbered(6, 2))
        if ".1.fc2" in each.name
        else each
        for each in decoder.tensors()
    ]
    text = refusal(LAYOUT, tensors)
    assert "dim 0 of 'layers.1.fc2.weight' ('embed mlp@tp') is 6, not 7" in text


def test_tensors_that_no_rule_has_are_listed_with_the_nearest_rule():
    extra = [saved(f"layers.{n}.fc3.weight", numbered(2)) for n in range(9)]
    text = refusal(LAYOUT, [*decoder.tensors(), *extra])
    assert "9 tensors of the checkpoint are in no rule: layers.0.fc3.weight" in text
    assert re.search(
        r"nearest: 'layers\.\{layer\}\.fc.\.weight', decoder.yml, line", text
    )
    assert "layers.5.fc3" not in text


def test_a_target_whose_tensors_are_dropped_is_named_with_the_reason():
    text = refusal(dataclasses.replace(LAYOUT, drop=("head.*",)))
    assert "2 tensors of the target are in no rule: params/head/kernel" in text
    assert "rules[5], whose tensors `drop` lists" in text


def test_an_unused_part_of_a_source_is_named():
    layout = Layout(rules=(Rule(source=side({"w": "l x"}), target=side({"{l}": "x"})),))
    wanted = {name: np.zeros(2, np.float32) for name in ("0", "2")}
    with pytest.raises(LayoutError, match="not used: w \\(2 of 6 elements\\)"):
        relayout(layout, {"w": numbered(3, 2)}, targets=wanted)


def test_ambiguous_sizes_are_named():
    layout = Layout(
        rules=(Rule(source=side({"w": "(a b)"}), target=side({"w": "b a"})),)
    )
    with pytest.raises(LayoutError, match="sizes of a, b are not determined"):
        relayout(layout, {"w": numbered(6)})


def test_unequal_parts_of_a_dim_need_widths():
    layout = Layout(rules=(Rule(source=side({"w": "x@tp"}), target=side({"w": "x"})),))
    tensors = [saved("w", numbered(n + 1), tp=n) for n in range(2)]
    with pytest.raises(LayoutError, match="dim 0 of 'w'"):
        relayout(layout, tensors, {"tp": 2})


def test_ranks_of_the_layout_do_not_contradict_the_checkpoint():
    layout = dataclasses.replace(LAYOUT, ranks={"tp": 4})
    assert "`ranks` has 4 of tp, the checkpoint 2" in refusal(layout)


def test_a_sum_over_a_capture_has_no_inverse():
    source = side({"{n}.w": TensorPattern(name="", dims="x", sum=("n",))})
    layout = Layout(rules=(Rule(source=source, target=side({"w": "x"})),))
    with pytest.raises(LayoutError, match="a sum over n cannot be undone"):
        layout.inverse()


def test_another_state_does_not_follow_a_scaled_parameter():
    layout = Layout.parse(decoder.TEXT.replace("first_moment:", "momentum:"))
    tensors = [
        dataclasses.replace(each, kind="momentum")
        if each.kind == "first_moment"
        else each
        for each in decoder.tensors()
    ]
    assert "how 'momentum' follows a parameter" in refusal(layout, tensors)
