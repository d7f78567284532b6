"""The program of a host: a job, the parts of a run in one world, over one mesh.

It is the same in a single process, in a world that the local launcher starts, and under
an outer launcher. Nothing outlives a job or is shared between two: a run that continues
on other hosts assembles another job, from the same configuration and another topology.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from absl import logging

from elastic_ckpt import frontend
from elastic_ckpt.checkpoint import foreign_steps, run_saver
from elastic_ckpt.checkpoint.host.answers import CheckpointMetadata
from elastic_ckpt.checkpoint.run_world import ALONE
from elastic_ckpt.core import allgather, errors, events, process, topology
from elastic_ckpt.data.lm import pipeline
from elastic_ckpt.data.state import Ranges
from elastic_ckpt.elastic import executables, termination, watch
from elastic_ckpt.elastic.world import BetweenWorlds, World, of_run
from elastic_ckpt.inspect import run_files
from elastic_ckpt.tiers.persistent import claims
from elastic_ckpt.training import (
    batch_size,
    configured,
    initial_weights,
    journal,
    listeners,
    run_directory,
    schema,
    step_log,
    train_step,
)
from elastic_ckpt.training.callbacks import (
    Action,
    Callback,
    Finding,
    Rollbacks,
    good_step,
)
from elastic_ckpt.training.initial_weights import InitialWeights
from elastic_ckpt.training.loop import Compile, Ended, Evaluation, Loop

# If a host dies meanwhile, the coordination service ends the others.
_COMPILE_TIMEOUT_SECS = 24 * 3600

# Returns the state after a number of steps, in the form of an abstract one, or None.
HandedOver = Callable[[int, Any], Any]


def assemble(
    config: schema.Config,
    world: topology.Topology,
    *,
    devices: Sequence[jax.Device] | None = None,
    place: World | None = None,
    callbacks: Mapping[str, Callback] | None = None,
    emit: events.Emit = events.nobody,
) -> Job:
    """The job of a run on `world`; every host of it calls this.

    Args:
      config: of the run; the files of its data exist.
      world: the hosts, slices and devices to train on.
      devices: those of `world`; by default all that JAX has.
      place: of this host in an elastic run.
      callbacks: your own by name, the same on all hosts, besides the configured ones.
      emit: called for each event of the run.

    Raises:
      ConfigError: if parts, devices or the number of steps do not fit together.
      DataError: if the data cannot be read.
      RunError: if another run uses the RAM disk, or hosts cannot be reached.
    """
    data = config.data
    called = configured.callbacks(config, callbacks or {}, emit=emit)
    mesh = topology.mesh_of(world, devices)
    sizes = batch_size.schedule(data, world)
    vocab_size = configured.vocab_size(config)
    parts = 1 if place is None else place.microbatches
    program = configured.program(config, mesh, microbatches=parts)
    global_batches = functools.partial(
        frontend.batches,
        mesh=mesh,
        # In this process it cannot run under a single controller.
        colocated=data.colocated_python_data_input or None,
        read_ahead=data.data_read_ahead_batches,
    )
    batches = global_batches(
        pipeline.from_config(data, vocab_size=vocab_size), global_batch_size=sizes.at(0)
    )
    evaluated = None
    if data.eval_interval:
        rows = batch_size.global_batch_size(data, world)
        of_eval = pipeline.eval_from_config(
            data, global_batch_size=rows, vocab_size=vocab_size
        )
        evaluated = Evaluation(
            evaluate=program.evaluate,
            batches=global_batches(of_eval, global_batch_size=rows),
            interval=data.eval_interval,
            max_batches=data.eval_steps,
            emit=emit,
        )
    saver, start_step = None, 0
    with contextlib.ExitStack() as on_error:
        if config.checkpoint.enable_checkpointing:
            checkpointer = _checkpointer(config, world, mesh, place, emit)
            on_error.enter_context(checkpointer)
            saved = configured.saved(config.checkpoint)
            saver = run_saver.RunSaver(
                checkpointer=checkpointer,
                saved=saved,
                data=batches,
                callbacks=called or None,
            )
            start_step = saver.latest_step or 0
        if start_step > config.run.steps:
            raise errors.ConfigError(
                f"steps={config.run.steps}, but {run_directory.path_of(config)} is"
                f" already at step {start_step}: steps counts over all starts of a run;"
                f" set it above {start_step} to continue, or choose another run_name"
            )
        if sizes.at(start_step) != sizes.at(0):
            batches.resize(sizes.at(start_step))
        on_error.pop_all()

    def preserve(up_to: int) -> int | None:
        if saver is None:
            return None
        return run_saver.preserve_newest(saver.checkpointer, up_to=up_to)

    return Job(
        steps=config.run.steps,
        world=world,
        loop=Loop(
            program=program,
            batches=batches,
            sizes=sizes,
            saver=saver,
            evaluation=evaluated,
            validation=configured.validation(
                config.validation, emit, preserve=preserve
            ),
            callbacks=called,
            emit=emit,
            compiled=executables.Executables(kept=None, emit=emit).compiled,
        ),
        rollbacks=configured.rollbacks(config),
        distrust_steps=config.divergence.distrust_steps,
        initial=configured.initial_weights(config.model),
        start_step=start_step,
        open_log=functools.partial(_open_log, config, world),
    )


def _checkpointer(
    config: schema.Config,
    world: topology.Topology,
    mesh: jax.sharding.Mesh,
    place: World | None,
    emit: events.Emit,
) -> frontend.Checkpointer:
    if place is not None:
        config = configured.in_memory_of(config, place.ram_directory)
    directory = os.path.join(run_directory.path_of(config), run_saver.DIRECTORY)
    slice_name = topology.slice_of_this_host(world.slices)
    return frontend.Checkpointer(
        configured.tiers(config, persistent=directory),
        mesh=mesh,
        run=config.run.run_name,
        slice_name=slice_name if place is None else place.slice_name,
        world=ALONE if place is None else of_run(place),
        emit=emit,
    )


def _open_log(
    config: schema.Config,
    world: topology.Topology,
    step: int,
    number: int,
    left_out: Ranges,
) -> step_log.StepLog:
    # Begins an attempt. Others find all memory of the run by its configuration.
    directory = run_directory.path_of(config)
    run_files.write(directory, configured.record(config))
    start = step_log.Start(
        step=step,
        world=world,
        data=dataclasses.asdict(config.data),
        number=number,
        left_out=left_out,
    )
    return step_log.StepLog(directory, start, detail=config.run.step_log)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A run in one world: `restore_or_init`, then `run`, then `close`.

    Every host of the world has one, and calls its methods in the same order.

    Attributes:
      steps: at which the run ends.
      world: the topology that the job was assembled for.
      loop: over the devices of the world; as it is without a log of its steps.
      rollbacks: to which step, and how often, the run goes back at a divergence.
      distrust_steps: after a restore, in which a divergence is first put down to the
        step that was restored; 0 trusts it.
      initial: the weights of a new run; None draws them.
      start_step: steps that are done already; 0 for a new run.
      open_log: opens the step log of an attempt on the primary host, given its first
        step, the number of the claimed world, and the rows that were left out.
    """

    steps: int
    world: topology.Topology
    loop: Loop
    rollbacks: Rollbacks
    distrust_steps: int
    initial: InitialWeights | None
    start_step: int
    open_log: Callable[[int, int, Ranges], step_log.StepLog]

    def restore_or_init(
        self, *, handed_over: HandedOver = lambda *_: None
    ) -> train_step.TrainState:
        """The state after `start_step` steps, sharded over the mesh.

        If that step proves to be unreadable, the state is that of the step before it.

        Args:
          handed_over: the state after a number of steps, if it is on the devices.

        Raises:
          CheckpointError: if the newest step is of another model, or none can be read.
          DataError: if its data state is of another pipeline.
          ConfigError: if the layout of `init_from` does not fit.
        """
        # A run that has gone back to its beginning has a step 0.
        if self.loop.saver is None or self.loop.saver.latest_step is None:
            return self._new_state()
        if self.initial:
            path = self.initial.path
            self.loop.emit("weights_skipped", path=path, step=self.start_step)
        state = handed_over(self.start_step, self.loop.program.abstract_state)
        if state is not None and self.loop.saver.restore_data(self.start_step):
            return state
        state = self.loop.saver.restore(self.loop.program.abstract_state)
        restored_step = self.loop.saver.latest_step
        assert restored_step is not None
        train_step.check_step(state, restored_step)
        self._resize(self.start_step, restored_step)
        return state

    def run(
        self,
        state: train_step.TrainState,
        *,
        compiled: Compile | None = None,
        begin: Callable[[str], None] = lambda _: None,
        is_stopping: Callable[[int], bool] = lambda _: False,
        is_ending: Callable[[int], bool] = lambda _: False,
        is_left: Callable[[], bool] = lambda: False,
    ) -> Ended:
        """Trains from `state` to the last step, or until asked to stop.

        When a callback has found a divergence it may go back to an older step, and
        continue from there with the data that comes next. Within `distrust_steps` of a
        restore it goes back to an older step in storage first, and repeats the data
        since then.

        Args:
          state: from `restore_or_init`; its buffers are donated.
          compiled: compiles the step; by default anew in each world.
          begin: called with the name of each phase that begins.
          is_stopping: called after each step; whether to save and end there, the same
            on all hosts.
          is_ending: see `Loop`.
          is_left: see `Loop`.
        """
        number = self.loop.saver.checkpointer.claim_world() if self.loop.saver else 0
        gather = functools.partial(
            allgather.new().gather, timeout_secs=_COMPILE_TIMEOUT_SECS
        )
        trained = dataclasses.replace(
            self.loop,
            compiled=_Compiled(compiled or self.loop.compiled),
            begin=begin,
            barrier=functools.partial(gather, "compiled", None),
            is_stopping=is_stopping,
            is_ending=is_ending,
            # The supervisor's message may not have reached all hosts yet.
            is_left=lambda: any(gather("left", is_left())),
        )
        restored = int(state["step"])
        older = self._distrust_restore(restored, begin)
        while True:
            start_step = int(state["step"])
            if self.loop.validation and start_step:
                self.loop.validation.equal_step = start_step
            # All hosts ask for it.
            left_out = self.loop.batches.left_out
            log = None
            if topology.is_primary():
                log = self.open_log(start_step, number, left_out)
            with contextlib.closing(log) if log else contextlib.nullcontext():
                ended = dataclasses.replace(trained, log=log).run(
                    state, start_step=start_step, steps=self.steps
                )
            finding = ended.finding
            if finding and finding.action is Action.DISTRUST:
                ended = self._restore_from_storage(ended, older[-1])
                if ended.is_stopped:
                    return ended
                state = ended.state
                continue
            if finding and finding.is_divergence and finding.action is Action.STOP:
                begin("restore")
                self._leave_newest_good(finding)
            if ended.finding is None or ended.finding.action is not Action.ROLLBACK:
                return ended
            begin("restore")
            ended = self._go_back(ended, ended.finding, began_at=start_step)
            if ended.finding is not None or ended.is_stopped:
                return ended
            state = ended.state

    def close(self) -> None:
        """Waits for all saves, and ends the parts of the job.

        Only after a `run` that returned: after an error the other hosts may be gone,
        and closing waits for them.
        """
        if self.loop.saver:
            self.loop.saver.close()
        if self.loop.evaluation:
            self.loop.evaluation.batches.close()
        self.loop.batches.close()

    def abandon(self, *, alone: BaseException | None = None) -> None:
        """Ends the parts of the job after an error.

        Hosts may be gone, so errors of the parts are logged.

        Args:
          alone: the error, if there is no other host: then saves in flight are
            finished. Otherwise they are not waited for.
        """
        parts: list[Callable[[], None]] = []
        if self.loop.saver and alone is not None:
            parts.append(functools.partial(self.loop.saver.checkpointer.leave, alone))
        elif self.loop.saver:
            parts.append(self.loop.saver.checkpointer.abandon)
        if self.loop.evaluation:
            parts.append(self.loop.evaluation.batches.close)
        for end in [*parts, self.loop.batches.close]:
            try:
                end()
            except Exception as error:
                logging.warning("a part of a failed job cannot be ended: %r", error)

    def _new_state(self) -> train_step.TrainState:
        initial, abstract = self.initial, self.loop.program.abstract_state
        if initial is None:
            return self.loop.program.init()
        wanted = {initial_weights.PARAMS: abstract[initial_weights.PARAMS]}
        weights = initial_weights.load(initial, wanted, self.loop.emit)
        return self.loop.program.begin(weights[initial_weights.PARAMS])

    def _distrust_restore(
        self, restored: int, begin: Callable[[str], None]
    ) -> list[CheckpointMetadata]:
        # Has the callbacks distrust the restored step; the step to go back to, later.
        saver, within = self.loop.saver, self.distrust_steps
        older: list[CheckpointMetadata] = []
        if saver is None or not (within and restored):
            return older

        def go_back(step: int, why: str) -> bool:
            # It waits for saves and backups, which is no hang of a step.
            begin("restore")
            found = run_saver.stored_before(saver.checkpointer, restored)
            self.loop.emit(
                "restore_distrusted",
                step=step,
                restored_step=restored,
                to_step=None if found is None else found.step,
                why=why,
            )
            if found is None:
                begin("step")
                return False
            older.append(found)
            return True

        self.loop.callbacks.distrust_until(restored + within, go_back)
        return older

    def _restore_from_storage(self, ended: Ended, older: CheckpointMetadata) -> Ended:
        # As if the loop had ended with the step in storage that the run goes back to.
        saver, rollbacks = self.loop.saver, self.loop.callbacks.rollbacks
        assert saver is not None
        # The devices may not have room for two states.
        for leaf in jax.tree.leaves(ended.state):
            leaf.delete()
        state = saver.restore(self.loop.program.abstract_state, older)
        train_step.check_step(state, older.step)
        self.loop.callbacks.go_on()
        self.loop.callbacks.rollbacks = rollbacks
        self.loop.batches.resize(self.loop.sizes.at(older.step))
        return Ended(state=state, step=older.step, is_stopped=ended.is_stopped)

    def _leave_newest_good(self, finding: Finding) -> None:
        # Steps that were saved since the divergence are abandoned, so that the next
        # start does not continue from one of them.
        saver = self.loop.saver
        saved = _complete(saver) if saver else []
        step = good_step([s.step for s in saved], since=finding.since)
        if saver is None or step is None or step == saved[-1].step:
            return
        (good,) = (each for each in saved if each.step == step)
        state = saver.restore(self.loop.program.abstract_state, good)
        saver.save_again(step, state)

    def _go_back(self, ended: Ended, finding: Finding, *, began_at: int) -> Ended:
        # As if the loop had ended with an older step, which is saved. If the run has to
        # end instead, the finding has the reason.
        began_secs = time.monotonic()
        saver, callbacks = self.loop.saver, self.loop.callbacks
        saved = _complete(saver) if saver else []
        try:
            step = self.rollbacks.choose(
                finding,
                [each.step for each in saved],
                before=callbacks.rollbacks,
                began_at=began_at,
            )
        except errors.DivergedError as error:
            why = dataclasses.replace(finding, action=Action.ABORT, why=str(error))
            return dataclasses.replace(ended, finding=why)
        assert saver is not None
        rollbacks = callbacks.rollbacks + 1
        read = self._read_to(callbacks.decided_step + 1, done=ended.step)
        # The devices may not have room for two states.
        for leaf in jax.tree.leaves(ended.state):
            leaf.delete()
        data = self.loop.batches.leaving_out()
        good = next((each for each in saved if each.step == step), None)
        if good is None:
            state = self._new_state()
            data.leave_out(None)
            saver.begin_anew()
        else:
            state = saver.restore(self.loop.program.abstract_state, good, data=data)
        train_step.check_step(state, step)
        callbacks.rollbacks = rollbacks
        self._resize(read, step)
        saver.save_again(step, state)
        first, last = self.loop.batches.left_out[-1]
        self.loop.emit(
            "rolled_back",
            step=ended.step,
            to_step=step,
            rows=last - first,
            rollbacks=rollbacks,
            secs=time.monotonic() - began_secs,
        )
        return Ended(state=state, step=step, is_stopped=ended.is_stopped)

    def _read_to(self, step: int, *, done: int) -> int:
        # Returns the last step whose batch was read, from 0. Mostly the loop has read
        # one more batch than callbacks have seen; so it always is, and the run always
        # continues with the same batch.
        for number in range(done, step):
            self._resize(number - 1, number)
            with contextlib.suppress(StopIteration):
                next(self.loop.batches)
        return max(done, step) - 1

    def _resize(self, before: int, step: int) -> None:
        # Batches are of the size of step `before`.
        if self.loop.sizes.at(step) != self.loop.sizes.at(before):
            self.loop.batches.resize(self.loop.sizes.at(step))


