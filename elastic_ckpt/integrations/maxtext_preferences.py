"""MaxText's training on preferences, DPO and ORPO, on our data and checkpoints.

`maxtext.trainers.post_train.dpo.train_dpo` runs the trainer of another package, Tunix,
which saves no state of its data: a run that was stopped has the first pairs again. It
takes its batches from an iterator until that ends, and saves each step that its manager
of checkpoints finds due. So the iterator ends the run, after its last step or when the
hosts leave a world, and the manager restores and saves the data, too.

Steps are counted from 1, and saved as Tunix saves them: `model_params` and
`optimizer_state` of a step can be restored by Tunix itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental import multihost_utils

from elastic_ckpt.core import errors, preemption
from elastic_ckpt.data import elastic_data
from elastic_ckpt.elastic import watch
from elastic_ckpt.integrations import (
    maxtext,
    maxtext_config,
    maxtext_record,
    maxtext_seam,
)

# The inputs of a step, int32: prompts `[B, P]`, responses `[B, L - P]`.
FEATURES = tuple(
    f"{name}_{kind}"
    for name in ("prompt", "chosen", "rejected")
    for kind in ("ids", "mask")
)
# The names under which Tunix saves.
_MODEL = "model_params"
_OPTIMIZER = "optimizer_state"
# Keys of MaxText that its trainer of preferences does not look at.
_WITHOUT_EFFECT = {
    "elastic_enabled": "set hosts and slices to what this program is to start",
    "enable_rampup_batch_size": "there all batches have one size; set it to false",
}


class PreferenceRun(maxtext.Run):
    """A run of MaxText's trainer of preferences, on one of its hosts."""

    FIRST_STEP = 1

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._mesh: Any = None
        self._tiers: maxtext.TieredManager | None = None
        # Whether the hosts leave their world after the step that was saved last.
        self._is_left = False

    def create_data_iterator(
        self, config: Any, mesh: Any
    ) -> tuple[maxtext.MaxTextIterator, maxtext.MaxTextIterator | None]:
        """As `Run`; the manager of checkpoints comes later here."""
        self._config, self._mesh = config, mesh
        with maxtext.past_maxtext():
            for key, remedy in _WITHOUT_EFFECT.items():
                if getattr(config, key):
                    raise errors.ConfigError(
                        f"{maxtext_config.PLACE}: {key}=true has no effect with"
                        f" use_dpo=true: {remedy}"
                    )
            parts = config.gradient_accumulation_steps
            rows = maxtext_config.global_batch_size(config, num_devices=mesh.size)
            if rows % (parts * mesh.size):
                raise errors.ConfigError(
                    f"{maxtext_config.PLACE}: gradient_accumulation_steps={parts} makes"
                    f" no equal parts of the {rows // mesh.size} rows of a device; set"
                    " per_device_batch_size to a whole number"
                )
        return super().create_data_iterator(config, mesh)

    def _handed_out(
        self,
        config: Any,
        batches: Any,
        record: maxtext_record.RunRecord | None,
    ) -> maxtext.MaxTextIterator:
        if record is None:
            return PairIterator(batches, begin=self._begin)
        return PairIterator(
            batches,
            parts=config.gradient_accumulation_steps,
            goes_on=self._goes_on,
            ended=self._data_ended,
            begin=self._begin,
            record=record,
        )

    def _goes_on(self) -> bool:
        # Asked before each global batch. An evaluation that there was since the last
        # one began at the beginning of its data, and so does the next.
        if self._evaluation is not None and self._evaluation.num_batches:
            self._evaluation.reset()
        done, trained = self._num_steps
        if trained == 1 and self._record is not None:
            # Tunix has compiled its step.
            self._record.compiled(done)
        return not self._is_left and done < self._config.steps

    def create_tunix_manager(self) -> TunixManager:
        """Makes the manager, over our tiers or persistent storage alone."""
        if self._is_again:
            self._is_again = False
        elif self._config.enable_checkpointing:
            with maxtext.past_maxtext():
                self._tiers = self._tiered(self._config, self._mesh)
            self._manager = self._tiers
        return TunixManager(self._tiers, run=self, mesh=self._mesh)

    def leaves_after(self, step: int) -> bool:
        """Whether all hosts end after a step, which they save then.

        They leave their world; or without one, a host has got SIGTERM.
        """
        stops = self.should_stop(step)
        if stops is None and jax.distributed.is_initialized():
            ask = multihost_utils.reached_preemption_sync_point
            stops = preemption.reached(step, ask)
        self._is_left = bool(stops)
        return self._is_left

    def _save_last(self) -> None:
        # Tunix saves the state at its end, if the manager does not have that.
        if self._tiers is not None:
            self._tiers.end()


