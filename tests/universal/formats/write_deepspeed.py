r"""Writes small checkpoints with DeepSpeed on CPU, whose values are `known_values`.

In an environment with torch 2.13.0 and deepspeed 0.19.8, one call for each sample:

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 PYTHONPATH=. torchrun --nproc-per-node 8 \
        tests/universal/formats/write_deepspeed.py /tmp/samples zero1_tp2_pp2_dp2

The names of samples state the ZeRO stage, and how many ranks are tensor-parallel, are
stages, share experts, and are data-parallel; `zero0_dp2` has float32 weights. The
sample `S_universal` is made of the sample S by DeepSpeed's own program:

    python -m deepspeed.checkpoint.ds_to_universal --num_extract_workers 1 \
        --num_merge_workers 1 --input_folder /tmp/samples/S/global_step2 \
        --output_folder /tmp/samples/S_universal/global_step2

A sample is packed by

    tar -cJf tests/golden/deepspeed/S.tar.xz --exclude='*.py' --sort=name --mtime=@0 \
        --owner=0 --group=0 -C /tmp/samples S
"""

import argparse
import itertools
import os
import pathlib
import re
import sys

import deepspeed
import torch
from deepspeed.checkpoint import affine
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe import topology as pipes
from torch import nn

from tests.universal.formats import known_values as kv

STEPS = 2
GATE_UP = r".*gate_up\.weight"
ROWS = [r".*dense\.weight", r".*down\.weight"]


