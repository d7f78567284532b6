"""Small models of each family, as arguments of the classes of Transformers.

Sizes differ from each other, so that no transposition goes unnoticed.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Model(NamedTuple):
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
SEVENTY_TWO = {**SIZES, "hidden_size": 72, "head_dim": 12}
QWEN_EXPERTS = {
    **SIZES,
    **ROPE,
    **EXPERTS,
    "num_experts": 5,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
}
QWEN_NEXT = {
    **SIZES,
    **EXPERTS,
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
}
WINDOW = {**SIZES, "sliding_window": 4}
GEMMA3 = {**WINDOW, **TIED, "num_hidden_layers": 4, "sliding_window_pattern": 3}
MIXTRAL = {**SIZES, "num_local_experts": 3, "num_experts_per_tok": 2}
GPT_OSS = {**WINDOW, "num_local_experts": 5, "num_experts_per_tok": 2}
LLAMA4 = {
    **SIZES,
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 68,
    "num_local_experts": 5,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
}
LITE = {**LATENT, "q_lora_rank": None}
MODELS = {
    "llama3": Model("LlamaForCausalLM", "hf_llama3", SIZES | ROPE),
    "llama3_tied": Model("LlamaForCausalLM", "hf_llama3", SIZES | TIED, "bfloat16"),
    "mistral": Model("MistralForCausalLM", "hf_llama3", WINDOW),
    "mixtral": Model("MixtralForCausalLM", "hf_mixtral", MIXTRAL, "bfloat16"),
    "qwen2.5": Model("Qwen2ForCausalLM", "hf_qwen3", SIZES | TIED),
    "qwen3": Model("Qwen3ForCausalLM", "hf_qwen3", SIZES),
    "qwen3_moe": Model("Qwen3MoeForCausalLM", "hf_qwen3", QWEN_EXPERTS),
    "qwen3_next": Model("Qwen3NextForCausalLM", "hf_qwen3_next", QWEN_NEXT),
    "gemma2": Model("Gemma2ForCausalLM", "hf_gemma3", SIZES | TIED),
    "gemma3": Model("Gemma3ForCausalLM", "hf_gemma3", GEMMA3),
    "deepseek2": Model("DeepseekV2ForCausalLM", "hf_deepseek3", LATENT),
    "deepseek2_lite": Model("DeepseekV2ForCausalLM", "hf_deepseek3", LITE),
    "deepseek3": Model("DeepseekV3ForCausalLM", "hf_deepseek3", LATENT),
    "gpt_oss": Model("GptOssForCausalLM", "hf_gpt_oss", GPT_OSS, "bfloat16"),
    "olmo3": Model("Olmo3ForCausalLM", "hf_olmo3", SEVENTY_TWO),
    "phi3": Model("Phi3ForCausalLM", "hf_phi4", SEVENTY_TWO),
    "llama4": Model("Llama4ForCausalLM", "hf_llama4", LLAMA4),
}
VISION = {
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
LLAMA4_VISION = {
    **VISION,
    "vision_output_dim": 18,
    "projector_input_dim": 18,
    "projector_output_dim": 18,
    "pixel_shuffle_ratio": 0.5,
}
GEMMA3_SEEING = {
    "text_config": GEMMA3,
    "vision_config": VISION,
    "mm_tokens_per_image": 4,
}
MISTRAL3_SEEING = {
    "text_config": {**WINDOW, "model_type": "mistral"},
    "vision_config": {**VISION, "model_type": "pixtral"},
    "tie_word_embeddings": False,
}
LLAMA4_SEEING = {"text_config": LLAMA4, "vision_config": LLAMA4_VISION}
# Models that also see.
SEEING = {
    name: Model(f"{architecture}ForConditionalGeneration", layout, config)
    for name, architecture, layout, config in (
        ("gemma3_vision", "Gemma3", "hf_gemma3", GEMMA3_SEEING),
        ("mistral3_vision", "Mistral3", "hf_llama3", MISTRAL3_SEEING),
        ("llama4_vision", "Llama4", "hf_llama4", LLAMA4_SEEING),
    )
}
# Blocks of FP8 have 128 x 128 elements, those of MXFP4 32.
FP8 = {
    **LATENT,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "q_lora_rank": 128,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 60,
    "v_head_dim": 68,
}
MXFP4 = {**GPT_OSS, "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2}
QUANTIZED = {
    name: MODELS[name.rpartition("_")[0]]._replace(
        config=config, dtype="bfloat16", quantized=name.rpartition("_")[2]
    )
    for name, config in {"deepseek3_fp8": FP8, "gpt_oss_mxfp4": MXFP4}.items()
}
# The tokens of the logits.
TOKENS = [[1, 5, 9, 70, 33, 2, 18], [4, 4, 61, 12, 7, 40, 3]]
# Settings of adapters of PEFT.
MERGED: Mapping[str, dict[str, Any]] = {
    "plain": {"target_modules": "all-linear"},
    "rslora": {"use_rslora": True},
    "ranks": {"rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 6}},
    "saved": {"modules_to_save": ["lm_head", "norm"]},
    "embeddings": {"target_modules": ["embed_tokens", "lm_head", "v_proj"]},
}
# What is refused, by the setting that the error names.
REFUSED: Mapping[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "alphas": {"alpha_pattern": {"q_proj": 3}},
    "pissa": {"init_lora_weights": "pissa"},
    "biases": {"lora_bias": True},
    "tokens": {"trainable_token_indices": [1, 2]},
    # Their base has one matrix for the embedding and the head.
    "tied": {"target_modules": ["embed_tokens"]},
    "tied_saved": {"modules_to_save": ["embed_tokens"]},
}
