"""Runs the MaxText that is installed, unmodified, on our iterators.

MaxText's trainer, checkpoints and resume stay in use. For the time of the run, nine
functions that MaxText looks up when it calls them are replaced, and one more on a host
of an elastic run (`maxtext_world`):

* after it has read its configuration, our keys are taken out (`maxtext_config`)
* when it makes Grain's iterators, it gets ours, in this process or in the sidecar
* when it saves and restores an iterator, ours is passed to Orbax unchanged
* when it makes its checkpointer, it gets ours if tiers are configured
* when it may save a step, that is noted, because it ends without a save with the data
* when it makes its logger of metrics, each step is reported to us (`maxtext_record`)

A MaxText in which one of them is missing or changed is refused before the run.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import logging
import os
import sys
import time
import types
import warnings
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from typing import Any

import jax
from absl import app
from etils import epath
from orbax import checkpoint

from elastic_ckpt import frontend
from elastic_ckpt.application import configured
from elastic_ckpt.checkpoint import component_io
from elastic_ckpt.config import schema
from elastic_ckpt.core import errors, events, storage, topology
from elastic_ckpt.data import data_keys, elastic_data, iterator
from elastic_ckpt.data.lm import pipeline
from elastic_ckpt.elastic.world import World
from elastic_ckpt.integrations import (
    maxtext_config,
    maxtext_record,
    maxtext_seams,
    maxtext_tiers,
    maxtext_world,
)

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
    """Trains as `python -m maxtext.trainers.pre_train.train ARGUMENTS` does.

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
    maxtext_seams.check_installed(explicit)
    with seams_taken(
        emit=emit, world=world, explicit=explicit, started=started
    ) as taken:
        train = importlib.import_module(maxtext_seams.MAIN.module)
        not_restored: errors.OtherModelError | None = None
        try:
            while _goes_back(train, arguments):
                taken.begin_again()
        except SystemExit as ended:
            if ended.code:
                raise
        except _PastMaxText as past:
            taken.abandon(past.error)
            raise past.error from past.error.__cause__
        except Exception as error:
            taken.abandon(error)
            if taken.restored is None or not _is_of_restore(error):
                raise
            not_restored = _not_restored(taken.restored, error)
        if not_restored is not None:
            _forget_what_is_unfinished()
            raise not_restored
        # Only here: after an error other hosts may be gone, and closing waits for them.
        taken.close()


def _goes_back(train: types.ModuleType, arguments: Sequence[str]) -> bool:
    # Runs MaxText until its end, which app.run raises as a SystemExit, or until it has
    # to begin again. Then its frames hold the state, which must go before the next.
    try:
        app.run(train.main, argv=[str(train.__file__), *arguments])
    except maxtext_record.GoneBack:
        return True
    return False


@contextlib.contextmanager
def seams_taken(
    *,
    emit: events.Emit = events.nobody,
    world: World | None = None,
    explicit: Collection[str] = (),
    started: schema.Config | None = None,
) -> Iterator[Taken]:
    """Replaces MaxText's functions by ours, until the body ends; see `run`."""
    modules = {
        seam: importlib.import_module(seam.module) for seam in maxtext_seams.SEAMS
    }
    originals = {seam: getattr(modules[seam], seam.name) for seam in modules}
    taken = Taken(
        originals,
        emit=emit,
        world=world,
        explicit=explicit,
        started=started or schema.Config(),
    )
    ours: dict[maxtext_seams.Seam, Any] = {
        maxtext_seams.PREPARE: taken.prepare,
        maxtext_seams.JOIN_WITH_REPLICATOR: _join,
        maxtext_seams.MAKE_TRAIN: taken.train_iterator,
        maxtext_seams.MAKE_EVAL: taken.evaluation_iterator,
        maxtext_seams.FOR_SAVE: taken.for_save,
        maxtext_seams.FOR_RESTORE: taken.for_restore,
        maxtext_seams.MAKE_CHECKPOINTER: taken.checkpoint_manager,
        maxtext_seams.MAKE_LOADER: taken.loader,
        maxtext_seams.SAVE_STEP: taken.save_step,
        maxtext_seams.MAKE_LOGGER: taken.metric_logger,
    }
    if taken.leaving is not None:
        ours[maxtext_seams.REACHED_PREEMPTION] = taken.leaving.reached_preemption
    with contextlib.ExitStack() as stack:
        for seam, function in ours.items():
            stack.callback(setattr, modules[seam], seam.name, originals[seam])
            setattr(modules[seam], seam.name, function)
        yield taken


