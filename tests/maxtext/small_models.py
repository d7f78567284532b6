"""Small models of the families that layouts are for: settings, tensors and tokens.

Imported by the tests, in MaxText's environment, and by `hf_logits`.
"""

import zlib

import numpy as np

LAYERS, VOCAB, HEADS, KV, HEAD_DIM, MLP = 3, 26, 6, 2, 14, 24
# Transformers require that of LLaMA.
EMBED = HEADS * HEAD_DIM
EXPERTS, CHOSEN = 5, 2
# So far apart that frequencies count, also those that LLaMA 3.1 scales.
POSITIONS = np.arange(16, dtype=np.int32)[None] * 257
TOKENS = np.random.default_rng(0).integers(0, VOCAB, POSITIONS.shape).astype(np.int32)

_HF = {
    "hidden_size": EMBED,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HEAD_DIM,
    "intermediate_size": MLP,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "max_position_embeddings": 131072,
}
_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5}
_ROPE_31 = {
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
}
_MAXTEXT = {
    "base_emb_dim": EMBED,
    "base_num_decoder_layers": LAYERS,
    "base_num_query_heads": HEADS,
    "base_num_kv_heads": KV,
    "head_dim": HEAD_DIM,
    "base_mlp_dim": MLP,
    "vocab_size": VOCAB,
}
# By name: Hugging Face's configuration, MaxText's settings, the layout and its sizes.
MODELS = {
    "llama2": (
        {**_LLAMA, "rope_theta": 10000.0},
        {"model_name": "llama2-7b"},
        ("hf_llama_to_maxtext", {"interleave": 1}),
    ),
    "llama3": (
        {**_LLAMA, "rope_theta": 500000.0},
        {"model_name": "llama3-8b"},
        ("hf_llama_to_maxtext", {"interleave": 1}),
    ),
    "llama3.1": (
        {**_LLAMA, **_ROPE_31, "rope_theta": 500000.0},
        {"model_name": "llama3.1-8b"},
        ("hf_llama_to_maxtext", {"interleave": 2}),
    ),
    "llama3.3": (
        {**_LLAMA, **_ROPE_31, "rope_theta": 500000.0},
        {"model_name": "llama3.3-70b", "rope_type": "llama3.1"},
        ("hf_llama_to_maxtext", {"interleave": 2}),
    ),
    "mixtral": (
        {
            "model_type": "mixtral",
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": CHOSEN,
        },
        {
            "model_name": "mixtral-8x7b",
            "base_moe_mlp_dim": MLP,
            "num_experts": EXPERTS,
        },
        ("hf_mixtral_to_maxtext", {}),
    ),
    "qwen2.5": (
        {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0},
        {"model_name": "qwen2.5-7b"},
        ("hf_qwen3_to_maxtext", {}),
    ),
    "qwen3": (
        {"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0},
        {"model_name": "qwen3-8b"},
        ("hf_qwen3_to_maxtext", {}),
    ),
    "qwen3_moe": (
        {
            "model_type": "qwen3_moe",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000000.0,
            "num_experts": EXPERTS,
            "num_experts_per_tok": CHOSEN,
            "moe_intermediate_size": MLP,
            "norm_topk_prob": True,
        },
        {
            "model_name": "qwen3-30b-a3b",
            "base_moe_mlp_dim": MLP,
            "num_experts": EXPERTS,
            "num_experts_per_tok": CHOSEN,
        },
        ("hf_qwen3_to_maxtext", {}),
    ),
}


def hf_config(name):
    """The `config.json` of a model."""
    return {**_HF, **MODELS[name][0]}


def maxtext_settings(name):
    """The keys of MaxText that make the same model."""
    return {**_MAXTEXT, **MODELS[name][1]}


def tensors(name):
    """The tensors of a model, by Hugging Face's names."""
    return {key: _numbers(key, shape) for key, shape in _shapes(name)}


def _numbers(key, shape):
    drawn = np.random.default_rng(zlib.crc32(key.encode())).standard_normal(shape)
    # Norms are near 1, and what they are followed by keeps its size.
    made = 1 + drawn / 4 if "norm" in key else drawn / np.sqrt(shape[-1])
    return made.astype(np.float32)


def _shapes(name):
    kind = MODELS[name][0]["model_type"]
    yield "model.embed_tokens.weight", (VOCAB, EMBED)
    yield "model.norm.weight", (EMBED,)
    yield "lm_head.weight", (VOCAB, EMBED)
    heads = {"q": HEADS, "k": KV, "v": KV}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        yield f"{at}input_layernorm.weight", (EMBED,)
        yield f"{at}post_attention_layernorm.weight", (EMBED,)
        for each, count in heads.items():
            yield f"{at}self_attn.{each}_proj.weight", (count * HEAD_DIM, EMBED)
            if kind == "qwen2":
                yield f"{at}self_attn.{each}_proj.bias", (count * HEAD_DIM,)
            if kind.startswith("qwen3") and each != "v":
                yield f"{at}self_attn.{each}_norm.weight", (HEAD_DIM,)
        yield f"{at}self_attn.o_proj.weight", (EMBED, HEADS * HEAD_DIM)
        dense = {
            "gate_proj": (MLP, EMBED),
            "up_proj": (MLP, EMBED),
            "down_proj": (EMBED, MLP),
        }
        block, names = "mlp", dense
        if kind == "mixtral":
            block = "block_sparse_moe"
            names = dict(zip(("w1", "w3", "w2"), dense.values(), strict=True))
        if kind in ("mixtral", "qwen3_moe"):
            yield f"{at}{block}.gate.weight", (EXPERTS, EMBED)
            block = [f"{block}.experts.{number}" for number in range(EXPERTS)]
        for prefix in [block] if isinstance(block, str) else block:
            for leaf, shape in names.items():
                yield f"{at}{prefix}.{leaf}.weight", shape
