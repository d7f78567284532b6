"""The train state of `llama_values` in the formats of other programs, with layouts.

DeepSpeed, PyTorch and Megatron wrote the samples: see `write_deepspeed`, `write_dcp`
and `write_megatron`. Orbax v0 and our RAM tier write here. `mp_rank` is written by this
file, as Megatron's training loop does.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as v0

from elastic_ckpt.frontend import Checkpointer
from elastic_ckpt.tiers.choices import Local
from tests.training import test_initial_weights as weights
from tests.universal import safetensors_files
from tests.universal.formats import known_values as kv
from tests.universal.formats import llama_values as llama
from tests.universal.formats import stored_values, test_megatron

TO = """version: 1
states:
  parameter: {from: %s, to: %s}
  master: {from: "{}", to: %s}
  first_moment: {from: %s, to: "opt_state/1/0/mu/{}"}
  second_moment: {from: %s, to: "opt_state/1/0/nu/{}"}
"""
# Moments have the names of parameters, which are float32 or have a master.
OF_PARAMETERS = TO % ('"model.{}"', '"params/{}"', "null", '"model.{}"', '"model.{}"')
OF_MASTERS = TO % ('"{}"', "null", '"params/{}"', '"{}"', '"{}"')
OF_TREE = TO % ('"params/{}"', '"params/{}"', "null", '"mu/{}"', '"nu/{}"')
RULES = weights.LAYOUT.partition("version: 1\n")[2].replace("params/", "")
# Every parameter has the number of steps.
EQUAL_STEPS = """
  - from: {"{name:path}": {dims: "", replicated: [name]}}
    to: {"step": {dims: "", dtype: int32}}
    kind: step
"""
STEP = """
  - from: {"%s": ""}
    to: {"step": {dims: "", dtype: int32}}
    kind: %s
"""
TORCH_DIST = """sizes: {three: 3, d: 4, two: 2, vocab: 259}
rules:
  - from: {"embedding.word_embeddings.weight": "(vocab + pad) embed"}
    to: {"embedding": "vocab embed"}
    pad: {pad: 0}
  - from:
      "decoder.layers.self_attention.linear_qkv.weight": "layer (heads three d) embed"
    to: {"qkv": "layer embed (three heads d)"}
  - from: {"decoder.layers.self_attention.linear_proj.weight": "layer embed heads"}
    to: {"attention_out": "layer heads embed"}
  - from: {"decoder.layers.mlp.linear_fc1.weight": "layer (two mlp) embed"}
    to: {"mlp_in": "layer embed (two mlp)"}
  - from: {"decoder.layers.mlp.linear_fc2.weight": "layer embed mlp"}
    to: {"mlp_out": "layer mlp embed"}
  - from: {"decoder.layers.self_attention.linear_qkv.layer_norm_weight": "layer embed"}
    to: {"attention_norm": "layer embed"}
  - from: {"decoder.layers.mlp.linear_fc1.layer_norm_weight": "layer embed"}
    to: {"mlp_norm": "layer embed"}
  - from: {"decoder.final_layernorm.weight": "embed"}
    to: {"final_norm": "embed"}
"""
MP_RANK = """sizes: {three: 3, d: 4, two: 2, vocab: 259}
rules:
  - from: {"embedding.word_embeddings.weight": "(vocab + pad)@tp embed"}
    to: {"embedding": "vocab embed"}
    pad: {pad: 0}
  - from:
      "decoder.layers.{local}.self_attention.linear_qkv.weight":
        "(heads@tp three d) embed"
    to: {"qkv": "(pp local) embed (three heads d)"}
  - from:
      "decoder.layers.{local}.self_attention.linear_proj.weight": "embed heads@tp"
    to: {"attention_out": "(pp local) heads embed"}
  - from: {"decoder.layers.{local}.mlp.linear_fc1.weight": "(two mlp@tp) embed"}
    to: {"mlp_in": "(pp local) embed (two mlp)"}
  - from: {"decoder.layers.{local}.mlp.linear_fc2.weight": "embed mlp@tp"}
    to: {"mlp_out": "(pp local) mlp embed"}
  - from:
      "decoder.layers.{local}.self_attention.linear_qkv.layer_norm_weight":
        {dims: "embed", replicated: [tp]}
    to: {"attention_norm": "(pp local) embed"}
  - from:
      "decoder.layers.{local}.mlp.linear_fc1.layer_norm_weight":
        {dims: "embed", replicated: [tp]}
    to: {"mlp_norm": "(pp local) embed"}
  - from: {"decoder.final_layernorm.weight": {dims: "embed", replicated: [tp, pp]}}
    to: {"final_norm": "embed"}
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A train state in a format.

    Attributes:
      write: makes it below a directory, and returns its path.
      layout: to the state of a run of ours.
      params: our parameters in a state of `known_values`.
    """

    write: Callable
    layout: str
    params: Callable = llama.pytorch


def sample(archive):
    return lambda folder: stored_values.unpacked(archive, folder)


def tree():
    """All tensors by name, as a program without stacked layers has them."""
    parts = {"params": "fp32", "mu": "exp_avg", "nu": "exp_avg_sq"}
    named = {
        part: {
            name: jnp.asarray(kv.known(state, name, shape))
            for name, shape in llama.PYTORCH.items()
        }
        for part, state in parts.items()
    }
    return named | {"step": jnp.asarray(llama.STEPS, jnp.int32)}


def write_ram(folder):
    """A step in RAM alone."""
    with Checkpointer([Local(folder / "ram", every=1)]) as checkpointer:
        checkpointer.save_checkpointables(llama.STEPS, {"state": tree()})
    return folder / "ram"


def write_orbax_v0(folder):
    """A step of Orbax v0's manager."""
    with v0.CheckpointManager(folder / "v0") as manager:
        manager.save(llama.STEPS, args=v0.args.StandardSave(tree()))
    return folder / "v0" / str(llama.STEPS) / "default"