class Taken:
    """The functions that replace MaxText's own.

    Args:
      originals: the function of MaxText at each seam.
      emit: called for each event of tiers of checkpoints.
      world: see `run`.
      explicit: the keys that a user has set.
      started: see `run`.

    Attributes:
      leaving: whether the world is left; None without one.
      restored: the directory of the step that is restored; None before.
    """

    def __init__(
        self,
        originals: dict[maxtext_seams.Seam, Callable[..., Any]],
        *,
        emit: events.Emit,
        world: World | None,
        explicit: Collection[str] = (),
        started: schema.Config,
    ) -> None:
        self._originals = originals
        self._emit = emit
        self._started = started
        self._began_secs = time.monotonic()
        self._record: maxtext_record.RunRecord | None = None
        self.leaving = None if world is None else maxtext_world.Leaving(world)
        self.restored: epath.Path | None = None
        self._world = world
        self._explicit = explicit
        self._own = maxtext_config.Own(values={})
        self._made: dict[maxtext_seams.Seam, MaxTextIterator] = {}
        self._manager: maxtext_tiers.TieredManager | None = None
        self._distrust_steps = 0
        # Whether MaxText goes back with the checkpointer that it has.
        self._is_again = False
        # Saves the state after the last step that was trained.
        self._save_last: Callable[[], object] | None = None
        self._num_steps = 0

    def prepare(self, raw_keys: dict[str, Any], *rest: Any, **more: Any) -> Any:
        """Takes our keys out of those that MaxText has read."""
        with _past_maxtext():
            theirs, self._own = maxtext_config.divide(
                raw_keys, known=maxtext_seams.known_keys(), explicit=self._explicit
            )
        return self._originals[maxtext_seams.PREPARE](theirs, *rest, **more)

    def train_iterator(
        self, config: Any, global_mesh: Any, process_indices: Any
    ) -> Any:
        """Makes the iterator of the training data."""
        del process_indices
        section = maxtext_config.train_section(config, self._own)
        _check_resumable(config)
        with _past_maxtext():
            record = self._recorded(config)
            record.describe(
                maxtext_config.run_config(
                    config, self._own, data=section, started=self._started
                ),
                rows=maxtext_config.global_batch_size(
                    config, num_devices=global_mesh.size
                ),
            )
        return self._iterator(
            maxtext_seams.MAKE_TRAIN, config, section, global_mesh, record
        )

    def evaluation_iterator(
        self, config: Any, global_mesh: Any, process_indices: Any
    ) -> Any:
        """Makes the iterator of the evaluation data."""
        del process_indices
        section = maxtext_config.eval_section(config, self._own)
        return self._iterator(maxtext_seams.MAKE_EVAL, config, section, global_mesh)

    def for_save(
        self, step: int, data_iterator: Any, expansion_factor_real_data: float
    ) -> Any:
        """Returns the object that Orbax saves as the iterator of a step."""
        if isinstance(data_iterator, MaxTextIterator):
            with _past_maxtext():
                data_iterator.sync_log()
            return data_iterator
        return self._originals[maxtext_seams.FOR_SAVE](
            step, data_iterator, expansion_factor_real_data
        )

    def for_restore(
        self,
        checkpoint_manager: Any,
        step: int,
        data_iterator: Any,
        expansion_factor_real_data: float,
    ) -> Any:
        """Loads our data state of a step; what Orbax then loads it into.

        Orbax would report any error of it as that of an incompatible handler.
        """
        if isinstance(data_iterator, MaxTextIterator):
            self.restored = checkpoint_manager.directory / str(step)
            with _past_maxtext():
                component_io.load(data_iterator, self.restored / maxtext_tiers.ITERATOR)
            return _Loaded()
        return self._originals[maxtext_seams.FOR_RESTORE](
            checkpoint_manager, step, data_iterator, expansion_factor_real_data
        )

    def checkpoint_manager(self, config: Any, mesh: Any, init_state_fn: Any) -> Any:
        """Makes MaxText's checkpointer, over our tiers if these are configured.

        It comes before the data, for which MaxText shards a batch over the devices.
        """
        with _past_maxtext():
            maxtext_config.global_batch_size(config, num_devices=mesh.size)
            if config.eval_interval > 0:
                maxtext_config.global_batch_size(
                    config, num_devices=mesh.size, evaluation=True
                )
        if self._is_again:
            self._is_again = False
            return self._manager
        if not (config.enable_multi_tier_checkpointing and config.enable_checkpointing):
            return self._originals[maxtext_seams.MAKE_CHECKPOINTER](
                config, mesh, init_state_fn
            )
        with _past_maxtext():
            chosen = maxtext_config.tiers_config(config, self._own)
            tiers = configured.tiers(chosen, persistent=config.checkpoint_dir)
            if self._world is not None:
                over_tiers = self._world.checkpointer(tiers, run=config.run_name)
            else:
                over_tiers = frontend.Checkpointer(
                    tiers,
                    mesh=mesh,
                    run=config.run_name,
                    emit=self._recorded(config).emit,
                )
        self._manager = maxtext_tiers.TieredManager(
            over_tiers,
            directory=config.checkpoint_dir,
            data=lambda: self._made[maxtext_seams.MAKE_TRAIN],
            last_step=config.steps - 1
            if config.save_checkpoint_on_completion
            else None,
            use_async=config.async_checkpointing,
            # MaxText skips a step that is there already.
            guard=functools.partial(_past_maxtext, except_for=(FileExistsError,)),
        )
        self._manager.validate(chosen.validation, self._recorded(config).emit)
        self._distrust_steps = chosen.divergence.distrust_steps
        return self._manager

    def loader(
        self,
        config: Any,
        mesh: Any,
        data_iterator: Any,
        goodput_recorder: Any,
        rampup_manager: Any,
    ) -> Any:
        """Makes MaxText's loader of batches, which grow during a ramp."""
        loader = self._originals[maxtext_seams.MAKE_LOADER](
            config, mesh, data_iterator, goodput_recorder, None
        )
        if rampup_manager is None:
            return loader
        load, sizes = loader.load_next_batch, None

        def load_of_size(*_: Any, **more: Any) -> Any:
            nonlocal sizes
            if sizes is None:
                # Only now is it known with which step the run continues. MaxText's own
                # count is one step behind then.
                done = 0 if self.restored is None else int(self.restored.name) + 1
                sizes = type(rampup_manager)(config, done)
            with _past_maxtext():
                self._made[maxtext_seams.MAKE_TRAIN].resize(
                    sizes.global_batch_size_current
                )
            batch = load(**more)
            sizes.update()
            return batch

        loader.load_next_batch = load_of_size
        return loader

    def save_step(
        self,
        checkpoint_manager: Any,
        state: Any,
        config: Any,
        data_iterator: Any,
        step: Any = None,
    ) -> None:
        """Saves a step if it is due; without a number it is the last one.

        MaxText ends without a save when the data ends, so what it would save is noted.
        """
        save = functools.partial(
            self._originals[maxtext_seams.SAVE_STEP],
            checkpoint_manager,
            state,
            config,
            data_iterator,
        )
        is_wanted = checkpoint_manager is not None
        self._save_last = None
        if step is not None:
            self._num_steps = int(step) + 1
        if is_wanted and step is not None and config.save_checkpoint_on_completion:
            self._save_last = save
        save(step)

    def _data_ended(self) -> None:
        # In place of the next batch: the state after the last step is still there.
        save, self._save_last = self._save_last, None
        if self._num_steps and self._record is not None:
            self._record.data_ended(self._num_steps)
        if save is None:
            return
        if self._manager is not None:
            self._manager.end()
        save()

    def metric_logger(
        self, config: Any, learning_rate_schedule: Any, start_step: int = 0
    ) -> Any:
        """Makes MaxText's logger of metrics, which reports each step to us, too."""
        if self.leaving is not None:
            self.leaving.last_step = config.steps - 1
        make = maxtext_record.reporting_logger(
            self._originals[maxtext_seams.MAKE_LOGGER],
            self._recorded(config),
            diverged=self._distrust,
        )
        return make(config, learning_rate_schedule, start_step)

    def begin_again(self) -> None:
        """Makes ready for MaxText to load the step that the run has gone back to."""
        self._save_last, self._is_again = None, True
        for made in self._made.values():
            made.close()
        self._made.clear()
        gc.collect()

    def _distrust(self, step: int, why: str) -> bool:
        return self._manager is not None and self._manager.distrust(
            step, within=self._distrust_steps, why=why
        )

    def close(self) -> None:
        """Closes the iterators that MaxText had last, and a checkpointer of ours."""
        try:
            for made in self._made.values():
                made.close()
            if self._manager is not None:
                self._manager.close()
        except Exception as error:
            if self._record is not None:
                self._record.abandon(error)
            raise
        if self._record is not None:
            self._record.close(secs=time.monotonic() - self._began_secs)

    def abandon(self, error: BaseException) -> None:
        """Ends what would hold up this process, whose run has failed."""
        if self._manager is not None:
            self._manager.abandon(error)
        if self._record is not None:
            self._record.abandon(error)
        _leave_others_at_once()

    def _recorded(self, config: Any) -> maxtext_record.RunRecord:
        # Only once MaxText has its devices is it known which host keeps the record.
        if self._record is None:
            world = self._world
            self._record = maxtext_record.RunRecord(
                config,
                world=topology.present(slices=max(1, config.num_slices))
                if world is None
                else world.topology,
                emit=self._emit if world is None else world.emit,
                is_supervised=world is not None,
            )
        return self._record

    def _iterator(
        self,
        seam: maxtext_seams.Seam,
        config: Any,
        section: data_keys.DataKeys,
        mesh: Any,
        record: maxtext_record.RunRecord | None = None,
    ) -> MaxTextIterator:
        if section.tokenize_train_data:
            maxtext_config.check_vocabulary(config, pipeline.vocab_size(section))
        evaluation = seam == maxtext_seams.MAKE_EVAL
        rows = maxtext_config.global_batch_size(
            config, num_devices=mesh.size, evaluation=evaluation
        )
        make_data = pipeline.from_config
        if evaluation:
            make_data = functools.partial(
                pipeline.eval_from_config, global_batch_size=rows
            )
        batches = frontend.configured_batches(
            make_data(section, vocab_size=config.vocab_size),
            section,
            mesh=mesh,
            spec=_spec_of(mesh),
            global_batch_size=rows,
        )
        # After an elastic event MaxText comes again; the old one's slices are gone.
        self._made[seam] = MaxTextIterator(
            batches,
            global_batch_size=rows,
            elastic=config.elastic_enabled,
            ended=_nothing if evaluation else self._data_ended,
            record=record,
        )
        return self._made[seam]


