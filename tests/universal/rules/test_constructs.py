"""Each construct of the language, against the same written with NumPy."""

import json

import numpy as np

from elastic_ckpt.universal.rules.layout import Layout
from tests.universal.rules.relayout import assert_same, numbered, relayout, saved


def rule(source, target, **options):
    written = json.dumps({"from": source, "to": target, **options})
    return Layout.parse(f"version: 1\nrules: [{written}]")


def test_a_renamed_tensor_keeps_its_values():
    w = numbered(2, 3)
    made = relayout(rule({"a.w": "x y"}, {"b/w": "x y"}), {"a.w": w})
    assert_same(made, {"b/w": w})


def test_a_transposed_tensor_is_that_of_numpy():
    w = numbered(2, 3, 4)
    made = relayout(rule({"w": "x y z"}, {"w": "z x y"}), {"w": w})
    assert_same(made, {"w": w.transpose(2, 0, 1)})


def test_captures_become_a_dim():
    layers = {f"layers.{n}.w": numbered(2, 3, start=10 * n) for n in range(12)}
    made = relayout(rule({"layers.{l}.w": "x y"}, {"w": "y l x"}), layers)
    assert_same(made, {"w": np.stack([w.T for w in layers.values()], axis=1)})


def test_a_dim_becomes_captures():
    w = numbered(3, 4, 2)
    made = relayout(rule({"w": "x l y"}, {"layers_{l}/w": "y x"}), {"w": w})
    assert_same(made, {f"layers_{n}/w": w[:, n].T for n in range(4)})


def test_grouped_query_key_value_over_ranks_is_split():
    kv, q, d, embed = 4, 3, 2, 5
    parts = {
        name: numbered(kv, n, d, embed, start=100 * n)
        for name, n in (("q", 3), ("k", 1), ("v", 1))
    }
    fused = np.concatenate(list(parts.values()), axis=1).reshape(-1, embed)
    ranks = [saved("0.qkv", shard, tp=n) for n, shard in enumerate(np.split(fused, 2))]
    made = relayout(
        rule(
            {"{layer}.qkv": "(kv@tp (q + k + v) d) embed"},
            {
                "query": "embed layer (kv q) d",
                "key": "embed layer (kv k) d",
                "value": "embed layer (kv v) d",
            },
            sizes={"kv": kv, "q": q, "k": 1, "v": 1},
        ),
        ranks,
        {"tp": 2},
    )
    names = {"query": "q", "key": "k", "value": "v"}
    expected = {
        name: parts[short].transpose(3, 0, 1, 2).reshape(embed, 1, -1, d)
        for name, short in names.items()
    }
    assert_same(made, expected)
