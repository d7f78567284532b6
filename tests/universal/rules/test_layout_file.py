"""A layout file is read strictly; errors name the file and the path."""

import pytest
import yaml

from elastic_ckpt.universal.rules.checkpoint_value import CheckpointValue
from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.rules.rule import Rule, TensorPattern, side
from elastic_ckpt.universal.rules.state import State

FULL = """\
version: 1
sizes: {d: 128, pad: d, layer: {value: [a/kv, b], default: 1}}
widths: {x: {tp: [3, 5]}}
ranks: {tp: 2}
states:
  parameter: {from: "m/{}", to: "p/{}"}
  second_moment: {from: "v/{}", to: null}
rules:
  - from: {"a.{layer}": {dims: "x@tp", replicated: [dp], scale: d ** 0.5}}
    to: {"b": {dims: layer x, shift: -1, dtype: float32}}
    states: [parameter]
  - from: {c: 1}
    to: {c: (1 + pad)}
    pad: {pad: 1e-3}
    optional: true
    except: ["c.*"]
    require: {a/kind: gqa}
drop: {from: ["*.x"], to: ["y"]}
fill: {step: {value: iteration}, count: 3}
lists: [opt]
require: {a/kind: [gqa, 2, null], a/flag: false}
"""


def test_a_file_and_python_values_make_the_same_layout(tmp_path):
    path = tmp_path / "full.yml"
    path.write_text(FULL)
    first = Rule(
        source=side(
            {
                "a.{layer}": TensorPattern(
                    name="", dims="x@tp", replicated=("dp",), scale="d ** 0.5"
                )
            }
        ),
        target=(TensorPattern(name="b", dims="layer x", shift=-1, dtype="float32"),),
        states=("parameter",),
    )
    second = Rule(
        source=side({"c": "1"}),
        target=side({"c": "(1 + pad)"}),
        pad={"pad": 0.001},
        optional=True,
        excepted=("c.*",),
        require={"a/kind": ("gqa",)},
    )
    layout = Layout(
        rules=(first, second),
        sizes={
            "d": 128,
            "pad": "d",
            "layer": CheckpointValue(paths=("a/kv", "b"), default=1),
        },
        widths={"x": {"tp": (3, 5)}},
        ranks={"tp": 2},
        states={
            "parameter": State(source="m/{}", target="p/{}"),
            "second_moment": State(source="v/{}", target=None),
        },
        drop=("*.x",),
        drop_inverse=("y",),
        fill={"step": CheckpointValue(paths=("iteration",)), "count": 3},
        lists=("opt",),
        require={"a/kind": ("gqa", 2, None), "a/flag": (False,)},
    )
    assert Layout.load(path) == layout
    assert Layout.load(path).rules[0].place == f"{path}: rules[0]"


def test_the_inverse_of_the_inverse_is_the_layout():
    layout = Layout.parse(FULL)
    assert layout.inverse().drop == ("y",)
    assert layout.inverse().fill_inverse == layout.fill
    assert layout.inverse().require_inverse == layout.require
    assert layout.inverse().inverse() == layout


@pytest.mark.parametrize(
    ("old", "new", "place", "problem"),
    [
        ("drop:", "drops:", "layout: drops", "nearest key is 'drop'"),
        ("optional", "optionel", "layout: rules[1].optionel", "'optional'"),
        ("scale", "scales", "rules[0].from['a.{layer}'].scales", "'scale'"),
        ("version: 1", "version: 2", "layout: version", "version 2 is not known"),
        ("version: 1\n", "", "layout", "`version: 1` is missing"),
        ("{c: 1}", "{c: 1, c: 1}", "line 12", "the key 'c' occurs twice"),
        ("{c: 1}", "{c: 2}", "rules[1].from['c']", "expected a text"),
        ("{c: 1}", "c", "rules[1].from", "expected a mapping"),
        ("    to: {c: (1 + pad)}\n", "", "layout: rules[1]", "`from` and `to`"),
        ("dims: layer x, ", "", "rules[0].to['b']", "`dims` is missing"),
        ("dims: layer x,", "dims: layer ((x,", "rules[0].to['b']", "expected )"),
        ("[3, 5]", "[3, -5]", "widths['x']['tp'][1]", "whole number"),
        ("d: 128", "d: .inf", "layout: sizes['d']", "finite number"),
        ('"m/{}"', '"m/"', "states['parameter'].from", "name of the parameter"),
        ("[parameter]", "[master]", "rules[0]", "the state 'master'"),
        ("true", "2", "rules[1].optional", "true or false"),
        ("float32", "float33", "rules[0].to['b']", "no dtype"),
        ("[dp]", "[tp]", "rules[0].from['a.{layer}']", "cannot be reduced"),
        ("[dp]", "[dp], sum: [ep]", "rules[0].from['a.{layer}']", "choose one"),
        ("d ** 0.5", "d(1)", "rules[0].from['a.{layer}']", "not allowed"),
        ('"a.{layer}"', '"a.{layer"', "rules[0].from['a.{layer']", "brace"),
        ("[3, 5]", "[3, 5", "layout", "not valid YAML"),
        ("default: 1", "defaults: 1", "sizes['layer'].defaults", "'default'"),
        ("false}", "2026-01-01}", "require['a/flag']", "a text, number or flag"),
    ],
)
def test_a_mistake_is_named_with_its_place(old, new, place, problem):
    assert old in FULL
    with pytest.raises(LayoutError) as caught:
        Layout.parse(FULL.replace(old, new))
    assert place in str(caught.value)
    assert problem in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(LayoutError, match=r"none\.yml: this file cannot be read"):
        Layout.load(tmp_path / "none.yml")
    (tmp_path / "empty.yml").write_text("")
    with pytest.raises(LayoutError, match=r"empty\.yml: the layout is empty"):
        Layout.load(tmp_path / "empty.yml")


def test_a_mapping_makes_the_same_layout():
    assert Layout.from_dict(yaml.safe_load(FULL)) == Layout.parse(FULL)
    fields = yaml.safe_load(FULL)
    del fields["version"]
    assert Layout.from_dict(fields) == Layout.parse(FULL)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rule": []}, "mine: rule: unknown key; the nearest key is 'rules'"),
        ({"rules": [{"from": {"a": [1]}, "to": {"b": 1}}]}, r"mine: rules\[0\].from"),
        ({"rules": [object()]}, r"mine: rules\[0\]: expected a mapping"),
        ([1], "mine: expected a mapping"),
        ({"rules": [], 1: 2}, "mine: a key is a text, not 1; quote it"),
        ({"rules": []}, "there are no rules"),
    ],
)
def test_a_mapping_that_is_no_layout_is_one_error_that_names_the_path(fields, message):
    with pytest.raises(LayoutError, match=message):
        Layout.from_dict(fields, name="mine")