class MaxTextIterator:
    """Batches as MaxText's step takes them; to Orbax, their data state.

    Args:
      batches: `iterator.Batches` or `RemoteIterator`.
      global_batch_size: the rows of their first batch.
      elastic: whether MaxText answers lost slices itself.
      ended: called when there is no next batch.
      record: of the run, if it trains on these batches.
    """

    def __init__(
        self,
        batches: Any,
        *,
        global_batch_size: int,
        elastic: bool,
        ended: Callable[[], object] = lambda: None,
        record: maxtext_record.RunRecord | None = None,
    ) -> None:
        self._batches = batches
        self._rows = global_batch_size
        self._record = record
        self._elastic = elastic
        self._ended = ended

    def __iter__(self) -> MaxTextIterator:
        return self

    def __next__(self) -> elastic_data.Batch:
        with _past_maxtext(except_for=self._left_to_maxtext()):
            try:
                batch = next(self._batches)
            except StopIteration:
                self._ended()
                raise
            if self._record is not None:
                self._record.take(batch)
        return {name: batch[name] for name in FEATURES}

    def resize(self, global_batch_size: int) -> None:
        """Continues with batches of that size."""
        if global_batch_size != self._rows:
            self._batches.resize(global_batch_size)
            self._rows = global_batch_size

    def sync_log(self) -> None:
        """Writes the log of the steps so far, before the last of them is saved."""
        if self._record is not None:
            self._record.sync()

    def reset(self) -> None:
        """Goes to the beginning; MaxText does so before each evaluation."""
        self._batches.reset()

    def close(self) -> None:
        """Ends what reads ahead."""
        self._batches.close()

    async def save(self, directory: iterator.AwaitedDirectory) -> Awaitable[None]:
        """Takes the state now; the awaitable writes it into Orbax's directory."""
        return await self._batches.save(directory)

    async def load(self, directory: epath.Path) -> Awaitable[None]:
        """Goes to the data state in `directory`, on any number of hosts."""
        return await self._batches.load(directory)

    def _left_to_maxtext(self) -> tuple[type[Exception], ...]:
        if self._elastic:
            return (StopIteration, jax.errors.JaxRuntimeError)
        return (StopIteration,)


