"""Layouts are read strictly, and refused where they do not fit, with the place."""

import re

import numpy as np
import pytest
import yaml

from elastic_ckpt.universal.rules import names, sizes
from elastic_ckpt.universal.rules.layout import (
    CheckpointValue,
    Layout,
    LayoutError,
    Rule,
    State,
    TensorPattern,
)
from tests.universal.rules.relayout import layout, relayout, rule, saved

# Rules and keys of a layout, the shapes of tensors (and of targets), the error.
REFUSED = r"""
{"{l}.up": f@tp e} -> {up: l e f}
0.up 2 3 tp=0; 0.up 2 3 tp=1; 0.norm 3 -> up 1 3 4; norm 3
=> 1 checkpoint tensors are .* 0.norm \(.*\n.* target tensors are .*: norm \(nearest

{w: x} -> {k: x} | {w: x} -> {l: x}
w 3 => any tensor that earlier rules left: layout: rules\[1\].from

{"{l}.up": f e} -> {up: l e f}
0.up 2 3; 2.up 2 3 -> up 3 3 2
=> rules\[0\].to\['up'\]: no tensor fills the elements e 0:3, f 0:2, l 1:2

{"{l}.up": f e} -> {up: l e f}
0.up 2 3; 1.up 2 3 -> up 3 3 2
=> dim 0 of 'up' \(layout: rules\[0\].to\['up'\]\) is 3, not 2, given l=2

{"{l}.up": f e} -> {up: l e f}
0.up 2 3; 1.up 5 3 => dim 0 of '[01].up' \(layout: rules\[0\].from\['{l}.up'\]\) is

{w: x} -> {k: x}
w 3; 0.b; 1.b; 2.b; 3.b; 4.b; 5.b; 6.b; 7.b; 8.b
=> 9 checkpoint tensors are not matched by any rule: 0.b(?!.*5.b)

{w: {dims: x, scale: 2}} -> {k: x} | {states: {momentum: {from: "{}", to: "{}"}}}
w 3 kind=momentum => the state 'momentum' changes when its parameter is scaled

{w: (vocab + rows) x} -> {k: vocab x} -> {pad: {rows: 0}, sizes: {rows: vocab // 2}}
w 128 2 => sizes of vocab; .*--size vocab

{"{l}.w": a b} -> {k: l a b}
0.w 2 3; 1.w 200 => '1.w' has shape \[200\], .* 'a b'; put rules for special

{w: (q d + d + d) x} -> {query: (q d) x, k: d x, v: d x} | {sizes: {q: 2}}
w 8 3 => from\['w'\]: .* \(d x\).* its own dim name \(with `sizes: {e: d}`

{"{l}.{e}.w": ff d} -> {"{l}/w": e ff d}
0.0.w 2 3; 0.1.w 2 3; 0.2.w 2 3; 1.0.w 2 3; 1.2.w 2 3
=> ff 0:2; '1.1.w' is missing

{"{n}.a": x, "{n}.b": {dims: x, copy: checked}} -> {"{n}.A": x}
p.a 2; p.b 2; q.a 2 => q.a \(layout: rules\[0\] lacks q.b\)

{"a{(x) (y)}": z} -> {b: x y z}
a0 2 => more than one index; .*{\(stage local\)}

{w: a b} -> {k: a b}
w 2 3 tp=0; w 2 3 tp=1 => multiple values of tp, .*`repl

{w: a@tp b} -> {k: a b}
w 2 3 tp=0; w 1 3 tp=1 => dim 0 of .*w

{w: (heads d) x} -> {k: heads d x}
w 2 3 => of d, heads

{w: a b} -> {k: a}
w 2 3 => 'w' has the coordinates \(a b\), and 'k' .* \(a\); .*`replicated`

{w: a b, v: a b} -> {k: a b}
w 2 3; v 2 3 => two elements have the same coordinates .*`copy: checked`

{w: a b} -> {k: a b}
w 2 3 tp=0; w 2 3 tp=0 => multiple values

{e: v d, head: {dims: (d v), copy: checked}} -> {e: v d}
e 2 3; head 6 => `copy: unchecked`

{e: v d, head: {dims: v d, copy: checked, scale: 2}} -> {e: v d}
e 2 3; head 2 3 => `copy: unchecked`

{w: {dims: a b, times: {s: {dims: "", replicated: [tp]}}}} -> {k: a b}
w 2 3; s tp=0; s tp=1 => `unchecked`

{w: {dims: a b, times: {s: {dims: "", shift: 1}}}} -> {k: a b}
w 2 3 => from\['s'\]: .*`shift`

{w: {dims: a b, times: {s: c}}} -> {k: a b}
w 2 3; s 4 => through

{w: {dims: a b, times: {s: a b/2}}} -> {k: a b}
w 2 3; s 2 3 => dim 1 of 'w' is 3, .* 2 blocks of 2, but dim 1 of 's' is 3

{w: {dims: a b, times: {s: a}}} -> {k: a b}
w 2 3; s 2 uint8 => as: float8_e8m0fnu

{w: {dims: a b, plus: {B: a r, A: r b}}} -> {k: a b}
w 2 3; B 2 1 => the whole checkpoint

{w: {dims: a b, plus: {B: a r, A: r b}}} -> {k: a b}
w 2 3 int8; B 2 1; A 1 3 => meaningless without scales

{w: {dims: a b, as: uint4}} -> {k: a b}
w 2 3 => the same size

{step: ""} -> {"{n:path}/step": {dims: "", replicated: [n]}}
step => the sizes of n; .*`--size n=

{"{l+1}": x} -> {k: l x}
0 3 => rule: 0

{a: a, b: b} -> {t: (a + b)} | {sizes: {b: 2 ** a}}
a 3; b 9 => 9

{w: a@tp b} -> {w: a b} | {ranks: {tp: 3}}
w 1 3 tp=0; w 1 3 tp=1 => `ranks` sets tp to 3, but the checkpoint has 2

{a: x} -> {k: x} | {b: x} -> {k: x}
a 2; b 2 => made more than once: k

{"{n}.w": l x} -> {"{n}/k.{l}": x}
a.w 2 3; b.w 2 3 -> a/k.0 3; a/k.1 3; b/k.0 3 => missing from the target: b/k\.1
"""


