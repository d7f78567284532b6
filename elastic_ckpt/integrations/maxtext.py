"""Runs the MaxText that is installed on our iterators, checkpoints and worlds.

MaxText's trainer, model and keys stay in use. `Run` is the object that it asks, by the
seam of `maxtext_seam`: for the keys that it is to check, the iterators, the manager of
checkpoints, its compiled steps, and whether to stop; and that it tells of each step.

Our manager of checkpoints saves and restores the data, too, so that MaxText itself
needs no state of an iterator.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import gc
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from etils import epath
from orbax import checkpoint
from orbax.checkpoint import v1 as ocp

from elastic_ckpt import frontend
from elastic_ckpt.checkpoint import component_io, run_saver
from elastic_ckpt.checkpoint.components import validation_schedule
from elastic_ckpt.core import errors, events, storage, topology
from elastic_ckpt.data import data_keys, elastic_data, iterator
from elastic_ckpt.data.lm import pipeline
from elastic_ckpt.elastic import watch
from elastic_ckpt.elastic.world import World
from elastic_ckpt.integrations import (
    maxtext_config,
    maxtext_record,
    maxtext_seam,
)
from elastic_ckpt.training import configured, listeners, schema
from elastic_ckpt.training.schema import ValidationSection

# The inputs of a step of MaxText, all int32 `[B, L]`.
FEATURES = tuple(
    name + suffix
    for name in ("inputs", "targets")
    for suffix in ("", "_position", "_segmentation")
)


def run(
    arguments: Sequence[str],
    *,
    emit: events.Emit = events.nobody,
    world: World | None = None,
    started: schema.Config | None = None,
) -> None:
    """Trains as MaxText's own program does with these arguments.

    That is `maxtext.trainers.pre_train.train`.

    Args:
      arguments: of MaxText, with our keys among them.
      emit: called for each event of tiers of checkpoints.
      world: that this process has joined as a host; None if MaxText joins one itself.
      started: the hosts and slices that the run was started with; by default one.

    Raises:
      ConfigError: if MaxText is missing, or of a version that this module does not
        support, or its configuration requires features that our data does not have.
      DataError: if the data cannot be read; MaxText itself would end without an error.
      OtherModelError: if a step does not fit the model.
      SystemExit: if MaxText refuses its configuration.
    """
    explicit = maxtext_config.explicit_keys(arguments)
    maxtext_seam.check_installed(explicit)
    this = Run(emit=emit, world=world, explicit=explicit, started=started)
    with maxtext_seam.extended(this):
        not_restored: errors.OtherModelError | None = None
        try:
            while _goes_back(arguments):
                this.begin_again()
        except SystemExit as ended:
            if ended.code:
                raise
        except PastMaxText as past:
            this.abandon(past.error)
            raise past.error from past.error.__cause__
        except Exception as error:
            this.abandon(error)
            if this.restored is None or not _is_of_restore(error):
                raise
            not_restored = _not_restored(this.restored, error)
        if not_restored is not None:
            _forget_what_is_unfinished()
            raise not_restored
        # Only here: after an error other hosts may be gone, and closing waits for them.
        this.close()


def _goes_back(arguments: Sequence[str]) -> bool:
    # Runs MaxText until its end, which is a SystemExit, or until it has to begin again.
    # Then its frames hold the state, which must go before the next.
    try:
        maxtext_seam.run(arguments)
    except _GoneBack:
        return True
    return False


class _GoneBack(BaseException):
    """Ends MaxText's loop, past `except Exception`; an older step is loaded next."""


