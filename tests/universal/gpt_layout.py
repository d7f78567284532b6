"""Layouts from the small models of `known_values` to one tree of scanned layers."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elastic_ckpt.universal.rules.layout import Layout
from tests.universal.formats import known_values as kv

# By leaf: its shape, and the mesh axis of each dim.
LEAVES = {
    "embedding": ((kv.VOCAB, kv.EMBED), (None, "tp")),
    "norm1": ((kv.BLOCKS, kv.EMBED), ("pp", None)),
    "norm2": ((kv.BLOCKS, kv.EMBED), ("pp", None)),
    "query": ((kv.EMBED, kv.BLOCKS, 8, kv.HEAD), (None, "pp", "tp", None)),
    "key": ((kv.EMBED, kv.BLOCKS, 4, kv.HEAD), (None, "pp", "tp", None)),
    "value": ((kv.EMBED, kv.BLOCKS, 4, kv.HEAD), (None, "pp", "tp", None)),
    "out": ((kv.BLOCKS, 8, kv.HEAD, kv.EMBED), ("pp", "tp", None, None)),
    "bias": ((kv.BLOCKS, kv.EMBED), ("pp", None)),
    "gate": ((kv.EMBED, kv.BLOCKS, kv.FF), (None, "pp", "tp")),
    "up": ((kv.EMBED, kv.BLOCKS, kv.FF), (None, "pp", "tp")),
    "down": ((kv.BLOCKS, kv.FF, kv.EMBED), ("pp", "tp", None)),
    "final_norm": ((kv.EMBED,), (None,)),
    "odd": ((3,), (None,)),
}
TREE = {"params": "fp32", "mu": "exp_avg", "nu": "exp_avg_sq"}


def layout_text(dropped, *, tp, is_pipeline, masters, has_frozen, has_steps):
    """The layout for a checkpoint.

    Args:
      dropped: names of tensors that are not used.
      tp: the number of tensor-parallel ranks.
      is_pipeline: whether names count layers from 1, after the embedding.
      masters: whether float32 parameters are of the kind `master`.
      has_frozen: whether the parameter `frozen` has been trained.
      has_steps: whether there are numbers of steps: ZeRO-3's conversion has none.
    """
    at, both, mean = (
        ("@tp", ", replicated: [tp]", ", mean: [tp]") if tp > 1 else ("", "", "")
    )
    block = "{layer+1}" if is_pipeline else "layers.{layer}"

    def rule(leaf, dims, targets, options=""):
        source = f'{{"{block}.{leaf}": {{dims: "{dims}"{options}}}}}'
        lines = [f'      "{to}": "{text}"' for to, text in targets.items()]
        return "\n".join([f"  - from: {source}", "    to:", *lines])

    embedding = (
        "tied_modules.embed.words.weight" if is_pipeline else "embed.words.weight"
    )
    final = f"{kv.BLOCKS + 1}" if is_pipeline else "final"
    master, weights = ("params/{}", "null") if masters else ("null", "params/{}")
    rows = [
        "version: 1",
        "sizes:",
        f"  {{vocab: {kv.VOCAB}, kv: {kv.HEADS_KV}, q: {kv.QUERIES}, k: 1, v: 1,",
        f"  d: {kv.HEAD}, up: gate}}",
        "states:",
        f'  parameter: {{from: "{{}}", to: {quoted(weights)}}}',
        f'  master: {{from: "{{}}", to: {quoted(master)}}}',
        '  first_moment: {from: "{}", to: "mu/{}"}',
        '  second_moment: {from: "{}", to: "nu/{}"}',
        "rules:",
        f'  - from: {{"{embedding}": "(vocab + pad){at} embed"}}',
        '    to: {"embedding": "vocab embed"}',
        "    pad: {pad: 0}",
        rule("norm1.weight", "embed", {"norm1": "layer embed"}, both),
        rule("norm2.weight", "embed", {"norm2": "layer embed"}, mean),
        rule("dense.bias", "embed", {"bias": "layer embed"}, both),
    ]
    rows += [
        rule(
            "qkv.weight",
            f"(kv{at} (q + k + v) d) embed",
            {
                "query": "embed layer (kv q) d",
                "key": "embed layer (kv k) d",
                "value": "embed layer (kv v) d",
            },
        ),
        rule("dense.weight", f"embed (kv{at} q d)", {"out": "layer (kv q) d embed"}),
        rule(
            "gate_up.weight",
            f"(gate{at} + up{at}) embed",
            {"gate": "embed layer gate", "up": "embed layer up"},
        ),
        rule("down.weight", f"embed gate{at}", {"down": "layer gate embed"}),
        f'  - from: {{"{final}.norm.weight": {{dims: "embed"{both}}}}}',
        '    to: {"final_norm": "embed"}',
        f'  - from: {{"{final}.odd.bias": {{dims: "odd"{both}}}}}',
        '    to: {"odd": "odd"}',
    ]
    if has_frozen:
        rows += [
            f'  - from: {{"frozen": {{dims: "a b"{both}}}}}',
            '    to: {"frozen": "a b"}',
        ]
    reduced = "name, tp" if tp > 1 else "name"
    if has_steps:
        rows += [
            f'  - from: {{"{{name:path}}": {{dims: "", replicated: [{reduced}]}}}}',
            '    to: {"count": ""}',
            "    kind: step",
        ]
    rows.append(f"drop: [{', '.join(dropped)}]")
    return "\n".join(rows)


def quoted(text):
    return text if text == "null" else f'"{text}"'


def known_tree(*, is_pipeline, tp, has_frozen):
    """The values of the tree, from those that were saved.

    Args:
      is_pipeline: see `layout_text`.
      tp: the number of tensor-parallel ranks that saved them.
      has_frozen: see `layout_text`.
    """
    tree = {key: _leaves(state, is_pipeline, tp) for key, state in TREE.items()}
    if has_frozen:
        for key, state in TREE.items():
            tree[key]["frozen"] = kv.known(state, "frozen", (3, 5))
    return tree | {"count": np.float32(2)}


def _leaves(state, is_pipeline, tp):
    def whole(name):
        shape = kv.full_shape(name, ())
        shards = [kv.of_rank(state, name, shape, rank, tp) for rank in range(tp)]
        return kv.merged(name, shards) if tp > 1 else shards[0]

    def layers(leaf):
        names = [f"{n + 1}" if is_pipeline else f"layers.{n}" for n in range(kv.BLOCKS)]
        return np.stack([whole(f"{name}.{leaf}") for name in names])

    qkv = layers("qkv.weight").reshape(kv.BLOCKS, kv.HEADS_KV, -1, kv.HEAD, kv.EMBED)
    query, key, value = np.split(qkv, [kv.QUERIES, kv.QUERIES + 1], axis=2)
    gate, up = np.split(layers("gate_up.weight"), 2, axis=1)
    embedding = "tied_modules.embed" if is_pipeline else "embed"
    final = f"{kv.BLOCKS + 1}" if is_pipeline else "final"

    def heads(array):
        joined = array.reshape(kv.BLOCKS, -1, kv.HEAD, kv.EMBED)
        return joined.transpose(3, 0, 1, 2)

    return {
        "embedding": whole(f"{embedding}.words.weight")[: kv.VOCAB],
        "norm1": layers("norm1.weight"),
        "norm2": layers("norm2.weight"),
        "query": heads(query),
        "key": heads(key),
        "value": heads(value),
        "out": layers("dense.weight")
        .reshape(kv.BLOCKS, kv.EMBED, -1, kv.HEAD)
        .transpose(0, 2, 3, 1),
        "bias": layers("dense.bias"),
        "gate": gate.transpose(2, 0, 1),
        "up": up.transpose(2, 0, 1),
        "down": layers("down.weight").transpose(0, 2, 1),
        "final_norm": whole(f"{final}.norm.weight"),
        "odd": whole(f"{final}.odd.bias"),
    }


def abstract_tree(tp, pp, dp, *, stage, has_frozen):
    """The tree over a mesh, as ZeRO `stage` would divide it: 0, 1 or 3."""
    devices = np.array(jax.devices()[: tp * pp * dp]).reshape(tp, pp, dp)
    mesh = Mesh(devices, ("tp", "pp", "dp"))

    def leaf(shape, axes, *, divided):
        axes = list(axes)
        for dim, size in enumerate(shape):
            if divided and axes[dim] is None and size % dp == 0:
                axes[dim] = "dp"
                break
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)

    leaves = LEAVES | ({"frozen": ((3, 5), (None, None))} if has_frozen else {})
    tree = {}
    for key in TREE:
        divided = stage == 3 or (stage == 1 and key != "params")
        tree[key] = {
            name: leaf(shape, axes, divided=divided)
            for name, (shape, axes) in leaves.items()
        }
    count = jax.ShapeDtypeStruct(
        (), np.float32, sharding=NamedSharding(mesh, PartitionSpec())
    )
    return tree | {"count": count}


def layout_of(checkpoint, *, is_pipeline):
    """The layout for an open checkpoint of DeepSpeed."""
    kinds = {each.kind for each in checkpoint.tensors}
    unused = {"scale"} if is_frozen_trained(checkpoint) else {"frozen", "scale"}
    text = layout_text(
        sorted({each.name for each in checkpoint.tensors} & unused),
        tp=checkpoint.axes.get("tp", 1),
        is_pipeline=is_pipeline,
        masters="master" in kinds,
        has_frozen=is_frozen_trained(checkpoint),
        has_steps="step" in kinds,
    )
    return Layout.parse(text)


def is_frozen_trained(checkpoint):
    """Whether the parameter `frozen` has a number of steps: some writers train it."""
    steps = {each.name for each in checkpoint.tensors if each.kind == "step"}
    return "frozen" in steps
