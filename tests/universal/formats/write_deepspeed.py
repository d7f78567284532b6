r"""Writes small checkpoints with DeepSpeed on CPU, whose values are `known_values`.

In an environment with torch 2.13.0 and deepspeed 0.19.8, one call for each sample:

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 PYTHONPATH=. torchrun --nproc-per-node 8 \
        tests/universal/formats/write_deepspeed.py /tmp/samples zero1_tp2_pp2_dp2

Samples and their number of processes are in `SAMPLES`. The sample `S_universal` is made
of the sample S by DeepSpeed's own program, in one process. A sample is packed by

    tar -cJf tests/golden/deepspeed/S.tar.xz --exclude='*.py' --sort=name --mtime=@0 \
        --owner=0 --group=0 -C /tmp/samples S
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys

import deepspeed
import torch
from deepspeed.checkpoint import affine
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import (
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
)
from deepspeed.utils import (
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import nn

from tests.universal.formats import known_values as kv

# By name: processes, then ZeRO stage, TP, PP, expert parallelism, dtype.
SAMPLES = {
    "zero0_dp2": (2, 0, 1, 1, 0, "fp32"),
    "zero0_bf16_dp2": (2, 0, 1, 1, 0, "bf16"),
    "zero1_dp2": (2, 1, 1, 1, 0, "bf16"),
    "zero2_dp4": (4, 2, 1, 1, 0, "bf16"),
    "zero3_dp2": (2, 3, 1, 1, 0, "bf16"),
    "zero3_dp4": (4, 3, 1, 1, 0, "bf16"),
    "zero1_pp2_dp2": (4, 1, 1, 2, 0, "bf16"),
    "zero1_tp2_pp2_dp2": (8, 1, 2, 2, 0, "bf16"),
    "zero1_ep2_dp4": (4, 1, 1, 1, 2, "bf16"),
    "zero1_tp4": (4, 1, 4, 1, 0, "bf16"),
    "zero3_tp2_dp2": (4, 3, 2, 1, 0, "bf16"),
    "zero1_tp2_ep2_dp2": (4, 1, 2, 1, 2, "bf16"),
    # Muon for matrices, Adam for the rest.
    "zero3_muon_dp2": (2, 3, 1, 1, 0, "bf16"),
}
STEPS = 2


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
        gradients = dict(self.named_buffers(recurse=False))
        return sum(
            (each * gradients[f"gradient_{name}"]).sum() if gradients else each.mean()
            for name, each in self.named_parameters(recurse=not gradients)
        )


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


class MuonModel(Model):
    """A model whose gradients are the known momentum: Muon sets it, without decay."""

    def __init__(self):
        super().__init__(0, frozen=False)
        for name, parameter in list(self.named_parameters()):
            path, _, leaf = name.rpartition(".")
            shape = kv.full_shape(name, tuple(parameter.shape))
            gradient = kv.of_rank("momentum_buffer", name, shape, 0, 1)
            self.get_submodule(path).register_buffer(
                f"gradient_{leaf}", torch.from_numpy(gradient), persistent=False
            )

    def forward(self, tokens):
        # ZeRO-3 gathers the parameters of a module for its own function.
        parts = [each() for each in self.modules() if isinstance(each, Part)]
        return (sum(parts) + Part.forward(self) + self.embed(tokens).sum()).float()


def logits(module, hidden):
    return hidden @ module.words.weight.T


def loss(output, target):
    del target
    return output.float().square().mean()


def pipeline(topology, tp):
    layers = [
        TiedLayerSpec("embed", Words, tp, tied_weight_attr=["words.weight"]),
        *[LayerSpec(Layer, kv.BLOCK, tp) for _ in range(kv.BLOCKS)],
        LayerSpec(Layer, kv.FINAL),
        TiedLayerSpec(
            "embed", Words, tp, forward_fn=logits, tied_weight_attr=["words.weight"]
        ),
    ]
    return PipelineModule(
        layers, topology=topology, loss_fn=loss, partition_method="parameters"
    )


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


def config(sample):
    processes, stage, _, _, _, dtype = SAMPLES[sample]
    # By default, ZeRO-3 leaves small parameters whole.
    threshold = {"stage3_param_persistence_threshold": 0} if processes == 4 else {}
    kind, optimizer = "Adam", {"lr": 0.01, "torch_adam": True}
    if "muon" in sample:
        kind, optimizer["momentum"] = "Muon", 0.0
        # ZeRO-3 refuses it with Muon.
        threshold["reduce_scatter"] = stage < 3
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": kind, "params": optimizer},
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage, **threshold},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **({"gradient_clipping": 0.0} if "muon" in sample else {}),
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
            known = global_name(name, ep_rank)
            values = {
                state: torch.from_numpy(kv.of_rank(state, known, shape, tp_rank, tp))
                for state in kv.STATES
            }
            set_value(engine, parameter, values)


def set_value(engine, parameter, values):
    if hasattr(parameter, "ds_id"):
        group = parameter.ds_process_group
        first = torch.distributed.get_process_group_ranks(group)[0]
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=first):
            parameter.data.copy_(values["fp32"])
    else:
        parameter.data.copy_(values["fp32"])
    if not parameter.requires_grad:
        return
    is_of_muon = getattr(parameter, "use_muon", False)
    moments = () if is_of_muon else ("exp_avg", "exp_avg_sq")
    if engine.zero_optimization_stage() == 0:
        master = master_of(engine.optimizer, parameter)
        master.data.copy_(values["fp32"])
        for key in moments:
            engine.optimizer.state[master][key].copy_(values[key])
        return
    if hasattr(parameter, "ds_id"):
        parts = {key: own_part(values[key], group) for key in kv.STATES}
        safe_set_local_fp32_param(parameter, parts["fp32"])
        for key in moments:
            safe_set_local_optimizer_state(parameter, parts[key], key)
        return
    safe_set_full_fp32_param(parameter, values["fp32"])
    for key in moments:
        safe_set_full_optimizer_state(parameter, values[key], key)


def master_of(optimizer, parameter):
    """The float32 parameter of an optimizer without ZeRO."""
    groups = zip(
        getattr(optimizer, "fp16_groups", []),
        getattr(optimizer, "fp32_groups", []),
        strict=True,
    )
    for parameters, masters in groups:
        for each, master in zip(parameters, masters, strict=True):
            if each is parameter:
                return master
    return parameter


def own_part(value, group):
    """The part of a rank in ZeRO-3, padded: all are equal."""
    ranks, flat = torch.distributed.get_world_size(group), value.flatten()
    flat = nn.functional.pad(flat, (0, -len(flat) % ranks))
    return flat.chunk(ranks)[torch.distributed.get_rank(group)]


def universal_info(tp, model):
    """The patterns of DeepSpeed's universal checkpoints: each has to match."""
    rows, columns = kv.BLOCK["qkv.weight"]
    shards = affine.contiguous_split_map((rows, columns), [rows // tp] * tp, 0)
    names = [name for name, each in model.named_parameters() if each.requires_grad]
    shared = [r"\d+\.norm\.weight", r"\d+\.odd\.bias", r"final\..*", "frozen"]
    shared.append(r".*\.gate\.wg\.weight")
    tied = [r"tied_modules\.embed\.words.*"]
    if not isinstance(model, PipelineModule):
        held = [each for each in shared if any(re.match(each, n) for n in names)]
        tied, shared = [], held
    else:
        shared = shared[:2]
    return {
        "universal_checkpoint_version": 0.4,
        "vocabulary_parameter_patterns": [r".*words\.weight"],
        "original_vocab_size": kv.VOCAB,
        "pipeline_replicated_parameter_patterns": tied,
        "tp_replicated_parameter_patterns": [
            r".*norm1\.weight",
            r".*dense\.bias",
            *shared,
        ],
        "parameter_to_average_patterns": [r".*norm2\.weight"],
        "parameter_with_row_parallelism_patterns": [
            r".*dense\.weight",
            r".*down\.weight",
        ],
        "parameter_with_2_sub_params_cat_dim_0": [],
        "parameter_with_sub_params": [
            {
                "patterns": [r".*gate_up\.weight"],
                "shape": ((kv.FF, kv.FF), kv.EMBED),
                "partition_dim": 0,
            }
        ],
        "sub_param_shard_widths": {
            r".*gate_up\.weight": [[kv.FF // tp] * tp, [kv.FF // tp] * tp]
        },
        "affine_map": {"version": 1, "params": {r".*qkv\.weight": shards.to_dict()}},
    }


def write(folder, sample):
    processes, stage, tp, pp, ep, _ = SAMPLES[sample]
    deepspeed.init_distributed("gloo")
    assert torch.distributed.get_world_size() == processes
    torch.manual_seed(0)
    piped = pp > 1
    ranks = {"num_pp": pp, "num_mp": tp, "num_dp": processes // (tp * pp)}
    topology = PipeModelDataParallelTopology(**ranks)
    mpu = PipelineParallelGrid(topology) if tp > 1 and not piped else None
    if "muon" in sample:
        model = MuonModel()
    else:
        model = pipeline(topology, tp) if piped else Model(ep, stage > 1, tp)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=groups(model, ep),
        config=config(sample),
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
        info = universal_info(tp, engine.module)
        if ep:
            # DeepSpeed refuses it among the values of a model with experts.
            engine.module.universal_checkpoint_info = info
        else:
            state["universal_checkpoint_info"] = info
    elif stage in (1, 2) and not ep:
        state["universal_checkpoint_info"] = {"universal_checkpoint_version": 0.2}
    engine.save_checkpoint(folder / sample, client_state=state)
    torch.distributed.destroy_process_group()


def convert(folder, sample):
    source = folder / sample / f"global_step{STEPS}"
    target = folder / f"{sample}_universal" / f"global_step{STEPS}"
    shutil.rmtree(target.parent, ignore_errors=True)
    program = "deepspeed.checkpoint.ds_to_universal"
    arguments = ["--input_folder", source, "--output_folder", target]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    call = [sys.executable, "-m", program, *map(str, arguments), *workers]
    subprocess.run(call, check=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("sample")
    arguments, _ = parser.parse_known_args()
    if arguments.sample.endswith("_universal"):
        convert(arguments.folder, arguments.sample.removesuffix("_universal"))
    else:
        write(arguments.folder, arguments.sample)


if __name__ == "__main__":
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    main()
