"""Runs the installed MaxText with our batches, checkpoints and worlds.

The trainer, model and keys are MaxText's own. `maxtext_hooks` replaces five functions
with methods of `Run`, which remove our keys before MaxText checks its own, create the
iterators and the checkpoint manager, decide whether to stop, and record each step in an
`ec.RunDirectory`.

Our manager also saves and restores the data state, so MaxText does not handle iterator
state.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

import elastic_ckpt as ec
from elastic_ckpt.checkpoint import component_io
from elastic_ckpt.core import errors, events
from elastic_ckpt.data import data_keys, elastic_data
from elastic_ckpt.data.lm import pipeline
from elastic_ckpt.elastic import termination, watch
from elastic_ckpt.inspect import run_files
from elastic_ckpt.integrations import maxtext_hooks, maxtext_keys
from elastic_ckpt.training import (
    configured,
    journal,
    run_saver,
    schema,
    validation_schedule,
)

# The inputs of a MaxText step, all int32 `[B, L]`.
FEATURES = tuple(
    name + suffix
    for name in ("inputs", "targets")
    for suffix in ("", "_position", "_segmentation")
)
# The data state is saved under this name, next to MaxText's `items`.
ITERATOR = "iter"


def run(
    arguments: Sequence[str],
    *,
    emit: events.Emit = events.nobody,
    world: ec.elastic.World | None = None,
    started: schema.Config | None = None,
) -> bool:
    """Trains as `maxtext.trainers.pre_train.train` does with these arguments.

    Args:
      arguments: MaxText's arguments, including our keys.
      emit: a function that shows the run's events.
      world: the world that this process has joined as a host; None if MaxText joins one
        itself.
      started: the hosts and slices with which the run was started; by default, one of
        each.

    Returns:
      Whether the run was stopped by a signal, after a save.

    Raises:
      ConfigError: if MaxText is missing or has an unsupported version, or if its
        configuration requires features that our data does not have.
      DataError: if the data cannot be read; stock MaxText would stop without an error.
      SystemExit: if MaxText rejects its configuration.
    """
    maxtext_keys.check(maxtext_keys.given(arguments), maxtext_hooks.keys())
    maxtext_hooks.check_installed()
    this = Run(emit=emit, world=world, started=started or schema.Config())
    functions: dict[maxtext_hooks.Hook, Callable[..., Any]] = {
        maxtext_hooks.PREPARE: this.prepare,
        maxtext_hooks.MANAGER: this.make_manager,
        maxtext_hooks.DATA: this.make_data,
        maxtext_hooks.LOGGER: this.make_logger,
        maxtext_hooks.STOP: this.leaves_after,
    }
    with contextlib.ExitStack() as hooks:
        hooks.enter_context(this.signals)
        for hook, function in functions.items():
            hooks.enter_context(hook.replaced(function))
        try:
            # MaxText then saves when it is asked to stop.
            maxtext_hooks.run([*arguments, "enable_autocheckpoint=True"])
        except SystemExit as ended:
            if ended.code:
                raise
        except PastMaxText as past:
            this.abandon(past.error)
            raise past.error from past.error.__cause__
        except Exception as error:
            this.abandon(error)
            raise
        # Skipped after an error: closing waits for other hosts, which may be gone.
        this.close()
    return this.is_leaving


class Run:
    """A MaxText run on one host, whose methods replace the hooked functions.

    For the arguments, see `run`.
    """

    def __init__(
        self,
        *,
        emit: events.Emit,
        world: ec.elastic.World | None,
        started: schema.Config,
    ) -> None:
        self._emit = emit if world is None else world.emit
        self._world = world
        self._started = started
        self._config: Any = None
        self._ours: maxtext_keys.Ours = {}
        self._data_keys = data_keys.DataKeys()
        # The run, manager and data that MaxText uses; after an elastic event under
        # Pathways, it gets new ones.
        self._record: ec.RunDirectory | None = None
        self._manager: Manager | None = None
        self._data: list[Data] = []
        # The number of rows in a global batch in the previous attempt; 0 if there was
        # none.
        self._rows_before = 0
        # The number of rows in the previous batch, and MaxText's batch sizes during a
        # ramp.
        self._rows = 0
        self._sizes: Any = None
        # The batch of the current step, until the step is logged.
        self._batch: elastic_data.Batch | None = None
        # Completed steps.
        self._done = 0
        # The newest step for which MaxText asked whether to stop, and the answer.
        self._asked: tuple[int, str | None] = (-1, None)
        # What to ask; None for JAX's service, which tells processes that joined it.
        self._leaving = None if world is None else world.leaving
        self.signals = contextlib.ExitStack()

    def prepare(
        self, original: Callable[..., Any], raw_keys: Any, *rest: Any, **more: Any
    ) -> Any:
        """Removes our keys from the keys that MaxText has read."""
        with past_maxtext():
            theirs, self._ours = maxtext_keys.divide(raw_keys)
        return original(theirs, *rest, **more)

    def make_manager(
        self, original: Callable[..., Any], config: Any, mesh: Any, *rest: Any
    ) -> Manager | None:
        """Creates the run's record and checkpoint manager."""
        del original, rest
        self._end_parts(errors.StoppedError("MaxText is starting over"))
        with past_maxtext():
            self._config = config
            self._data_keys = maxtext_keys.data_keys(config, self._ours)
            chosen = maxtext_keys.tiers(config, self._ours)
            tiers = configured.tiers(chosen, persistent=config.checkpoint_dir)
            kept = self._kept(chosen)
            directory = journal.path_of(kept)
            with contextlib.suppress(errors.RunError):
                before = run_files.read(directory).data or {}
                self._rows_before = before["global_batch_size"]
            self._record = ec.RunDirectory(
                directory,
                tiers=tiers,
                steps=config.steps,
                world=self._world,
                emit=self._emit,
                _record=configured.record(kept, program="maxtext"),
                _metrics=kept.metrics,
            )
            if not config.enable_checkpointing:
                return None
            options = {"run": config.run_name, "emit": self._record.emit}
            if self._world is not None:
                checkpointer = self._world.checkpointer(tiers, **options)
            else:
                checkpointer = ec.Checkpointer(tiers, mesh=mesh, **options)
            self._manager = Manager(
                checkpointer,
                self,
                config,
                configured.validation(
                    chosen.validation,
                    self._record.emit,
                    preserve=lambda step: run_saver.preserve_newest(
                        checkpointer, up_to=step
                    ),
                ),
            )
        return self._manager

    def _kept(self, chosen: schema.Config) -> schema.Config:
        # The configuration that the run directory stores.
        config, started = self._config, self._started
        return dataclasses.replace(
            started,
            metrics=chosen.metrics,
            run=dataclasses.replace(
                started.run,
                run_name=config.run_name,
                base_output_directory=config.base_output_directory,
                steps=config.steps,
            ),
            world=dataclasses.replace(
                started.world, slices=max(started.world.slices, config.num_slices)
            ),
            data=dataclasses.replace(
                self._data_keys, global_batch_size=config.global_batch_size_to_load
            ),
            # In a world, `chosen` has the slice's directory inside the run directory.
            tiers=chosen.tiers if self._world is None else started.tiers,
            checkpoint=chosen.checkpoint,
        )

    def make_data(
        self, original: Callable[..., Any], config: Any, mesh: Any
    ) -> tuple[Data, Data | None]:
        """Creates the iterators over the training and evaluation data."""
        del original
        with past_maxtext():
            section, vocab_size = self._data_keys, config.vocab_size
            if section.tokenize_train_data:
                maxtext_keys.check_vocabulary(config, pipeline.vocab_size(section))
            data = pipeline.from_config(section, vocab_size=vocab_size)
            rows = config.global_batch_size_to_load
            batches = self._batches(data, mesh, rows=rows)
            train = Data(batches, self._next_of_training, config)
            self._data = [train]
            if config.eval_interval <= 0:
                return train, None
            rows = config.global_batch_size_to_load_eval
            data = pipeline.eval_from_config(
                maxtext_keys.data_keys(config, self._ours, evaluation=True),
                vocab_size=vocab_size,
            )
            batches = self._batches(data, mesh, rows=rows)
            self._data.append(Data(batches, self._next_of_evaluation, config))
        return train, self._data[-1]

    def _batches(self, data: elastic_data.ElasticData, mesh: Any, *, rows: int) -> Any:
        section = self._data_keys
        return ec.batches(
            data,
            mesh=mesh,
            # Rows are sharded over all axes, as in MaxText's own input pipeline; its
            # step then reshards by `data_sharding`.
            spec=jax.sharding.PartitionSpec(mesh.axis_names),
            global_batch_size=rows,
            colocated=section.colocated_python_data_input or None,
            read_ahead=section.data_read_ahead_batches,
        )

    def make_logger(
        self,
        original: Callable[..., Any],
        config: Any,
        learning_rate_schedule: Any,
        start_step: int = 0,
    ) -> Any:
        """Creates MaxText's logger and makes it also report each step to us."""
        assert self._record is not None
        record = self._record
        self._done = start_step
        rows = config.global_batch_size_to_load
        if start_step and self._rows_before not in (0, rows):
            before = self._rows_before
            record.emit(
                "batch_changed",
                step=start_step,
                rows=rows,
                rows_before=before,
                per_device_before=config.per_device_batch_size * before / rows,
            )
        if self._leaving is None and not jax.distributed.is_initialized():
            grace_secs = configured.limits(self._started).grace_secs
            is_ending = self.signals.enter_context(
                termination.in_this_process(
                    grace_secs=grace_secs, ended=lambda: None, emit=record.emit
                )
            )
            self._leaving = lambda step: "stop" if is_ending(step) else None
        # Must precede calls of `World.leaving`, which reports steps.
        record._start(start_step)
        made = original(config, learning_rate_schedule, start_step)
        write = made.buffer_and_write_metrics

        def report(metrics: Any, step: int, *rest: Any, **more: Any) -> None:
            write(metrics, step, *rest, **more)
            if more.get("is_training", True):
                self.log(step)
                scalars = metrics["scalar"]
                record.log_metrics(
                    step + 1,
                    loss=scalars["learning/loss"],
                    tokens=scalars["learning/total_weights"],
                    learning_rate=scalars["learning/current_learning_rate"],
                )

        made.buffer_and_write_metrics = report
        return made

    def leaves_after(
        self, original: Callable[..., bool], checkpoint_manager: Any, step: int
    ) -> bool:
        """Whether the hosts leave their world; after the last step, the run ends."""
        if self._leaving is None:
            self._asked = (step, "stop" if original(checkpoint_manager, step) else None)
        elif step != self._asked[0] and step != self._config.steps - 1:
            # MaxText numbers steps from 0.
            self._asked = (step, self._leaving(step + 1))
        return self.is_leaving

    @property
    def is_leaving(self) -> bool:
        """Whether the hosts have agreed to leave their world."""
        return self._asked[1] is not None

    def begin(self, phase: str) -> None:
        """Reports a phase of the run to its hosts' watchers."""
        if self._world is not None:
            self._world.begin(phase)

    @property
    def batches(self) -> Any:
        """The training data's iterator, which is saved with each step."""
        return self._data[0].batches

    def log(self, step: int) -> None:
        """Logs a step once, before it is saved."""
        batch, self._batch = self._batch, None
        if batch is not None:
            assert self._record is not None
            self._record.log(step + 1, batch)
            self._done = step + 1

    def _next_of_training(self, batches: Any) -> elastic_data.Batch:
        rows = self._config.global_batch_size_to_load
        if self._ours["enable_rampup_batch_size"]:
            if self._sizes is None:
                # The step from which the run resumes is not known earlier.
                self._sizes = maxtext_hooks.RAMP.look_up()(self._config, self._done)
            rows = self._sizes.global_batch_size_current
        is_other, self._rows = rows != self._rows, rows
        # The step is recompiled for a new batch size.
        self.begin(watch.COMPILE if is_other else "step")
        if is_other and self._sizes is not None:
            batches.resize(rows)
        try:
            self._batch = next(batches)
        except StopIteration:
            if self._record is not None:
                self._record.emit("data_ended", step=self._done)
            raise
        if self._sizes is not None:
            self._sizes.update()
        return self._batch

    def _next_of_evaluation(self, batches: Any) -> elastic_data.Batch:
        self.begin("evaluate")
        return next(batches)

    def close(self) -> None:
        """Waits for saves and closes everything that MaxText used."""
        self.begin(watch.CLOSE)
        try:
            for each in self._data:
                each.batches.close()
            if self._manager is not None:
                self._manager.close()
            if self._record is not None:
                self._record.close()
        except Exception as error:
            self._end_parts(error)
            raise

    def abandon(self, error: BaseException) -> None:
        """Stops everything that would delay this process's exit after a failure."""
        self._end_parts(error)
        # At exit, JAX would wait five minutes for the other processes, which wait for
        # this one in the middle of a step.
        if jax.distributed.is_initialized():
            atexit.register(_end)

    def _end_parts(self, error: BaseException) -> None:
        # Does not wait, because hosts may be gone.
        checkpointer = self._manager.checkpointer if self._manager else None
        parts: list[Any] = [checkpointer, self._record]
        of_error = (type(error), error, error.__traceback__)
        ends = [each.batches.close for each in self._data] + [
            functools.partial(part.__exit__, *of_error) for part in parts if part
        ]
        for end in ends:
            # The journal raises the error again.
            with contextlib.suppress(BaseException):
                end()
        self._data, self._manager, self._record = [], None, None
        self._rows, self._sizes, self._batch = 0, None, None