class PairIterator(maxtext.MaxTextIterator):
    """Batches of pairs as Tunix's step takes them, and their data state.

    Args:
      batches: `iterator.Batches` or `RemoteIterator`.
      parts: in which a global batch of rows is handed out, one after the other; Tunix
        averages their gradients. Each part has as many rows of each device.
      goes_on: asked before each global batch, whether there is to be another.
      ended: called when the data has no other.
      begin: called with the phase of the run that a global batch begins.
      record: of the run, if it trains on these batches.
    """

    def __init__(
        self,
        batches: Any,
        *,
        parts: int = 1,
        goes_on: Callable[[], bool] = lambda: True,
        ended: Callable[[], object] = lambda: None,
        begin: Callable[[str], object] = lambda _: None,
        record: maxtext_record.RunRecord | None = None,
    ) -> None:
        super().__init__(
            batches,
            elastic=False,
            features=FEATURES,
            ended=ended,
            begin=begin,
            record=record,
        )
        self._num_parts = parts
        self._parts: list[elastic_data.Batch] = []
        self._goes_on = goes_on

    def __next__(self) -> elastic_data.Batch:
        with maxtext.past_maxtext(except_for=self._left_to_maxtext()):
            if not self._parts:
                if not self._goes_on():
                    raise StopIteration
                batch = super().__next__()
                num_parts = self._num_parts
                self._parts = [
                    {name: _part(rows, at, num_parts) for name, rows in batch.items()}
                    for at in range(num_parts)
                ]
            return self._parts.pop(0)

    def _phase(self) -> str:
        # Tunix compiles its step with the first batch.
        phase = super()._phase()
        is_first = phase == "step" and not self.num_batches
        return watch.COMPILE if is_first else phase

    def _left_to_maxtext(self) -> tuple[type[Exception], ...]:
        # It takes any other, with the patch too, for the end of the data.
        return (StopIteration,)


class TunixManager:
    """The verbs that Tunix's trainer calls of its `CheckpointManager`.

    Args:
      manager: of our tiers; None if the run saves nothing.
      run: that has the data.
      mesh: of the run's devices.
    """

    def __init__(
        self,
        manager: maxtext.TieredManager | None,
        *,
        run: PreferenceRun,
        mesh: jax.sharding.Mesh,
    ) -> None:
        self._manager = manager
        self._run = run
        self._mesh = mesh
        # That this trainer has saved, complete or not.
        self._newest: int | None = None

    def latest_step(self) -> int | None:
        """The newest step that was saved or restored; None asks for another save."""
        if self._manager is None or self._manager.is_ending:
            return None
        return self._newest

    def save(
        self,
        step: int,
        model: Any,
        optimizer: Any,
        save_only_lora_params: bool = False,
        force: bool = False,
        custom_metadata: dict[str, Any] | None = None,
    ) -> bool:
        """Begins to save a step that is due; called after each, and at the end.

        Args:
          step: from 1.
          model: of Flax, whose state is saved.
          optimizer: whose state is saved, too.
          save_only_lora_params: whether the state of the model is that of LoRA alone.
          force: whether to save a step that is not due.
          custom_metadata: Tunix's; its trainer of preferences has none.

        Returns:
          Whether it is saved.
        """
        del custom_metadata
        leaves = self._run.leaves_after(step)
        if self._manager is None:
            return False
        trees = _state(model, optimizer, only_lora=save_only_lora_params)
        is_wanted = (force and self._manager.saves_last) or leaves
        if self._manager.use_async:
            response = self._manager.save_checkpointables_async(
                step, trees, force=is_wanted
            )
            is_saved = response is not None
        else:
            is_saved = self._manager.save_checkpointables(step, trees, force=is_wanted)
        if is_saved:
            self._newest = step
        return is_saved

    def maybe_restore(
        self,
        model: Any,
        optimizer: Any,
        step: int | None = None,
        restore_only_lora_params: bool = False,
    ) -> tuple[int, dict[str, Any]]:
        """Restores the newest step into the model, the optimizer, and the data.

        Args:
          model: of Flax, which gets the state.
          optimizer: that gets its state.
          step: that is restored instead of the newest.
          restore_only_lora_params: see `save`.

        Returns:
          The step, 0 if there is none, and no metadata of Tunix's.
        """
        newest = None if self._manager is None else self._manager.latest
        if self._manager is None or newest is None:
            self._run.begin_at(0)
            return 0, {}
        self._newest = found = newest.step if step is None else step
        state = _state(model, optimizer, only_lora=restore_only_lora_params)
        abstract = jax.tree.map(self._abstract, state)
        restored = self._manager.load_checkpointables(found, abstract)
        nnx = maxtext_seam.nnx()
        nnx.update(model, restored[_MODEL])
        nnx.update(optimizer, restored[_OPTIMIZER])
        self._run.begin_at(found)
        return found, {}

    def _abstract(self, leaf: jax.Array) -> jax.ShapeDtypeStruct:
        # Tunix has counts on one device until its first step replicates them.
        sharding = leaf.sharding
        if not isinstance(sharding, jax.sharding.NamedSharding):
            sharding = jax.sharding.NamedSharding(self._mesh, jax.P())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def close(self) -> None:
        """Nothing: the run waits for its saves when MaxText has returned."""


def _state(model: Any, optimizer: Any, *, only_lora: bool) -> dict[str, Any]:
    nnx = maxtext_seam.nnx()
    kinds = (nnx.LoRAParam,) if only_lora else ()
    return {
        _MODEL: nnx.state(model, *kinds),
        _OPTIMIZER: nnx.state(optimizer, nnx.optimizer.OptState),
    }


def _part(rows: jax.Array, at: int, parts: int) -> jax.Array:
    # Of each device's rows, so that none of them moves.
    if parts == 1:
        return rows

    def own(shard: jax.Array) -> jax.Array:
        num_rows = len(shard) // parts
        return shard[at * num_rows : (at + 1) * num_rows]

    shape = (len(rows) // parts, *rows.shape[1:])
    shards: Sequence[jax.Array] = [own(each.data) for each in rows.addressable_shards]
    return jax.make_array_from_single_device_arrays(shape, rows.sharding, shards)