class Words(nn.Module):
    """An embedding; of a tensor-parallel rank, its rows."""

    def __init__(self, tp):
        super().__init__()
        rows = kv.padded(kv.known("fp32", "", (kv.VOCAB, kv.EMBED)), 8 * tp)
        self.words = nn.Embedding(len(rows) // tp, kv.EMBED)

    def forward(self, tokens):
        return self.words(tokens % self.words.num_embeddings)


class Part(nn.Module):
    """Parameters, with a function that uses them all."""

    def forward(self):
        return sum(each.mean() for each in self.parameters(recurse=False))


class Layer(nn.Module):
    """The parameters of a block. Its function is arbitrary: values are replaced."""

    def __init__(self, shapes, tp=1, experts=0, ep=1):
        super().__init__()
        for name, shape in shapes.items():
            module, _, leaf = name.rpartition(".")
            local = kv.of_rank("fp32", name, shape, 0, tp)
            parameter = nn.Parameter(torch.from_numpy(local.copy()))
            if tp > 1 and local.shape != shape:
                parameter.model_parallel = True
            if not hasattr(self, module):
                self.add_module(module, Part())
            getattr(self, module).register_parameter(leaf, parameter)
        self.tp = tp
        self.moe = None
        if experts:
            expert, sizes = Layer(kv.EXPERT, tp), {"num_experts": experts, "k": 1}
            # Otherwise, tensor-parallel ranks have different experts.
            sizes |= {"ep_size": ep, "enable_expert_tensor_parallelism": tp > 1}
            self.moe = MoE(kv.EMBED, expert, **sizes)

    def forward(self, hidden):
        parts = [each() for each in self.children() if isinstance(each, Part)]
        hidden = hidden * (1 + sum(parts))
        if self.moe is None:
            return hidden
        if self.tp > 1:
            # Gloo does not gather the tokens of tensor-parallel ranks.
            return hidden * (1 + Part.forward(self.moe))
        return hidden + self.moe(hidden)[0]


class Model(nn.Module):
    """Embedding, blocks and a norm, without a pipeline."""

    def __init__(self, ep, frozen, tp=1):
        super().__init__()
        self.embed = Words(tp)
        experts = 4 if ep else 0
        blocks = 2 if ep else kv.BLOCKS
        blocks = [Layer(kv.BLOCK, tp, experts, ep or 1) for _ in range(blocks)]
        self.layers = nn.ModuleList(blocks)
        self.final = Layer(kv.FINAL)
        self.frozen = nn.Parameter(torch.zeros(3, 5), requires_grad=not frozen)
        self.register_buffer("scale", torch.arange(3.0))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return (self.final(hidden) + self.frozen.sum()).float().square().mean()


def logits(module, hidden):
    return hidden @ module.words.weight.T


def loss(output, _):
    return output.float().square().mean()


def pipeline(topology, tp):
    words = {"tied_weight_attr": ["words.weight"]}
    layers = [
        TiedLayerSpec("embed", Words, tp, **words),
        *[LayerSpec(Layer, kv.BLOCK, tp) for _ in range(kv.BLOCKS)],
        LayerSpec(Layer, kv.FINAL),
        TiedLayerSpec("embed", Words, tp, forward_fn=logits, **words),
    ]
    options = {"loss_fn": loss, "partition_method": "parameters"}
    return PipelineModule(layers, topology=topology, **options)


def groups(model, ep):
    """Two groups, so that a file has several flat tensors."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    decayed = [p for n, p in named if p.dim() > 1]
    rest = [p for n, p in named if p.dim() <= 1]
    split = [
        {"params": decayed, "weight_decay": 0.1, "name": "decayed"},
        {"params": rest, "weight_decay": 0.0, "name": "rest"},
    ]
    return split_params_into_different_moe_groups_for_optimizer(split) if ep else split


def config(sizes, is_muon):
    # By default, ZeRO-3 leaves small parameters whole.
    is_small = torch.distributed.get_world_size() == 2
    whole = {} if is_small else {"stage3_param_persistence_threshold": 0}
    optimizer = {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}
    if is_muon:
        # Matrices have Muon, the rest Adam.
        optimizer["type"], whole = "Muon", {"reduce_scatter": False}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": optimizer,
        "bf16": {"enabled": sizes["bf16"]},
        "zero_optimization": {"stage": sizes["zero"], **whole},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }


def global_name(name, ep_rank):
    """An expert's number counts over all ranks."""
    before, middle, after = name.partition("deepspeed_experts.")
    if not middle:
        return name
    number, _, rest = after.partition(".")
    return f"{before}{middle}{int(number) + 2 * ep_rank}.{rest}"


def set_values(engine, module, tp_rank, tp, ep_rank):
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            held = getattr(parameter, "ds_shape", parameter.shape)
            shape = kv.full_shape(name, tuple(held))
            place = global_name(name, ep_rank), shape, tp_rank, tp

            def known(state, place=place):
                return torch.from_numpy(kv.of_rank(state, *place))

            set_value(engine.optimizer, parameter, known)


def set_value(optimizer, parameter, known):
    is_divided = hasattr(parameter, "ds_id")
    group = parameter.ds_process_group if is_divided else None
    if is_divided:
        first = torch.distributed.get_process_group_ranks(group)[0]
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=first):
            parameter.data.copy_(known("fp32"))
    else:
        parameter.data.copy_(known("fp32"))
    if not parameter.requires_grad:
        return
    is_of_muon = getattr(parameter, "use_muon", False)
    moments = ("momentum_buffer",) if is_of_muon else kv.STATES[1:]
    if is_divided:
        part = own_part(known("fp32"), group)
        deepspeed.utils.safe_set_local_fp32_param(parameter, part)
        for key in moments:
            part = own_part(known(key), group)
            deepspeed.utils.safe_set_local_optimizer_state(parameter, part, key)
    elif hasattr(parameter, "_hp_mapping"):
        deepspeed.utils.safe_set_full_fp32_param(parameter, known("fp32"))
        for key in moments:
            deepspeed.utils.safe_set_full_optimizer_state(parameter, known(key), key)
    else:
        master = master_of(optimizer, parameter)
        master.data.copy_(known("fp32"))
        for key in moments:
            optimizer.state[master][key].copy_(known(key))


def master_of(optimizer, parameter):
    """The float32 parameter of an optimizer without ZeRO."""
    lists = (getattr(optimizer, f"{name}_groups", []) for name in ("fp16", "fp32"))
    groups = (zip(*each, strict=True) for each in zip(*lists, strict=True))
    pairs = itertools.chain.from_iterable(groups)
    return next((master for each, master in pairs if each is parameter), parameter)


