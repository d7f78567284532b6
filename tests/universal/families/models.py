"""Small models of each family, as arguments of the classes of Transformers.

Sizes differ from each other, so that no transposition goes unnoticed.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model.

    Attributes:
      architecture: its class.
      layout: a shipped layout.
      config: the arguments of the class's configuration.
      dtype: in which it is saved.
      quantized: "fp8" or "mxfp4", if it is stored so.
    """

    architecture: str
    layout: str
    config: Mapping[str, Any]
    dtype: str = "float32"
    quantized: str = ""


SIZES = {
    "vocab_size": 71,
    "hidden_size": 66,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
ROPE = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
TIED = {"tie_word_embeddings": True}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
LATENT = {
    **SIZES,
    **EXPERTS,
    "num_hidden_layers": 4,
    "num_key_value_heads": 6,
    "head_dim": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 2,
    "q_lora_rank": 14,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 9,
    "n_group": 2,
    "topk_group": 1,
}
MODELS = {
    "llama3": Model(
        architecture="LlamaForCausalLM",
        layout="hf_llama3",
        config=SIZES | ROPE,
    ),
    "llama3_tied": Model(
        architecture="LlamaForCausalLM",
        layout="hf_llama3",
        config=SIZES | TIED,
        dtype="bfloat16",
    ),
    "mistral": Model(
        architecture="MistralForCausalLM",
        layout="hf_llama3",
        config=SIZES | {"sliding_window": 4},
    ),
    "mixtral": Model(
        architecture="MixtralForCausalLM",
        layout="hf_mixtral",
        config=SIZES | {"num_local_experts": 3, "num_experts_per_tok": 2},
        dtype="bfloat16",
    ),
    "qwen2.5": Model(
        architecture="Qwen2ForCausalLM", layout="hf_qwen3", config=SIZES | TIED
    ),
    "qwen3": Model(architecture="Qwen3ForCausalLM", layout="hf_qwen3", config=SIZES),
    "qwen3_moe": Model(
        architecture="Qwen3MoeForCausalLM",
        layout="hf_qwen3",
        config=SIZES
        | ROPE
        | EXPERTS
        | {"num_experts": 5, "mlp_only_layers": [1], "norm_topk_prob": True},
    ),
    "qwen3_next": Model(
        architecture="Qwen3NextForCausalLM",
        layout="hf_qwen3_next",
        config=SIZES
        | EXPERTS
        | {
            "num_experts": 5,
            "num_hidden_layers": 4,
            "mlp_only_layers": [1, 3],
            "shared_expert_intermediate_size": 28,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 14,
            "linear_value_head_dim": 9,
            "linear_conv_kernel_dim": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "gemma2": Model(
        architecture="Gemma2ForCausalLM", layout="hf_gemma3", config=SIZES | TIED
    ),
    "gemma3": Model(
        architecture="Gemma3ForCausalLM",
        layout="hf_gemma3",
        config=SIZES
        | TIED
        | {"sliding_window": 4, "num_hidden_layers": 4, "sliding_window_pattern": 3},
    ),
    "deepseek2": Model(
        architecture="DeepseekV2ForCausalLM", layout="hf_deepseek3", config=LATENT
    ),
    "deepseek2_lite": Model(
        architecture="DeepseekV2ForCausalLM",
        layout="hf_deepseek3",
        config=LATENT | {"q_lora_rank": None},
    ),
    "deepseek3": Model(
        architecture="DeepseekV3ForCausalLM", layout="hf_deepseek3", config=LATENT
    ),
    "gpt_oss": Model(
        architecture="GptOssForCausalLM",
        layout="hf_gpt_oss",
        config=SIZES
        | {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 4},
        dtype="bfloat16",
    ),
    "olmo3": Model(
        architecture="Olmo3ForCausalLM",
        layout="hf_olmo3",
        config=SIZES | {"hidden_size": 72, "head_dim": 12},
    ),
    "phi3": Model(
        architecture="Phi3ForCausalLM",
        layout="hf_phi4",
        config=SIZES | {"hidden_size": 72, "head_dim": 12},
    ),
    "llama4": Model(
        architecture="Llama4ForCausalLM",
        layout="hf_llama4",
        config=SIZES
        | {
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 68,
            "num_local_experts": 5,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
        },
    ),
}
VISION = {
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
# Models that also see.
SEEING = {
    "gemma3_vision": Model(
        architecture="Gemma3ForConditionalGeneration",
        layout="hf_gemma3",
        config={
            "text_config": MODELS["gemma3"].config,
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
        },
    ),
    "mistral3_vision": Model(
        architecture="Mistral3ForConditionalGeneration",
        layout="hf_llama3",
        config={
            "text_config": {**MODELS["mistral"].config, "model_type": "mistral"},
            "vision_config": {**VISION, "model_type": "pixtral"},
            "tie_word_embeddings": False,
        },
    ),
    "llama4_vision": Model(
        architecture="Llama4ForConditionalGeneration",
        layout="hf_llama4",
        config={
            "text_config": MODELS["llama4"].config,
            "vision_config": VISION
            | {
                "vision_output_dim": 18,
                "projector_input_dim": 18,
                "projector_output_dim": 18,
                "pixel_shuffle_ratio": 0.5,
            },
        },
    ),
}
# Blocks of FP8 have 128 x 128 elements, those of MXFP4 32.
QUANTIZED = {
    "deepseek3_fp8": Model(
        architecture="DeepseekV3ForCausalLM",
        layout="hf_deepseek3",
        config=LATENT
        | {
            "num_hidden_layers": 2,
            "first_k_dense_replace": 1,
            "hidden_size": 256,
            "intermediate_size": 384,
            "moe_intermediate_size": 128,
            "q_lora_rank": 128,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 60,
            "v_head_dim": 68,
        },
        dtype="bfloat16",
        quantized="fp8",
    ),
    "gpt_oss_mxfp4": Model(
        architecture="GptOssForCausalLM",
        layout="hf_gpt_oss",
        config=MODELS["gpt_oss"].config
        | {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2},
        dtype="bfloat16",
        quantized="mxfp4",
    ),
}
# The tokens of the logits.
TOKENS = [[1, 5, 9, 70, 33, 2, 18], [4, 4, 61, 12, 7, 40, 3]]