def write_safetensors(folder):
    """The names of states begin with their kinds."""
    parts = tree()
    step = parts.pop("step")
    tensors = {
        f"{part}/{name}": parts[part][name] for part in parts for name in parts[part]
    }
    path = folder / "model.safetensors"
    safetensors_files.write(path, tensors | {"step": step.astype(jnp.float32)})
    return path


def write_mp_rank(folder):
    """Two stages of two tensor-parallel ranks."""
    for tp in range(2):
        for pp in range(2):
            arrays = {
                name: {state: of_rank(state, name, tp, pp) for state in kv.STATES}
                for name in llama.MEGATRON
                if pp == is_of_last(name) or is_of_layers(name)
            }
            named = {
                name.replace("layers.", "layers.0."): values
                for name, values in arrays.items()
            }
            test_megatron.write_rank(folder, f"mp_rank_{tp:02d}_{pp:03d}", named)
    return folder / f"iter_{llama.STEPS:07d}"


def is_of_layers(name):
    return ".layers." in name


def is_of_last(name):
    return name == "decoder.final_layernorm.weight"


def of_rank(state, name, tp, pp):
    """The part of a parameter in torch_dist that a rank has."""
    array = kv.known(state, name, llama.MEGATRON[name])
    if is_of_layers(name):
        array = array[pp]
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        array = np.split(array, 2, axis=1)[tp]
    elif name.endswith("linear_fc1.weight"):
        gate, up = np.split(array, 2)
        array = np.concatenate([np.split(gate, 2)[tp], np.split(up, 2)[tp]])
    elif name.endswith(("linear_qkv.weight", "word_embeddings.weight")):
        array = np.split(array, 2)[tp]
    return np.ascontiguousarray(array)


SOURCES = {
    **{
        f"DeepSpeed ZeRO-{stage}": Source(
            write=sample(f"deepspeed/llama_zero{stage}_dp2.tar.xz"),
            layout=OF_MASTERS + RULES + EQUAL_STEPS,
        )
        for stage in (1, 3)
    },
    # As with optimizers that count steps in numbers, not tensors.
    "DeepSpeed ZeRO-2": Source(
        write=sample("deepspeed/llama_zero2_dp2.tar.xz"),
        layout=OF_MASTERS
        + '  step: {from: "{}", to: null}\n'
        + RULES
        + "fill: {step: {value: global_steps}}",
    ),
    # Its parameters are float32, and have no masters.
    "DeepSpeed ZeRO-0": Source(
        write=sample("deepspeed/llama_zero0_dp2.tar.xz"),
        layout=OF_PARAMETERS.replace("model.{}", "{}") + RULES + EQUAL_STEPS,
    ),
    "DeepSpeed universal": Source(
        write=sample("deepspeed/llama_zero1_dp2_universal.tar.xz"),
        layout=OF_MASTERS + RULES + EQUAL_STEPS,
    ),
    "PyTorch distributed checkpoint": Source(
        write=sample("dcp/llama_dcp.tar.xz"),
        layout=OF_PARAMETERS + RULES + EQUAL_STEPS,
    ),
    "Megatron torch_dist": Source(
        write=sample("megatron/llama_tp2_pp2.tar.xz"),
        layout=OF_MASTERS
        + TORCH_DIST
        + STEP % ("optimizer/optimizer/state/common_step", "step"),
        params=llama.megatron,
    ),
    # No tensor has the number of steps.
    "Megatron mp_rank": Source(
        write=write_mp_rank,
        layout=OF_MASTERS + MP_RANK + "fill: {step: {value: iteration}}",
        params=llama.megatron,
    ),
    "elastic_ckpt RAM disk": Source(
        write=write_ram, layout=OF_TREE + RULES + STEP % ("step", "parameter")
    ),
    "safetensors": Source(
        write=write_safetensors, layout=OF_TREE + RULES + STEP % ("step", "parameter")
    ),
    "Orbax": Source(
        write=write_orbax_v0, layout=OF_TREE + RULES + STEP % ("step", "parameter")
    ),
}
