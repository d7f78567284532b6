"""A small decoder-only transformer, in pure JAX.

Pre-norm blocks of rotary attention (Su et al. 2021) and a gated feed-forward (Shazeer
2020); input and output share the embedding. The parameters of all layers are stacked
along a leading dim and scanned, so that compiling forty layers takes as long as one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from elastic_ckpt.data import tokens

Params = dict[str, jax.Array]
Batch = dict[str, jax.Array]
# Gathers the sharded parameters of one layer on each device.
Gather = Callable[[Params], Params]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a model.

    Attributes:
      vocab: rows of the embedding.
      layers: the number of decoder blocks.
      emb: the width of the residual stream.
      heads: of each block.
      head_dim: the width of a head.
      mlp: the width inside the feed-forward block.
    """

    vocab: int
    layers: int
    emb: int
    heads: int
    head_dim: int
    mlp: int


def init(key: jax.Array, sizes: Sizes) -> Params:
    """Initial float32 parameters: LeCun's uniform distribution, variance 1 / fan-in."""
    layers, emb, mlp = sizes.layers, sizes.emb, sizes.mlp
    heads = sizes.heads * sizes.head_dim
    shapes = {
        "embedding": (sizes.vocab, emb),
        "qkv": (layers, emb, 3 * heads),
        "attention_out": (layers, heads, emb),
        "mlp_in": (layers, emb, 2 * mlp),
        "mlp_out": (layers, mlp, emb),
    }
    # One draw for all parameters compiles in a quarter of the time of separate draws.
    # It is uniform because it rounds only in the last product, so weights have the same
    # bits on every mesh; the last bit of a normal draw depends on the compiler.
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    uniform = jax.random.uniform(key, (ends[-1],), minval=-1.0, maxval=1.0)
    drawn = jnp.split(uniform, ends[:-1])
    params = {
        name: values.reshape(shape) * (3 / shape[-2]) ** 0.5
        for values, (name, shape) in zip(drawn, shapes.items(), strict=True)
    }
    params["attention_norm"] = jnp.ones((layers, emb))
    params["mlp_norm"] = jnp.ones((layers, emb))
    params["final_norm"] = jnp.ones((emb,))
    return params


def logits(params: Params, batch: Batch, *, head_dim: int, gather: Gather) -> jax.Array:
    """Next-token logits.

    Args:
      params: parameters that `init` made.
      batch: `inputs`, int32 tokens `[rows, length]`. If rows are packed, also
        `inputs_segmentation` and `inputs_position`, of the same shape: a token attends
        to itself and to earlier tokens of its segment.
      head_dim: width of an attention head.
      gather: applied to the parameters of a layer before the layer.

    Returns:
      float32 of shape `[rows, length, vocabulary]`.
    """
    ends = gather({k: params[k] for k in ("embedding", "final_norm")})
    layers = {k: v for k, v in params.items() if k not in ends}
    inputs = batch["inputs"]
    positions, mask = jnp.arange(inputs.shape[1])[None], None
    if "inputs_segmentation" in batch:
        positions, segments = batch["inputs_position"], batch["inputs_segmentation"]
        mask = (segments[:, :, None] == segments[:, None, :])[:, None]

    def block(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        layer = gather(layer)
        normed = _rms_norm(x, layer["attention_norm"])
        x += _attention(normed, layer, head_dim, positions=positions, mask=mask)
        gate, up = jnp.split(_rms_norm(x, layer["mlp_norm"]) @ layer["mlp_in"], 2, -1)
        return x + (jax.nn.silu(gate) * up) @ layer["mlp_out"], None

    x, _ = jax.lax.scan(block, ends["embedding"][inputs], layers)
    return _rms_norm(x, ends["final_norm"]) @ ends["embedding"].T


def loss(
    params: Params, batch: Batch, *, head_dim: int, gather: Gather
) -> tuple[jax.Array, jax.Array]:
    """The summed cross-entropy in nats, and the number of targets; without padding.

    Takes the arguments of `logits`; the batch also has `targets` and, if rows are
    packed, `targets_segmentation`, which is 0 for padding.
    """
    targets = batch["targets"]
    scores = jax.nn.log_softmax(logits(params, batch, head_dim=head_dim, gather=gather))
    picked = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    counted = is_counted(batch)
    return -(picked * counted).sum(), counted.sum()


def is_counted(batch: Batch) -> jax.Array:
    """The targets of `batch` that its loss counts, bool: all but padding."""
    return batch.get("targets_segmentation", batch["targets"]) != tokens.PAD


def _attention(
    x: jax.Array,
    layer: Params,
    head_dim: int,
    *,
    positions: jax.Array,
    mask: jax.Array | None,
) -> jax.Array:
    rows, length, _ = x.shape
    qkv = (x @ layer["qkv"]).reshape(rows, length, 3, -1, head_dim)
    q, k = _rotary(qkv[:, :, 0], positions), _rotary(qkv[:, :, 1], positions)
    mixed = jax.nn.dot_product_attention(q, k, qkv[:, :, 2], mask=mask, is_causal=True)
    return mixed.reshape(rows, length, -1) @ layer["attention_out"]


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def _rotary(x: jax.Array, positions: jax.Array) -> jax.Array:
    # x: [rows, length, heads, head_dim]; pairs are (i, i + head_dim / 2).
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-jnp.arange(half) / half)
    angles = positions[:, :, None] * frequencies
    sin, cos = jnp.sin(angles)[:, :, None], jnp.cos(angles)[:, :, None]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )
