"""The reference model, a small transformer, and the jitted step that trains it.

Pre-norm blocks of rotary attention (Su et al. 2021) and a gated feed-forward (Shazeer
2020); input and output share the embedding. The parameters of all layers are stacked
along a leading dim and scanned, so compiling forty layers takes as long as one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elastic_ckpt.core import digest, topology
from elastic_ckpt.data import elastic_data, tokens
from elastic_ckpt.data.lm import pipeline
from elastic_ckpt.training import schema

Params = dict[str, jax.Array]
# {"params": ..., "opt_state": ..., "step": int32 scalar}.
TrainState = dict[str, Any]
# Gathers one layer's sharded parameters on each device.
Gather = Callable[[Params], Params]


def _shapes(sizes: schema.ModelSection) -> dict[str, tuple[int, ...]]:
    layers, emb = sizes.base_num_decoder_layers, sizes.base_emb_dim
    heads, mlp = sizes.base_num_query_heads * sizes.head_dim, sizes.base_mlp_dim
    return {
        "embedding": (sizes.vocab_size, emb),
        "qkv": (layers, emb, 3 * heads),
        "attention_out": (layers, heads, emb),
        "mlp_in": (layers, emb, 2 * mlp),
        "mlp_out": (layers, mlp, emb),
        "attention_norm": (layers, emb),
        "mlp_norm": (layers, emb),
        "final_norm": (emb,),
    }


def init_params(key: jax.Array, sizes: schema.ModelSection) -> Params:
    """Initial float32 parameters: LeCun's uniform distribution, variance 1 / fan-in."""
    shapes = _shapes(sizes)
    norms = {name: shapes.pop(name) for name in shapes.copy() if "norm" in name}
    # One draw for all parameters compiles four times as fast as separate draws. A
    # uniform draw rounds only in the last product, so weights are bit-identical on
    # every mesh; the last bit of a normal draw depends on the compiler.
    ends = np.cumsum([math.prod(shape) for shape in shapes.values()])
    uniform = jax.random.uniform(key, (ends[-1],), minval=-1.0, maxval=1.0)
    drawn = jnp.split(uniform, ends[:-1])
    params = {
        name: values.reshape(shape) * (3 / shape[-2]) ** 0.5
        for values, (name, shape) in zip(drawn, shapes.items(), strict=True)
    }
    return params | {name: jnp.ones(shape) for name, shape in norms.items()}


