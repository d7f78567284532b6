"""One tiny decoder in Flax NNX, Flax Linen and Equinox, of the same PyTorch tensors.

`plain` gives the weights by Flax's names; nothing here is made with a layout.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

LAYERS, EMBED, HEADS, D, FF, VOCAB = 2, 16, 4, 8, 32, 24
_SHAPES = {
    "input_layernorm": (EMBED,),
    "self_attn.q_proj": (HEADS * D, EMBED),
    "self_attn.k_proj": (HEADS * D, EMBED),
    "self_attn.v_proj": (HEADS * D, EMBED),
    "self_attn.o_proj": (EMBED, HEADS * D),
    "post_attention_layernorm": (EMBED,),
    "mlp.gate_proj": (FF, EMBED),
    "mlp.up_proj": (FF, EMBED),
    "mlp.down_proj": (EMBED, FF),
}
TOKENS = np.arange(6) % VOCAB


def tensors(seed=0):
    """In Hugging Face's names and PyTorch's layout, [out, in]."""
    shapes = {
        "model.embed_tokens.weight": (VOCAB, EMBED),
        "model.norm.weight": (EMBED,),
        "lm_head.weight": (VOCAB, EMBED),
    }
    for layer in range(LAYERS):
        for name, shape in _SHAPES.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    random = np.random.default_rng(seed)
    return {
        name: random.standard_normal(shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def plain(given):
    """Nested weights by Flax's names; layers are in a list."""

    def of_layer(layer):
        def weight(name):
            return given[f"model.layers.{layer}.{name}.weight"]

        def heads(name):
            return {"kernel": weight(name).T.reshape(EMBED, HEADS, D)}

        out = weight("self_attn.o_proj").T.reshape(HEADS, D, EMBED)
        return {
            "attention_norm": {"scale": weight("input_layernorm")},
            "attention": {
                "query": heads("self_attn.q_proj"),
                "key": heads("self_attn.k_proj"),
                "value": heads("self_attn.v_proj"),
                "out": {"kernel": out},
            },
            "mlp_norm": {"scale": weight("post_attention_layernorm")},
            "mlp": {
                part: {"kernel": weight(f"mlp.{part}_proj").T}
                for part in ("gate", "up", "down")
            },
        }

    return {
        "embed": {"embedding": given["model.embed_tokens.weight"]},
        "layers": [of_layer(layer) for layer in range(LAYERS)],
        "final_norm": {"scale": given["model.norm.weight"]},
        "head": {"kernel": given["lm_head.weight"].T},
    }


def nnx_weights(given):
    """The pure dict of the parameters of an `NnxDecoder`."""
    weights = plain(given)
    return {**weights, "layers": dict(enumerate(weights["layers"]))}