class Run:
    """A run of MaxText, on one of its hosts; a `maxtext_seam.Extension`.

    Args:
      emit: called for each event of tiers of checkpoints.
      world: see `run`.
      explicit: the keys that a user has set.
      started: see `run`.

    Attributes:
      restored: the directory of the step that is restored; None before.
    """

    def __init__(
        self,
        *,
        emit: events.Emit = events.nobody,
        world: World | None = None,
        explicit: Collection[str] = (),
        started: schema.Config | None = None,
    ) -> None:
        self._emit = emit
        self._world = world
        self._explicit = explicit
        self._started = started or schema.Config()
        self._began_secs = time.monotonic()
        self.restored: epath.Path | None = None
        self._own = maxtext_config.Own(values={})
        self._config: Any = None
        self._record: maxtext_record.RunRecord | None = None
        self._train: MaxTextIterator | None = None
        self._evaluation: MaxTextIterator | None = None
        self._manager: OrbaxManager | TieredManager | None = None
        self._distrust_steps = 0
        # Whether MaxText goes back, with the manager that it has.
        self._is_again = False
        # After the last step that was trained.
        self._state: Any = None
        # The step with which MaxText began, and the batches that it had then.
        self._began = (0, 0)
        # The newest step that MaxText asked about, and the answer.
        self._asked = (-1, False)

    def configure(self, raw_keys: dict[str, Any]) -> dict[str, Any]:
        """Takes our keys out of those that MaxText has read."""
        with past_maxtext():
            theirs, self._own = maxtext_config.divide(
                raw_keys, known=maxtext_seam.known_keys(), explicit=self._explicit
            )
        return theirs

    def create_data_iterator(
        self, config: Any, mesh: Any
    ) -> tuple[MaxTextIterator, MaxTextIterator | None]:
        """Makes the iterators of the training data and of the evaluation data."""
        section = maxtext_config.train_section(config, self._own)
        _check_resumable(config)
        with past_maxtext():
            rows = maxtext_config.global_batch_size(config, num_devices=mesh.size)
            record = self._recorded(config)
            record.describe(
                maxtext_config.run_config(
                    config, self._own, data=section, started=self._started
                ),
                rows=rows,
            )
        # After an elastic event MaxText comes again; the old one's slices are gone.
        self._train = self._iterator(config, section, mesh, rows=rows, record=record)
        self._evaluation = None
        if config.eval_interval > 0:
            self._evaluation = self._iterator(
                config,
                maxtext_config.eval_section(config, self._own),
                mesh,
                rows=maxtext_config.global_batch_size(
                    config, num_devices=mesh.size, evaluation=True
                ),
            )
        return self._train, self._evaluation

    def create_checkpoint_manager(
        self, config: Any, mesh: Any, create: Callable[[], Any]
    ) -> Any:
        """Makes the manager, over our tiers if these are configured, or MaxText's own.

        It comes before the data, for which MaxText shards a batch over the devices.
        """
        self._config = config
        with past_maxtext():
            maxtext_config.global_batch_size(config, num_devices=mesh.size)
            if config.eval_interval > 0:
                maxtext_config.global_batch_size(
                    config, num_devices=mesh.size, evaluation=True
                )
        if self._is_again:
            self._is_again = False
        elif self._own.uses_tiers and config.enable_checkpointing:
            with past_maxtext():
                self._manager = self._tiered(config, mesh)
        else:
            theirs = create()
            self._manager = theirs and OrbaxManager(theirs, data=self._data_of)
        return self._manager

    def _tiered(self, config: Any, mesh: Any) -> TieredManager:
        chosen = maxtext_config.tiers_config(config, self._own)
        tiers = configured.tiers(chosen, persistent=config.checkpoint_dir)
        emit = self._recorded(config).emit
        if self._world is not None:
            over_tiers = self._world.checkpointer(tiers, run=config.run_name)
        else:
            over_tiers = frontend.Checkpointer(
                tiers, mesh=mesh, run=config.run_name, emit=emit
            )
        saves_last = config.save_checkpoint_on_completion
        manager = TieredManager(
            over_tiers,
            directory=config.checkpoint_dir,
            data=self._data_of,
            last_step=self._last_step if saves_last else None,
            use_async=config.async_checkpointing,
        )
        manager.validate(chosen.validation, emit)
        self._distrust_steps = chosen.divergence.distrust_steps
        return manager

    @property
    def _last_step(self) -> int:
        last: int = self._config.steps - 1
        return last

    def _data_of(self, step: epath.Path | None) -> MaxTextIterator:
        # Of a step that is restored, or saved if there is none.
        if step is not None:
            self._begin(watch.RESTORE)
            self.restored = step
        assert self._train is not None
        return self._train

    def wrap_step(self, step: Any) -> KeptStep:
        """Keeps the executable of a step for other worlds, and what it returns."""
        return KeptStep(step, world=self._world, note=self._note_state)

    def _note_state(self, state: Any) -> None:
        self._state = state

    def should_stop(self, step: int) -> bool | None:
        """Whether the hosts of a world leave it; the last step ends the run instead."""
        if self._world is None:
            return None
        if step != self._asked[0] and step != self._last_step:
            # By the number by which the checkpointer asks the same service.
            self._asked = (step, self._world.should_stop(step))
        return self._asked[1]

    def start(self, config: Any, start_step: int) -> None:
        """Notes the step with which MaxText begins, which is compiled."""
        assert self._train is not None
        self._began = (start_step, self._train.num_batches)
        self._recorded(config).begin(start_step)
        self._recorded(config).compiled(start_step + 1)

    def report(self, step: int, scalars: Mapping[str, Any]) -> bool:
        """Notes the metrics of a step; those of one to go back from are ours alone."""
        loss = float(scalars["learning/loss"])
        goes_back = not math.isfinite(loss) and self._distrust(
            step, f"the loss is {loss}"
        )
        if not self._is_again:
            assert self._record is not None
            self._record.report(step, scalars)
        if goes_back:
            # MaxText comes with it once more, on its way out.
            self._is_again = True
            raise _GoneBack
        return not self._is_again

    def _distrust(self, step: int, why: str) -> bool:
        if self._is_again or not isinstance(self._manager, TieredManager):
            return False
        return self._manager.distrust(step, within=self._distrust_steps, why=why)

    def _data_ended(self) -> None:
        # In place of the next batch.
        done, trained = self._num_steps
        if trained and self._record is not None:
            self._record.data_ended(done)
        if trained and self._config.save_checkpoint_on_completion:
            self._save_last()

    @property
    def _num_steps(self) -> tuple[int, int]:
        # That are done, and those of them that MaxText did since it began.
        assert self._train is not None
        begin, num_before = self._began
        num_steps = self._train.num_batches - num_before
        return begin + num_steps, num_steps

    def _save_last(self) -> None:
        # The state after the last step is still there.
        state, self._state = self._state, None
        if state is None or self._manager is None:
            return
        if isinstance(self._manager, TieredManager):
            self._manager.end()
        maxtext_seam.save_last(self._manager, state, self._config, self._train)

    def begin_again(self) -> None:
        """Makes ready for MaxText to load the step that the run has gone back to."""
        self._state = None
        self._close_data()
        gc.collect()

    def _close_data(self) -> None:
        for made in (self._train, self._evaluation):
            if made is not None:
                made.close()
        self._train = self._evaluation = None

    def close(self) -> None:
        """Closes the iterators that MaxText had last, and a checkpointer of ours."""
        self._begin(watch.CLOSE)
        try:
            self._close_data()
            if isinstance(self._manager, TieredManager):
                self._manager.close()
        except Exception as error:
            if self._record is not None:
                self._record.abandon(error)
            raise
        if self._record is not None:
            self._record.close(secs=time.monotonic() - self._began_secs)

    def abandon(self, error: BaseException) -> None:
        """Ends what would hold up this process, whose run has failed."""
        if isinstance(self._manager, TieredManager):
            self._manager.abandon(error)
        if self._record is not None:
            self._record.abandon(error)
        _leave_others_at_once()

    def _recorded(self, config: Any) -> maxtext_record.RunRecord:
        # Only once MaxText has its devices is it known which host keeps the record.
        if self._record is None:
            world = self._world
            of_host = dataclasses.replace(
                self._started,
                metrics=maxtext_config.tiers_config(config, self._own).metrics,
            )
            if world is not None:
                of_host = listeners.of_process(of_host, topology.this_host())
            self._record = maxtext_record.RunRecord(
                config,
                metrics=of_host.metrics,
                world=topology.present(slices=max(1, config.num_slices))
                if world is None
                else world.topology,
                emit=self._emit if world is None else world.emit,
                is_supervised=world is not None,
            )
        return self._record

    def _iterator(
        self,
        config: Any,
        section: data_keys.DataKeys,
        mesh: Any,
        *,
        rows: int,
        record: maxtext_record.RunRecord | None = None,
    ) -> MaxTextIterator:
        # Of the training data if it is recorded, else of the evaluation data.
        if section.tokenize_train_data:
            maxtext_config.check_vocabulary(config, pipeline.vocab_size(section))
        if record is None:
            data = pipeline.eval_from_config(
                section, global_batch_size=rows, vocab_size=config.vocab_size
            )
        else:
            data = pipeline.from_config(section, vocab_size=config.vocab_size)
        batches = frontend.configured_batches(
            data,
            section,
            mesh=mesh,
            spec=_spec_of(mesh),
            global_batch_size=rows,
        )
        if record is None:
            return MaxTextIterator(
                batches, elastic=config.elastic_enabled, begin=self._begin
            )

        def ramp() -> Any:
            # Only now is it known with which step the run continues. MaxText's own
            # count is one step behind then.
            done = 0 if self.restored is None else int(self.restored.name) + 1
            return maxtext_seam.ramp(config, done)

        return MaxTextIterator(
            batches,
            elastic=config.elastic_enabled,
            ramp=ramp if config.enable_rampup_batch_size else None,
            ended=self._data_ended,
            begin=self._begin,
            record=record,
        )

    def _begin(self, phase: str) -> None:
        if self._world is not None:
            self._world.begin(phase)