def tensor_of(text):
    name, *words = text.split()
    shape = [int(each) for each in words if each.isdecimal()]
    options = dict(each.split("=") for each in words if "=" in each)
    options |= {"tp": int(options["tp"])} if "tp" in options else {}
    dtype = words[-1] if "int" in text else np.float32
    return saved(name, np.zeros(shape, dtype), **options)


@pytest.mark.parametrize("case", REFUSED.strip().split("\n\n"))
def test_what_does_not_fit_is_refused(case):
    made_by, tensors, message = re.split(r"\n(?!=)|\s=> ", case)
    rules, keys = [], {}
    for part in made_by.split(" | "):
        source, *target = map(yaml.safe_load, part.split(" -> "))
        if target:
            rules.append(rule(source, target[0], **dict(*target[1:])))
        else:
            keys |= source
    tensors, *targets = (
        [tensor_of(each) for each in side.split("; ")] for side in tensors.split(" -> ")
    )
    wanted = {each.name: each.values for side in targets for each in side} or None
    with pytest.raises(LayoutError, match=message):
        relayout(
            layout(*rules, **keys), tensors, {"tp": 2} if "tp" in case else {}, wanted
        )


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({"dims": "a b", "replicated": ["tp"], "mean": ["dp"]}, "choose one of"),
        ({"dims": "a b", "mean": ["dp"], "times": {"s": ""}}, "cannot be combined"),
        ({"dims": "a b", "sum": ["dp"], "copy": "checked"}, "cannot be combined"),
        ({"dims": "a b", "mean": ["b"]}, "not over dims"),
        ({"dims": "a b", "unchecked": ["dp", "dp"]}, "listed twice"),
        ({"dims": "a@tp b", "unchecked": ["tp"]}, "cannot also be reduced"),
        ({"dims": "a b", "as": "float33"}, "the nearest is 'float32'"),
        ({"dims": "a b", "scale": "f(a)"}, "not allowed"),
        ("a (b a)", "'a' occurs twice"),
        ("a/2 b", "not /2"),
        ("a@ b", "axis after @"),
        ("a (b + )", r"not \)"),
        ("a (b", "not the end"),
        ("a + b", r"not \+"),
        ("a 2", "not 2"),
    ],
)
def test_a_tensor_that_is_malformed_is_named(tensor, message):
    with pytest.raises(
        LayoutError, match=rf"layout: rules\[0\].from\['w'\]: .*{message}"
    ):
        layout(rule({"w": tensor}, {"k": "a b"}))


