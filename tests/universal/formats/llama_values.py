"""A model that `elastic-ckpt train` trains, as other programs name its parameters.

Writers put `known_values` into their models and optimizers; here the same values are
the train state of ours, made with NumPy alone.
"""

import numpy as np

from tests.universal.formats import known_values as kv

VOCAB, EMBED, HEADS, HEAD, FF, LAYERS = 259, 8, 2, 4, 12, 2
STEPS = 2
# The sizes of a run of ours.
SIZES = {
    "base_emb_dim": EMBED,
    "base_num_query_heads": HEADS,
    "head_dim": HEAD,
    "base_mlp_dim": FF,
    "base_num_decoder_layers": LAYERS,
}
_OF_LAYER = {
    "attention_norm": (EMBED,),
    "q_proj": (HEADS * HEAD, EMBED),
    "k_proj": (HEADS * HEAD, EMBED),
    "v_proj": (HEADS * HEAD, EMBED),
    "o_proj": (EMBED, HEADS * HEAD),
    "mlp_norm": (EMBED,),
    "gate_proj": (FF, EMBED),
    "up_proj": (FF, EMBED),
    "down_proj": (EMBED, FF),
}
# As PyTorch's models name them.
PYTORCH = {
    "model.embed_tokens.weight": (VOCAB, EMBED),
    **{
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(LAYERS)
        for name, shape in _OF_LAYER.items()
    },
    "model.norm.weight": (EMBED,),
}
# As Megatron names them, in torch_dist. Rows of the embedding are padded.
PADDED = VOCAB + 1
_DECODER = "decoder.layers"
MEGATRON = {
    "embedding.word_embeddings.weight": (PADDED, EMBED),
    f"{_DECODER}.self_attention.linear_qkv.layer_norm_weight": (LAYERS, EMBED),
    f"{_DECODER}.self_attention.linear_qkv.weight": (LAYERS, 3 * HEADS * HEAD, EMBED),
    f"{_DECODER}.self_attention.linear_proj.weight": (LAYERS, EMBED, HEADS * HEAD),
    f"{_DECODER}.mlp.linear_fc1.layer_norm_weight": (LAYERS, EMBED),
    f"{_DECODER}.mlp.linear_fc1.weight": (LAYERS, 2 * FF, EMBED),
    f"{_DECODER}.mlp.linear_fc2.weight": (LAYERS, EMBED, FF),
    "decoder.final_layernorm.weight": (EMBED,),
}


def pytorch(state):
    """The parameters of our model in a state of `known_values`, as PyTorch has it."""

    def layers(*names):
        return np.stack(
            [
                np.concatenate(
                    [
                        kv.known(
                            state, f"model.layers.{layer}.{n}.weight", _OF_LAYER[n]
                        ).T
                        for n in names
                    ],
                    axis=-1,
                )
                for layer in range(LAYERS)
            ]
        )

    def whole(name):
        return kv.known(state, name, PYTORCH[name])

    return {
        "embedding": whole("model.embed_tokens.weight"),
        "qkv": layers("q_proj", "k_proj", "v_proj"),
        "attention_out": layers("o_proj"),
        "mlp_in": layers("gate_proj", "up_proj"),
        "mlp_out": layers("down_proj"),
        "attention_norm": layers("attention_norm"),
        "mlp_norm": layers("mlp_norm"),
        "final_norm": whole("model.norm.weight"),
    }


def megatron(state):
    """The same as Megatron has it: the heads of a layer are fused one by one."""

    def whole(name):
        return kv.known(state, name, MEGATRON[name])

    qkv = whole(f"{_DECODER}.self_attention.linear_qkv.weight")
    qkv = qkv.reshape(LAYERS, HEADS, 3, HEAD, EMBED).transpose(0, 4, 2, 1, 3)

    def transposed(name):
        return whole(f"{_DECODER}.{name}.weight").transpose(0, 2, 1)

    return {
        "embedding": whole("embedding.word_embeddings.weight")[:VOCAB],
        "qkv": qkv.reshape(LAYERS, EMBED, -1),
        "attention_out": transposed("self_attention.linear_proj"),
        "mlp_in": transposed("mlp.linear_fc1"),
        "mlp_out": transposed("mlp.linear_fc2"),
        "attention_norm": whole(
            f"{_DECODER}.self_attention.linear_qkv.layer_norm_weight"
        ),
        "mlp_norm": whole(f"{_DECODER}.mlp.linear_fc1.layer_norm_weight"),
        "final_norm": whole("decoder.final_layernorm.weight"),
    }
