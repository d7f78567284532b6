"""A layout file is read strictly; errors name the file and the path."""

import pytest
import yaml

from elastic_ckpt.universal.rules.layout import (
    CheckpointValue,
    Layout,
    LayoutError,
    Rule,
    State,
    TensorPattern,
)

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
    pad: {pad: 0.001}
    optional: true
    except: "c.*"
    require: {a/kind: gqa}
drop: ["*.x"]
drop_inverse: ["y"]
fill: {step: {value: iteration}, count: 3}
lists: [opt]
tree: items
require: {a/kind: [gqa, 2, null], a/flag: false}
"""
THROUGH = "version: 1\nthrough: untied"


def test_a_file_and_python_values_make_the_same_layout(tmp_path):
    (tmp_path / "full.yml").write_text(FULL)
    layout = Layout.load(tmp_path / "full.yml")
    assert layout == Layout.from_dict(yaml.safe_load(FULL))
    first, second = layout.rules
    assert first.place == f"{tmp_path}/full.yml: rules[0]"
    scaled = {"replicated": ("dp",), "scale": "d ** 0.5"}
    assert first == Rule(
        source=(TensorPattern(name="a.{layer}", dims="x@tp", **scaled),),
        target=(TensorPattern(name="b", dims="layer x", shift=-1, dtype="float32"),),
        states=("parameter",),
    )
    assert second.source == (TensorPattern(name="c", dims="1"),)
    assert (second.pad, second.optional) == ({"pad": 0.001}, True)
    assert (second.excepted, second.require) == (("c.*",), {"a/kind": ("gqa",)})
    value = CheckpointValue(paths=("a/kv", "b"), default=1)
    assert layout.sizes == {"d": 128, "pad": "d", "layer": value}
    assert (layout.widths, layout.ranks) == ({"x": {"tp": (3, 5)}}, {"tp": 2})
    assert layout.states["second_moment"] == State(source="v/{}", target=None)
    assert layout.require == {"a/kind": ("gqa", 2, None), "a/flag": (False,)}
    assert (layout.tree, layout.inverse().tree_inverse) == ("items", "items")
    assert (layout.drop, layout.inverse().drop) == (("*.x",), ("y",))
    assert layout.inverse().inverse() == layout
    (tmp_path / "full.yml").write_text(FULL.replace("drop:", "drops:"))
    for name, problem in (("full.yml", "drops"), ("absent.yml", "cannot be read")):
        with pytest.raises(LayoutError, match=rf"{name}.*{problem}"):
            Layout.load(tmp_path / name)


@pytest.mark.parametrize(
    ("old", "new", "place", "problem"),
    [
        ("drop:", "drops:", "layout: drops", "'drop'"),
        ("scale", "scales", "rules[0].from['a.{layer}'].scales", "'scale'"),
        ("version: 1", "version: 2", "layout: version", "2"),
        ("{c: 1}", "{c: 1, c: 1}", "line 12", "the key 'c' occurs twice"),
        ("{c: 1}", "{c: 1, yes: 1}", "rules[1].from", "`bool`"),
        ("{c: 1}", "{c: yes}", "rules[1].from['c']", "`str`"),
        ("{c: 1}", "c", "rules[1].from", "`str`"),
        ("    to: {c: (1 + pad)}\n", "", "layout: rules[1]", "`to` is missing"),
        ("dims: layer x, ", "", "rules[0].to['b']", "`dims` is missing"),
        ("dims: layer x,", "dims: layer ((x,", "rules[0].to['b']", "expected"),
        ("[3, 5]", "[3, -5]", "widths['x']['tp'][1]", ">= 0"),
        ("{tp: 2}", "{tp: 0}", "ranks['tp']", ">= 1"),
        ('"m/{}"', '"m/"', "states['parameter'].from", "{}"),
        ("[parameter]", "[master]", "rules[0]", "the state 'master'"),
        ("true", "2", "rules[1].optional", "`bool`"),
        ("optional: true", "only: back", "rules[1].only", "forward"),
        ("[3, 5]", "[3, 5", "layout", "not valid YAML"),
        ("false}", "2026-01-01}", "require['a/flag']", "`date`"),
        ("d: 128", "d: 128, e: 1", "layout", "no rule uses the size 'e'"),
        ("tree: items", "tree: a/b", "layout: tree", "_-"),
        (FULL, "", "layout", "`null`"),
        (FULL, "version: 1", "layout", "there are no rules"),
        (FULL, f"{THROUGH}\ndrop: x", "layout", "beside `through` there is no drop"),
        ("drop: [", "through: [untied]\ndrop: [", "layout", "not to both"),
    ],
)
def test_a_mistake_is_named_with_its_place(old, new, place, problem):
    assert old in FULL
    with pytest.raises(LayoutError) as caught:
        Layout.parse(FULL.replace(old, new))
    assert place in str(caught.value)
    assert problem in str(caught.value)
