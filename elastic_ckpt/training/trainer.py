"""The program of a host: our reference trainer, in one world over one mesh.

It is the same in a single process, in a world that a supervisor starts, and under an
outer launcher, and it is made of what anybody's loop uses: `ec.batches`, the world's
checkpointer, and `ec.RunDirectory`. Nothing outlives a trainer or is shared between
two: a run that continues on other hosts makes another one of the same configuration.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from absl import logging

from elastic_ckpt import frontend
from elastic_ckpt.checkpoint import run_saver
from elastic_ckpt.checkpoint.host.answers import CheckpointMetadata
from elastic_ckpt.core import (
    bucket_clients,
    errors,
    events,
    process,
    storage,
    topology,
)
from elastic_ckpt.data.lm import pipeline
from elastic_ckpt.elastic import termination, watch
from elastic_ckpt.elastic.world import BetweenWorlds, World
from elastic_ckpt.tiers.persistent import claims, leases
from elastic_ckpt.training import (
    batch_size,
    callbacks,
    configured,
    journal,
    model,
    schema,
)
from elastic_ckpt.training.callbacks import Action, Finding
from elastic_ckpt.training.loop import Ended, Loop
from elastic_ckpt.training.own_loop import RunDirectory
from elastic_ckpt.universal import loading, shipped
from elastic_ckpt.universal.formats import files


class Trainer:
    """A run in one world: `restore`, then `train`, then `close`, within `with run:`.

    Every host of the world makes one, and calls its methods in the same order.

    Args:
      config: of the run; the files of its data exist.
      world: of this host; its events are emitted on the primary host alone.

    Attributes:
      run: the directory of the run, which records its end.
      program: of the model.
      batches: of the data.
      loop: over the devices of the world.
      saver: None if the run has no checkpoints.
      start_step: the steps that are done already; 0 for a new run.

    Raises:
      ConfigError: if parts, devices or the number of steps do not fit together.
      DataError: if the data cannot be read.
      RunError: if another run uses the RAM disk, or hosts cannot be reached.
    """

    def __init__(self, config: schema.Config, world: World) -> None:
        self._config = config
        self._world = world
        self._emit = world.emit
        data, mesh, place = config.data, world.mesh, world.topology
        self._callbacks = callbacks.configured(config, emit=self._emit)
        self._sizes = batch_size.schedule(data, place)
        self.program = model.build(config, mesh, microbatches=world.microbatches)
        batches_of = functools.partial(
            frontend.batches,
            mesh=mesh,
            # In this process it cannot run under a single controller.
            colocated=data.colocated_python_data_input or None,
            read_ahead=data.data_read_ahead_batches,
        )
        vocab_size = model.vocab_size(config)
        self.batches = batches_of(
            pipeline.from_config(data, vocab_size=vocab_size),
            global_batch_size=self._sizes.at(0),
        )
        # They are closed after the saver, in reverse order.
        self._parts = contextlib.ExitStack()
        self._parts.callback(self.batches.close)
        evaluated = None
        if data.eval_interval:
            rows = batch_size.global_batch_size(data, place)
            of_eval = pipeline.eval_from_config(
                data, global_batch_size=rows, vocab_size=vocab_size
            )
            evaluated = batches_of(of_eval, global_batch_size=rows)
            self._parts.callback(evaluated.close)
        directory = journal.path_of(config)
        tiers = configured.tiers(
            config,
            persistent=journal.steps_of(directory),
            ram=world.ram_directory,
        )
        self.run = RunDirectory(
            directory,
            tiers=tiers,
            steps=config.run.steps,
            world=world,
            _config=config,
        )
        self.saver, self.start_step = None, 0
        with contextlib.ExitStack() as on_error:
            on_error.enter_context(self.run)
            if config.checkpoint.enable_checkpointing:
                self.saver = run_saver.RunSaver(
                    checkpointer=on_error.enter_context(
                        world.checkpointer(
                            tiers, run=config.run.run_name, emit=self.run.emit
                        )
                    ),
                    saved=configured.saved(config.checkpoint),
                    data=self.batches,
                    callbacks=self._callbacks or None,
                )
                self.start_step = self.saver.latest_step or 0
            if self.start_step > config.run.steps:
                raise errors.ConfigError(
                    f"steps={config.run.steps}, but {directory} is already at step"
                    f" {self.start_step}: steps counts over all starts of a run; set it"
                    f" above {self.start_step} to continue, or choose another run_name"
                )
            self._resize(0, self.start_step)
            on_error.pop_all()
        self._validation = configured.validation(
            config.validation,
            self._emit,
            preserve=lambda up_to: (
                None
                if self.saver is None
                else run_saver.preserve_newest(self.saver.checkpointer, up_to=up_to)
            ),
        )
        self.loop = Loop(
            data=data,
            world=world,
            run=self.run,
            program=self.program,
            batches=self.batches,
            sizes=self._sizes,
            saver=self.saver,
            evaluated=evaluated,
            validation=self._validation,
            callbacks=self._callbacks,
        )

    def restore(self) -> model.TrainState:
        """The state after `start_step` steps, sharded over the mesh.

        If that step proves to be unreadable, the state is that of the step before it. A
        new run begins with the weights of `init_from`, or draws them.

        Raises:
          CheckpointError: if the newest step is of another model, or none can be read.
          DataError: if its data state is of another pipeline.
          ConfigError: if the layout of `init_from` does not fit.
        """
        self._world.begin("restore")
        # A run that has gone back to its beginning has a step 0.
        if self.saver is None or self.saver.latest_step is None:
            return self._new_state()
        if path := self._config.model.init_from:
            self._emit("weights_skipped", path=path, step=self.start_step)
        abstract_state = self.program.abstract_state
        state = self._world.take_state(self.start_step, abstract_state)
        if state is not None and self.saver.restore_data(self.start_step):
            return state
        state = self.saver.restore(abstract_state)
        restored = self.saver.latest_step
        assert restored is not None
        _check_step(state, restored)
        self._resize(self.start_step, restored)
        return state

    def train(self, state: model.TrainState) -> Ended:
        """Trains from `state` to the last step, or until the hosts leave.

        When a callback has found a divergence the run may go back to an older step, and
        continue from there with the data that comes next. Within `distrust_steps` of a
        restore it goes back to an older step in storage first, and repeats the data
        since then.

        Args:
          state: from `restore`; its buffers are donated.
        """
        if self.saver:
            self.saver.checkpointer.claim_world()
        older = self._distrust_restore(int(state["step"]))
        while True:
            start_step = int(state["step"])
            if self._validation and start_step:
                self._validation.equal_step = start_step
            # All hosts ask for it.
            self.run._begin(start_step, left_out=self.batches.left_out)
            steps = self._config.run.steps
            ended = self.loop.run(state, start_step=start_step, steps=steps)
            finding = ended.finding
            if finding is None or finding.action in (Action.STOP, Action.ABORT):
                if finding and finding.is_divergence and finding.action is Action.STOP:
                    self._leave_newest_good(finding)
                return ended
            if finding.action is Action.DISTRUST:
                # It repeats the rows since then.
                state = self._back_to(ended, older[-1], self._callbacks.rollbacks)
                self.batches.resize(self._sizes.at(older[-1].step))
                ended = Ended(state, older[-1].step, ended.is_stopped)
            else:
                ended = self._go_back(ended, finding, began_at=start_step)
            if ended.finding is not None or ended.is_stopped:
                return ended
            state = ended.state

    def close(self) -> None:
        """Waits for all saves, and ends the parts, but `run`.

        Only after a `train` that returned: after an error the other hosts may be gone,
        and closing waits for them.
        """
        with self._parts:
            if self.saver:
                self.saver.close()

    def abandon(self, error: Exception) -> None:
        """Ends the parts after an error; hosts may be gone, so their errors are logged.

        A process that is alone finishes the saves in flight; one that goes on in
        another world leaves them.
        """
        saver = None if self.saver is None else self.saver.checkpointer
        if self._world.devices is None and topology.num_hosts() > 1:
            # This process ends at once, and what it wrote to is free.
            if saver:
                saver.let_others_write()
            return
        try:
            with self._parts:
                if saver and self._world.devices is None:
                    saver.leave(error)
                elif saver:
                    saver.abandon()
        except Exception as another:
            logging.warning("a part of a failed run cannot be ended: %r", another)

    def _new_state(self) -> model.TrainState:
        section, abstract = self._config.model, self.program.abstract_state
        if not section.init_from:
            return self.program.init()
        return self.program.begin(
            initial_weights(section, abstract["params"], self._emit)
        )

    def _distrust_restore(self, restored: int) -> list[CheckpointMetadata]:
        # Has the callbacks distrust the restored step; the step to go back to, later.
        saver, within = self.saver, self._config.divergence.distrust_steps
        older: list[CheckpointMetadata] = []
        if saver is None or not (within and restored):
            return older

        def go_back(step: int, why: str) -> bool:
            # It waits for saves and backups, which is no hang of a step.
            self._world.begin("restore")
            found = run_saver.stored_before(saver.checkpointer, restored)
            self._emit(
                "restore_distrusted",
                step=step,
                restored_step=restored,
                to_step=None if found is None else found.step,
                why=why,
            )
            if found is None:
                self._world.begin("step")
                return False
            older.append(found)
            return True

        self._callbacks.distrust_until(restored + within, go_back)
        return older

    def _back_to(
        self,
        ended: Ended,
        saved: CheckpointMetadata | None,
        rollbacks: int,
        *,
        leaves_out: bool = False,
    ) -> model.TrainState:
        # The state of a saved step, or of the beginning, in place of the present one.
        saver = self.saver
        assert saver is not None
        # The devices may not have room for two states.
        for leaf in jax.tree.leaves(ended.state):
            leaf.delete()
        data = self.batches.leaving_out() if leaves_out else None
        if saved is None:
            assert data is not None
            state = self._new_state()
            data.leave_out(None)
            saver.begin_anew()
        else:
            state = saver.restore(self.program.abstract_state, saved, data=data)
        _check_step(state, 0 if saved is None else saved.step)
        self._callbacks.go_on()
        self._callbacks.rollbacks = rollbacks
        return state

    def _leave_newest_good(self, finding: Finding) -> None:
        # Steps that were saved since the divergence are abandoned, so that the next
        # start does not continue from one of them.
        self._world.begin("restore")
        saved = self._complete()
        step = callbacks.good_step(list(saved), since=finding.since)
        if self.saver and step is not None and step != max(saved):
            state = self.saver.restore(self.program.abstract_state, saved[step])
            self.saver.save_again(step, state)

    def _go_back(self, ended: Ended, finding: Finding, *, began_at: int) -> Ended:
        # As if the loop had ended with an older step, which is saved. If the run has to
        # end instead, the finding has the reason.
        self._world.begin("restore")
        called, saved = self._callbacks, self._complete()
        began_secs = time.monotonic()
        section, tiers = self._config.divergence, self._config.tiers
        period = self._config.checkpoint.checkpoint_period
        if tiers.enable_multi_tier_checkpointing:
            period = tiers.local_checkpoint_period
        try:
            step = callbacks.step_to_go_back_to(
                finding,
                list(saved),
                before=called.rollbacks,
                began_at=began_at,
                most=section.divergence_max_rollbacks,
                margin=section.divergence_rollback_steps,
                first_due=period,
            )
        except errors.DivergedError as error:
            why = dataclasses.replace(finding, action=Action.ABORT, why=str(error))
            return ended._replace(finding=why)
        assert self.saver is not None
        read = self._read_to(called.decided_step + 1, done=ended.step)
        number = called.rollbacks + 1
        state = self._back_to(ended, saved.get(step), number, leaves_out=True)
        self._resize(read, step)
        self.saver.save_again(step, state)
        first, last = self.batches.left_out[-1]
        self._emit(
            "rolled_back",
            step=ended.step,
            to_step=step,
            rows=last - first,
            rollbacks=number,
            secs=time.monotonic() - began_secs,
        )
        return Ended(state, step, ended.is_stopped)

    def _complete(self) -> dict[int, CheckpointMetadata]:
        # The saved steps, once all saves that have begun are done.
        if self.saver is None:
            return {}
        self.saver.checkpointer.wait()
        return {each.step: each for each in self.saver.checkpointer.checkpoints}

    def _read_to(self, step: int, *, done: int) -> int:
        # Returns the last step whose batch was read, from 0. Mostly the loop has read
        # one more batch than callbacks have seen; so it always is, and the run always
        # continues with the same batch.
        for number in range(done, step):
            self._resize(number - 1, number)
            with contextlib.suppress(StopIteration):
                next(self.batches)
        return max(done, step) - 1

    def _resize(self, before: int, step: int) -> None:
        # Batches are of the size of step `before`.
        if self._sizes.at(step) != self._sizes.at(before):
            self.batches.resize(self._sizes.at(step))


def train(config: schema.Config, world: World) -> bool:
    """Trains on this host, a member of a world that all of its hosts have joined.

    Args:
      config: of the run; the files of its data exist.
      world: of this host.

    Returns:
      Whether the hosts left before the last step.

    Raises:
      DivergedError: if a callback has ended the run.
    """
    world.begin("prepare")
    trainer = Trainer(config, world)
    with trainer.run:
        world.emit(
            "run_started",
            run=config.run.run_name,
            **dataclasses.asdict(world.topology),
            start_step=trainer.start_step,
            steps=config.run.steps,
        )
        try:
            ended = trainer.train(trainer.restore())
            world.begin(watch.CLOSE)
            world.put_state(ended.step, ended.state)
            trainer.close()
        except Exception as error:
            trainer.abandon(error)
            raise
        if ended.finding is not None:
            newest = trainer.saver.latest_step if trainer.saver else None
            kept = "saved" if newest == ended.step else "not saved"
            left = "" if newest in (None, ended.step) else f"; the newest is {newest}"
            raise errors.DivergedError(
                f"the run was ended after step {ended.step}, which is {kept}:"
                f" {ended.finding.why}{left}"
            )
    return ended.is_stopped


@contextlib.contextmanager
def alone(
    config: schema.Config,
    emit: events.Emit,
    *,
    ended: Callable[[], None] = lambda: None,
) -> Iterator[World]:
    """The world of this process, if no supervisor has started it.

    SIGTERM ends the run while the block runs: before the first step at once.

    Args:
      config: of the run.
      emit: called for its events.
      ended: called before SIGTERM ends the only process of the run.
    """
    # The launcher of several processes sets the time limit.
    if jax.distributed.is_initialized():
        leaving = termination.agreed()
    else:
        leaving = termination.in_this_process(
            grace_secs=configured.grace_secs(config), ended=ended, emit=emit
        )
    with leaving as is_ending:
        slices = config.world.slices
        # An outer launcher starts the hosts again, which take over.
        claimant = claims.Claimant(
            owner=process.this() if topology.num_hosts() == 1 else None
        )
        yield World(
            number=1,
            slices=tuple(range(slices)),
            slice_name=topology.slice_of_this_host(slices),
            emit=emit,
            leaving=lambda step: "stop" if is_ending(step) else None,
            _between=BetweenWorlds(claimant=claimant),
        )


def initial_weights(
    section: schema.ModelSection, params: Any, emit: events.Emit
) -> Any:
    """The weights of a new run, from a checkpoint of any format: the key `init_from`.

    Each host reads what its devices need. A step that was saved by a run of the same
    model needs no layout; every other checkpoint is read through one.

    Args:
      section: says where they are; without a layout they are those of the same model.
      params: shapes, dtypes and shardings of the weights.
      emit: called once they are there.

    Returns:
      A tree like `params`.

    Raises:
      ConfigError: if a layout is missing, malformed, or does not fit.
      CheckpointError: if the checkpoint cannot be read, or is of another model.
    """
    began_secs = time.monotonic()
    wanted = {"params": params}
    path = str(files.resolved(section.init_from))
    bucket_clients.prepare(path)
    # Another run may be saving there, and removes its old steps.
    with leases.leased_if_ours(path):
        if not section.init_from_layout:
            state = _of_same_leaves(path, wanted)
        else:
            layout = shipped.resolve(section.init_from_layout).weights()
            state = loading.load(path, wanted, layout=layout)
    emit(
        "weights_loaded",
        path=section.init_from,
        bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
        secs=time.monotonic() - began_secs,
    )
    return state["params"]


def _of_same_leaves(path: str, wanted: Any) -> Any:
    tree = storage.absolute(path) / run_saver.STATE
    source = str(tree) if tree.exists() else path
    try:
        return loading.load_leaves(source, wanted)
    except errors.OtherModelError as error:
        raise errors.OtherModelError(
            f"{error}; or set init_from_layout to the layout of that checkpoint"
        ) from None


def _check_step(state: model.TrainState, step: int) -> None:
    saved = int(state["step"])
    if saved != step:
        raise errors.CheckpointError(
            f"the checkpoint of step {step} holds the state after {saved} steps: it was"
            f" renamed, or copied from another step; move {step} out of its directory"
            " to continue from the step before"
        )
