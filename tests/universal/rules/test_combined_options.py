"""Options that meet: every element is used, and none is changed without a word."""

import contextlib
import json

import jax
import ml_dtypes
import numpy as np
import pytest

import elastic_ckpt as ec
from elastic_ckpt.core import errors
from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.rules.layout_error import LayoutError
from tests.universal import safetensors_files
from tests.universal.rules.relayout import assert_same, numbered, relayout, saved

FLOAT8 = ml_dtypes.float8_e4m3fn


def layout(*rules, **keys):
    return Layout.parse(json.dumps({"version": 1, "rules": list(rules), **keys}))


def rule(source, target, **options):
    return {"from": source, "to": target, **options}


def loaded(tmp_path, made_by, tensors, **expected):
    """The leaves of a real load, by their names, of these shapes and dtypes."""
    safetensors_files.write(tmp_path / "model.safetensors", tensors)
    tree = {
        name: jax.ShapeDtypeStruct(shape, dtype)
        for name, (shape, dtype) in expected.items()
    }
    found = ec.universal.load(tmp_path, tree, layout=made_by)
    return {name: np.asarray(values) for name, values in found.items()}


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        ({"{n}.w": "l x"}, {"{n}/k.{l}": "x"}),
        ({"{n}.w": "(p + q) x"}, {"{n}/k.{p}": "x", "{n}/j.{q}": "x"}),
    ],
)
def test_a_tensor_whose_targets_are_not_there_is_not_left_out(source, targets):
    sizes = {"p": 1} if "p" in str(source) else {}
    made_by = layout(rule(source, targets), sizes=sizes)
    tensors = {"a.w": numbered(2, 3), "b.w": numbered(2, 3)}
    every = relayout(made_by, tensors)
    for name in ("b/k", "b/j"):
        some = {each: array for each, array in every.items() if name not in each}
        if len(some) < len(every):
            with pytest.raises(LayoutError, match=r"that the target lacks: b\.w"):
                relayout(made_by, tensors, targets=some)


def test_elements_that_only_missing_ranks_have_are_not_left_out():
    target = {"k.{tp}": {"dims": "(kv rep)@tp d", "replicated": ["rep"]}}
    made_by = layout(
        rule({"w": "kv d"}, target), sizes={"rep": 4, "kv": 2}, ranks={"tp": 4}
    )
    targets = {f"k.{n}": np.zeros((2, 3), np.float32) for n in range(2)}
    with pytest.raises(LayoutError, match=r"not used: w \(3 of 6 elements\)"):
        relayout(made_by, {"w": numbered(2, 3)}, targets=targets)


def test_a_weight_has_several_factors(tmp_path):
    source = {"w": {"dims": "a b", "times": {"s": "a", "g": ""}}}
    made_by = layout(rule(source, {"w": {"dims": "b a", "dtype": "float32"}}))
    tensors = {"w": numbered(2, 3), "s": numbered(2), "g": np.float32(100)}
    expected = (tensors["w"] * tensors["s"][:, None] * 100).T
    assert_same(relayout(made_by, tensors), {"w": np.ascontiguousarray(expected)})
    made = loaded(tmp_path, made_by, tensors, w=((3, 2), np.float32))
    np.testing.assert_array_equal(made["w"], expected)


@pytest.mark.parametrize("at", ["w", "s"])
def test_replicas_that_would_not_be_compared_are_refused(at):
    main, factor = {"dims": "a"}, {"dims": ""}
    {"w": main, "s": factor}[at]["replicated"] = ["tp"]
    made_by = layout(rule({"w": {**main, "times": {"s": factor}}}, {"k": "a"}))
    tensors = [
        saved("w", [1.0], **({"tp": 0} if at == "w" else {})),
        saved("s", 2.0, **({"tp": 0} if at == "s" else {})),
        saved(at, [7.0] if at == "w" else 7.0, tp=1),
    ]
    with pytest.raises(LayoutError, match=rf"'{at}' is there 2 times.* `unchecked`"):
        relayout(made_by, tensors)
    del {"w": main, "s": factor}[at]["replicated"]
    {"w": main, "s": factor}[at]["unchecked"] = ["tp"]
    made_by = layout(rule({"w": {**main, "times": {"s": factor}}}, {"k": "a"}))
    assert relayout(made_by, tensors)["k"] == 2


