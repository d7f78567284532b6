"""The paper's matrix: DeepSpeed's checkpoints are loaded under any parallelism.

The sources were written by DeepSpeed itself, see `write_deepspeed.py`. Parameters and
optimizer states have to be bit-equal to the values that it was given.
"""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from elastic_ckpt import universal
from tests.universal import gpt_layout
from tests.universal.formats import known_values as kv

SOURCES = (
    "zero0_bf16_dp2",
    "zero2_dp4",
    "zero1_pp2_dp2",
    "zero3_tp2_dp2",
    "zero3_dp4_universal",
    "zero1_tp4_universal",
)
OTHER_SOURCES = (
    *("zero0_dp2", "zero1_dp2", "zero3_dp2", "zero3_dp4", "zero1_tp2_pp2_dp2"),
    *("zero1_dp2_universal", "zero2_dp4_universal", "zero1_pp2_dp2_universal"),
    *("zero1_tp2_pp2_dp2_universal", "zero1_tp4", "zero3_tp2_dp2_universal"),
)
# By tensor, pipeline and data parallelism, as many as there are devices.
TARGETS = [
    each for each in itertools.product((1, 2, 4), repeat=3) if np.prod(each) <= 8
]


def check_load(path, target, stage):
    is_pipeline = "pp2" in path.name
    checkpoint = universal.open_checkpoint(path)
    layout = gpt_layout.layout_of(checkpoint, is_pipeline=is_pipeline)
    has_frozen = gpt_layout.is_frozen_trained(checkpoint)
    tree = gpt_layout.abstract_tree(*target, stage=stage, has_frozen=has_frozen)
    if path.name.startswith("zero3") and path.name.endswith("universal"):
        del tree["count"]
    state = universal.load(path, tree, layout=layout)
    tp = next((n for n in (2, 4) if f"tp{n}" in path.name), 1)
    expected = gpt_layout.known_tree(
        is_pipeline=is_pipeline, tp=tp, has_frozen=has_frozen
    )
    if path.name == "zero0_bf16_dp2":
        expected["count"] += 1
    if "count" not in tree:
        del expected["count"]
    for (keys, array), (_, known) in zip(
        jax.tree_util.tree_leaves_with_path(state),
        jax.tree_util.tree_leaves_with_path(expected),
        strict=True,
    ):
        assert np.asarray(array).tobytes() == known.tobytes(), keys


@pytest.mark.parametrize("source", SOURCES)
def test_many_sources_become_one_target(samples, source):
    check_load(samples(source), (2, 2, 2), 3)


@pytest.mark.night
@pytest.mark.parametrize("source", OTHER_SOURCES)
def test_every_source_becomes_one_target(samples, source):
    check_load(samples(source), (2, 2, 2), 3)


EXPERTS = """
version: 1
states:
  parameter: {from: "{}", to: null}
  master: {from: "{}", to: "params/{}"}
  first_moment: {from: "{}", to: "mu/{}"}
  second_moment: {from: "{}", to: "nu/{}"}
rules:
  - from:
      "layers.{layer}.moe.deepspeed_moe.experts.deepspeed_experts.{expert}.up.weight":
        "ff embed"
    to: {"up": "expert layer embed ff"}
  - from:
      "layers.{layer}.moe.deepspeed_moe.experts.deepspeed_experts.{expert}.down.weight":
        "embed ff"
    to: {"down": "expert layer ff embed"}
  - from: {"layers.{layer}.moe.deepspeed_moe.gate.wg.weight": "expert embed"}
    to: {"gate": "layer embed expert"}
  - from: {"layers.{name:path}": {dims: "", replicated: [name]}}
    to: {"count": ""}
    kind: step
drop: ["embed.*", "final.*", "frozen", "scale"]
"""


def test_experts_are_stacked_from_the_files_of_their_ranks(samples):
    path = samples("zero1_ep2_dp4")
    checkpoint = universal.open_checkpoint(path)
    dense = {each.name for each in checkpoint.tensors if ".moe." not in each.name}
    dense = sorted(name for name in dense if name.startswith("layers."))
    rules = "".join(
        f'  - from: {{"{name}": "a{" b" * (len(shape) - 1)}"}}\n'
        f'    to: {{"{name}": "a{" b" * (len(shape) - 1)}"}}\n'
        for name in dense
        for shape in [kv.full_shape(name, ())]
    )
    text = EXPERTS.replace("rules:\n", f"rules:\n{rules}")
    mesh = jax.make_mesh((4, 2), ("expert", "data"))

    def leaf(*shape, spec=()):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)

    sizes = (4, 2, kv.EMBED, kv.FF)
    tree = {
        key: {
            "up": leaf(*sizes, spec=("expert", None, "data")),
            "down": leaf(4, 2, kv.FF, kv.EMBED, spec=("expert", "data")),
            "gate": leaf(2, kv.EMBED, 4),
            **{name: leaf(*kv.full_shape(name, ())) for name in dense},
        }
        for key in gpt_layout.TREE
    } | {"count": leaf()}
    state = universal.load(path, tree, layout=universal.Layout.parse(text))
    for key, kind in gpt_layout.TREE.items():
        for layer, expert in itertools.product(range(2), range(4)):
            moe = f"layers.{layer}.moe.deepspeed_moe"
            for leaf_name in ("up", "down"):
                name = f"{moe}.experts.deepspeed_experts.{expert}.{leaf_name}.weight"
                known = kv.known(kind, name, kv.full_shape(name, ())).T
                loaded = np.asarray(state[key][leaf_name])[expert, layer]
                assert loaded.tobytes() == known.tobytes(), name
            known = kv.known(kind, f"{moe}.gate.wg.weight", (4, kv.EMBED)).T
            assert np.asarray(state[key]["gate"])[layer].tobytes() == known.tobytes()
    assert state["count"] == 2


@pytest.mark.parametrize(
    ("target", "stage"), [((1, 1, 1), 0), ((4, 2, 1), 1), ((1, 1, 4), 3)]
)
def test_one_source_becomes_targets(samples, target, stage):
    check_load(samples("zero1_tp2_pp2_dp2"), target, stage)


@pytest.mark.night
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("target", TARGETS)
def test_one_source_becomes_every_target(samples, target, stage):
    check_load(samples("zero1_tp2_pp2_dp2"), target, stage)
