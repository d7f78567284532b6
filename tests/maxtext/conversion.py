"""Converts small models with MaxText's own programs, from Hugging Face and back.

    python -m tests.maxtext.conversion DIRECTORY

For the environment of MaxText. For each model, DIRECTORY/MODEL has the files
`hf/model.safetensors`, of random numbers, and the conversion of MaxText,
`maxtext.safetensors`, with the names of its tree joined by "/", and of that
`hf_again/model.safetensors`, if MaxText has a way back.
"""

import gc
import os
import pathlib
import sys
import zlib

from tests.maxtext import small_models

# By model of MaxText: its sizes, where they are not those of SIZES. For some, its
# tables of shapes assume that heads fill the embedding.
MODELS = {
    "llama3.1-8b": {},
    "qwen3-0.6b": {},
    "qwen2.5-1.5b": {"base_emb_dim": 84},
    "mixtral-8x7b": {"base_emb_dim": 84, "num_experts": 5},
    "qwen3-30b-a3b": {"num_experts": 5, "num_experts_per_tok": 2},
}
# Others are those of `small_models`. The converter fails for DeepSeek V3, and there is
# none for Llama 4.
SMALL = {
    "gemma2-2b": "gemma2",
    "gemma3-4b": "gemma3",
    "olmo3-7b-pt": "olmo3",
    "gpt-oss-20b": "gpt_oss",
    "deepseek2-16b": "deepseek2",
    "qwen3-next-80b-a3b": "qwen3_next",
}
# The converter has no layers after the last whole block.
LAYERS = {"qwen3-next-80b-a3b": 8}
# It has no shapes of the first, and makes none of the second.
WITHOUT_WAY_BACK = ("olmo3-7b-pt", "qwen3-next-80b-a3b")
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
        sizes = SIZES | changes
        convert(model, sizes, hf_tensors(model, sizes), directory / model)
    name_as_text("gemma3-4b")
    for model, name in SMALL.items():
        convert_small(model, name, directory / model)


class NoTokenizer:
    """Stands for a tokenizer, which would be fetched."""

    @classmethod
    def from_pretrained(cls, *_, **__):
        return cls()

    def save_pretrained(self, *_):
        return ()


def name_as_text(model):
    """Has the converters name the tensors of a language model without others."""
    from maxtext.checkpoint_conversion import to_huggingface as programs

    def plain(names):
        if isinstance(names, str):
            return names.replace("model.language_model.", "model.")
        return [plain(each) for each in names]

    mapping, shapes = programs.PARAM_MAPPING[model], programs.HF_SHAPE[model]
    programs.PARAM_MAPPING[model] = lambda *given: {
        key: plain(names) for key, names in mapping(*given).items()
    }
    programs.HF_SHAPE[model] = lambda *given: {
        plain(name): shape for name, shape in shapes(*given).items()
    }


def convert_small(model, name, directory):
    config = small_models.hf_config(name)
    sizes, tensors = small_models.maxtext_settings(name), small_models.tensors(name)
    if model in LAYERS:
        config["num_hidden_layers"] = LAYERS[model]
        sizes["base_num_decoder_layers"] = LAYERS[model]
        tensors = {
            key: value
            for key, value in tensors.items()
            if not key.startswith(f"model.layers.{LAYERS[model]}.")
        }
    configure(model, config)
    convert(model, sizes, tensors, directory)


def configure(model, config):
    """Gives a configuration of the converters the sizes of a small model."""
    from maxtext.checkpoint_conversion.utils import hf_model_configs

    held = hf_model_configs.HF_MODEL_CONFIGS[model]
    held = getattr(held, "text_config", held)
    for name, value in config.items():
        if isinstance(value, int) and hasattr(held, name):
            setattr(held, name, value)
    if hasattr(held, "qk_head_dim"):
        held.qk_head_dim = held.qk_nope_head_dim + held.qk_rope_head_dim


def convert(model, sizes, tensors, directory):
    import maxtext
    import orbax.checkpoint as ocp
    from maxtext.checkpoint_conversion import to_huggingface, to_maxtext
    from safetensors.numpy import save_file

    (directory / "hf").mkdir(parents=True)
    save_file(tensors, directory / "hf/model.safetensors")
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
    if model in WITHOUT_WAY_BACK:
        return
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