@pytest.mark.parametrize("option", ["mean", "sum"])
def test_means_and_products_are_not_combined(option):
    for other in ({"times": {"s": ""}}, {"copy": "checked"}):
        with pytest.raises(LayoutError, match=f"`{option}` cannot be combined"):
            layout(rule({"w": {"dims": "a", option: ["dp"], **other}}, {"k": "a"}))


def test_an_unchecked_dim_of_a_target_is_repeated(tmp_path):
    made_by = layout(
        rule({"w": "d"}, {"e{x}": {"dims": "d", "unchecked": ["x"]}}), sizes={"x": 2}
    )
    pair = {"e0": ((2,), np.float32), "e1": ((2,), np.float32)}
    made = loaded(tmp_path, made_by, {"w": numbered(2)}, **pair)
    assert_same(made, dict.fromkeys(pair, numbered(2)))


@pytest.mark.parametrize(
    ("dims", "to", "size", "fits"),
    [("(a t)", "t a", 3, False), ("(a t)", "t a", 4, True), ("(g t h)", "t g h", 4, 1)],
)
def test_halves_of_bytes_stay_together_or_are_refused(tmp_path, dims, to, size, fits):
    numbers = np.arange(24) % 16
    packed = (numbers[::2] | (numbers[1::2] << 4)).astype(np.uint8)
    made_by = layout(
        rule(
            {"w": {"dims": dims, "as": "uint4"}}, {"k": {"dims": to, "dtype": "int32"}}
        ),
        sizes={"t": size, "h": 2} if "h" in dims else {"t": size},
    )
    if not fits:
        with pytest.raises(LayoutError, match=r"w, which becomes k: .* half a byte"):
            relayout(made_by, {"w": packed})
        return
    shape = (-1, size) if "h" not in dims else (-1, size, 2)
    expected = np.moveaxis(numbers.reshape(shape), 1, 0)
    made = loaded(tmp_path, made_by, {"w": packed}, k=(expected.shape, np.int32))
    np.testing.assert_array_equal(made["k"], expected)


@pytest.mark.parametrize(
    ("value", "dtype", "target", "options"),
    [
        (2**40 + 5, "int64", "int32", {}),
        (200, "uint8", "int8", {}),
        (200, "uint8", "uint8", {"scale": 2}),
        (300.0, "float32", "int8", {"dtype": "int8"}),
        (1.5, "float32", "int32", {"dtype": "int32"}),
        (np.nan, "float32", "int64", {"dtype": "int64"}),
        (2.0**63, "float64", "int64", {"dtype": "int64"}),
        (2, "int32", "bool", {"dtype": "bool"}),
        (2**53 + 1, "int64", "int64", {"scale": 1.5}),
        (1e30, "float32", "float16", {}),
        (-1e300, "float64", "float32", {}),
        (500.0, "bfloat16", "float8_e4m3fn", {}),
    ],
)
def test_integers_that_do_not_fit_are_refused(tmp_path, value, dtype, target, options):
    made_by = layout(rule({"w": "a"}, {"k": {"dims": "a", **options}}))
    tensors = {"w": np.array([0, value], dtype)}
    with pytest.raises(errors.CheckpointError, match=r"k: .* is no |cannot be scaled"):
        loaded(tmp_path, made_by, tensors, k=((2,), np.dtype(target)))
    near = {"float16": 65519, "float8_e4m3fn": 448}.get(target, 2)
    tensors = {
        "w": np.array([-np.inf, near] if "float1" in target else [0, near], dtype)
    }
    if target != "bool":
        loaded(tmp_path, made_by, tensors, k=((2,), np.dtype(target)))


