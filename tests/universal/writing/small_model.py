"""A small model in safetensors, a layout that changes it, and the result."""

import pathlib

import numpy as np

from elastic_ckpt.cli import main
from elastic_ckpt.universal.rules.layout import Layout
from tests.universal import safetensors_files
from tests.universal.rules.relayout import relayout

LAYOUT = """
version: 1
sizes: {kv: 2, q: 4, k: 1, v: 1, d: 8}
rules:
  - from: {"layers.{layer}.qkv.weight": "(kv (q + k + v) d) embed"}
    to:
      "params/layers/query": "embed layer (kv q) d"
      "params/layers/key": "embed layer (kv k) d"
      "params/layers/value": "embed layer (kv v) d"
  - from: {"layers.{layer}.up.weight": "out embed"}
    to: {"params/layers/up": "layer embed out"}
  - from: {"layers.{layer}.norm.weight": "embed"}
    to: {"params/layers/norm": "layer embed"}
  - from: {"embedding.weight": "vocab embed"}
    to: {"params/embedding": "(vocab + pad) embed"}
    pad: {pad: 0}
    sizes: {pad: 1}
"""


def tensors(num_layers, embed):
    """The tensors of a model by name, float32."""
    shapes = {"embedding.weight": (3 * embed + 7, embed)}
    for layer in range(num_layers):
        shapes[f"layers.{layer}.qkv.weight"] = 2 * (4 + 2) * 8, embed
        shapes[f"layers.{layer}.up.weight"] = 4 * embed, embed
        shapes[f"layers.{layer}.norm.weight"] = (embed,)
    numbers = np.random.default_rng(num_layers)
    return {
        name: numbers.random(shape, np.float32) - np.float32(0.5)
        for name, shape in shapes.items()
    }


def expected(given):
    """The tensors that `LAYOUT` makes of a model's, by path."""
    return relayout(Layout.parse(LAYOUT), given)


def write(directory, given):
    """Writes a model of one file, and `layout.yml` beside its directory."""
    path = pathlib.Path(directory)
    path.mkdir(parents=True)
    safetensors_files.write(path / "model.safetensors", given)
    (path.parent / "layout.yml").write_text(LAYOUT)


def converted(*arguments):
    """The exit status of the command."""
    return main.main(["convert", *map(str, arguments)])


def refusal(capsys, *arguments):
    """What the command writes when it fails."""
    capsys.readouterr()
    assert converted(*arguments) == 1
    return capsys.readouterr().err