class KeptStep:
    """A jitted step of MaxText, which an earlier world may have compiled.

    MaxText lowers it and compiles that, and then calls the step itself.

    Args:
      jitted: the function of `jax.jit`.
      world: that keeps executables; None keeps none.
      note: called with the first of what the step returns, if that is a pair: the
        state after it.
    """

    def __init__(
        self,
        jitted: Any,
        *,
        world: World | None,
        note: Callable[[Any], object],
    ) -> None:
        self._jitted = jitted
        self._world = world
        self._note = note
        # By the form of the batch; None until MaxText has the step compiled, and
        # without a world.
        self._compiled: dict[_Form, Callable[..., Any]] | None = None
        self._options: Mapping[str, Any] | None = None

    def __call__(self, state: Any, batch: Any, *more: Any) -> Any:
        """Computes the step; a batch of another form has another program."""
        step = self._jitted
        if self._compiled is not None:
            form = _form(batch)
            if form not in self._compiled:
                lowered = self._jitted.lower(state, batch, *more)
                self._compile(lowered, state, batch, *more, options=self._options)
            step = self._compiled[form]
        made = step(state, batch, *more)
        if isinstance(made, tuple):
            self._note(made[0])
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jitted, name)

    def lower(self, state: Any, batch: Any, *more: Any) -> Any:
        """Traces the step for these arguments, arrays or abstract ones."""
        lowered = self._jitted.lower(state, batch, *more)
        if self._world is None:
            return lowered
        return _Lowered(functools.partial(self._compile, lowered, state, batch, *more))

    def _compile(
        self,
        lowered: Any,
        *arguments: Any,
        options: Mapping[str, Any] | None,
    ) -> Callable[..., Any]:
        assert self._world is not None
        compiled = self._world.compiled(lowered, *arguments, options=options)
        self._compiled = {**(self._compiled or {}), _form(arguments[1]): compiled}
        self._options = options
        return compiled


