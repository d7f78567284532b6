"""A layout that does not fit is refused, with the names of tensors and rules."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.universal.rules.layout import Layout, LayoutError
from tests.universal.rules import decoder
from tests.universal.rules.relayout import layout_of_one, numbered, relayout, saved

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
    assert "decoder.yml: rules[3]" in text
    assert (
        "elements that no tensor fills: params/layers/wo (layer 1:2, mlp 0:4)" in text
    )


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
        r"nearest: 'layers\.\{layer\}\.fc.\.weight', decoder.yml: rules", text
    )
    assert "layers.5.fc3" not in text


def test_another_state_does_not_follow_a_scaled_parameter():
    layout = Layout.parse(decoder.TEXT.replace("first_moment:", "momentum:"))
    tensors = [
        dataclasses.replace(each, kind="momentum")
        if each.kind == "first_moment"
        else each
        for each in decoder.tensors()
    ]
    assert "how 'momentum' follows a parameter" in refusal(layout, tensors)


def test_unequal_parts_of_a_dim_need_widths():
    tensors = [saved("w", numbered(n + 1), tp=n) for n in range(2)]
    with pytest.raises(LayoutError, match="dim 0 of 'w'"):
        relayout(layout_of_one({"w": "x@tp"}, {"w": "x"}), tensors, {"tp": 2})