class _Compiled:
    """Compiles the step once for all batches with the same shapes and dtypes.

    Args:
      compiled: compiles it.
    """

    def __init__(self, compiled: Compile) -> None:
        self._compiled = compiled
        self._steps: dict[Any, Callable[..., Any]] = {}

    def __call__(self, jitted: Any, *arguments: Any, step: int) -> Callable[..., Any]:
        _, batch = arguments
        form = tuple((each.shape, each.dtype) for each in jax.tree.leaves(batch))
        if form not in self._steps:
            self._steps[form] = self._compiled(jitted, *arguments, step=step)
        return self._steps[form]


def train(
    config: schema.Config,
    world: World,
    *,
    callbacks: Mapping[str, Callback] | None = None,
) -> bool:
    """Trains on this host, a member of a world that all of its hosts have joined.

    Args:
      config: of the run; the files of its data exist.
      world: of this host; its events are emitted on the primary host alone.
      callbacks: your own by name, besides the configured ones.

    Returns:
      Whether the hosts left before the last step.

    Raises:
      DivergedError: if a callback has ended the run.
    """
    began_secs = time.monotonic()
    emit = world.emit if topology.is_primary() else events.nobody
    # The journal of a process that trains in several worlds has its listeners.
    has_listeners = world.devices is not None
    listening = contextlib.nullcontext() if has_listeners else listeners.started(config)
    with listening:
        world.begin("prepare")
        job = assemble(
            config,
            world.topology,
            devices=world.devices,
            place=world,
            callbacks=callbacks,
            emit=emit,
        )
        emit(
            "run_started",
            run=config.run.run_name,
            **dataclasses.asdict(job.world),
            start_step=job.start_step,
            steps=config.run.steps,
        )
        try:
            ended = _run(job, world)
        except Exception as error:
            if world.devices is not None:
                # This process goes on.
                job.abandon()
            elif topology.num_hosts() == 1:
                job.abandon(alone=error)
            elif job.loop.saver is not None:
                # This process ends at once, and what it wrote to is free.
                job.loop.saver.checkpointer.let_others_write()
            raise
        if ended.is_stopped:
            emit("run_stopped", step=ended.step, saved=job.loop.saver is not None)
        else:
            secs = time.monotonic() - began_secs
            emit("run_finished", step=ended.step, secs=secs)
    return ended.is_stopped


