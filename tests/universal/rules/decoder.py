"""A small decoder as two ranks saved it, its target, and the layout between them."""

import numpy as np

from tests.universal.rules.relayout import numbered, saved

LAYERS, VOCAB, EMBED, MLP, KV, Q, D, RANKS = 3, 10, 7, 4, 2, 3, 5, 2
AXES = {"tp": RANKS}
TEXT = """\
version: 1
sizes: {kv: 2, q: 3, k: 1, v: 1, rows: 2}
states:
  parameter: {from: "{}", to: "params/{}"}
  first_moment: {from: "{}", to: "mu/{}"}
rules:
- from: {"embedding.weight": "(vocab + rows)@tp embed"}
  to: {"embedder/embedding": "vocab embed"}
  pad: {rows: 0}
- from: {"layers.{layer}.qkv.weight": "(kv@tp (q + k + v) d) embed"}
  to:
    "layers/query": "embed layer (kv q) d"
    "layers/key": "embed layer kv d k"
    "layers/value": "embed layer kv d v"
- from: {"layers.{layer}.fc1.weight": "(gate@tp + up@tp) embed"}
  to: {"layers/wi_0": "embed layer gate", "layers/wi_1": "embed layer up"}
- from: {"layers.{layer}.fc2.weight": "embed mlp@tp"}
  to: {"layers/wo": "mlp layer embed"}
- from: {"layers.{layer}.norm.weight": {dims: "embed", replicated: [tp]}}
  to: {"layers/scale": {dims: "layer embed", shift: -1}}
- from: {"head.weight": "embed vocab@tp"}
  to: {"head/kernel": "vocab embed"}
"""


def tensors():
    """The tensors that the ranks saved."""
    for kind in ("parameter", "first_moment"):
        for tp in range(RANKS):
            rows = (VOCAB + 2) // RANKS
            yield saved("embedding.weight", numbered(rows, EMBED), kind, tp=tp)
            yield saved("head.weight", numbered(EMBED, VOCAB // RANKS), kind, tp=tp)
            for layer in range(LAYERS):
                shapes = {
                    "qkv": (KV // RANKS * (Q + 2) * D, EMBED),
                    "fc1": (2 * MLP // RANKS, EMBED),
                    "fc2": (EMBED, MLP // RANKS),
                    "norm": (EMBED,),
                }
                for name, shape in shapes.items():
                    values = numbered(*shape, start=layer)
                    yield saved(f"layers.{layer}.{name}.weight", values, kind, tp=tp)


def targets():
    """The arrays of the target; their values do not count."""
    shapes = {
        "embedder/embedding": (VOCAB, EMBED),
        "layers/query": (EMBED, LAYERS, KV * Q, D),
        "layers/key": (EMBED, LAYERS, KV, D, 1),
        "layers/value": (EMBED, LAYERS, KV, D, 1),
        "layers/wi_0": (EMBED, LAYERS, MLP),
        "layers/wi_1": (EMBED, LAYERS, MLP),
        "layers/wo": (MLP, LAYERS, EMBED),
        "layers/scale": (LAYERS, EMBED),
        "head/kernel": (VOCAB, EMBED),
    }
    return {
        f"{state}/{name}": np.zeros(shape, np.float32)
        for state in ("params", "mu")
        for name, shape in shapes.items()
    }
