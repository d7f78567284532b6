"""A decoder in JAX that computes with the tree of the layouts.

It is that of Llama 3, and of Qwen 3 with experts.
"""

import operator

import jax
import jax.numpy as jnp


def logits(tree, config, tokens):
    """The logits [batch, length, vocab] of `tokens` [batch, length].

    Layers are branches by their numbers, or stacked.
    """
    hidden = tree["embed"]["embedding"][tokens]
    layers, numbers = tree["layers"], range(config["num_hidden_layers"])
    if "0" not in layers:
        layers = {str(n): jax.tree.map(operator.itemgetter(n), layers) for n in numbers}
    for number in numbers:
        hidden = _block(layers[str(number)], config, hidden)
    return _norm(hidden, tree["final_norm"]) @ tree["head"]["kernel"]


def _block(layer, config, hidden):
    hidden += _attention(layer, config, _norm(hidden, layer["attention_norm"]))
    normed = _norm(hidden, layer["mlp_norm"])
    if "moe" in layer:
        return hidden + _experts(layer["moe"], config, normed)
    gate, up, down = (layer["mlp"][each]["kernel"] for each in ("gate", "up", "down"))
    return hidden + (jax.nn.silu(normed @ gate) * (normed @ up)) @ down


def _norm(hidden, norm):
    variance = jnp.mean(hidden**2, axis=-1, keepdims=True)
    return hidden * jax.lax.rsqrt(variance + 1e-6) * norm["scale"]


def _attention(layer, config, hidden):
    layer = layer["attention"]
    query, key, value = (
        jnp.einsum("ble,ehd->blhd", hidden, layer[part]["kernel"])
        for part in ("query", "key", "value")
    )
    if "query_norm" in layer:
        query, key = _norm(query, layer["query_norm"]), _norm(key, layer["key_norm"])
    theta = config["rope_parameters"]["rope_theta"]
    query, key = _rotated(query, theta), _rotated(key, theta)
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(each, group, axis=2) for each in (key, value))
    scores = jnp.einsum("blhd,bmhd->bhlm", query, key) / query.shape[-1] ** 0.5
    length = hidden.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf))
    mixed = jnp.einsum("bhlm,bmhd->blhd", weights, value)
    return jnp.einsum("blhd,hde->ble", mixed, layer["out"]["kernel"])


def _rotated(values, theta):
    half = values.shape[-1] // 2
    frequencies = theta ** -(jnp.arange(half) / half)
    angles = jnp.arange(values.shape[1])[:, None, None] * frequencies
    first, second = values[..., :half], values[..., half:]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )


def _experts(moe, config, hidden):
    """Computes all experts of each token, and weighs those that are chosen."""
    scores = jax.nn.softmax(hidden @ moe["router"]["kernel"])
    best, chosen = jax.lax.top_k(scores, config["num_experts_per_tok"])
    best /= best.sum(-1, keepdims=True)
    weights = jnp.zeros_like(scores)
    weights = jnp.put_along_axis(weights, chosen, best, -1, inplace=False)
    gate, up = (
        jnp.einsum("ble,xef->blxf", hidden, moe[part]["kernel"])
        for part in ("gate", "up")
    )
    each = jnp.einsum("blxf,xfe->blxe", jax.nn.silu(gate) * up, moe["down"]["kernel"])
    return jnp.einsum("blx,blxe->ble", weights, each)