def _complete(saver: run_saver.RunSaver) -> list[CheckpointMetadata]:
    # Once all saves that have begun are done.
    saver.checkpointer.wait()
    return saver.checkpointer.checkpoints


def compile_ahead(config: schema.Config, world: World) -> None:
    """Compiles the step of a world that may follow; reads batches, writes nothing.

    It begins with the stage of the newest step in storage, and goes on with those that
    come after it.

    Args:
      config: of the run; the files of its data exist.
      world: of this host, in a world of that size.
    """
    job = assemble(configured.only_compiled(config), world.topology, place=world)
    directory = run_directory.steps_of(run_directory.path_of(config))
    newest = max(foreign_steps.steps(directory), default=0)
    compiled, loop = _Compiled(world.compiled), job.loop
    for step in [newest, *(s for s, _ in loop.sizes.stages if s > newest)]:
        loop.batches.begin_at(step)
        loop.batches.resize(loop.sizes.at(step))
        batch = next(loop.batches)
        compiled(loop.program.step, loop.program.abstract_state, batch, step=step)
    job.close()


def _run(job: Job, world: World) -> Ended:
    world.begin("restore")
    state = job.restore_or_init(handed_over=world.take_state)
    ended = job.run(
        state,
        compiled=world.compiled,
        begin=world.begin,
        is_stopping=world.should_stop,
        is_ending=world.should_stop_early,
        is_left=world.will_resume,
    )
    world.begin(watch.CLOSE)
    world.put_state(ended.step, ended.state)
    job.close()
    newest = job.loop.saver.latest_step if job.loop.saver else None
    if ended.finding is not None:
        kept = "saved" if newest == ended.step else "not saved"
        left = (
            f"; the newest step is {newest}" if newest not in (None, ended.step) else ""
        )
        raise errors.DivergedError(
            f"the run was ended after step {ended.step}, which is {kept}:"
            f" {ended.finding.why}{left}"
        )
    return ended


@contextlib.contextmanager
def alone(config: schema.Config, emit: events.Emit) -> Iterator[World]:
    """The world of this process, if no supervisor has started it.

    SIGTERM ends the run while the block runs: before the first step at once.
    """

    def ended() -> None:
        assert isinstance(emit, journal.Journal)
        emit.stopped_early()

    with termination.in_this_process(
        grace_secs=configured.grace_secs(config), ended=ended, emit=emit
    ) as is_ending:
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
            should_stop=is_ending,
            _between=BetweenWorlds(claimant=claimant),
        )