def test_sums_of_integers_are_exact_or_refused(tmp_path):
    made_by = layout(rule({"w{r}": {"dims": "a", "sum": ["r"]}}, {"k": "a"}))
    jax.config.update("jax_enable_x64", val=True)
    try:
        tensors = {"w0": np.array([2**53 + 1]), "w1": np.array([2])}
        made = loaded(tmp_path, made_by, tensors, k=((1,), np.int64))
        assert made["k"] == 2**53 + 3
        tensors["w1"] += 2**63 - 3
        with pytest.raises(errors.CheckpointError, match=r"k: \d+ is no int64"):
            loaded(tmp_path, made_by, tensors, k=((1,), np.int64))
    finally:
        jax.config.update("jax_enable_x64", val=False)


@pytest.mark.parametrize("option", ["dtype", "as"])
@pytest.mark.parametrize("dtype", ["O", "str", "f4,f4", "a,,b[[", "V4", "datetime64"])
def test_only_dtypes_of_elements_can_be_written(option, dtype):
    source, target = {"dims": "a"}, {"dims": "a"}
    (source if option == "as" else target)[option] = dtype
    with pytest.raises(LayoutError, match="is no dtype of elements; the nearest is"):
        layout(rule({"w": source}, {"k": target}))


@pytest.mark.parametrize("place", ["layout", "rule"])
def test_a_size_that_is_left_to_the_user_is_given_for_rules_too(place):
    choice = {"sizes": {"x": {"choose": {"1": "one", "2": "two"}}}}
    of_rule, of_layout = (choice, {}) if place == "rule" else ({}, choice)
    made_by = layout(rule({"w": "(x y)"}, {"k": "x y"}, **of_rule), **of_layout)
    with pytest.raises(LayoutError, match="choose 'x'"):
        relayout(made_by, {"w": numbered(4)})
    made = relayout(made_by.with_sizes({"x": 2}), {"w": numbered(4)})
    assert_same(made, {"k": numbered(2, 2)})
    with pytest.raises(LayoutError, match="x cannot be 3"):
        made_by.with_sizes({"x": 3})


@pytest.mark.parametrize("place", ["file", "rule", "option"])
def test_a_size_that_no_rule_uses_is_refused(place):
    rules = rule({"w.{l+1}": "(heads d) x"}, {"k": "l heads d x"})
    match = "no rule uses the size 'haeds'; the nearest name is 'heads'"
    sizes = {"haeds": 2}
    made = {
        "file": lambda: layout(rules, sizes=sizes),
        "rule": lambda: layout({**rules, "sizes": sizes}),
        "option": lambda: layout(rules).with_sizes(sizes),
    }
    with pytest.raises(LayoutError, match=match):
        made[place]()
    for name in ("l", "heads", "d", "x"):
        layout(rules).with_sizes({name: 2})
    layout(rules, sizes={"d": "n ** 2", "n": 2})


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("option", ["replicated", "unchecked"])
def test_heads_that_are_repeated_over_ranks_are_read_once(tp, option):
    source = {"k": {"dims": "(kv rep)@tp d", option: ["rep"]}}
    made_by = layout(rule(source, {"k": "kv d"}), sizes={"rep": 4})
    heads = np.repeat(numbered(2, 3), 4, axis=0)
    tensors = [
        saved("k", part, tp=rank) for rank, part in enumerate(np.split(heads, tp))
    ]
    assert_same(relayout(made_by, tensors, {"tp": tp}), {"k": numbered(2, 3)})
    if tp == 4:
        tensors[1] = saved("k", tensors[1].values + 1, tp=1)
        refused = pytest.raises(AssertionError)
        with refused if option == "replicated" else contextlib.nullcontext():
            relayout(made_by, tensors, {"tp": tp})
