"""The train state on its mesh, and the jitted step that advances it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from elastic_ckpt.core import digest, errors, topology
from elastic_ckpt.data import elastic_data
from elastic_ckpt.training import transformer

# {"params": ..., "opt_state": ..., "step": int32 scalar}
TrainState = dict[str, Any]


class StepReport(NamedTuple):
    """The outputs of a step besides the state; every host holds all of them.

    Attributes:
      loss: float32 scalar, over the global batch before the update.
      example_id: uint32 `[B, 2]`, ids of the rows that the step was computed from.
      row_digests: uint32 `[B]`, digests of the tokens of these rows.
      tokens: int32 scalar, the targets of the global batch without padding.
      learning_rate: float32 scalar, of the update.
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
      init: makes the initial state, sharded.
      begin: makes the initial state of given weights, which it donates.
      step: `(state, batch) -> (state, StepReport)`; donates the state.
      evaluate: `(state, batch) -> (loss, targets)`: the summed loss in nats, and the
        number of its targets.
    """

    abstract_state: TrainState
    init: Callable[[], TrainState]
    begin: Callable[[transformer.Params], TrainState]
    step: Step
    evaluate: Callable[[TrainState, elastic_data.Batch], tuple[jax.Array, jax.Array]]


def build(
    mesh: Mesh,
    *,
    sizes: transformer.Sizes,
    optimizer: optax.GradientTransformation,
    learning_rate: optax.Schedule,
    seed: int = 0,
    microbatches: int = 1,
) -> Program:
    """Builds the program: weights are sharded over `fsdp`, rows over both axes.

    Args:
      mesh: with the axes `slice` and `fsdp`.
      sizes: of the model.
      optimizer: of its parameters.
      learning_rate: of the optimizer, by the step, for reports.
      seed: of the initial weights.
      microbatches: equal parts of a device's rows, computed one after the other.
    """

    def begin(params: transformer.Params) -> TrainState:
        step = jnp.zeros((), jnp.int32)
        return {"params": params, "opt_state": optimizer.init(params), "step": step}

    def init() -> TrainState:
        return begin(transformer.init(jax.random.key(seed), sizes))

    summed_loss = functools.partial(
        transformer.loss,
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
        report = _report(
            batch,
            total / count,
            learning_rate=learning_rate(state["step"]),
            gradient_norm=optax.tree.norm(gradients),
        )
        return {
            "params": optax.apply_updates(state["params"], updates),
            "opt_state": opt_state,
            "step": state["step"] + 1,
        }, report

    shapes = jax.eval_shape(init)
    shardings = jax.tree.map(lambda leaf: _state_sharding(leaf.shape, mesh), shapes)
    return Program(
        abstract_state=jax.tree.map(_abstract, shapes, shardings),
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


def _report(
    batch: elastic_data.Batch,
    loss: jax.Array,
    *,
    learning_rate: jax.typing.ArrayLike,
    gradient_norm: jax.Array,
) -> StepReport:
    tokens = jnp.concatenate(digest.row_features(batch), axis=1)
    return StepReport(
        loss=loss,
        example_id=batch["example_id"],
        row_digests=digest.row_digests(tokens),
        tokens=transformer.is_counted(batch).sum(dtype=jnp.int32),
        learning_rate=jnp.float32(learning_rate),
        gradient_norm=gradient_norm,
    )


def _over_slices(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    # The sum over slices of what `function(params, batch)` returns for the rows of
    # each. They add once in a step, after the loop over layers: one collective between
    # slices in place of one for each layer. Within a slice the compiler shards.
    if mesh.shape[topology.SLICE_AXIS] == 1:
        return function

    def of_slice(params: transformer.Params, batch: elastic_data.Batch) -> Any:
        return jax.lax.psum(function(params, batch), topology.SLICE_AXIS)

    return jax.shard_map(
        of_slice,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(topology.SLICE_AXIS)),
        out_specs=PartitionSpec(),
        axis_names={topology.SLICE_AXIS},
        # With checks, gradients would be summed where parameters are used, in the loop.
        check_vma=False,
    )


def _constrained(arrays: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    # In a function for each slice, the mesh is that of its slice.
    of_slice = jax.sharding.get_abstract_mesh()
    sharding = NamedSharding(mesh if of_slice.empty else of_slice, spec)
    return jax.lax.with_sharding_constraint(arrays, sharding)


def _accumulated(
    differentiated: Callable[..., Any], microbatches: int, mesh: Mesh
) -> Callable[..., Any]:
    # As `differentiated`, from the sums over the parts of a batch of a slice.
    def accumulate(params: transformer.Params, batch: elastic_data.Batch) -> Any:
        def add(sums: Any, part: elastic_data.Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, differentiated(params, part)), None

        parts = jax.tree.map(
            lambda rows: _microbatches(rows, microbatches, mesh), batch
        )
        part = jax.tree.map(lambda rows: rows[0], parts)
        shapes = jax.eval_shape(differentiated, params, part)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        sums, _ = jax.lax.scan(add, zeros, parts)
        return sums

    return accumulate


def _microbatches(rows: jax.Array, number: int, mesh: Mesh) -> jax.Array:
    # `[B, ...]` to `[number, B / number, ...]`, of a slice: each part has rows of every
    # device, in place.
    devices = mesh.shape[topology.FSDP_AXIS]
    by_device = rows.reshape(devices, number, -1, *rows.shape[1:])
    parts = by_device.swapaxes(0, 1).reshape(number, -1, *rows.shape[1:])
    return _constrained(parts, mesh, PartitionSpec(None, topology.FSDP_AXIS))


def _abstract(
    leaf: jax.ShapeDtypeStruct, sharding: NamedSharding
) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def check_step(state: TrainState, step: int) -> None:
    """Raises a CheckpointError unless `state` is the state after `step` steps."""
    saved = int(state["step"])
    if saved != step:
        raise errors.CheckpointError(
            f"the checkpoint of step {step} holds the state after {saved} steps: it was"
            f" renamed, or copied from another step; move {step} out of its directory"
            " to continue from the step before"
        )


def _state_sharding(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    # Shards the longest dim that divides over a slice; replicates if there is none.
    size = mesh.shape[topology.FSDP_AXIS]
    fitting = [dim for dim, length in enumerate(shape) if length % size == 0]
    if size == 1 or not fitting:
        return topology.replicated(mesh)
    longest = max(fitting, key=lambda dim: shape[dim])
    axes = [topology.FSDP_AXIS if dim == longest else None for dim in range(len(shape))]
    return NamedSharding(mesh, PartitionSpec(*axes))
