"""The reference trainer. Each host runs one per world, over a single mesh.

The trainer is the same in a single process, in a world that a supervisor starts, and
under an outer launcher. Like any user's loop, it uses `ec.batches`, the world's
checkpointer and `ec.RunDirectory`. Trainers share nothing: a run that continues on
other hosts creates a new trainer from the same configuration.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import jax
from absl import logging

from elastic_ckpt import frontend
from elastic_ckpt.checkpoint.host.answers import CheckpointMetadata
from elastic_ckpt.core import (
    allgather,
    bucket_clients,
    errors,
    events,
    process,
    storage,
    topology,
)
from elastic_ckpt.data import elastic_data
from elastic_ckpt.data.iterator import Batches
from elastic_ckpt.data.lm import pipeline
from elastic_ckpt.elastic import termination, watch
from elastic_ckpt.elastic.world import BetweenWorlds, World
from elastic_ckpt.steps import layout
from elastic_ckpt.tiers.choices import Local, Persistent
from elastic_ckpt.tiers.persistent import claims, leases
from elastic_ckpt.training import (
    batch_size,
    callbacks,
    configured,
    journal,
    model,
    run_saver,
    schema,
    validation_schedule,
)
from elastic_ckpt.training.callbacks import Action, Callbacks, Detection, StepMetrics
from elastic_ckpt.training.own_loop import RunDirectory
from elastic_ckpt.universal import loading, shipped
from elastic_ckpt.universal.formats import files

# The name of the mean loss among the metrics that rank a step.
EVAL_METRIC = "eval_loss"
# Long, because the coordination service stops the other hosts if one host dies.
_COMPILE_TIMEOUT_SECS = 24 * 3600


class Ended(NamedTuple):
    """The result of a loop.

    Attributes:
      step: the number of completed steps.
      is_stopped: whether the hosts left before the last step.
      finding: the callback's finding that ended the loop, if any. The last step is
        saved if the action is to stop and the finding is not a divergence.
    """

    state: model.TrainState
    step: int
    is_stopped: bool
    finding: Detection | None = None


@dataclasses.dataclass(kw_only=True, eq=False)
class Trainer:
    """A run in one world: `restore`, then `train`, then `close`, within `with run:`.

    Every host of the world has a trainer and calls its methods in the same order.

    Attributes:
      run: the run directory, which logs the steps and records the end.
      batches: global batches, initially with the batch size of step 0.
      sizes: the batch size of each step.
      saver: the object that saves and restores steps; None trains without
        checkpoints.
      start_step: the number of steps already completed; 0 for a new run.
      first_due: the first step that is saved.
      evaluated: finite batches to evaluate; None disables evaluation.
      validation: the schedule of replica comparisons; None disables them.
      callbacks: the callbacks for each step and evaluation.
      parts: an exit stack that closes the batches.
    """

    config: schema.Config
    world: World
    run: RunDirectory
    program: model.Program
    batches: Batches
    sizes: batch_size.Schedule
    saver: run_saver.RunSaver | None
    start_step: int = 0
    first_due: int = 0
    evaluated: Batches | None
    validation: validation_schedule.ValidationSchedule | None
    callbacks: Callbacks
    parts: contextlib.ExitStack

    def __post_init__(self) -> None:
        self._hosts = allgather.new()
        # The number of rows in the current batches.
        self._rows = batch_size.at(self.sizes, 0)
        # The compiled step, keyed by the shapes and dtypes of its batch.
        self._steps: dict[Any, Callable[..., Any]] = {}
        # The last step, until the callbacks have seen it.
        self._pending: tuple[int, model.StepReport] | None = None
        # The step in storage that replaces a distrusted restore.
        self._older: CheckpointMetadata | None = None

    def restore(self) -> model.TrainState:
        """Restores the state after `start_step` steps, sharded over the mesh.

        If that step turns out to be unreadable, restores the previous one. A new run
        begins with the weights of `init_from` or with random weights.

        Raises:
          CheckpointError: if the newest step comes from a different model or no step
            can be read.
          DataError: if the step's data state comes from a different pipeline.
          ConfigError: if the layout of `init_from` does not match the checkpoint or
            the model.
        """
        self.world.begin("restore")
        # Only a run that rolled back to its beginning has a step 0.
        if self.saver is None or self.saver.latest_step is None:
            return self._new_state()
        if path := self.config.model.init_from:
            self.world.emit("weights_skipped", path=path, step=self.start_step)
        # The first batch is read as soon as the data is restored.
        self._resize(self.start_step)
        abstract_state = self.program.abstract_state
        state = self.world.take_state(self.start_step, abstract_state)
        if state is not None and self.saver.restore_data(self.start_step):
            return state
        state = self.saver.restore(abstract_state)
        _check_step(state, self.saver.latest_step)
        return state

    def train(self, state: model.TrainState) -> Ended:
        """Trains from `state`, which is donated, to the last step or until hosts leave.

        When a callback finds a divergence, the run may roll back to an older step and
        continue from there with the next data. Within `distrust_steps` of a restore, it
        first returns to an older step in storage and trains on the same data again.
        """
        restored, within = int(state["step"]), self.config.divergence.distrust_steps
        if self.saver:
            self.saver.checkpointer.claim_world()
            if restored and within:
                look = functools.partial(self._is_to_go_back, self.saver, restored)
                self.callbacks.distrust_until(restored + within, look)
        while True:
            start_step = int(state["step"])
            if self.validation and start_step:
                self.validation.equal_step = start_step
            self.run._begin(start_step, left_out=self.batches.left_out)
            ended = self.loop(state, start_step=start_step, steps=self.config.run.steps)
            finding = ended.finding
            if finding is None or self.saver is None:
                return ended
            if finding.action is Action.DISTRUST:
                # Trains on the rows since that step again.
                state = self._back_to(self.saver, ended, self._older)
            elif finding.action is Action.ROLLBACK:
                try:
                    state = self._roll_back(self.saver, ended, finding, start_step)
                except errors.DivergedError as error:
                    finding = dataclasses.replace(finding, why=str(error))
                    return ended._replace(finding=finding)
            else:
                if finding.action is Action.STOP and finding.is_divergence:
                    self._leave_newest_good(self.saver, ended, finding)
                return ended
            if ended.is_stopped:
                self.run._begin(int(state["step"]), left_out=self.batches.left_out)
                return Ended(state, int(state["step"]), is_stopped=True)

    def loop(self, state: model.TrainState, *, start_step: int, steps: int) -> Ended:
        """Trains from `state`, which is donated, until `steps` steps are completed.

        Steps are logged one step behind the devices, which never wait for the log.
        Callbacks also run one step behind, but before a save, so that a step they find
        bad is never saved.
        """
        done, leaving = start_step, False
        self.batches.begin_at(start_step)
        while done < steps and not leaving and self.callbacks.decision is None:
            self.world.begin("step")
            batch = self._next(done)
            if batch is None:
                self._catch_up()
                self.run.emit("data_ended", step=done)
                break
            state, report = self._compiled(done + 1, state, batch)(state, batch)
            self._catch_up()
            done += 1
            self._pending = (done, report)
            self.run.log(
                done,
                batch,
                loss=report.loss,
                tokens=report.tokens,
                learning_rate=report.learning_rate,
                _gradient_norm=report.gradient_norm,
                _rows=(report.example_id, report.row_digests),
            )
            if done == start_step + 1:
                # The first step's loss ends a slice change and may reveal a bad state.
                # Only then does the supervisor start processes for the next change.
                self._catch_up()
            leaving = done < steps and self.world.leaving(done) is not None
            self._evaluate(done, state)
            is_due = self.saver is not None and (
                leaving or self.saver.is_due(done, last=done == steps)
            )
            self._validate(done, state, is_saving=is_due)
            if is_due:
                self._catch_up()
                if self.callbacks.decision is None:
                    self._save(done, state, last=done == steps or leaving)
        self._catch_up()
        finding = self.callbacks.decision
        # A run that was already complete, or whose data has ended, may lack its last
        # checkpoint in storage.
        if done and self._is_end_due(done, finding):
            self._validate(done, state, is_saving=True)
            self._save(done, state, last=True)
        return Ended(state, done, leaving, finding)

    def close(self) -> None:
        """Waits for all saves and closes everything except `run`.

        Call it only after `train` has returned: after an error, other hosts may be
        gone, and closing waits for them.
        """
        with self.parts:
            if self.saver:
                self.saver.close()

    def abandon(self, error: Exception) -> None:
        """Closes everything after an error; logs errors, because hosts may be gone.

        A single process completes its saves in flight; a process that continues in the
        next world abandons them.
        """
        saver = None if self.saver is None else self.saver.checkpointer
        if self.world.devices is None and topology.num_hosts() > 1:
            # This process exits immediately; others may write to the same place.
            if saver:
                saver.let_others_write()
            return
        try:
            with self.parts:
                if saver and self.world.devices is None:
                    saver.leave(error)
                elif saver:
                    saver.abandon()
        except Exception as another:
            logging.warning("cannot close everything after the run failed: %r", another)

    def _next(self, step: int) -> elastic_data.Batch | None:
        # The batch of a step, counted from 0; None if the data has ended.
        self._resize(step)
        try:
            return next(self.batches)
        except StopIteration:
            return None

    def _resize(self, step: int) -> None:
        rows = batch_size.at(self.sizes, step)
        if rows != self._rows:
            self.batches.resize(rows)
        self._rows = rows

    def _compiled(
        self, number: int, state: model.TrainState, batch: elastic_data.Batch
    ) -> model.Step:
        # A data stage may have rows of a different length.
        form = tuple((each.shape, each.dtype) for each in jax.tree.leaves(batch))
        if form not in self._steps:
            step = self.program.step
            self._steps[form] = self.world.compiled(step, state, batch, step=number)
            # A collective on CPU fails if a host is more than 30 s late.
            self._hosts.gather("compiled", None, timeout_secs=_COMPILE_TIMEOUT_SECS)
        return self._steps[form]

    def _catch_up(self) -> None:
        # Waits until the pending step is computed. No host may run ahead of the logging
        # host, because hosts leave after a step that all of them have begun.
        pending, self._pending = self._pending, None
        if pending is None:
            return
        step, report = pending
        jax.block_until_ready(report.loss)
        if self.callbacks.reads(step):
            numbers = StepMetrics(
                loss=float(report.loss),
                gradient_norm=float(report.gradient_norm),
                tokens=int(report.tokens),
                learning_rate=float(report.learning_rate),
            )
            self.callbacks.after_step(step, numbers)

    def _evaluate(self, step: int, state: model.TrainState) -> None:
        # Emits the mean loss in nats per target, excluding padding, from the start of
        # the evaluation data.
        batches, data = self.evaluated, self.config.data
        if batches is None or step % data.eval_interval:
            return
        self._catch_up()
        if self.callbacks.decision is not None:
            return
        self.world.begin("evaluate")
        began = time.monotonic()
        batches.reset()
        loss, targets, num_batches = 0.0, 0, 0
        for batch in batches:
            summed, count = self.program.evaluate(state, batch)
            loss, targets = loss + float(summed), targets + int(count)
            num_batches += 1
            if num_batches == data.eval_steps:
                break
        mean, secs = loss / max(targets, 1), time.monotonic() - began
        self.run.emit("evaluated", step=step, loss=mean, batches=num_batches, secs=secs)
        self.callbacks.after_evaluation(step, mean)
        if self.saver:
            self.saver.record(step, {EVAL_METRIC: mean})

    def _is_end_due(self, step: int, finding: Detection | None) -> bool:
        # Whether to save the loop's last step, which may be saved already or bad.
        if self.saver is None or self.saver.last_step == step:
            return False
        if finding is None:
            return self.saver.is_due(step, last=True)
        return finding.action is Action.STOP and not finding.is_divergence

    def _validate(self, step: int, state: model.TrainState, *, is_saving: bool) -> None:
        if self.validation and self.validation.is_due(step, is_saving=is_saving):
            self._catch_up()
            self.world.begin("validate")
            components = {callbacks.COMPONENT: self.callbacks.get_state()}
            self.validation.run(step, state, components=components)

    def _save(self, step: int, state: model.TrainState, *, last: bool) -> None:
        assert self.saver is not None
        self.world.begin("save")
        began = time.monotonic()
        self.saver.save(step, state, last=last)
        self.run.emit("save_blocked", step=step, secs=time.monotonic() - began)

    def _new_state(self) -> model.TrainState:
        section, params = self.config.model, self.program.abstract_state["params"]
        if not section.init_from:
            return self.program.init()
        return self.program.begin(initial_weights(section, params, self.world.emit))

    def _is_to_go_back(
        self, saver: run_saver.RunSaver, restored: int, step: int, why: str
    ) -> bool:
        # Whether storage has a step older than the distrusted one. Waits for saves and
        # backups; this wait does not count as a hang of a step.
        self.world.begin("restore")
        self._older = run_saver.stored_before(saver.checkpointer, restored)
        self.world.emit(
            "restore_distrusted",
            step=step,
            restored_step=restored,
            to_step=None if self._older is None else self._older.step,
            why=why,
        )
        if self._older is None:
            self.world.begin("step")
        return self._older is not None

    def _back_to(
        self,
        saver: run_saver.RunSaver,
        ended: Ended,
        saved: CheckpointMetadata | None,
        *,
        leaves_out: bool = False,
    ) -> model.TrainState:
        # Returns the state of a saved step or of the beginning, to replace the state of
        # an ended loop. The data also rolls back, unless it skips rows already read.
        rollbacks = self.callbacks.rollbacks + leaves_out
        # The devices may not have room for two states.
        for leaf in jax.tree.leaves(ended.state):
            leaf.delete()
        data = self.batches.leaving_out() if leaves_out else None
        if saved is None:
            assert data is not None
            state = self._new_state()
            data.leave_out(None)
            saver.start_over()
        else:
            state = saver.restore(self.program.abstract_state, saved, data=data)
        _check_step(state, 0 if saved is None else saved.step)
        self.callbacks.reset()
        self.callbacks.rollbacks = rollbacks
        return state

    def _leave_newest_good(
        self, saver: run_saver.RunSaver, ended: Ended, finding: Detection
    ) -> None:
        # Abandons steps saved since the divergence, so that a restarted run does not
        # continue from one of them.
        self.world.begin("restore")
        saved = _complete(saver)
        step = callbacks.good_step(list(saved), since=finding.since)
        if step is not None and step != max(saved):
            saver.save_again(step, self._back_to(saver, ended, saved[step]))

    def _roll_back(
        self,
        saver: run_saver.RunSaver,
        ended: Ended,
        finding: Detection,
        began_at: int,
    ) -> model.TrainState:
        # Restores an older step and saves it as if the loop had ended with this step.
        self.world.begin("restore")
        began_secs, saved = time.monotonic(), _complete(saver)
        section = self.config.divergence
        step = callbacks.step_to_go_back_to(
            finding,
            list(saved),
            before=self.callbacks.rollbacks,
            began_at=began_at,
            most=section.divergence_max_rollbacks,
            margin=section.divergence_rollback_steps,
            first_due=self.first_due,
        )
        if ended.step == self.callbacks.decided_step:
            # Callbacks usually decide one step later. Reads and logs one more batch so
            # that the run always continues with the same batch.
            batch = self._next(ended.step)
            if batch is not None:
                self.run.log(ended.step + 1, batch)
                # The batch is not a step of the run.
                self.run._event = None
        state = self._back_to(saver, ended, saved.get(step), leaves_out=True)
        saver.save_again(step, state)
        first, last = self.batches.left_out[-1]
        self.world.emit(
            "rolled_back",
            step=ended.step,
            to_step=step,
            rows=last - first,
            rollbacks=self.callbacks.rollbacks,
            secs=time.monotonic() - began_secs,
        )
        return state


def assembled(config: schema.Config, world: World) -> Trainer:
    """Creates this host's trainer; every host of the world calls this function.

    The data files must exist.

    Raises:
      ConfigError: if settings, devices or the number of steps are incompatible.
      DataError: if the data cannot be read.
      RunError: if another run is using the RAM disk or hosts cannot be reached.
    """
    data, mesh, place = config.data, world.mesh, world.topology
    called = callbacks.configured(config, emit=world.emit)
    sizes = batch_size.schedule(data, place)
    program = model.build(config, mesh, microbatches=world.microbatches)
    batches_of = functools.partial(
        frontend.batches,
        mesh=mesh,
        # Not False: under a single controller this process cannot read the data.
        colocated=data.colocated_python_data_input or None,
        read_ahead=data.data_read_ahead_batches,
    )
    vocab_size, directory = model.vocab_size(config), journal.path_of(config)
    saver, start_step, evaluated = None, 0, None
    with contextlib.ExitStack() as on_error:
        parts = on_error.enter_context(contextlib.ExitStack())
        batches = batches_of(
            pipeline.from_config(data, vocab_size=vocab_size),
            global_batch_size=batch_size.at(sizes, 0),
        )
        parts.callback(batches.close)
        if data.eval_interval:
            rows = batch_size.global_batch_size(data, place)
            of_eval = pipeline.eval_from_config(data, vocab_size=vocab_size)
            evaluated = batches_of(of_eval, global_batch_size=rows)
            parts.callback(evaluated.close)
        steps = journal.steps_of(directory)
        tiers = configured.tiers(config, persistent=steps, ram=world.ram_directory)
        run = on_error.enter_context(
            RunDirectory(
                directory,
                tiers=tiers,
                steps=config.run.steps,
                world=world,
                _record=configured.record(config),
            )
        )
        if config.checkpoint.enable_checkpointing:
            checkpointer = on_error.enter_context(
                world.checkpointer(tiers, run=config.run.run_name, emit=run.emit)
            )
            saver = run_saver.RunSaver(
                checkpointer=checkpointer,
                saved=configured.saved(config.checkpoint),
                data=batches,
                callbacks=called or None,
            )
            start_step = saver.latest_step or 0
        if start_step > config.run.steps:
            raise errors.ConfigError(
                f"steps={config.run.steps}, but {directory} is already at step"
                f" {start_step}; steps is the total over all launches of a run, so set"
                f" it above {start_step} to continue, or choose a different run_name"
            )
        on_error.pop_all()
    return Trainer(
        config=config,
        world=world,
        run=run,
        program=program,
        batches=batches,
        sizes=sizes,
        saver=saver,
        start_step=start_step,
        first_due=cast(Local | Persistent, tiers[0]).every or 0,
        evaluated=evaluated,
        validation=configured.validation(
            config.validation,
            world.emit,
            preserve=lambda up_to: (
                None
                if saver is None
                else run_saver.preserve_newest(saver.checkpointer, up_to=up_to)
            ),
        ),
        callbacks=called,
        parts=parts,
    )


def train(config: schema.Config, world: World) -> bool:
    """Trains on this host of a world, which all hosts have joined.

    The data files must exist.

    Returns:
      Whether the hosts left before the last step.

    Raises:
      DivergedError: if a callback stopped the run.
    """
    world.begin("prepare")
    trainer = assembled(config, world)
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
            if ended.finding is None:
                world.put_state(ended.step, ended.state)
            trainer.close()
        except Exception as error:
            trainer.abandon(error)
            raise
        if ended.finding is not None:
            newest = trainer.saver.latest_step if trainer.saver else None
            raise errors.DivergedError(
                f"the run was stopped after step {ended.step}: {ended.finding.why}; the"
                f" newest saved step is {newest}"
            )
    return ended.is_stopped


@contextlib.contextmanager
def alone(
    config: schema.Config,
    emit: events.Emit,
    *,
    ended: Callable[[], None] = lambda: None,
) -> Iterator[World]:
    """The world of a process that no supervisor started.

    SIGTERM during the block stops the run after a save or, before the first step,
    immediately. `ended` is called before SIGTERM stops a run of a single process.
    """
    # With multiple processes, their launcher sets the time limit.
    if jax.distributed.is_initialized():
        leaving = termination.agreed()
    else:
        leaving = termination.in_this_process(
            grace_secs=configured.limits(config).grace_secs, ended=ended, emit=emit
        )
    with leaving as is_ending:
        slices = config.world.slices
        # Hosts that an outer launcher restarts take over the claim.
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
    """The initial weights of a run, loaded from the `init_from` checkpoint.

    The checkpoint may be in any format. Each host reads the data its devices need. A
    step saved by a run of the same model needs no layout; any other checkpoint needs
    one. The result has the shapes, dtypes and shardings of `params`.

    Raises:
      ConfigError: if the layout is missing, is malformed, or does not match the
        checkpoint.
      CheckpointError: if the checkpoint cannot be read or comes from a different model.
    """
    began_secs = time.monotonic()
    wanted = {"params": params}
    path = str(files.resolved(section.init_from))
    bucket_clients.prepare(path)
    # Another run may be saving there and deleting old steps.
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
    tree = storage.absolute(path) / layout.STATE
    source = str(tree) if tree.exists() else path
    try:
        return loading.load_leaves(source, wanted)
    except errors.OtherModelError as error:
        raise errors.OtherModelError(
            f"{error}; or set init_from_layout to the checkpoint's layout"
        ) from None


def _complete(saver: run_saver.RunSaver) -> dict[int, CheckpointMetadata]:
    # The saved steps, after waiting for all saves.
    saver.checkpointer.wait()
    return {each.step: each for each in saver.checkpointer.checkpoints}


def _check_step(state: model.TrainState, step: int | None) -> None:
    saved = int(state["step"])
    if saved != step:
        raise errors.CheckpointError(
            f"the checkpoint of step {step} contains the state after {saved} steps, so"
            f" it was renamed or copied from a different step; move step {step}'s"
            " directory out of the checkpoint directory to continue from the previous"
            " step"
        )
