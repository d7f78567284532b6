r"""Writes small checkpoints with Megatron-core on CPU, whose values are `known_values`.

In an environment with torch 2.13.0, megatron-core 0.16.1 and psutil, for each sample:

    OMP_NUM_THREADS=1 PYTHONPATH=. torchrun --nproc-per-node 4 \
        tests/universal/formats/write_megatron.py /tmp/samples torch_dist_tp2_pp2

The optimizer of Megatron needs a GPU: its states are made here, and described by its
functions. Samples are packed as those of `write_deepspeed`.
"""

import argparse
import pathlib

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.universal.formats import known_values as kv
from tests.universal.formats import llama_values

# By name: tensor, pipeline and expert parallelism, experts, layers.
SAMPLES = {
    "torch_dist_tp2_pp2": (2, 2, 1, None, 4),
    "torch_dist_ep2": (1, 1, 2, 4, 2),
    # The model of `llama_values`.
    "llama_tp2_pp2": (2, 2, 1, None, 2),
}
SIZES = {
    "vocab_size": 16,
    "hidden_size": 8,
    "ffn_hidden_size": 12,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 4,
}
LLAMA_SIZES = {
    "vocab_size": llama_values.PADDED,
    "hidden_size": llama_values.EMBED,
    "ffn_hidden_size": llama_values.FF,
    "num_attention_heads": llama_values.HEADS,
    "num_query_groups": llama_values.HEADS,
    "kv_channels": llama_values.HEAD,
}
STEPS = 2


def model_of(tp, pp, ep, experts, layers, *, is_llama):
    sizes = dict(LLAMA_SIZES if is_llama else SIZES)
    vocab_size = sizes.pop("vocab_size")
    config = TransformerConfig(
        num_layers=layers,
        **sizes,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        num_moe_experts=experts,
        gated_linear_unit=True,
        add_bias_linear=False,
        normalization="RMSNorm",
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=experts, normalization="RMSNorm"
        ),
        vocab_size=vocab_size,
        max_sequence_length=4,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=is_llama,
        position_embedding_type="rope",
    )
    return model.bfloat16()


def set_values(sharded, state):
    """Fills what a rank has of a parameter with its part of the known values."""
    if isinstance(sharded, ShardedTensorFactory):
        for each in nested_values(sharded.build()):
            set_values(each, state)
        return
    name = sharded.key.removeprefix(f"optimizer.state.{state}.").removeprefix(
        "optimizer.state.fp32_param."
    )
    full = kv.known(state, name, tuple(sharded.global_shape))
    axes, first = sharded.prepend_axis_num, sharded.global_offset
    sizes = zip(first[axes:], sharded.data.shape, strict=True)
    index = (*first[:axes], *(slice(start, start + size) for start, size in sizes))
    sharded.data.copy_(torch.from_numpy(full[index].copy()))


def optimizer_states(model, sharded):
    """States as Megatron's optimizer of bfloat16 parameters describes them."""
    parameters = list(model.parameters())
    ids = get_param_id_to_sharded_param_map(sharded, parameters)
    masters, state = [], {}
    for number, parameter in enumerate(parameters):
        new = [torch.empty(parameter.shape) for _ in kv.STATES]
        prefix = "optimizer.state.fp32_param"
        masters.append(make_sharded_optimizer_tensor(ids[number], new[0], prefix))
        state[number] = {"exp_avg": new[1], "exp_avg_sq": new[2]}
    group = {"params": list(state), "lr": 0.01, "weight_decay": 0.1}
    optimizer = {"state": state, "param_groups": [group]}
    optim_state_to_sharding_state(optimizer, ids)
    for number, master in enumerate(masters):
        set_values(master, "fp32")
        for key in ("exp_avg", "exp_avg_sq"):
            set_values(optimizer["state"][number][key], key)
    optimizer["state"]["common_step"] = torch.tensor(float(STEPS))
    return {"optimizer": optimizer, "fp32_from_fp16_params": [masters]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("sample")
    arguments = parser.parse_args()
    tp, pp, ep, experts, layers = SAMPLES[arguments.sample]
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tp, pp, expert_model_parallel_size=ep, create_gloo_process_groups=True
    )
    # They are called on machines without a GPU, too.
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda: None
    torch.Tensor.cuda = lambda tensor: tensor
    is_llama = arguments.sample.startswith("llama")
    model = model_of(tp, pp, ep, experts, layers, is_llama=is_llama)
    sharded = model.sharded_state_dict()
    with torch.no_grad():
        for each in sharded.values():
            if not isinstance(each, ShardedObject):
                set_values(each, "fp32")
    states = optimizer_states(model, sharded)
    folder = arguments.folder / arguments.sample / f"iter_{STEPS:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    content = {
        "model": sharded,
        "optimizer": states,
        "iteration": STEPS,
        "args": argparse.Namespace(lr=0.01, num_layers=layers),
    }
    dist_checkpointing.save(content, str(folder))
    # Megatron's training loop writes it.
    latest = folder.parent / "latest_checkpointed_iteration.txt"
    latest.write_text(str(STEPS))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