MALFORMED = "{ } a{b {} {1} {a}{b} {a:int} {(a,b)} {a+} {a+0} {a-1} {a+1:path}"


@pytest.mark.parametrize("text", MALFORMED.split())
def test_a_malformed_name_is_refused(text):
    with pytest.raises(LayoutError, match=r"capture|brace|expected|number"):
        names.parse(text)


@pytest.mark.parametrize(
    "text",
    ["d.real", "f(d)", "d if d else 1", "'a'", "d +", "[1]", "d and d", "not d",
     "1e999", "1 / 0", "9.0 ** 99999", "(-8) ** 0.5", "1" * 300, "True", "2j",
     "9 ** 9 ** 9 ** 9"],
)  # fmt: skip
def test_other_arithmetic_is_refused(text):
    with pytest.raises(LayoutError):
        sizes.value(text, {"d": 1})


def test_captures_match_names_and_their_skeletons():
    for text, name, numbers, expected in [
        ("l.{n}.w", "l.12.w", {"n"}, ("12",)),
        ("l.{n}.w", "l.x.w", {"n"}, None),
        ("l.{n}.w", "l.012.w", {"n"}, None),
        ("l.{n}.w", "l.x1y.w", (), ("x1y",)),
        ("l.{n}.w", "l.x.y.w", (), None),
        ("l/{n:path}/w", "l/x.1/y/w", (), ("x.1/y",)),
        ("l{n:02}", "l07", (), ("07",)),
        ("l{n:02}", "l7", (), None),
        ("l{n:02}", "l123", (), ("123",)),
        ("fc1{n}", "fc123", {"n"}, ("23",)),
        ("{(a b)}x", "5x", (), ("5",)),
        ("{n + 10:02}.w", "07.w", (), ("07",)),
        ("{n+1}.w", "x.w", (), None),
    ]:
        pattern = names.parse(text)
        match = pattern.regex(numbers).fullmatch(name)
        assert (match and match.groups()) == expected, (text, name)
        if match:
            assert pattern.skeleton(numbers).fullmatch(names.skeleton(name))
    assert names.glob(["*.inv[1]*", "a[*]"]).fullmatch("a.b.inv[1]")
    assert not names.glob(["*.inv[1]*", "a[*]"]).fullmatch("ab")


# Files.

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
        ("tree: items", "tree: ..", "layout: tree", "_-"),
        ("tree: items", "tree: _x", "layout: tree", "_-"),
        (FULL, "", "layout", "`null`"),
        (FULL, "version: 1", "layout", "set either `rules`"),
        (FULL, f"{THROUGH}\ndrop: x", "layout", "drop cannot be used with `through`"),
        ("drop: [", "through: [untied]\ndrop: [", "layout", "but not both"),
    ],
)
def test_a_mistake_is_named_with_its_place(old, new, place, problem):
    assert old in FULL
    with pytest.raises(LayoutError) as caught:
        Layout.parse(FULL.replace(old, new))
    assert place in str(caught.value)
    assert problem in str(caught.value)