class NnxMlp(nnx.Module):
    def __init__(self, rngs):
        self.gate = nnx.Linear(EMBED, FF, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(EMBED, FF, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(FF, EMBED, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.down(nnx.silu(self.gate(x)) * self.up(x)))


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.attention_norm = nnx.RMSNorm(EMBED, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, EMBED, HEADS * D, use_bias=False, decode=False, rngs=rngs
        )
        self.mlp_norm = nnx.RMSNorm(EMBED, rngs=rngs)
        self.mlp = NnxMlp(rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(x[..., 0])
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.mlp(self.mlp_norm(x))


class NnxDecoder(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.layers = nnx.List([NnxLayer(rngs) for _ in range(LAYERS)])
        self.final_norm = nnx.RMSNorm(EMBED, rngs=rngs)
        self.head = nnx.Linear(EMBED, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.final_norm(x))


def _dense(features, name):
    # In a `Partitioned`.
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "data"))
    return nn.Dense(features, use_bias=False, kernel_init=init, name=name)


class LinenMlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        gate = nn.silu(_dense(FF, "gate")(x))
        return _dense(EMBED, "down")(gate * _dense(FF, "up")(x))


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        # In a `LogicallyPartitioned`.
        scale = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
        attention = nn.MultiHeadDotProductAttention(
            HEADS, qkv_features=HEADS * D, use_bias=False, name="attention"
        )
        normed = nn.RMSNorm(scale_init=scale, name="attention_norm")(x)
        x = x + attention(normed, mask=nn.make_causal_mask(x[..., 0]))
        normed = nn.RMSNorm(scale_init=scale, name="mlp_norm")(x)
        return x + LinenMlp(name="mlp")(normed), None


class LinenDecoder(nn.Module):
    is_scanned: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, EMBED, name="embed")(tokens)
        if self.is_scanned:
            scanned = nn.scan(
                LinenLayer,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=LAYERS,
                metadata_params={nn.PARTITION_NAME: None},
            )
            x, _ = scanned(name="layers")(x)
        else:
            for number in range(LAYERS):
                x, _ = LinenLayer(name=f"layers_{number}")(x)
        return _dense(VOCAB, "head")(nn.RMSNorm(name="final_norm")(x))


def linen_weights(given, *, is_scanned):
    """The variables of a `LinenDecoder`, without boxes."""
    weights = plain(given)
    layers = weights.pop("layers")
    if is_scanned:
        named = {"layers": jax.tree.map(lambda *each: np.stack(each), *layers)}
    else:
        named = {f"layers_{number}": each for number, each in enumerate(layers)}
    return {"params": {**weights, **named}}


class EquinoxMlp(eqx.Module):
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    activation: Callable

    def __init__(self, key):
        keys = jax.random.split(key, 3)
        self.gate = eqx.nn.Linear(EMBED, FF, use_bias=False, key=keys[0])
        self.up = eqx.nn.Linear(EMBED, FF, use_bias=False, key=keys[1])
        self.down = eqx.nn.Linear(FF, EMBED, use_bias=False, key=keys[2])
        self.activation = jax.nn.silu

    def __call__(self, x):
        return self.down(self.activation(self.gate(x)) * self.up(x))


class EquinoxLayer(eqx.Module):
    attention_norm: eqx.nn.RMSNorm
    attention: eqx.nn.MultiheadAttention
    mlp_norm: eqx.nn.RMSNorm
    mlp: EquinoxMlp

    def __init__(self, key):
        keys = jax.random.split(key)
        self.attention_norm = eqx.nn.RMSNorm(EMBED, use_bias=False)
        self.attention = eqx.nn.MultiheadAttention(
            HEADS, EMBED, qk_size=D, vo_size=D, key=keys[0]
        )
        self.mlp_norm = eqx.nn.RMSNorm(EMBED, use_bias=False)
        self.mlp = EquinoxMlp(keys[1])

    def __call__(self, x):
        normed = jax.vmap(self.attention_norm)(x)
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
        x = x + self.attention(normed, normed, normed, mask)
        return x + jax.vmap(self.mlp)(jax.vmap(self.mlp_norm)(x))


class EquinoxDecoder(eqx.Module):
    embed: eqx.nn.Embedding
    layers: list[EquinoxLayer]
    final_norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear
    max_tokens: int = eqx.field(static=True)

    def __init__(self, key):
        keys = jax.random.split(key, LAYERS + 2)
        self.embed = eqx.nn.Embedding(VOCAB, EMBED, key=keys[0])
        self.layers = [EquinoxLayer(each) for each in keys[2:]]
        self.final_norm = eqx.nn.RMSNorm(EMBED, use_bias=False)
        self.head = eqx.nn.Linear(EMBED, VOCAB, use_bias=False, key=keys[1])
        self.max_tokens = 64

    def __call__(self, tokens):
        x = jax.vmap(self.embed)(tokens)
        for layer in self.layers:
            x = layer(x)
        return jax.vmap(self.head)(jax.vmap(self.final_norm)(x))


def equinox_weights(model, given):
    """An `EquinoxDecoder` with other weights, which are stored as PyTorch's are."""

    def weights(model):
        yield model.embed.weight
        for layer in model.layers:
            yield layer.attention_norm.weight
            yield layer.attention.query_proj.weight
            yield layer.attention.key_proj.weight
            yield layer.attention.value_proj.weight
            yield layer.attention.output_proj.weight
            yield layer.mlp_norm.weight
            yield from (layer.mlp.gate.weight, layer.mlp.up.weight)
            yield layer.mlp.down.weight
        yield from (model.final_norm.weight, model.head.weight)

    of_layers = [
        f"model.layers.{layer}.{name}.weight"
        for layer in range(LAYERS)
        for name in _SHAPES
    ]
    names = ["model.embed_tokens.weight", *of_layers]
    names += ["model.norm.weight", "lm_head.weight"]
    return eqx.tree_at(
        lambda each: tuple(weights(each)), model, tuple(given[name] for name in names)
    )
