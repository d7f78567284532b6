"""Converts small models with MaxText's own programs, from Hugging Face and back.

    python -m tests.maxtext.conversion DIRECTORY

For the environment of MaxText. For each model, DIRECTORY/MODEL has the files
`hf/model.safetensors`, of random numbers, and the conversion of MaxText,
`maxtext.safetensors`, with the names of its tree joined by "/", and of that
`hf_again/model.safetensors`.
"""

import gc
import os
import pathlib
import sys
import zlib

# By model of MaxText: its sizes, where they are not those of SIZES. For some, its
# tables of shapes assume that heads fill the embedding.
MODELS = {
    "llama3.1-8b": {},
    "qwen3-0.6b": {},
    "qwen2.5-1.5b": {"base_emb_dim": 84},
    "mixtral-8x7b": {"base_emb_dim": 84, "num_experts": 5},
    "qwen3-30b-a3b": {"num_experts": 5, "num_experts_per_tok": 2},
}
SIZES = {
    "base_emb_dim": 20,
    "base_num_query_heads": 6,
    "base_num_kv_heads": 2,
    "head_dim": 14,
    "base_mlp_dim": 22,
    "base_moe_mlp_dim": 22,
    "base_num_decoder_layers": 3,
    "vocab_size": 26,
}
# MaxText cannot save what it reads lazily on one.
DEVICES = 2
SETTINGS = {
    "override_model_config": True,
    "weight_dtype": "float32",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "log_config": False,
    "max_target_length": 8,
}
# MaxText's names of sizes, by those of Hugging Face.
HF_SIZES = {
    "hidden_size": "base_emb_dim",
    "intermediate_size": "base_mlp_dim",
    "moe_intermediate_size": "base_moe_mlp_dim",
    "num_attention_heads": "base_num_query_heads",
    "num_key_value_heads": "base_num_kv_heads",
    "head_dim": "head_dim",
    "num_hidden_layers": "base_num_decoder_layers",
    "vocab_size": "vocab_size",
    "num_experts": "num_experts",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
}


def main():
    os.environ |= {"DECOUPLE_GCLOUD": "TRUE", "JAX_PLATFORMS": "cpu"}
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"
    directory = pathlib.Path(sys.argv[1])
    from absl import flags
    from maxtext.checkpoint_conversion import to_huggingface, to_maxtext

    flags.FLAGS(["conversion", "--override_model_architecture"])
    to_huggingface.AutoTokenizer = NoTokenizer
    # MaxText 0.2.5 stacks the gates of Mixtral along another dim than its model,
    # because of their name, and then raises an error.
    stacked = to_maxtext._build_single_axis_stacked_tensor
    to_maxtext._build_single_axis_stacked_tensor = lambda *given: stacked(*given[:5])
    # The converters collect garbage after each tensor.
    gc.freeze()
    for model, changes in MODELS.items():
        convert(model, SIZES | changes, directory / model)


class NoTokenizer:
    """Stands for a tokenizer, which would be fetched."""

    @classmethod
    def from_pretrained(cls, *_, **__):
        return cls()

    def save_pretrained(self, *_):
        return ()


def convert(model, sizes, directory):
    import maxtext
    import orbax.checkpoint as ocp
    from maxtext.checkpoint_conversion import to_huggingface, to_maxtext
    from safetensors.numpy import save_file

    (directory / "hf").mkdir(parents=True)
    save_file(hf_tensors(model, sizes), directory / "hf/model.safetensors")
    base = pathlib.Path(maxtext.__file__).parent / "configs/base.yml"
    keys = {**SETTINGS, **sizes, "model_name": model, "run_name": model}
    written = [f"{key}={value}" for key, value in keys.items()]
    arguments = ["conversion", str(base), *written]
    to_maxtext.main(
        [*arguments, f"base_output_directory={directory}/maxtext"],
        hf_model_path=str(directory / "hf"),
        save_dtype="float32",
        simulated_cpu_devices_count=DEVICES,
    )
    items = directory / "maxtext/0/items"
    with ocp.PyTreeCheckpointer() as checkpointer:
        state = checkpointer.restore(items)
    save_file(named(state), directory / "maxtext.safetensors")
    to_huggingface.main(
        [
            *arguments,
            f"base_output_directory={directory}/hf_again",
            f"load_parameters_path={items}",
        ]
    )


def hf_tensors(model, sizes):
    """Random tensors of a model of these sizes, by Hugging Face's names."""
    import numpy as np
    from maxtext.checkpoint_conversion.utils import hf_model_configs, hf_shape

    config = hf_model_configs.HF_MODEL_CONFIGS[model]
    for name, size in HF_SIZES.items():
        if hasattr(config, name) and size in sizes:
            setattr(config, name, sizes[size])
    shapes = hf_shape.HF_SHAPE[model](config.to_dict())
    # The tables have tensors of other models too.
    absent = ["lm_head."] * config.tie_word_embeddings
    absent += ["q_norm.", "k_norm."] * model.startswith("qwen2.5")
    return {
        name: np.random.default_rng(zlib.crc32(name.encode())).standard_normal(
            shape, np.float32
        )
        for name, shape in shapes.items()
        if not any(part in name for part in absent)
    }


def named(state):
    """The parameters and the step of a tree, by their paths."""
    import jax
    import numpy as np

    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in leaves
    }


if __name__ == "__main__":
    main()