def logits(
    params: Params, batch: elastic_data.Batch, *, head_dim: int, gather: Gather
) -> jax.Array:
    """Next-token logits.

    Args:
      params: parameters from `init_params`.
      batch: `inputs`, int32 tokens `[rows, length]`. If rows are packed, also
        `inputs_segmentation` and `inputs_position` of the same shape: a token attends
        to itself and to earlier tokens of its segment.
      head_dim: width of an attention head.
      gather: called with a layer's parameters before the layer is computed.

    Returns:
      Logits, float32 of shape `[rows, length, vocabulary]`.
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
    params: Params, batch: elastic_data.Batch, *, head_dim: int, gather: Gather
) -> tuple[jax.Array, jax.Array]:
    """The summed cross-entropy in nats and the number of targets, excluding padding.

    Takes the arguments of `logits`; the batch also has `targets` and, if rows are
    packed, `targets_segmentation`, which is 0 for padding.
    """
    targets = batch["targets"]
    scores = jax.nn.log_softmax(logits(params, batch, head_dim=head_dim, gather=gather))
    picked = jnp.take_along_axis(scores, targets[..., None], axis=-1)[..., 0]
    counted = is_counted(batch)
    return -(picked * counted).sum(), counted.sum()


def is_counted(batch: elastic_data.Batch) -> jax.Array:
    """The bool mask of the targets that count in the loss: all but padding."""
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
    # x: [rows, length, heads, head_dim]; rotates the pairs (i, i + head_dim / 2).
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-jnp.arange(half) / half)
    angles = positions[:, :, None] * frequencies
    sin, cos = jnp.sin(angles)[:, :, None], jnp.cos(angles)[:, :, None]
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    )


class StepReport(NamedTuple):
    """What a step returns in addition to the state, replicated on every host.

    Attributes:
      loss: float32 scalar, the loss of the global batch before the update.
      example_id: uint32 `[B, 2]`, the ids of the rows in the batch.
      row_digests: uint32 `[B]`, digests of these rows.
      tokens: int32 scalar, the number of targets in the global batch, excluding
        padding.
      learning_rate: float32 scalar, the learning rate of the update.
      gradient_norm: float32 scalar, the L2 norm of all gradients, before clipping.
    """

    loss: jax.Array
    example_id: jax.Array
    row_digests: jax.Array
    tokens: jax.Array
    learning_rate: jax.Array
    gradient_norm: jax.Array


Step = Callable[[TrainState, elastic_data.Batch], tuple[TrainState, StepReport]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """The compiled functions for one mesh.

    Attributes:
      abstract_state: shapes, dtypes and shardings of the train state.
      init: returns the initial state, sharded.
      begin: builds the initial state from given weights, which are donated.
      step: `(state, batch) -> (state, StepReport)`; donates the state.
      evaluate: `(state, batch) -> (loss, targets)`: the summed loss in nats and the
        number of targets.
    """

    abstract_state: TrainState
    init: Callable[[], TrainState]
    begin: Callable[[Params], TrainState]
    step: Step
    evaluate: Callable[[TrainState, elastic_data.Batch], tuple[jax.Array, jax.Array]]


def build(config: schema.Config, mesh: Mesh, *, microbatches: int = 1) -> Program:
    """Builds the functions of the configured model and optimizer.

    Shards weights over the mesh axis `fsdp` and rows over `slice` and `fsdp`. Each
    device sums gradients over `microbatches` microbatches of equal size.
    """
    sizes = dataclasses.replace(config.model, vocab_size=vocab_size(config))
    optimizer, learning_rate = _optimizer(config.optimizer, config.run.steps)

    def begin(params: Params) -> TrainState:
        step = jnp.zeros((), jnp.int32)
        return {"params": params, "opt_state": optimizer.init(params), "step": step}

    def init() -> TrainState:
        return begin(init_params(jax.random.key(sizes.init_weights_seed), sizes))

    summed_loss = functools.partial(
        loss,
        head_dim=sizes.head_dim,
        gather=functools.partial(_constrained, mesh=mesh, spec=PartitionSpec()),
    )
    differentiated = jax.value_and_grad(summed_loss, has_aux=True)
    if microbatches > 1:
        differentiated = _accumulated(differentiated, microbatches, mesh)
    differentiated = _over_slices(differentiated, mesh)
    evaluated = _over_slices(summed_loss, mesh)

    def step(
        state: TrainState, batch: elastic_data.Batch
    ) -> tuple[TrainState, StepReport]:
        (total, count), gradients = differentiated(state["params"], batch)
        count = jnp.maximum(count, 1)
        gradients = jax.tree.map(lambda leaf: leaf / count, gradients)
        updates, opt_state = optimizer.update(
            gradients, state["opt_state"], state["params"]
        )
        report = StepReport(
            loss=total / count,
            example_id=batch["example_id"],
            row_digests=digest.row_digests(batch),
            tokens=is_counted(batch).sum(dtype=jnp.int32),
            learning_rate=jnp.float32(learning_rate(state["step"])),
            gradient_norm=optax.tree.norm(gradients),
        )
        return {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
            "step": state["step"] + 1,
        }, report

    # Starting from shapes avoids tracing the random draw in each recovery.
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, shape in _shapes(sizes).items()
    }
    shapes = jax.eval_shape(begin, params)
    shardings = jax.tree.map(lambda leaf: _state_sharding(leaf.shape, mesh), shapes)
    abstract_state = jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding), shapes, shardings
    )
    return Program(
        abstract_state=abstract_state,
        init=jax.jit(init, out_shardings=shardings),
        begin=jax.jit(begin, out_shardings=shardings, donate_argnums=0),
        step=jax.jit(
            step,
            out_shardings=(shardings, topology.replicated(mesh)),
            donate_argnums=0,
        ),
        evaluate=jax.jit(
            lambda state, batch: evaluated(state["params"], batch),
            out_shardings=topology.replicated(mesh),
        ),
    )


def vocab_size(config: schema.Config) -> int:
    """The number of rows in the embedding."""
    return config.model.vocab_size or pipeline.vocab_size(config.data)


def _optimizer(
    section: schema.OptimizerSection, steps: int
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    if section.learning_rate_schedule_steps >= 0:
        steps = section.learning_rate_schedule_steps
    warmup_steps = int(steps * section.warmup_steps_fraction)
    learning_rate = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=section.learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=max(steps, warmup_steps + 1),
        end_value=section.learning_rate * section.learning_rate_final_fraction,
    )
    adamw = optax.adamw(
        learning_rate,
        b1=section.adam_b1,
        b2=section.adam_b2,
        eps=section.adam_eps,
        weight_decay=section.adam_weight_decay,
    )
    if not section.gradient_clipping_threshold:
        return adamw, learning_rate
    clip = optax.clip_by_global_norm(section.gradient_clipping_threshold)
    return optax.chain(clip, adamw), learning_rate


def _over_slices(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    # Sums `function(params, batch)` over slices, each with its own rows. The sum is
    # computed once per step, after the loop over layers: one collective between slices
    # instead of one for each layer. Within a slice, the compiler shards the work.
    if mesh.shape[topology.SLICE_AXIS] == 1:
        return function

    def of_slice(params: Params, batch: elastic_data.Batch) -> Any:
        return jax.lax.psum(function(params, batch), topology.SLICE_AXIS)

    return jax.shard_map(
        of_slice,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(topology.SLICE_AXIS)),
        out_specs=PartitionSpec(),
        axis_names={topology.SLICE_AXIS},
        # The check would sum gradients where parameters are used, inside the loop.
        check_vma=False,
    )


def _constrained(arrays: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    # Inside `shard_map`, the mesh is the slice's mesh.
    of_slice = jax.sharding.get_abstract_mesh()
    sharding = NamedSharding(mesh if of_slice.empty else of_slice, spec)
    return jax.lax.with_sharding_constraint(arrays, sharding)


def _accumulated(
    differentiated: Callable[..., Any], microbatches: int, mesh: Mesh
) -> Callable[..., Any]:
    # Like `differentiated`, but sums over the microbatches of a slice's batch.
    def accumulate(params: Params, batch: elastic_data.Batch) -> Any:
        def add(sums: Any, some: elastic_data.Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, differentiated(params, some)), None

        split = jax.tree.map(
            lambda rows: _microbatches(rows, microbatches, mesh), batch
        )
        first = jax.tree.map(lambda rows: rows[0], split)
        shapes = jax.eval_shape(differentiated, params, first)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        sums, _ = jax.lax.scan(add, zeros, split)
        return sums

    return accumulate


def _microbatches(rows: jax.Array, number: int, mesh: Mesh) -> jax.Array:
    # Reshapes a slice's `[B, ...]` to `[number, B / number, ...]`. Each microbatch
    # has rows from every device, so no rows move.
    devices = mesh.shape[topology.FSDP_AXIS]
    by_device = rows.reshape(devices, number, -1, *rows.shape[1:])
    split = by_device.swapaxes(0, 1).reshape(number, -1, *rows.shape[1:])
    return _constrained(split, mesh, PartitionSpec(None, topology.FSDP_AXIS))


def _state_sharding(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    # Shards the longest dim that the slice's devices divide; replicates if none does.
    size = mesh.shape[topology.FSDP_AXIS]
    fitting = [dim for dim, length in enumerate(shape) if length % size == 0]
    if size == 1 or not fitting:
        return topology.replicated(mesh)
    longest = max(fitting, key=lambda dim: shape[dim])
    axes = [topology.FSDP_AXIS if dim == longest else None for dim in range(len(shape))]
    return NamedSharding(mesh, PartitionSpec(*axes))
