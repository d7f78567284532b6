r"""Writes small checkpoints with Megatron-core on CPU, whose values are `known_values`.

In an environment with torch 2.13.0, megatron-core 0.16.1 and psutil, for each sample:

    OMP_NUM_THREADS=1 PYTHONPATH=. torchrun --nproc-per-node 4 \
        tests/universal/formats/write_megatron.py /tmp/samples torch_dist_tp2_pp2

The optimizer of Megatron needs a GPU: states of torch_dist are made here, and described
by its functions. A sample of ranks has Megatron's distributed optimizer, which writes
`distrib_optim.pt`; the file of the model is written here as Megatron's training loop
does it, which is outside of that package. Samples are packed as those of
`write_deepspeed`.
"""

import argparse
import pathlib
import re
import sys

import torch
from megatron.core import dist_checkpointing, distributed, parallel_state
from megatron.core.dist_checkpointing import optimizer as sharding
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.universal.formats import known_values as kv

# By name: tensor, pipeline and expert parallelism, experts, layers, and the chunks of
# each stage in a sample of ranks.
SAMPLES = {
    "torch_dist_tp2_pp2": (2, 2, 1, None, 4, 0),
    "torch_dist_ep2": (1, 1, 2, 4, 2, 0),
    "mp_rank_pp2_vp2": (1, 2, 1, None, 4, 2),
}
STEPS = 2


def without_gpu():
    """Replaces the functions that are called on machines without a GPU, too."""
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda tensor: tensor
    name_of, tensor_of = torch.Tensor.type, torch.tensor

    def type_of(tensor, *args, **kwargs):
        name = name_of(tensor, *args, **kwargs)
        return name.replace("torch.", "torch.cuda.") if isinstance(name, str) else name

    def tensor(*args, device=None, **kwargs):
        del device
        return tensor_of(*args, **kwargs)

    torch.Tensor.type, torch.tensor = type_of, tensor


def model_of(sample, chunk=None):
    """The part of the model that a rank has; of its stage, one of the chunks."""
    tp, pp, ep, experts, layers, chunks = SAMPLES[sample]
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        ffn_hidden_size=12,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=4,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=chunks or None,
        expert_model_parallel_size=ep,
        num_moe_experts=experts,
        gated_linear_unit=True,
        add_bias_linear=False,
        normalization="RMSNorm",
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
    )
    place = {"ignore_virtual": False, "vp_stage": chunk} if chunks else {}
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=experts, normalization="RMSNorm"
        ),
        # In a flat buffer, 13 rows end at no multiple of 64, as norms do.
        vocab_size=13 if chunks else 16,
        max_sequence_length=4,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        vp_stage=chunk,
    )
    if not chunks:
        return model.bfloat16()
    ddp = distributed.DistributedDataParallelConfig(use_distributed_optimizer=True)
    model = Float16Module(config, model)
    return distributed.DistributedDataParallel(config, ddp, model)


def set_sharded(sharded, state):
    """Fills what a rank has of a parameter with its part of the known values."""
    if isinstance(sharded, ShardedTensorFactory):
        for each in nested_values(sharded.build()):
            set_sharded(each, state)
        return
    name = re.sub(r"^optimizer\.state\.[^.]+\.", "", sharded.key)
    full = kv.known(state, name, tuple(sharded.global_shape))
    axes, first = sharded.prepend_axis_num, sharded.global_offset
    sizes = zip(first[axes:], sharded.data.shape, strict=True)
    index = (*first[:axes], *(slice(start, start + size) for start, size in sizes))
    sharded.data.copy_(torch.from_numpy(full[index].copy()))


def optimizer_states(model, sharded):
    """States as Megatron's optimizer of bfloat16 parameters describes them."""
    parameters = list(model.parameters())
    ids = sharding.get_param_id_to_sharded_param_map(sharded, parameters)
    masters, state = [], {}
    for number, parameter in enumerate(parameters):
        new = [torch.empty(parameter.shape) for _ in kv.STATES]
        of_master = ids[number], new[0], "optimizer.state.fp32_param"
        masters.append(sharding.make_sharded_optimizer_tensor(*of_master))
        state[number] = {"exp_avg": new[1], "exp_avg_sq": new[2]}
    group = {"params": list(state), "lr": 0.01, "weight_decay": 0.1}
    optimizer = {"state": state, "param_groups": [group]}
    sharding.optim_state_to_sharding_state(optimizer, ids)
    for number, master in enumerate(masters):
        set_sharded(master, "fp32")
        for key in ("exp_avg", "exp_avg_sq"):
            set_sharded(optimizer["state"][number][key], key)
    optimizer["state"]["common_step"] = torch.tensor(float(STEPS))
    return {"optimizer": optimizer, "fp32_from_fp16_params": [masters]}


def write_torch_dist(folder, sample):
    model = model_of(sample)
    sharded = model.sharded_state_dict()
    with torch.no_grad():
        for each in sharded.values():
            if not isinstance(each, ShardedObject):
                set_sharded(each, "fp32")
    states = optimizer_states(model, sharded)
    folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    content = {
        "model": sharded,
        "optimizer": states,
        "iteration": STEPS,
        "args": argparse.Namespace(lr=0.01, num_layers=SAMPLES[sample][4]),
    }
    dist_checkpointing.save(content, str(folder))


def write_ranks(folder, sample):
    _, pp, _, _, _, num_chunks = SAMPLES[sample]
    chunks = [model_of(sample, chunk) for chunk in range(num_chunks)]
    options = {"lr": 0.01, "weight_decay": 0.1, "use_distributed_optimizer": True}
    config = OptimizerConfig(bf16=True, params_dtype=torch.bfloat16, **options)
    (optimizer,) = get_megatron_optimizer(config, chunks).chained_optimizers
    for _ in range(STEPS):
        optimizer._init_optimizer_states_with_dummy_values()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    with torch.no_grad():
        for chunk, model in enumerate(chunks):
            for name, parameter in model.module.module.named_parameters():
                place = f"{stage} {chunk} {name}", tuple(parameter.shape)
                parameter.data.copy_(torch.from_numpy(kv.known("fp32", *place)))
    folder = folder / f"mp_rank_00_{stage:03d}"
    folder.mkdir(parents=True, exist_ok=True)
    optimizer.save_parameter_state(folder / "distrib_optim.pt")
    if parallel_state.get_data_parallel_rank() == 0:
        sizes = {"pipeline_model_parallel_size": pp}
        sizes["virtual_pipeline_model_parallel_size"] = num_chunks
        content = {
            "args": argparse.Namespace(**sizes),
            "checkpoint_version": 3.0,
            "iteration": STEPS,
            "optimizer": optimizer.state_dict(),
        }
        for chunk, model in enumerate(chunks):
            content[f"model{chunk}"] = model.state_dict_for_save_checkpoint()
        torch.save(content, folder / "model_optim_rng.pt")
    torch.distributed.barrier()


def main(folder, sample):
    tp, pp, ep, _, _, chunks = SAMPLES[sample]
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tp,
        pp,
        virtual_pipeline_model_parallel_size=chunks or None,
        expert_model_parallel_size=ep,
        create_gloo_process_groups=True,
    )
    without_gpu()
    write = write_ranks if chunks else write_torch_dist
    write(folder / f"iter_{STEPS:07d}", sample)
    # Megatron's training loop writes it.
    (folder / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]) / sys.argv[2], sys.argv[2])
