"""Small models of the families that layouts are for: settings, tensors and tokens.

Imported by the tests, in MaxText's environment, and by `hf_logits`.
"""

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

LAYERS, VOCAB, HEADS, KV, HEAD_DIM, MLP = 3, 26, 6, 2, 14, 24
# Transformers require that of LLaMA.
EMBED = HEADS * HEAD_DIM
EXPERTS, CHOSEN, MOE_MLP = 5, 2, 20
# Gemma's: the root of the first is a power of two, the last a vocabulary with padding.
GEMMA_EMBED, GEMMA_HEADS, PADDED = 64, 4, 32
# Latent attention: ranks, and elements of a head that are not rotated, rotated, values.
Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 16, 10, 12, 6, 8
# Linear attention: heads of keys and of values, and their elements.
LINEAR_HEADS, LINEAR_DIMS, WIDTH = (2, 4), (12, 8), 4
WINDOW = 5
# So far apart that frequencies count, also those that LLaMA 3.1 scales.
POSITIONS = np.arange(16, dtype=np.int32)[None] * 257
TOKENS = np.random.default_rng(0).integers(0, VOCAB, POSITIONS.shape).astype(np.int32)

_SIZES = {
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
# What MaxText calls the sizes in a configuration of Hugging Face.
_MAXTEXT = {
    "hidden_size": "base_emb_dim",
    "num_hidden_layers": "base_num_decoder_layers",
    "num_attention_heads": "base_num_query_heads",
    "num_key_value_heads": "base_num_kv_heads",
    "intermediate_size": "base_mlp_dim",
    "sliding_window": "sliding_window_size",
    "attention_chunk_size": "chunk_attn_window_size",
    **dict.fromkeys(("num_local_experts", "n_routed_experts"), "num_experts"),
    "moe_intermediate_size": "base_moe_mlp_dim",
    "first_k_dense_replace": "first_num_dense_layers",
    "n_group": "n_routing_groups",
    "topk_group": "topk_routing_group",
    "linear_num_key_heads": "gdn_num_key_heads",
    "linear_num_value_heads": "gdn_num_value_heads",
    "linear_key_head_dim": "gdn_key_head_dim",
    "linear_value_head_dim": "gdn_value_head_dim",
    "linear_conv_kernel_dim": "gdn_conv_kernel_dim",
    **{name: name for name in ("head_dim", "vocab_size", "num_experts")},
    **{name: name for name in ("num_experts_per_tok", "q_lora_rank", "kv_lora_rank")},
    **{name: name for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
}


def _kind(model_type, rope_theta, rms_norm_eps=1e-6, **more):
    """What each configuration of Hugging Face has beside the sizes."""
    return dict(
        model_type=model_type, rope_theta=rope_theta, rms_norm_eps=rms_norm_eps, **more
    )


_ROPE_31 = {
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
}
_LLAMA_31 = _kind("llama", 5e5, 1e-5, **_ROPE_31)
_YARN = {
    "rope_type": "yarn",
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}
_EXPERTS = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN}
_LOCAL = {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN}
_GEMMA = {
    "hidden_size": GEMMA_EMBED,
    "num_attention_heads": GEMMA_HEADS,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": WINDOW,
    "tie_word_embeddings": True,
}
_DEEPSEEK = {
    "head_dim": ROPE,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": KV_RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
    "n_routed_experts": 2 * 4,
    "num_experts_per_tok": CHOSEN,
    "moe_intermediate_size": MOE_MLP,
}
_LLAMA4 = _kind(
    "llama4_text",
    5e5,
    1e-5,
    num_hidden_layers=8,
    num_local_experts=EXPERTS,
    num_experts_per_tok=1,
    intermediate_size=MOE_MLP,
    intermediate_size_mlp=MLP,
    attention_chunk_size=WINDOW,
)
_LLAMA4_MAXTEXT = {"base_mlp_dim": MLP, "base_moe_mlp_dim": MOE_MLP}


class Model(NamedTuple):
    """A small model.

    Attributes:
      name: That of MaxText for a model of this kind.
      layout: From Hugging Face's tree to MaxText's.
      config: Hugging Face's configuration, but for the sizes that all have.
      sizes: Of the layout.
      maxtext: Settings of MaxText that do not follow from `config`; None for no such.
    """

    name: str
    layout: str
    config: Mapping[str, Any]
    sizes: Mapping[str, int] = {}
    maxtext: Mapping[str, Any] = {}


MODELS = {
    "llama2": Model(
        "llama2-7b", "hf_llama_to_maxtext", _kind("llama", 1e4, 1e-5), {"interleave": 1}
    ),
    "llama3": Model(
        "llama3-8b", "hf_llama_to_maxtext", _kind("llama", 5e5, 1e-5), {"interleave": 1}
    ),
    "llama3.1": Model(
        "llama3.1-8b", "hf_llama_to_maxtext", _LLAMA_31, {"interleave": 2}
    ),
    "llama3.3": Model(
        *("llama3.3-70b", "hf_llama_to_maxtext", _LLAMA_31, {"interleave": 2}),
        maxtext={"rope_type": "llama3.1"},
    ),
    "mixtral": Model(
        "mixtral-8x7b",
        "hf_mixtral_to_maxtext",
        _kind("mixtral", 1e6, 1e-5, **_LOCAL),
        maxtext={"base_moe_mlp_dim": MLP},
    ),
    "qwen2.5": Model("qwen2.5-7b", "hf_qwen3_to_maxtext", _kind("qwen2", 1e6)),
    "qwen3": Model("qwen3-8b", "hf_qwen3_to_maxtext", _kind("qwen3", 1e6)),
    "qwen3_moe": Model(
        "qwen3-30b-a3b",
        "hf_qwen3_to_maxtext",
        _kind(
            *("qwen3_moe", 1e7),
            **_EXPERTS,
            moe_intermediate_size=MLP,
            norm_topk_prob=True,
        ),
    ),
    "gemma2": Model(
        "gemma2-2b",
        "hf_gemma2_to_maxtext",
        {
            **_GEMMA,
            "model_type": "gemma2",
            "rms_norm_eps": 1e-6,
            "num_hidden_layers": 4,
            "query_pre_attn_scalar": HEAD_DIM + 2,
        },
        sizes={"pad": PADDED - VOCAB},
        maxtext={"base_num_decoder_layers": 2, "vocab_size": PADDED},
    ),
    "gemma3": Model(
        "gemma3-4b",
        "hf_gemma3_to_maxtext",
        _kind(
            *("gemma3_text", 1e6),
            **_GEMMA,
            num_hidden_layers=14,
            vocab_size=PADDED,
            query_pre_attn_scalar=HEAD_DIM,
            rope_local_base_freq=10000.0,
            rope_scaling={"factor": 8.0, "rope_type": "linear"},
        ),
        sizes={"vocab": VOCAB},
        maxtext={"vocab_size": VOCAB},
    ),
    "olmo3": Model(
        "olmo3-7b-pt",
        "hf_olmo3_to_maxtext",
        _kind("olmo3", 5e5, num_hidden_layers=8, sliding_window=WINDOW),
    ),
    "gpt_oss": Model(
        "gpt-oss-20b",
        "hf_gpt_oss_to_maxtext",
        _kind(
            *("gpt_oss", 150000.0, 1e-5),
            **_LOCAL,
            num_hidden_layers=4,
            rope_scaling={**_YARN, "factor": 32.0, "truncate": False},
            sliding_window=WINDOW,
        ),
        maxtext={"base_moe_mlp_dim": MLP},
    ),
    "deepseek2": Model(
        "deepseek2-16b",
        "hf_deepseek3_to_maxtext",
        _kind(
            *("deepseek_v2", 1e4),
            **_DEEPSEEK,
            first_k_dense_replace=1,
            q_lora_rank=None,
            n_shared_experts=2,
            n_group=1,
            topk_group=1,
            topk_method="greedy",
            norm_topk_prob=False,
            routed_scaling_factor=1.0,
            rope_scaling=_YARN
            | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
        ),
        maxtext={
            **dict.fromkeys(("n_routing_groups", "topk_routing_group")),
            "head_dim": HEAD_DIM,
        },
    ),
    "deepseek3": Model(
        "deepseek3-671b",
        "hf_deepseek3_to_maxtext",
        _kind(
            *("deepseek_v3", 1e4),
            **_DEEPSEEK,
            num_hidden_layers=5,
            first_k_dense_replace=2,
            q_lora_rank=Q_RANK,
            n_shared_experts=1,
            n_group=4,
            topk_group=2,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            rope_scaling=_YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        ),
        maxtext={"head_dim": HEAD_DIM},
    ),
    "llama4_scout": Model(
        "llama4-17b-16e",
        "hf_llama4_to_maxtext",
        {**_LLAMA4, **_ROPE_31, "interleave_moe_layer_step": 1, "use_qk_norm": True},
        maxtext=_LLAMA4_MAXTEXT,
    ),
    "llama4_maverick": Model(
        "llama4-17b-128e",
        "hf_llama4_to_maxtext",
        {**_LLAMA4, "interleave_moe_layer_step": 2, "use_qk_norm": False},
        maxtext=_LLAMA4_MAXTEXT,
    ),
    "qwen3_next": Model(
        "qwen3-next-80b-a3b",
        "hf_qwen3_next_to_maxtext",
        _kind(
            *("qwen3_next", 1e7),
            **_EXPERTS,
            num_hidden_layers=9,
            head_dim=16,
            partial_rotary_factor=0.25,
            norm_topk_prob=True,
            moe_intermediate_size=MOE_MLP,
            shared_expert_intermediate_size=MOE_MLP,
            linear_num_key_heads=LINEAR_HEADS[0],
            linear_num_value_heads=LINEAR_HEADS[1],
            linear_key_head_dim=LINEAR_DIMS[0],
            linear_value_head_dim=LINEAR_DIMS[1],
            linear_conv_kernel_dim=WIDTH,
        ),
        maxtext={"base_mlp_dim": MOE_MLP, "gdn_chunk_size": 8},
    ),
}


def hf_config(name):
    """The `config.json` of a model."""
    return {**_SIZES, **MODELS[name].config}


def maxtext_settings(name):
    """The keys of MaxText that make the same model."""
    config = hf_config(name)
    made = {_MAXTEXT[key]: config[key] for key in config.keys() & _MAXTEXT.keys()}
    made |= {"model_name": MODELS[name].name, **MODELS[name].maxtext}
    return {key: value for key, value in made.items() if value is not None}


def tensors(name):
    """The tensors of a model, by Hugging Face's names."""
    made = {key: _numbers(key, shape) for key, shape in _shapes(name)}
    if hf_config(name)["model_type"].startswith(("gemma", "qwen3_next")):
        # These add 1.
        for key in made:
            if "norm" in key and "linear_attn" not in key:
                made[key] -= np.float32(1)
    if hf_config(name)["tie_word_embeddings"]:
        # MaxText computes logits with the embedding in bfloat16.
        embedding = made["model.embed_tokens.weight"]
        embedding.view(np.uint32)[...] &= 0xFFFF0000
    return made


def _numbers(key, shape):
    drawn = np.random.default_rng(zlib.crc32(key.encode())).standard_normal(shape)
    # Norms are near 1, and what they are followed by keeps its size.
    made = 1 + drawn / 4 if "norm" in key else drawn / np.sqrt(shape[-1])
    return made.astype(np.float32)


def _shapes(name):
    config = hf_config(name)
    embed = config["hidden_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], embed)
    yield "model.norm.weight", (embed,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], embed)
    for layer in range(config["num_hidden_layers"]):
        made = _attention(config, layer) | _block(config, layer)
        made |= {f"{each}.weight": (embed,) for each in _norms(config["model_type"])}
        for leaf, shape in made.items():
            yield f"model.layers.{layer}.{leaf}", shape


def _norms(kind):
    yield "post_attention_layernorm"
    if kind != "olmo3":
        yield "input_layernorm"
    if kind.startswith(("gemma", "olmo3")):
        yield "post_feedforward_layernorm"
    if kind.startswith("gemma"):
        yield "pre_feedforward_layernorm"


def _attention(config, layer):
    kind = config["model_type"]
    if kind.startswith("deepseek"):
        return _latent(config)
    if kind == "qwen3_next" and (layer + 1) % 4:
        return _linear()
    embed, dim = config["hidden_size"], config["head_dim"]
    queries = config["num_attention_heads"]
    made = {"self_attn.o_proj.weight": (embed, queries * dim)}
    for each, heads in {"q": queries, "k": KV, "v": KV}.items():
        # Qwen 3-Next's query has a gate beside it.
        rows = heads * dim * (1 + (kind == "qwen3_next" and each == "q"))
        made[f"self_attn.{each}_proj.weight"] = (rows, embed)
        if kind in ("qwen2", "gpt_oss"):
            made[f"self_attn.{each}_proj.bias"] = (rows,)
        if each != "v" and kind.startswith(("qwen3", "gemma3")):
            made[f"self_attn.{each}_norm.weight"] = (dim,)
        if each != "v" and kind == "olmo3":
            made[f"self_attn.{each}_norm.weight"] = (rows,)
    if kind == "gpt_oss":
        made["self_attn.o_proj.bias"] = (embed,)
        made["self_attn.sinks"] = (HEADS,)
    return made


def _latent(config):
    query = {"q_proj.weight": (HEADS * (NOPE + ROPE), EMBED)}
    if config["q_lora_rank"]:
        query = {
            "q_a_proj.weight": (Q_RANK, EMBED),
            "q_a_layernorm.weight": (Q_RANK,),
            "q_b_proj.weight": (HEADS * (NOPE + ROPE), Q_RANK),
        }
    made = {
        **query,
        "kv_a_proj_with_mqa.weight": (KV_RANK + ROPE, EMBED),
        "kv_a_layernorm.weight": (KV_RANK,),
        "kv_b_proj.weight": (HEADS * (NOPE + VALUE), KV_RANK),
        "o_proj.weight": (EMBED, HEADS * VALUE),
    }
    return {f"self_attn.{leaf}": shape for leaf, shape in made.items()}


def _linear():
    keys, values = map(int.__mul__, LINEAR_HEADS, LINEAR_DIMS)
    made = {
        "in_proj_qkvz.weight": (2 * keys + 2 * values, EMBED),
        "in_proj_ba.weight": (2 * LINEAR_HEADS[1], EMBED),
        "conv1d.weight": (2 * keys + values, 1, WIDTH),
        "A_log": (LINEAR_HEADS[1],),
        "dt_bias": (LINEAR_HEADS[1],),
        "norm.weight": (LINEAR_DIMS[1],),
        "out_proj.weight": (EMBED, values),
    }
    return {f"linear_attn.{leaf}": shape for leaf, shape in made.items()}


def _dense(at, embed, mlp, names=("gate_proj", "up_proj", "down_proj")):
    shapes = ((mlp, embed), (mlp, embed), (embed, mlp))
    return {f"{at}.{n}.weight": shape for n, shape in zip(names, shapes, strict=True)}


def _experts(config, at, number, **names):
    mlp = config.get("moe_intermediate_size", config["intermediate_size"])
    made = {f"{at}.gate.weight": (number, EMBED)}
    for expert in range(number):
        made |= _dense(f"{at}.experts.{expert}", EMBED, mlp, **names)
    return made


def _block(config, layer):
    kind = config["model_type"]
    match kind:
        case "mixtral":
            names = ("w1", "w3", "w2")
            return _experts(config, "block_sparse_moe", EXPERTS, names=names)
        case "qwen3_moe":
            return _experts(config, "mlp", EXPERTS)
        case "qwen3_next":
            shared = _dense(
                "mlp.shared_expert", EMBED, config["shared_expert_intermediate_size"]
            )
            gate = {"mlp.shared_expert_gate.weight": (1, EMBED)}
            return _experts(config, "mlp", EXPERTS) | shared | gate
        case "gpt_oss":
            return {
                "mlp.router.weight": (EXPERTS, EMBED),
                "mlp.router.bias": (EXPERTS,),
                "mlp.experts.gate_up_proj": (EXPERTS, EMBED, 2 * MLP),
                "mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * MLP),
                "mlp.experts.down_proj": (EXPERTS, MLP, EMBED),
                "mlp.experts.down_proj_bias": (EXPERTS, EMBED),
            }
        case "deepseek_v2" | "deepseek_v3":
            if layer < config["first_k_dense_replace"]:
                return _dense("mlp", EMBED, MLP)
            number, mlp = config["n_routed_experts"], config["moe_intermediate_size"]
            shared = config["n_shared_experts"] * mlp
            made = _experts(config, "mlp", number)
            made |= _dense("mlp.shared_experts", EMBED, shared)
            if kind == "deepseek_v3":
                made["mlp.gate.e_score_correction_bias"] = (number,)
            return made
        case "llama4_text":
            if (layer + 1) % config["interleave_moe_layer_step"]:
                return _dense("feed_forward", EMBED, config["intermediate_size_mlp"])
            mlp = config["intermediate_size"]
            return {
                "feed_forward.router.weight": (EXPERTS, EMBED),
                "feed_forward.experts.gate_up_proj": (EXPERTS, EMBED, 2 * mlp),
                "feed_forward.experts.down_proj": (EXPERTS, mlp, EMBED),
                **_dense("feed_forward.shared_expert", EMBED, mlp),
            }
    return _dense("mlp", config["hidden_size"], MLP)
