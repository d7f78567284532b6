"""A small model in safetensors, a layout that changes it, and the result."""

import pathlib

import numpy as np

from elastic_ckpt.cli import main
from tests.universal import safetensors_files

KV, Q, D = 2, 4, 8
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
        shapes[f"layers.{layer}.qkv.weight"] = KV * (Q + 2) * D, embed
        shapes[f"layers.{layer}.up.weight"] = 4 * embed, embed
        shapes[f"layers.{layer}.norm.weight"] = (embed,)
    numbers = np.random.default_rng(num_layers)
    return {
        name: numbers.random(shape, np.float32) - np.float32(0.5)
        for name, shape in shapes.items()
    }


def expected(given):
    """The tensors that `LAYOUT` makes of a model's, by path."""

    def stacked(name):
        return np.stack(
            [given[each] for each in given if each.endswith(f".{name}.weight")]
        )

    qkv = stacked("qkv")
    qkv = qkv.reshape(len(qkv), KV, Q + 2, D, -1).transpose(4, 0, 1, 2, 3)
    made = {
        "params/embedding": np.pad(given["embedding.weight"], ((0, 1), (0, 0))),
        "params/layers/norm": stacked("norm"),
        "params/layers/up": stacked("up").transpose(0, 2, 1),
    }
    for number, name in enumerate(("query", "key", "value")):
        heads = np.split(qkv, [Q, Q + 1], axis=3)[number]
        made[f"params/layers/{name}"] = heads.reshape(*heads.shape[:2], -1, D)
    return made


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