class _Loaded:
    """Takes the place of an iterator whose state has been loaded."""

    async def save(self, directory: iterator.AwaitedDirectory) -> Awaitable[None]:
        """Is never called: nothing is saved under this name."""
        raise NotImplementedError

    async def load(self, directory: epath.Path) -> Awaitable[None]:
        """Reads nothing."""
        del directory

        async def done() -> None:
            pass

        return done()


class _PastMaxText(BaseException):
    """Carries an error past `except Exception`.

    MaxText takes any error of an iterator for the end of the data, and ends well; and
    any error of its configuration it prints itself.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextlib.contextmanager
def _past_maxtext(*, except_for: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    try:
        yield
    except except_for:
        raise
    except Exception as error:
        raise _PastMaxText(error) from error


def _join(
    local_checkpoint_directory: Any,
    *,
    jax_initialization_timeout_seconds: int = 900,
    use_colocated_python: bool = False,
    **settings: Any,
) -> None:
    # With tiers on TPUs MaxText joins by Orbax, which waits for what GKE's replicator
    # writes to the RAM disk. Our tiers have no replicator, and JAX finds the hosts. The
    # controller of Pathways joins nothing.
    del local_checkpoint_directory, settings
    if not use_colocated_python:
        jax.distributed.initialize(
            initialization_timeout=jax_initialization_timeout_seconds
        )


def _nothing() -> None:
    """An evaluation ends with its data."""


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
    if not (latest / maxtext_tiers.ITERATOR).exists():
        what = (
            "has no data state (`iter`), so the examples that it has seen are unknown"
        )
    elif any((latest / maxtext_tiers.ITERATOR).glob("process_*.json")):
        what = "was saved by MaxText's own iterator, whose place in the data is another"
    else:
        return
    raise errors.CheckpointError(
        f"step {latest.name} in {directory} {what}; to go on from its weights, and with"
        " the data from the beginning, set"
        f" load_full_state_path={latest / maxtext_tiers.ITEMS} and another run_name"
    )