def own_part(value, group):
    """The part of a rank in ZeRO-3, padded: all are equal."""
    ranks, flat = torch.distributed.get_world_size(group), value.flatten()
    flat = nn.functional.pad(flat, (0, -len(flat) % ranks))
    return flat.chunk(ranks)[torch.distributed.get_rank(group)]


def universal_info(sizes):
    """The patterns of DeepSpeed's universal checkpoints: each has to match."""
    (rows, columns), tp = kv.BLOCK["qkv.weight"], sizes["tp"]
    shards = affine.contiguous_split_map((rows, columns), [rows // tp] * tp, 0)
    joined = {"shape": ((kv.FF, kv.FF), kv.EMBED), "partition_dim": 0}
    tied, norms = [], [r".*norm1\.weight", r".*dense\.bias"]
    shared = [r"final\..*"]
    if sizes["pp"] > 1:
        tied = [r"tied_modules\.embed\.words.*"]
        shared = [r"\d+\.norm\.weight", r"\d+\.odd\.bias"]
    elif sizes["zero"] < 2:
        shared.append("frozen")
    if sizes["ep"]:
        shared.append(r".*\.gate\.wg\.weight")
    return {
        "universal_checkpoint_version": 0.4,
        "vocabulary_parameter_patterns": [r".*words\.weight"],
        "original_vocab_size": kv.VOCAB,
        "pipeline_replicated_parameter_patterns": tied,
        "tp_replicated_parameter_patterns": [*norms, *shared],
        "parameter_to_average_patterns": [r".*norm2\.weight"],
        "parameter_with_row_parallelism_patterns": ROWS,
        "parameter_with_2_sub_params_cat_dim_0": [],
        "parameter_with_sub_params": [{"patterns": [GATE_UP], **joined}],
        "sub_param_shard_widths": {GATE_UP: [[kv.FF // tp] * tp] * 2},
        "affine_map": {"version": 1, "params": {r".*qkv\.weight": shards.to_dict()}},
    }


def write(folder, sample):
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    found = re.findall(r"(zero|tp|pp|ep|dp)(\d)", sample)
    sizes = {"tp": 1, "pp": 1, "ep": 0, "dp": 1} | {key: int(n) for key, n in found}
    sizes["bf16"], is_muon = sample != "zero0_dp2", "muon" in sample
    stage, tp, ep, piped = sizes["zero"], sizes["tp"], sizes["ep"], sizes["pp"] > 1
    ranks = {"num_pp": sizes["pp"], "num_mp": tp, "num_dp": sizes["dp"]}
    topology = pipes.PipeModelDataParallelTopology(**ranks)
    mpu = pipes.PipelineParallelGrid(topology) if tp > 1 and not piped else None
    frozen = stage > 1 and not is_muon
    model = pipeline(topology, tp) if piped else Model(ep, frozen, tp)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=groups(model, ep),
        config=config(sizes, is_muon),
        mpu=mpu,
    )
    tokens = torch.arange(5)[None]
    for _ in range(STEPS):
        if piped:
            engine.train_batch(iter([(tokens, tokens)] * 8))
        else:
            engine.backward(engine(tokens))
            engine.step()
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):
        # DeepSpeed links them after the step of the first group of parameters.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    grid = engine.grid if piped else mpu
    rank, tp_rank = torch.distributed.get_rank(), 0
    if grid:
        rank, tp_rank = grid.get_data_parallel_rank(), grid.get_slice_parallel_rank()
    ep_rank = rank % ep if ep else 0
    set_values(engine, engine.module, tp_rank, tp, ep_rank)
    state = {"iteration": STEPS, "args": argparse.Namespace(lr=0.01, model="tiny")}
    if tp > 1:
        info = universal_info(sizes)
        if ep:
            # DeepSpeed refuses it among the values of a model with experts.
            engine.module.universal_checkpoint_info = info
        else:
            state["universal_checkpoint_info"] = info
    elif stage in (1, 2) and not ep:
        state["universal_checkpoint_info"] = {"universal_checkpoint_version": 0.2}
    engine.save_checkpoint(folder / sample, client_state=state)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    write(pathlib.Path(sys.argv[1]), sys.argv[2])