class Data:
    """Batches in the form that MaxText's step needs.

    `draw` takes the next batch from `batches`, the iterator from `ec.batches`.
    """

    def __init__(
        self, batches: Any, draw: Callable[[Any], elastic_data.Batch], config: Any
    ) -> None:
        self.batches = batches
        self._draw = draw
        self._left: tuple[type[Exception], ...] = (StopIteration,)
        if config.elastic_enabled:
            # Under Pathways, MaxText handles lost slices itself.
            self._left = (StopIteration, jax.errors.JaxRuntimeError)

    @property
    def __class__(self) -> type:
        """A class that MaxText neither saves nor restores, because our manager does."""
        return maxtext_hooks.STATELESS.look_up()

    def __iter__(self) -> Data:
        return self

    def __next__(self) -> elastic_data.Batch:
        with past_maxtext(except_for=self._left):
            batch = self._draw(self.batches)
        return {name: batch[name] for name in FEATURES}

    def reset(self) -> None:
        """Rewinds to the beginning, as MaxText does before each evaluation."""
        self.batches.reset()


class Manager:
    """The methods that MaxText calls on its checkpoint manager, for our tiers.

    Each step is saved with the data state of `run`. Before each save, `validation`
    compares the replicas of the state.
    """

    def __init__(
        self,
        checkpointer: ec.Checkpointer,
        run: Run,
        config: Any,
        validation: validation_schedule.ValidationSchedule | None,
    ) -> None:
        self.checkpointer = checkpointer
        self._run = run
        self._validation = validation
        # This step is saved to every tier, due or not.
        saves_last = config.save_checkpoint_on_completion
        self._last_step = config.steps - 1 if saves_last else None
        self._has_ended = False
        # MaxText reads this attribute and sets it on Orbax's manager.
        self.use_async = config.async_checkpointing

    @property
    def __class__(self) -> type:
        """Orbax's final class, which MaxText asserts before a load."""
        return ocp.training.Checkpointer

    @property
    def latest(self) -> Any:
        """The newest complete step in any tier, as an object with a `step`."""
        return self.checkpointer.latest

    @property
    def checkpoints(self) -> list[Any]:
        """Only the newest complete step.

        Before each save, MaxText checks here whether the step already exists; listing
        all tiers would delay training.
        """
        latest = self.checkpointer.latest
        return [] if latest is None else [latest]

    def should_save(self, step: int) -> bool:
        """Whether a save to any tier is due at `step`."""
        return step == self._last_step or self.checkpointer.should_save(step)

    def save_checkpointables_async(
        self, step: int, checkpointables: Mapping[str, Any], **options: Any
    ) -> Any:
        """Saves MaxText's checkpointables and the data state."""
        # MaxText skips a step that already exists.
        with past_maxtext(except_for=(FileExistsError,)):
            self._run.log(step)
            self._has_ended = step == self._last_step
            is_last = self._has_ended or self._run.is_leaving
            options["force"] = options.get("force", False) or is_last
            if self._validation:
                trees, _ = component_io.split(checkpointables)
                self._validation.run(step, trees)
            wanted = {**checkpointables, ITERATOR: self._run.batches}
            return self.checkpointer.save_checkpointables_async(step, wanted, **options)

    def save_checkpointables(
        self, step: int, checkpointables: Mapping[str, Any], **options: Any
    ) -> bool:
        """Like `save_checkpointables_async`, but waits."""
        saving = self.save_checkpointables_async(step, checkpointables, **options)
        with past_maxtext():
            return saving is not None and saving.result()

    def load_checkpointables(
        self, step: int, abstract_checkpointables: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Restores MaxText's checkpointables and the data state."""
        self._run.begin(watch.RESTORE)
        wanted = {**abstract_checkpointables, ITERATOR: self._run.batches}
        # MaxText's own context also asks Orbax for partial loads.
        loaded = self.checkpointer.load_checkpointables(step, wanted, partial=True)
        self._run.begin(watch.COMPILE)
        return loaded

    def wait(self) -> None:
        """Waits for all pending work in every tier.

        If the run continues in another world, returns immediately; `close` then waits
        only for RAM.
        """
        if not self.checkpointer.is_leaving_world:
            self.checkpointer.wait()

    def close(self) -> None:
        """Waits for all tiers and releases the hosts.

        Raises:
          CheckpointError: if the run's last step is not in persistent storage.
        """
        last_step = self._last_step if self._has_ended else None
        run_saver.close(self.checkpointer, last_step=last_step)


class PastMaxText(BaseException):
    """Carries an error past `except Exception`.

    MaxText treats any error from an iterator as the end of the data and exits normally;
    it only prints configuration errors.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def past_maxtext(*, except_for: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Carries a block's errors past MaxText, other than the types `except_for`."""
    try:
        yield
    except except_for:
        raise
    except Exception as error:
        raise PastMaxText(error) from error


def _end() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
