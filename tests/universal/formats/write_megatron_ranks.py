r"""Writes a checkpoint of Megatron's ranks, with its distributed optimizer, on CPU.

Two stages of two chunks, two data-parallel ranks. In an environment with torch 2.13.0,
megatron-core 0.16.1 and psutil:

    OMP_NUM_THREADS=1 PYTHONPATH=. torchrun --nproc-per-node 4 \
        tests/universal/formats/write_megatron_ranks.py /tmp/samples mp_rank_pp2_vp2

Megatron-core makes the buffers of parameters, and writes `distrib_optim.pt`. The file
of the model is written here as Megatron's training loop does it, which is outside of
that package. Samples are packed as those of `write_deepspeed`.
"""

import argparse
import pathlib

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.universal.formats import known_values as kv

# By name: stages, chunks of each.
SAMPLES = {"mp_rank_pp2_vp2": (2, 2)}
STEPS = 2


def without_gpu():
    """Replaces the functions that are called on machines without a GPU, too."""
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    name_of, tensor_of = torch.Tensor.type, torch.tensor

    def type_of(tensor, *args, **kwargs):
        name = name_of(tensor, *args, **kwargs)
        return name.replace("torch.", "torch.cuda.") if isinstance(name, str) else name

    def tensor(*args, device=None, **kwargs):
        del device
        return tensor_of(*args, **kwargs)

    torch.Tensor.type, torch.tensor = type_of, tensor


def chunk_of(pp, vp, chunk):
    config = TransformerConfig(
        num_layers=pp * vp,
        hidden_size=8,
        ffn_hidden_size=12,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=4,
        use_cpu_initialization=True,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp,
        gated_linear_unit=True,
        add_bias_linear=False,
        normalization="RMSNorm",
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
    )
    place = {"ignore_virtual": False, "vp_stage": chunk}
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        # Its number of elements is no multiple of 64, as those of norms.
        vocab_size=13,
        max_sequence_length=4,
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        vp_stage=chunk,
    )
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True
    )
    return DistributedDataParallel(config, ddp, Float16Module(config, model))


def set_values(optimizer, chunks, stage):
    """Fills the weights, masters and moments of this rank."""
    for chunk, model in enumerate(chunks):
        for name, parameter in model.module.module.named_parameters():
            known = {
                key: torch.from_numpy(
                    kv.known(key, f"{stage} {chunk} {name}", tuple(parameter.shape))
                )
                for key in kv.STATES
            }
            parameter.data.copy_(known["fp32"])
            held = optimizer.model_param_gbuf_map
            if parameter not in held or not is_held(optimizer, parameter):
                continue
            part = optimizer._get_model_param_range_map(parameter)["param"]
            states = optimizer._get_main_param_and_optimizer_states(parameter)
            for key, state in (("fp32", "param"), *((k, k) for k in kv.STATES[1:])):
                states[state].data.copy_(known[key].flatten()[part.start : part.end])


def is_held(optimizer, parameter):
    """Whether this data-parallel rank has a range of a parameter."""
    return parameter in optimizer.model_param_group_index_map


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("sample")
    arguments = parser.parse_args()
    pp, vp = SAMPLES[arguments.sample]
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        1, pp, virtual_pipeline_model_parallel_size=vp, create_gloo_process_groups=True
    )
    without_gpu()
    chunks = [chunk_of(pp, vp, chunk) for chunk in range(vp)]
    config = OptimizerConfig(
        lr=0.01,
        weight_decay=0.1,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
    )
    (optimizer,) = get_megatron_optimizer(config, chunks).chained_optimizers
    for _ in range(STEPS):
        optimizer._init_optimizer_states_with_dummy_values()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    with torch.no_grad():
        set_values(optimizer, chunks, stage)
    folder = arguments.folder / arguments.sample / f"iter_{STEPS:07d}"
    folder = folder / f"mp_rank_00_{stage:03d}"
    folder.mkdir(parents=True, exist_ok=True)
    optimizer.save_parameter_state(folder / "distrib_optim.pt")
    if parallel_state.get_data_parallel_rank() == 0:
        content = {
            "args": argparse.Namespace(
                pipeline_model_parallel_size=pp,
                virtual_pipeline_model_parallel_size=vp,
            ),
            "checkpoint_version": 3.0,
            "iteration": STEPS,
            **{
                f"model{chunk}": model.state_dict_for_save_checkpoint()
                for chunk, model in enumerate(chunks)
            },
            "optimizer": optimizer.state_dict(),
        }
        torch.save(content, folder / "model_optim_rng.pt")
    latest = folder.parents[1] / "latest_checkpointed_iteration.txt"
    latest.write_text(str(STEPS))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
