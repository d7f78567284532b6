"""Constructs of the language against NumPy: what each makes, and back."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from elastic_ckpt.universal.rules.layout import Layout, LayoutError
from tests.universal.rules.relayout import (
    assert_same,
    layout,
    layout_of_one,
    numbered,
    relayout,
    rule,
    saved,
)

F8 = np.dtype(ml_dtypes.float8_e4m3fn)
W = numbered(6, 4)


def of(text, pad=(), **sizes):
    """A layout of one rule: `w = a b -> k = b a`."""
    sides = (side.split(", ") for side in text.split(" -> "))
    both = (dict(each.split(" = ") for each in side) for side in sides)
    return layout(rule(*both, pad=dict(pad)), sizes=sizes)


PARTS = {f"a.{x}.w": numbered(2, 3, start=n) for n, x in enumerate("qkv")}
BLOCKS = numbered(2, 3, 5)
LAYERS = {f"layers.{3 * b + n}.w": BLOCKS[b, n] for b in range(2) for n in range(3)}
LAYERS |= {f"layers.{3 * b + 2}.b": -BLOCKS[b, 2] for b in range(2)}
KEY = numbered(6, 5)
REPEATED = np.repeat(KEY.reshape(2, 1, 3, 5), 4, axis=1).transpose(3, 0, 1, 2)
PADDED = np.full((3, 3, 3), -2, np.float32)
PADDED[:, 2, :2] = -1
PADDED[:, :2, :2] = numbered(3, 2, 2)
HEAD = {"e": "v d", "head": {"dims": "d v", "copy": "checked"}}
CASES = {
    "an empty tensor": (
        of("w = x y -> w = y x"),
        {"w": np.ones((0, 3))},
        {"w": np.ones((3, 0))},
    ),
    "dims without names, and braces of a name": (
        of("{n:path}.{{w}} = x ... -> {n}/{{}} = x ..."),
        {"a.b.{w}": W, "c.{w}": numbered(3)},
        {"a.b/{}": W, "c/{}": numbered(3)},
    ),
    "numbers that count from 1, with leading zeros": (
        of("{l+1:02}.w = x -> w = l x"),
        {f"{n + 1:02}.w": -each for n, each in enumerate(numbered(11, 2))},
        {"w": -numbered(11, 2)},
    ),
    "texts as positions": (
        of("a.{x:q|k|v}.w = i o -> qkv = i x o"),
        PARTS,
        {"qkv": np.stack([*PARTS.values()], axis=1)},
    ),
    "repeated heads": (
        layout_of_one(
            {"k": "(kv d) e"}, {"k": {"dims": "e (kv rep d)", "replicated": ["rep"]}}
        ).with_sizes({"rep": 4, "kv": 2}),
        {"k": KEY},
        {"k": REPEATED.reshape(5, -1)},
    ),
    "padding inside of a product": (
        of(
            "w = h d x -> w = (h (d + more)) (x + last)",
            pad={"more": -1, "last": -2},
            more=1,
            last=1,
        ),
        {"w": numbered(3, 2, 2)},
        {"w": PADDED.reshape(9, 3)},
    ),
    "a tied head": (layout_of_one({"e": "v d"}, HEAD), {"e": W}, {"e": W, "head": W.T}),
    "scales and shifts of both sides": (
        layout_of_one(
            {"w": {"dims": "a b", "scale": 4, "shift": 3}},
            {"w": {"dims": "a b", "scale": "bfloat16(b ** 0.5)", "shift": -1}},
        ),
        {"w": 4 * KEY + 3},
        {"w": np.float32(ml_dtypes.bfloat16(5**0.5)) * KEY - 1},
    ),
    "a number that several names share": (
        layout_of_one(
            {"zero/{n:path}/step": {"dims": "", "replicated": ["n"]}}, {"step": ""}
        ),
        {"zero/a.w/step": 5, "zero/b.w/step": 5},
        {"step": 5},
    ),
    "the first rule counts whose `except` has not the name": (
        layout(
            rule({"norm.w": "n"}, {"norm/scale": "n"}),
            rule({"{n:path}.w": "i o"}, {"{n}/k": "o i"}, **{"except": ["add.*"]}),
            rule({"{n:path}": "..."}, {"{n}": "..."}),
        ),
        {"a.w": W, "norm.w": numbered(5), "add.w": W},
        {"a/k": W.T, "norm/scale": numbered(5), "add.w": W},
    ),
    "an object that holds an array alone": (
        of("{n:path} = x y -> p/{n} = y x"),
        {"dense/kernel": W},
        {"p/dense/kernel/value": W.T},
    ),
    "two kinds of layers, one of which lacks a tensor": (
        of(
            "layers.{(block (local + global))}.{n} = x"
            " -> local/{n} = block local x, global/{block}/{n} = global x",
            **{"local": 2, "global": 1},
        ),
        LAYERS,
        {
            "local/w": BLOCKS[:, :2],
            **{f"global/{b}/w": BLOCKS[b, 2:] for b in range(2)},
            **{f"global/{b}/b": -BLOCKS[b, 2:] for b in range(2)},
        },
    ),
    "a size that is computed": (
        of("a = a, b = b -> t = (a + b)", b="2 * a"),
        {"a": numbered(3), "b": numbered(6)},
        {"t": np.concatenate([numbered(3), numbered(6)])},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_construct_makes_what_numpy_makes_and_comes_back(case):
    made_by, tensors, expected = CASES[case]
    tensors, expected = (
        {name: np.array(each, order="C") for name, each in arrays.items()}
        for arrays in (tensors, expected)
    )
    assert_same(relayout(made_by, tensors, targets=expected), expected)
    assert_same(relayout(made_by.inverse(), expected, targets=tensors), tensors)
    if case != "an object that holds an array alone":
        assert_same(relayout(made_by, tensors), expected)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("pp", [1, 2])
def test_stages_and_shards_become_whole_and_an_absent_axis_has_one_rank(tp, pp):
    made_by = layout(
        rule({"{local}.w": "x@tp y"}, {"w/{(pp local)}": "y x"}),
        rule({"norm": {"dims": "y", "replicated": ["pp", "tp"]}}, {"norm": "y"}),
        rule({"{local}.b": {"dims": "y", "unchecked": ["tp"]}}, {"b": "(pp local) y"}),
    )
    layers = numbered(2, 4, 3)
    axes = {axis: n for axis, n in {"tp": tp, "pp": pp}.items() if n > 1}
    tensors = []
    for stage, rank in np.ndindex(pp, tp):
        ranks = {k: v for k, v in {"tp": rank, "pp": stage}.items() if k in axes}
        tensors.append(saved("norm", layers[0, 0], **ranks))
        for local, layer in enumerate(np.split(layers, pp)[stage]):
            tensors.append(saved(f"{local}.w", np.split(layer, tp)[rank], **ranks))
            # Of the others, nothing is read.
            tensors.append(saved(f"{local}.b", layer[0] + 100 * rank, **ranks))
    expected = {f"w/{n}": layer.T for n, layer in enumerate(layers)}
    expected |= {"norm": layers[0, 0], "b": layers[:, 0]}
    assert_same(relayout(made_by, tensors, axes), expected)


def test_stages_of_different_lengths_have_widths():
    rules = (
        rule({"{layer@pp}.w": "x"}, {"w": "layer x"}),
        rule({"{layer@pp}.b": "x"}, {"{layer}/b": "x"}),
    )
    made_by = layout(*rules, widths={"layer": {"pp": [3, 2]}})
    whole = {f"{n}.{x}": numbered(3, start=10 * n) for n in range(5) for x in "wb"}
    tensors = [
        saved(f"{n - 3 * pp}.{x}", whole[f"{n}.{x}"], pp=pp)
        for pp, layers in enumerate((range(3), range(3, 5)))
        for n, x in itertools.product(layers, "wb")
    ]
    expected = {f"{n}/b": whole[f"{n}.b"] for n in range(5)}
    expected["w"] = np.stack([whole[f"{n}.w"] for n in range(5)])
    made = relayout(made_by, tensors, {"pp": 2})
    assert_same(made, expected)
    assert_same(relayout(made_by.inverse(), made), whole)
    with pytest.raises(LayoutError, match=r"number of values of \{layer@pp\} in .* is"):
        relayout(layout(*rules), tensors, {"pp": 2})


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("option", ["replicated", "unchecked"])
def test_heads_that_are_repeated_over_ranks_are_read_once(tp, option):
    source = {"k": {"dims": "(kv rep)@tp d", option: ["rep"]}}
    heads = np.split(np.repeat(numbered(2, 3), 4, axis=0), tp)
    tensors = [saved("k", part, tp=rank) for rank, part in enumerate(heads)]
    made_by = layout(rule(source, {"k": "kv d"}), sizes={"rep": 4})
    made = relayout(made_by, tensors, {"tp": tp})
    assert_same(made, {"k": numbered(2, 3)})


@pytest.mark.parametrize(
    ("option", "dtype", "expected"),
    [
        ("mean", "float32", [3, 4]),
        ("sum", "float32", [9, 12]),
        ("sum", "int64", [3 * 2**53 + 9, 3 * 2**53 + 12]),
        ("unchecked", "float32", [1, 2]),
        ("replicated", "float32", None),
    ],
)
def test_ranks_are_reduced(option, dtype, expected):
    made_by = layout_of_one({"w": {"dims": "x", option: ["dp"]}}, {"w": "x"})
    first = np.array([1, 2], dtype) + (2**53 if dtype == "int64" else 0)
    tensors = [saved("w", first + np.array(2 * n, dtype), dp=n) for n in range(3)]
    if option == "replicated":
        with pytest.raises(AssertionError):
            relayout(made_by, tensors, {"dp": 3})
        return
    made = relayout(made_by, tensors, {"dp": 3})
    assert_same(made, {"w": np.array(expected, dtype)})
    if option != "unchecked":
        with pytest.raises(LayoutError, match="only 2 of 3 over dp"):
            relayout(made_by, tensors[:2], {"dp": 3})


@pytest.mark.parametrize(
    ("dims", "scales", "shape", "sizes"),
    [
        ("out in", "out/3 in/4", (2, 2), {}),
        ("out in", "out/o in/i", (2, 2), {"o": 3, "i": 4}),
        ("out (b i)", "out/3 b", (2, 2), {"i": 4}),
        ("(g three) in", "g in/4", (2, 2), {"three": 3}),
        ("out in", "out/3 1", (2, 1), {}),
        ("out in", "out", (6,), {}),
        ("out in", "", (), {}),
    ],
)
def test_a_weight_is_multiplied_by_scales_of_blocks(dims, scales, shape, sizes):
    # The last block of `in` is cut short where nothing else says that it is whole.
    columns = 8 if "b" in dims else 7
    weight, values = (numbered(6, columns) % 13).astype(F8), numbered(*shape, start=2)
    source = {"{n}.w": {"dims": dims, "times": {"{n}.s": scales}}}
    made_by = layout(rule(source, {"{n}": dims}), sizes=sizes)
    a, b = (*shape, 1, 1)[:2]
    blocks = np.kron(values.reshape(a, b), np.ones((6 // a, 8 // b), np.float32))
    expected = weight.astype(np.float32) * blocks[:, :columns]
    made = relayout(made_by, {"a.w": weight, "a.s": values})
    assert_same(made, {"a": expected.astype(ml_dtypes.bfloat16)})


def test_a_weight_has_several_factors_and_packed_elements():
    source = {"dims": "a (b two)", "as": "uint4", "times": {"s": "a", "g": ""}}
    target = {"k": {"dims": "(b two) a", "dtype": "float32"}}
    made_by = layout(rule({"w": source}, target), sizes={"two": 2})
    packed = np.arange(6, dtype=np.uint8).reshape(2, 3) * 17
    tensors = {"w": packed, "s": np.float32([1, 2]), "g": np.float32(100)}
    whole = np.repeat(np.arange(6).reshape(2, 3), 2, axis=1)
    expected = (whole * [[100], [200]]).T.astype(np.float32)
    assert_same(relayout(made_by, tensors), {"k": expected})


def test_a_weight_without_its_scales_is_read_as_it_is_or_refused():
    source = {"{n}.w": {"dims": "x", "times": {"{n}.s": "x/2"}}}
    made_by = layout_of_one(source, {"{n}": {"dims": "x", "dtype": "float32"}})
    assert_same(relayout(made_by, {"a.w": numbered(4)}), {"a": numbered(4)})
    for dtype in (F8, np.int8):
        with pytest.raises(LayoutError, match="without scales"):
            relayout(made_by, {"a.w": numbered(4).astype(dtype)})


def test_matrices_of_low_rank_are_added_and_the_first_complete_rule_counts():
    low_rank = {"dims": "out r", "scale": "alpha / r"}
    merged = {"dims": "out in", "plus": {"add.{n}.B": low_rank, "add.{n}.A": "r in"}}
    copied = {"add.{n:path}": "...", "{n}": {"dims": "...", "copy": "unchecked"}}
    every = {"{n:path}": "..."}
    made_by = layout(
        rule({"{n}.w": merged}, {"{n}.w": "out in"}, optional=True),
        rule(copied, {"{n}": "..."}, optional=True),
        rule(every, {"{n}": "..."}, optional=True, **{"except": ["add.*"]}),
        sizes={"alpha": 8},
    )
    b, a = numbered(6, 2), numbered(2, 4)
    tensors = {"x.w": W, "y.w": W, "add.x.B": b, "add.x.A": a, "add.y.w": -W}
    assert_same(relayout(made_by, tensors), {"x.w": W + 4 * b @ a, "y.w": -W})
    for lacking, left_over in (("add.x.B", "add.x.A"), ("y.w", "add.y.w")):
        held = {name: each for name, each in tensors.items() if name != lacking}
        with pytest.raises(
            LayoutError,
            match=rf"that lack other tensors: {left_over} .* lacks {lacking}",
        ):
            relayout(made_by, held)


def test_an_optional_rule_is_passed_over_without_its_targets():
    pairs = (("dense", "n"), ("sparse", "n"), ("sparse", "other"))
    made_by = layout(
        *(
            rule(
                {"norm": "x", mlp: "y z"}, {norm: "x", f"a/{mlp}": "y z"}, optional=True
            )
            for mlp, norm in pairs
        )
    )
    for mlp, norm in pairs:
        tensors = {"norm": numbered(6), mlp: W}
        expected = {norm: numbered(6), f"a/{mlp}": W}
        assert_same(relayout(made_by, tensors, targets=expected), expected)
        assert_same(relayout(made_by.inverse(), expected), tensors)


def test_a_rule_holds_in_one_direction():
    made_by = layout(
        rule({"w": "x"}, {"w": {"dims": "x", "scale": 2}}, only="forward"),
        rule({"w": "x"}, {"w": "x"}, only="inverse"),
    )
    assert_same(relayout(made_by, {"w": numbered(3)}), {"w": 2 * numbered(3)})
    assert_same(relayout(made_by.inverse(), {"w": numbered(3)}), {"w": numbered(3)})


def test_a_rule_requires_values_where_it_is_used():
    made_by = layout(
        rule({"x": "n"}, {"k": "n"}, optional=True, require={"config/act": "silu"}),
        rule({"y": "n"}, {"l": "n"}),
    )
    both = {"x": numbered(3), "y": numbered(2)}
    fitting, other = (made_by.with_values({"config/act": x}) for x in ("silu", "gelu"))
    assert_same(relayout(fitting, both), {"k": numbered(3), "l": numbered(2)})
    assert_same(relayout(other, {"y": numbered(2)}), {"l": numbered(2)})
    with pytest.raises(LayoutError, match=r"x \(.*rules\[0\]: config/act in the"):
        relayout(other, both)


def test_states_follow_a_parameter_by_kind_or_by_name():
    kinds = {"parameter": "p", "master": "w", "first_moment": "m", "second_moment": "v"}
    made_by = layout(
        rule({"w": "d x"}, {"k": {"dims": "x d", "scale": 2, "shift": -1}}),
        states={kind: {"from": "{}", "to": f"{at}/{{}}"} for kind, at in kinds.items()},
    )
    flat = W.T.copy()
    expected = {"m/k": flat / 2, "v/k": flat / 4}
    expected |= {f"{at}/k": 2 * flat - 1 for at in "pw"}
    tensors = [saved("w", W, kind) for kind in kinds]
    assert_same(relayout(made_by, tensors), expected)
    weights = made_by.weights()
    made = relayout(weights, tensors)
    assert made.keys() == {"p/k"}
    assert_same(relayout(weights.inverse(), made), {"w": W})
    states = {
        "parameter": {"from": "m/{}", "to": "{}"},
        "first_moment": {"from": "v/{}", "to": None},
    }
    dropped = layout(rule({"w": "d x"}, {"k": "x d"}), states=states, drop=["*.inv"])
    arrays = {"m/w": W, "v/w": W, "rope.inv": numbered(2)}
    assert_same(relayout(dropped, arrays), {"k": flat})


def test_a_dtype_is_that_of_the_rule_or_of_the_source():
    made_by = layout_of_one({"w": "a b"}, {"w": {"dims": "a b", "dtype": "int32"}})
    wanted = {"w": W.astype(np.int32)}
    assert_same(relayout(made_by, {"w": W}), wanted)
    assert_same(relayout(made_by, {"w": W}, targets=wanted), wanted)
    plain = layout_of_one({"w": "a b"}, {"w": "a b"})
    half = {"w": W.astype(ml_dtypes.bfloat16)}
    assert_same(relayout(plain, {"w": W}, targets=half), half)
    with pytest.raises(LayoutError, match="set `dtype: int32`"):
        relayout(plain, {"w": W}, targets=wanted)


# Names that have the rank.

STAGES = rule({"stage{pp}.layers.{layer@pp}.up": "ff embed"}, {"up": "layer embed ff"})
SHARDS = rule({"embedding.rank_{tp:02}": "vocab@tp embed"}, {"embed": "vocab embed"})
UP = {"up": numbered(9, 2, 3)}
EMBED = {"embed": numbered(8, 3)}


def stages(*widths):
    """The tensors of stages that have so many layers."""
    layers = iter(UP["up"])
    return {
        f"stage{pp}.layers.{layer}.up": next(layers).T
        for pp, width in enumerate(widths)
        for layer in range(width)
    }


def shards(count):
    parts = np.split(EMBED["embed"], count)
    return {f"embedding.rank_{tp:02}": part for tp, part in enumerate(parts)}


@pytest.mark.parametrize("has_tree", [False, True])
@pytest.mark.parametrize(
    ("keys", "widths"),
    [
        ({"ranks": {"pp": 3}}, (3, 3, 3)),
        ({"ranks": {"pp": 3}, "widths": {"layer": {"pp": [3, 4, 2]}}}, (3, 4, 2)),
        ({"widths": {"layer": {"pp": [3, 4, 2]}}}, (3, 4, 2)),
        ({"ranks": {"pp": 1}}, (9,)),
    ],
)
def test_each_rank_has_its_own_number_of_names(keys, widths, has_tree):
    made_by, tensors = layout(STAGES, **keys), stages(*widths)
    assert_same(relayout(made_by, tensors), UP)
    tree = tensors if has_tree else None
    assert_same(relayout(made_by.inverse(), UP, targets=tree), tensors)


@pytest.mark.parametrize("count", [1, 4])
def test_the_number_of_ranks_comes_from_the_layout_a_checkpoint_or_a_tree(count):
    tensors, ranks = shards(count), {"tp": count}
    assert_same(relayout(layout(SHARDS), tensors), EMBED)
    back = layout(SHARDS).inverse()
    assert_same(relayout(layout(SHARDS, ranks=ranks).inverse(), EMBED), tensors)
    assert_same(relayout(back, EMBED, ranks), tensors)
    assert_same(relayout(back, EMBED, targets=tensors), tensors)
    parts = enumerate(np.split(EMBED["embed"], count))
    many = [saved("w", part, tp=tp) for tp, part in parts]
    to_names = layout_of_one({"w": "v@tp e"}, {"embedding.rank_{tp:02}": "v@tp e"})
    assert_same(relayout(to_names, many, ranks), tensors)
    # A checkpoint may leave out an axis of one rank.
    assert_same(relayout(to_names, {"w": EMBED["embed"]}), shards(1))


def test_replicas_have_the_ranks_of_the_layout():
    replicas = rule({"{tp}.norm": {"dims": "d", "replicated": ["tp"]}}, {"norm": "d"})
    norm = numbered(3)
    made = relayout(layout(replicas, ranks={"tp": 2}).inverse(), {"norm": norm})
    assert_same(made, {"0.norm": norm, "1.norm": norm})
    with pytest.raises(LayoutError, match="sizes of tp"):
        relayout(layout(replicas).inverse(), {"norm": norm})


@pytest.mark.parametrize(
    ("made_by", "tensors", "message"),
    [
        (layout(STAGES).inverse(), UP, r"number of ranks of pp; .*`ranks: {pp: N}`"),
        (
            layout(SHARDS, ranks={"tp": 2}),
            shards(4),
            r"rules\[0\]: names have 4 ranks of tp, .* 2;",
        ),
        (
            layout(STAGES, widths={"layer": {"pp": [4, 5]}}),
            stages(3, 4, 2),
            "`widths` of layer has 2 entries for pp, but there are 3 ranks",
        ),
        (
            layout(STAGES, ranks={"pp": 2}).inverse(),
            UP,
            "9 elements cannot be split into 2 equal parts; set `widths`",
        ),
    ],
)
def test_a_number_of_ranks_that_is_missing_or_wrong_is_named(made_by, tensors, message):
    with pytest.raises(LayoutError, match=message):
        relayout(made_by, tensors)


# Layouts one after another.


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
        (TURNED, REGROUPED, "both layouts regroup a dim of w, which w is made from"),
        (TURNED, SCALED, "only the first layout"),
        (WRONG, TURNED, r"the first does not match(?s:.)* by any rule: [sw]"),
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
    with pytest.raises(LayoutError, match=r"both\.yml.*includes itself"):
        Layout.load(tmp_path / "both.yml")