# What a program is for: the shape and the type of each feature of a batch.
_Form: TypeAlias = tuple[tuple[str, tuple[int, ...], Any], ...]


def _form(batch: Mapping[str, Any]) -> _Form:
    return tuple((name, each.shape, each.dtype) for name, each in sorted(batch.items()))


class _Lowered:
    """A step that has been traced; it is compiled once."""

    def __init__(self, compiled: Callable[..., Callable[..., Any]]) -> None:
        self._compiled = compiled

    def compile(
        self, compiler_options: Mapping[str, Any] | None = None
    ) -> Callable[..., Any]:
        """As `jax.stages.Lowered.compile`."""
        return self._compiled(options=compiler_options)


class MaxTextIterator:
    """Batches as MaxText's step takes them, and their data state.

    Args:
      batches: `iterator.Batches` or `RemoteIterator`.
      elastic: whether MaxText answers lost slices itself.
      ramp: returns MaxText's sizes of the batches that follow, called before the first;
        None if all have one size.
      ended: called when there is no next batch.
      begin: called with the phase of the run that a batch begins.
      record: of the run, if it trains on these batches.

    Attributes:
      num_batches: that were handed out since the beginning.
    """

    def __init__(
        self,
        batches: Any,
        *,
        elastic: bool,
        ramp: Callable[[], Any] | None = None,
        ended: Callable[[], object] = lambda: None,
        begin: Callable[[str], object] = lambda _: None,
        record: maxtext_record.RunRecord | None = None,
    ) -> None:
        self._begin = begin
        self._batches = batches
        self._record = record
        self._elastic = elastic
        self._ramp = ramp
        # MaxText's sizes, and the one of the batch before.
        self._sizes: Any = None
        self._rows = 0
        self.num_batches = 0
        self._ended = ended

    @property
    def __class__(self) -> type:
        """One that MaxText itself neither saves nor restores; our manager does."""
        return maxtext_seam.stateless_class()

    def __iter__(self) -> MaxTextIterator:
        return self

    def __next__(self) -> elastic_data.Batch:
        with past_maxtext(except_for=self._left_to_maxtext()):
            self._begin(self._phase())
            try:
                batch = next(self._batches)
            except StopIteration:
                self._ended()
                raise
            if self._sizes is not None:
                self._sizes.update()
            if self._record is not None:
                self._record.take(batch)
        self.num_batches += 1
        return {name: batch[name] for name in FEATURES}

    def _phase(self) -> str:
        # Which the next batch begins; of another size, it has a program of its own.
        if self._record is None:
            return "evaluate"
        return watch.COMPILE if self._resize() else "step"

    def _resize(self) -> bool:
        if self._ramp is None:
            return False
        if self._sizes is None:
            self._sizes = self._ramp()
        rows = self._sizes.global_batch_size_current
        is_other = rows != self._rows
        if is_other:
            self._batches.resize(rows)
            self._rows = rows
        return is_other

    def reset(self) -> None:
        """Goes to the beginning; MaxText does so before each evaluation."""
        self._batches.reset()
        self.num_batches = 0

    def close(self) -> None:
        """Ends what reads ahead."""
        self._batches.close()

    async def save(self, directory: iterator.AwaitedDirectory) -> Awaitable[None]:
        """Takes the state now; the awaitable writes it into Orbax's directory."""
        if self._record is not None:
            # The log of the steps so far, before the last of them is saved.
            self._record.sync()
        return await self._batches.save(directory)

    async def load(self, directory: epath.Path) -> Awaitable[None]:
        """Goes to the data state in `directory`, on any number of hosts."""
        return await self._batches.load(directory)

    def _left_to_maxtext(self) -> tuple[type[Exception], ...]:
        if self._elastic:
            return (StopIteration, jax.errors.JaxRuntimeError)
        return (StopIteration,)


