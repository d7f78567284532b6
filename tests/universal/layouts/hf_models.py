"""Random tensors of small models, by Hugging Face's names."""

import zlib

import numpy as np

# No two sizes are equal, and each has a prime factor that no other has.
LAYERS, VOCAB, EMBED, MLP, EXPERTS = 3, 13, 10, 11, 17
KV, Q, HALF = 2, 19, 7
D, HEADS = 2 * HALF, KV * Q
QUERY = "self_attn.q_proj.weight"
ATTENTION = {
    "input_layernorm.weight": (EMBED,),
    "post_attention_layernorm.weight": (EMBED,),
    QUERY: (HEADS * D, EMBED),
    "self_attn.k_proj.weight": (KV * D, EMBED),
    "self_attn.v_proj.weight": (KV * D, EMBED),
    "self_attn.o_proj.weight": (EMBED, HEADS * D),
}
QUERY_NORMS = {"self_attn.q_norm.weight": (D,), "self_attn.k_norm.weight": (D,)}
BIASES = {
    "self_attn.q_proj.bias": (HEADS * D,),
    "self_attn.k_proj.bias": (KV * D,),
    "self_attn.v_proj.bias": (KV * D,),
}
DENSE = {
    "mlp.gate_proj.weight": (MLP, EMBED),
    "mlp.up_proj.weight": (MLP, EMBED),
    "mlp.down_proj.weight": (EMBED, MLP),
}
MIXTRAL = {"block_sparse_moe.gate.weight": (EXPERTS, EMBED)} | {
    f"block_sparse_moe.experts.{number}.{leaf}.weight": shape
    for number in range(EXPERTS)
    for leaf, shape in {
        "w1": (MLP, EMBED),
        "w2": (EMBED, MLP),
        "w3": (MLP, EMBED),
    }.items()
}
QWEN_EXPERTS = {"mlp.gate.weight": (EXPERTS, EMBED)} | {
    f"mlp.experts.{number}.{leaf.removeprefix('mlp.')}": shape
    for number in range(EXPERTS)
    for leaf, shape in DENSE.items()
}
ENDS = {"model.embed_tokens.weight": (VOCAB, EMBED), "model.norm.weight": (EMBED,)}
HEAD = {"lm_head.weight": (VOCAB, EMBED)}


def model(*blocks, head=True):
    """The tensors of a model whose layers have these shapes by name."""
    shapes = {**ENDS, **(HEAD if head else {})}
    for layer in range(LAYERS):
        for block in blocks:
            shapes |= {
                f"model.layers.{layer}.{name}": shape for name, shape in block.items()
            }
    return {name: random(name, shape) for name, shape in shapes.items()}


def random(name, shape):
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return rng.standard_normal(shape, np.float32)


def layers(arrays, name):
    """The tensors of this name of all layers."""
    return [arrays[f"model.layers.{layer}.{name}"] for layer in range(LAYERS)]


def experts(arrays, name):
    """The tensors of all experts, by layer; `{}` stands for the number."""
    return [
        [arrays[f"model.layers.{n}.{name.format(expert)}"] for expert in range(EXPERTS)]
        for n in range(LAYERS)
    ]
