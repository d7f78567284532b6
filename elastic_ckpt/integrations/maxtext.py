"""Runs the MaxText that is installed, unmodified, on our iterators.

MaxText's trainer, checkpoints and resume stay in use. For the time of the run, six
functions that MaxText looks up when it calls them are replaced, and two more on a host
of an elastic run (`maxtext_world`):

* after it has read its configuration, our keys are taken out (`maxtext_config`)
* when it makes Grain's iterators, it gets ours, in this process or in the sidecar
* when it saves and restores an iterator, ours is passed to Orbax unchanged
* when it makes its checkpointer, it gets ours if tiers are configured

A MaxText in which one of them is missing or changed is refused before the run.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import jax
from absl import app
from etils import epath
from orbax import checkpoint

from elastic_ckpt.checkpoint import components, configured_tiers
from elastic_ckpt.config import schema
from elastic_ckpt.core import errors, events, storage
from elastic_ckpt.data import elastic_data, iterator, pipeline
from elastic_ckpt.elastic.world import World
from elastic_ckpt.frontend import checkpointer
from elastic_ckpt.frontend.batches import configured_batches
from elastic_ckpt.integrations import (
    maxtext_config,
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
) -> None:
    """Trains as `python -m maxtext.trainers.pre_train.train ARGUMENTS` does.

    Args:
      arguments: of MaxText, with our keys among them.
      emit: called for each event of tiers of checkpoints.
      world: that this process has joined as a host; None if MaxText joins one itself.

    Raises:
      ConfigError: if MaxText is missing, or of a version that this module does not
        support, or its configuration requires features that our data does not have.
      DataError: if the data cannot be read; MaxText itself would end without an error.
      SystemExit: if MaxText refuses its configuration.
    """
    maxtext_seams.check_installed()
    with seams_taken(emit=emit, world=world) as taken:
        train = importlib.import_module(maxtext_seams.MAIN.module)
        try:
            app.run(train.main, argv=[str(train.__file__), *arguments])
        except SystemExit as ended:
            if ended.code:
                raise
        except _PastMaxText as past:
            taken.abandon(past.error)
            raise past.error from past.error.__cause__
        except Exception as error:
            taken.abandon(error)
            raise
        # Only here: after an error other hosts may be gone, and closing waits for them.
        taken.close()


@contextlib.contextmanager
def seams_taken(
    *, emit: events.Emit = events.nobody, world: World | None = None
) -> Iterator[Taken]:
    """Replaces MaxText's functions by ours, until the body ends; see `run`."""
    modules = {
        seam: importlib.import_module(seam.module) for seam in maxtext_seams.SEAMS
    }
    originals = {seam: getattr(modules[seam], seam.name) for seam in modules}
    taken = Taken(originals, emit=emit, world=world)
    ours: dict[maxtext_seams.Seam, Any] = {
        maxtext_seams.PREPARE: taken.prepare,
        maxtext_seams.MAKE_TRAIN: taken.train_iterator,
        maxtext_seams.MAKE_EVAL: taken.evaluation_iterator,
        maxtext_seams.FOR_SAVE: taken.for_save,
        maxtext_seams.FOR_RESTORE: taken.for_restore,
        maxtext_seams.MAKE_CHECKPOINTER: taken.checkpoint_manager,
    }
    if world is not None:
        ours |= maxtext_world.functions(world, originals)
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
    """

    def __init__(
        self,
        originals: dict[maxtext_seams.Seam, Callable[..., Any]],
        *,
        emit: events.Emit,
        world: World | None,
    ) -> None:
        self._originals = originals
        self._emit = emit
        self._world = world
        self._own = maxtext_config.Own(values={})
        self._made: dict[maxtext_seams.Seam, MaxTextIterator] = {}
        self._manager: maxtext_tiers.TieredManager | None = None

    def prepare(self, raw_keys: dict[str, Any], *rest: Any, **more: Any) -> Any:
        """Takes our keys out of those that MaxText has read."""
        with _past_maxtext():
            theirs, self._own = maxtext_config.divide(raw_keys)
        return self._originals[maxtext_seams.PREPARE](theirs, *rest, **more)

    def train_iterator(
        self, config: Any, global_mesh: Any, process_indices: Any
    ) -> Any:
        """Makes the iterator of the training data."""
        del process_indices
        section = maxtext_config.train_section(config, self._own)
        _check_resumable(config)
        return self._iterator(maxtext_seams.MAKE_TRAIN, config, section, global_mesh)

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
            directory = (
                checkpoint_manager.directory / str(step) / maxtext_tiers.ITERATOR
            )
            with _past_maxtext():
                components.load(data_iterator, directory)
            return _Loaded()
        return self._originals[maxtext_seams.FOR_RESTORE](
            checkpoint_manager, step, data_iterator, expansion_factor_real_data
        )

    def checkpoint_manager(self, config: Any, mesh: Any, init_state_fn: Any) -> Any:
        """Makes MaxText's checkpointer, over our tiers if these are configured."""
        if not (config.enable_multi_tier_checkpointing and config.enable_checkpointing):
            return self._originals[maxtext_seams.MAKE_CHECKPOINTER](
                config, mesh, init_state_fn
            )
        with _past_maxtext():
            chosen = maxtext_config.tiers_config(config, self._own)
            tiers = configured_tiers.tiers(chosen, persistent=config.checkpoint_dir)
            if self._world is not None:
                over_tiers = self._world.checkpointer(tiers, run=config.run_name)
            else:
                over_tiers = checkpointer.Checkpointer(
                    tiers, mesh=mesh, run=config.run_name, emit=self._emit
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
        emit = self._emit if self._world is None else self._world.emit
        self._manager.validate(chosen.validation, emit)
        return self._manager

    def close(self) -> None:
        """Closes the iterators that MaxText had last, and a checkpointer of ours."""
        for made in self._made.values():
            made.close()
        if self._manager is not None:
            self._manager.close()

    def abandon(self, error: BaseException) -> None:
        """Ends what would hold up this process, whose run has failed."""
        if self._manager is not None:
            self._manager.abandon(error)
        _leave_others_at_once()

    def _iterator(
        self,
        seam: maxtext_seams.Seam,
        config: Any,
        section: schema.DataSection,
        mesh: Any,
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
        batches = configured_batches(
            make_data(section, vocab_size=config.vocab_size),
            section,
            mesh=mesh,
            spec=_spec_of(mesh),
            global_batch_size=rows,
        )
        # After an elastic event MaxText comes again; the old one's slices are gone.
        self._made[seam] = MaxTextIterator(batches, elastic=config.elastic_enabled)
        return self._made[seam]


class MaxTextIterator:
    """Batches as MaxText's step takes them; to Orbax, their data state.

    Args:
      batches: `iterator.Batches` or `RemoteIterator`.
      elastic: whether MaxText answers lost slices itself.
    """

    def __init__(self, batches: Any, *, elastic: bool) -> None:
        self._batches = batches
        self._elastic = elastic

    def __iter__(self) -> MaxTextIterator:
        return self

    def __next__(self) -> elastic_data.Batch:
        with _past_maxtext(except_for=self._left_to_maxtext()):
            batch = next(self._batches)
        return {name: batch[name] for name in FEATURES}

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
        f" the data from the beginning, set load_full_state_path={latest / 'items'} and"
        " another run_name"
    )