# Returns the iterator, whose state is that of a step; see `OrbaxManager`.
_Data = Callable[[epath.Path | None], MaxTextIterator]


class OrbaxManager:
    """MaxText's manager of checkpoints, of Orbax, that saves and restores the data too.

    Args:
      manager: MaxText's own; used for all that is not here.
      data: returns the iterator of the training data; given the directory of a step
        whose state it is about to restore, or None.
    """

    def __init__(self, manager: Any, *, data: _Data) -> None:
        self._manager = manager
        self._data = data

    @property
    def __class__(self) -> type:
        """Orbax's class, which is final, and which MaxText asserts before a load."""
        return ocp.training.Checkpointer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def save_checkpointables_async(
        self, step: int, checkpointables: Mapping[str, Any], **options: Any
    ) -> Any:
        """Saves what MaxText names, and the data state."""
        wanted = {**checkpointables, maxtext_seam.ITERATOR: self._data(None)}
        return self._manager.save_checkpointables_async(step, wanted, **options)

    def save_checkpointables(
        self, step: int, checkpointables: Mapping[str, Any], **options: Any
    ) -> bool:
        """As `save_checkpointables_async`, and waits."""
        wanted = {**checkpointables, maxtext_seam.ITERATOR: self._data(None)}
        return self._manager.save_checkpointables(step, wanted, **options)

    def load_checkpointables(
        self, step: int, abstract_checkpointables: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Restores the data state, and what MaxText names.

        Orbax would report any error of the first as that of an incompatible handler.
        """
        directory = self._manager.directory / str(step)
        with past_maxtext():
            component_io.load(self._data(directory), directory / maxtext_seam.ITERATOR)
        return self._manager.load_checkpointables(step, abstract_checkpointables)


class TieredManager:
    """The verbs that MaxText calls, on a checkpointer over tiers.

    With `enable_multi_tier_checkpointing` MaxText makes Orbax's replicator manager,
    which saves no data state; this takes its place.

    Args:
      checkpointer: over the tiers.
      directory: of the persistent tier.
      data: see `OrbaxManager`.
      last_step: that is backed up, due or not; None if MaxText saves no last step.
      use_async: whether saves return before they are committed.
    """

    def __init__(
        self,
        checkpointer: frontend.Checkpointer,
        *,
        directory: epath.PathLike,
        data: _Data,
        last_step: int | None,
        use_async: bool,
    ) -> None:
        self._checkpointer = checkpointer
        self._directory = storage.absolute(directory)
        self._data = data
        self._last_step = last_step
        self._has_ended = False
        # Whether what is saved next is the last, because the data has ended.
        self._is_ending = False
        # MaxText skips a step that is there already.
        self._guard = functools.partial(past_maxtext, except_for=(FileExistsError,))
        self._validation: validation_schedule.ValidationSchedule | None = None
        # MaxText reads this attribute, which it sets on Orbax's.
        self.use_async = use_async

    @property
    def __class__(self) -> type:
        """As that of `OrbaxManager`."""
        return ocp.training.Checkpointer

    def validate(self, section: ValidationSection, emit: events.Emit) -> None:
        """Compares the replicas of what is saved from now on, as configured."""

        def preserve(step: int) -> int | None:
            return run_saver.preserve_newest(self._checkpointer, up_to=step)

        self._validation = configured.validation(section, emit, preserve=preserve)

    def end(self) -> None:
        """Saves what is saved next to every tier, also a step that RAM has already."""
        self._is_ending = True

    @property
    def directory(self) -> epath.Path:
        """The directory of backups; newer steps may be in RAM alone."""
        return self._directory

    @property
    def latest(self) -> Any:
        """The newest complete step of all tiers, which has a `step`."""
        if self._is_ending:
            # MaxText would leave out a step that is there.
            return None
        with self._guard():
            return self._checkpointer.latest

    @property
    def checkpoints(self) -> list[Any]:
        """The newest complete step alone.

        MaxText looks, before each save, whether the step is there already; to list all
        tiers would hold up the training.
        """
        latest = self.latest
        return [] if latest is None else [latest]

    def should_save(self, step: int) -> bool:
        """Whether a tier is due at `step`."""
        if self._is_ending:
            return True
        with self._guard():
            return self._checkpointer.should_save(step)

    def save_checkpointables_async(
        self, step: int, checkpointables: Mapping[str, Any], **options: Any
    ) -> Any:
        """As `Checkpointer.save_checkpointables_async`."""
        if self._is_ending:
            self._is_ending, self._last_step = False, step
            latest = self._checkpointer.latest
            options["overwrite"] = latest is not None and latest.step == step
        self._has_ended = step == self._last_step
        is_last = self._has_ended or self._checkpointer.is_left
        options["force"] = options.get("force", False) or is_last
        with self._guard():
            is_due = options["force"] or self._checkpointer.should_save(step)
            if self._validation and is_due:
                trees, _ = component_io.split(checkpointables)
                self._validation.run(step, trees)
            wanted = {**checkpointables, maxtext_seam.ITERATOR: self._data(None)}
            return self._checkpointer.save_checkpointables_async(
                step, wanted, **options
            )

    def save_checkpointables(
        self, step: int, checkpointables: Mapping[str, Any], **options: Any
    ) -> bool:
        """As `Checkpointer.save_checkpointables`."""
        response = self.save_checkpointables_async(step, checkpointables, **options)
        with self._guard():
            return response is not None and response.result()

    def load_checkpointables(
        self,
        step: Any = None,
        abstract_checkpointables: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Restores what MaxText names, and the data state."""
        data = self._data(self._directory / str(step))
        wanted = {**(abstract_checkpointables or {}), maxtext_seam.ITERATOR: data}
        with self._guard():
            # MaxText's own context asks Orbax for partial loads, too.
            return self._checkpointer.load_checkpointables(step, wanted, partial=True)

    def distrust(self, step: int, *, within: int, why: str) -> bool:
        """Whether the run goes back to storage; see `Checkpointer.distrust`."""
        with self._guard():
            older = self._checkpointer.distrust(step, within=within, why=why)
        return older is not None

    def wait(self) -> None:
        """Returns when all that was begun is done, in every tier.

        If the run goes on in another world, `close` waits for RAM alone.
        """
        with self._guard():
            if not self._checkpointer.is_left:
                self._checkpointer.wait()

    def close(self) -> None:
        """Waits for all tiers, and releases the hosts.

        Raises:
          CheckpointError: if the step that ends the run is not in persistent storage.
        """
        last_step = self._last_step if self._has_ended else None
        run_saver.close(self._checkpointer, last_step=last_step)

    def abandon(self, error: BaseException) -> None:
        """Releases the hosts without a wait for them, for some may be gone."""
        self._checkpointer.__exit__(type(error), error, error.__traceback__)


class PastMaxText(BaseException):
    """Carries an error past `except Exception`.

    MaxText takes any error of an iterator for the end of the data, and ends well; and
    any error of its configuration it prints itself.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def past_maxtext(*, except_for: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Carries the errors of a block past MaxText, but for some."""
    try:
        yield
    except except_for:
        raise
    except Exception as error:
        raise PastMaxText(error) from error


def _is_of_restore(error: Exception) -> bool:
    # Orbax takes any error of a restore for that of an incompatible handler.
    is_orbaxs = isinstance(error, KeyError) and "Failed to load" in str(error)
    return is_orbaxs and error.__cause__ is not None


def _not_restored(step: epath.Path, error: Exception) -> errors.OtherModelError:
    why = str(error.__cause__).partition("\n")[0].partition(". ")[0].rstrip(".")
    return errors.OtherModelError(
        f"{step} cannot be restored: {why}; if the model has changed, set its keys as"
        " they were, or another run_name"
    )


def _forget_what_is_unfinished() -> None:
    # Parts of Orbax's restore, which Python would report after our line.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        gc.collect()


def _leave_others_at_once() -> None:
    # JAX would have this process wait for the other hosts at its exit, five minutes,
    # and these wait for it in the midst of a step.
    if jax.distributed.is_initialized():
        atexit.register(_end)


def _end() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def _spec_of(mesh: Any) -> jax.sharding.PartitionSpec:
    # As MaxText's own input pipeline: rows over every axis. Its step reshards a batch
    # as its `data_sharding` requires.
    return jax.sharding.PartitionSpec(mesh.axis_names)


def _check_resumable(config: Any) -> None:
    # MaxText restores a step without data state, too, and begins the data anew without
    # a warning.
    if not config.enable_checkpointing or not config.checkpoint_dir:
        return
    directory = storage.absolute(config.checkpoint_dir)
    steps = directory.iterdir() if directory.exists() else ()
    complete = [
        step
        for step in steps
        if step.name.isdigit() and checkpoint.utils.is_checkpoint_finalized(step)
    ]
    latest = max(complete, key=lambda step: int(step.name), default=None)
    if latest is None:
        return
    if not (latest / maxtext_seam.ITERATOR).exists():
        what = (
            "has no data state (`iter`), so the examples that it has seen are unknown"
        )
    elif any((latest / maxtext_seam.ITERATOR).glob("process_*.json")):
        what = "was saved by MaxText's own iterator, whose place in the data is another"
    else:
        return
    remedy = "set another run_name"
    items = latest / maxtext_seam.ITEMS
    if items.exists():
        remedy = (
            "to go on from its weights, and with the data from the beginning, set"
            f" load_full_state_path={items} and another run_name"
        )
    raise errors.CheckpointError(f"step {latest.name} in {directory} {what}; {remedy}")
