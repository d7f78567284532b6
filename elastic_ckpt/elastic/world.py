"""A world, the hosts that train together, as the training function receives it."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from absl import logging
from etils import epy

from elastic_ckpt.core import errors, events, storage
from elastic_ckpt.elastic import executables, watch
from elastic_ckpt.tiers.persistent.claims import Claimant

with epy.lazy_imports():
    import jax

    from elastic_ckpt import frontend
    from elastic_ckpt.checkpoint import run_world
    from elastic_ckpt.core import topology
    from elastic_ckpt.tiers import choices

# "stop": save and return; the run ends. "resume": save and return; the run continues in
# the next world.
Leaving = Literal["stop", "resume"]


class DeviceState:
    """State that a world leaves on the devices until the next world takes it."""

    # The state's step, structure and shapes, and its leaves.
    _kept: tuple[object, list[jax.Array]] = (None, [])

    def put(self, step: int, state: Any) -> None:
        """Stores `state`, a pytree of arrays, as the state after `step` steps."""
        leaves, structure = jax.tree.flatten(state)
        shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
        self._kept = (step, structure, shapes), leaves

    def clear(self) -> None:
        """Releases the arrays."""
        self._kept = (None, [])

    def take(self, step: int, abstract_state: Any, emit: events.Emit) -> Any:
        """Moves the stored state to the shardings of `abstract_state` and forgets it.

        Returns:
          The state; None if no state is stored for this step and these shapes, or if it
          cannot be read.
        """
        began_secs = time.monotonic()
        wanted, structure = jax.tree.flatten(abstract_state)
        form, leaves = self._kept
        self.clear()
        shapes = [(leaf.shape, leaf.dtype) for leaf in wanted]
        if form != (step, structure, shapes):
            return None
        # Pops from the end, so that each leaf is released once it has been moved.
        leaves.reverse()
        try:
            moved = [jax.device_put(leaves.pop(), each.sharding) for each in wanted]
            jax.block_until_ready(moved)
        except jax.errors.JaxRuntimeError as error:
            logging.warning(
                "the state of step %d cannot be read from the devices: %s", step, error
            )
            return None
        emit(
            "state_kept",
            step=step,
            device_bytes=sum(leaf.nbytes for leaf in moved),
            secs=time.monotonic() - began_secs,
        )
        return jax.tree.unflatten(structure, moved)


@dataclasses.dataclass(kw_only=True)
class BetweenWorlds:
    """State that a world shares with the worlds before and after it.

    Attributes:
      emit: a function called with each of the world's events.
      ask: a function called with the number of completed steps. It returns how the
        hosts leave the world, or None to stay. The result is the same on all hosts.
        Once it is not None, `ask` is not called again.
      await_check: a function that waits until this host's devices have passed their
        check; until then, steps neither count nor are saved.
      compiled: a function that compiles a jitted function, or loads what an earlier
        world compiled.
      claimant: the claimant of the world for this launch of the run; None disables
        claims.
      device_state: state that stays on the devices if the process continues.
      answer: the first answer of `ask`; None until the hosts leave.
      step: the number of completed steps when `ask` was last called; 0 before the first
        call.
      loses_memory: whether a host loses its memory when it leaves, so that copies must
        be made first.
    """

    emit: events.Emit = events.nobody
    ask: Callable[[int], Leaving | None] = lambda _: None
    await_check: Callable[[], object] = lambda: None
    compiled: Callable[..., Callable[..., Any]] = executables.compile_now
    claimant: Claimant | None = None
    device_state: DeviceState = dataclasses.field(default_factory=DeviceState)
    answer: Leaving | None = None
    step: int = 0
    loses_memory: bool = False
    _emits_steps: bool = False

    def report(self, name: str, **fields: storage.Json) -> None:
        """Emits an event of the world."""
        self._emits_steps |= name in ("run_started", "step")
        self.emit(name, **fields)

    def leaving(self, step: int) -> Leaving | None:
        """See `World.leaving`; emits `step_done` if the program emits no steps."""
        self.await_check()
        if not self._emits_steps:
            self.emit("step_done", step=step)
        if self.answer is None:
            self.answer, self.step = self.ask(step), step
        return self.answer

    def resumes(self) -> bool:
        """Whether the hosts have agreed to leave for the next world of the run.

        The next world completes pending backups.
        """
        return self.answer == "resume"


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """The hosts that train together, until one is lost or another is added.

    `run` passes one to the training function on each host.

    Attributes:
      number: the world number; each launch of the run counts from 1.
      slices: the world's slice numbers, in mesh order.
      slice_name: the name of this host's slice.
      rows: the number of rows in a global batch; 0 if the training function chooses
        them.
      devices: the world's devices, if the single controller also has others; None means
        all devices.
      ram_directory: the run directory on this slice's RAM disk, for
        `ec.Local(world.ram_directory)`; None if the cluster has no RAM disk.
      microbatches: the number of equal microbatches into which a device splits its rows
        so that each fits in device memory. The training function sums their gradients.
      emit: a function that reports an event.
      leaving: a function to call after each step, on all hosts, with the number of
        completed steps. It returns the same value on all hosts: None to continue,
        `"stop"` to save and return because the run is ending, or `"resume"` to save and
        return because the run continues in the next world.
      begin: a function to call with a phase name (`restore`, `step`, `evaluate`)
        whenever a phase begins, so that a hang in that phase is found sooner.
    """

    number: int
    slices: tuple[int, ...]
    slice_name: str
    rows: int = 0
    devices: tuple[jax.Device, ...] | None = None
    ram_directory: str | None = None
    microbatches: int = 1
    emit: events.Emit = events.nobody
    leaving: Callable[[int], Leaving | None] = lambda _: None
    begin: Callable[[str], None] = lambda _: None
    _between: BetweenWorlds = dataclasses.field(default_factory=BetweenWorlds)

    def compiled(
        self, jitted: Any, *arguments: Any, step: int = 0
    ) -> Callable[..., Any]:
        """Compiles a jitted function, or loads what an earlier world compiled.

        Args:
          jitted: a function from `jax.jit`, the same on all hosts.
          *arguments: the positional arguments of `jitted`: arrays, or abstract arrays
            with shardings.
          step: the step to report in events.

        Returns:
          The compiled function.
        """
        self.begin(watch.COMPILE)
        compiled = self._between.compiled(jitted, *arguments, step=step, emit=self.emit)
        self.begin(watch.TRAIN)
        return compiled

    @property
    def topology(self) -> topology.Topology:
        """The hosts, slices and devices of this world."""
        return topology.present(len(self.slices), self.devices)

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """A mesh with the axes `slice` and `fsdp` over all devices of the world."""
        return topology.mesh_of(self.topology, self.devices)

    def put_state(self, step: int, state: Any) -> None:
        """Leaves a saved state in device memory for the next world.

        If the process keeps its devices, the next world need not restore the state.
        Call this method before the training function returns.

        Args:
          step: the number of completed steps.
          state: a pytree of arrays, which must not be donated afterward.
        """
        if self._between.resumes():
            self._between.device_state.put(step, state)

    def take_state(self, step: int, abstract_state: Any) -> Any:
        """The state that the previous world left in device memory.

        Args:
          step: the newest saved step.
          abstract_state: a pytree of abstract arrays with the shardings of this world.

        Returns:
          The arrays; None if device memory has none for this step.
        """
        return self._between.device_state.take(step, abstract_state, self.emit)

    def checkpointer(
        self,
        tiers: Sequence[choices.Tier],
        *,
        run: str | None = None,
        emit: events.Emit | None = None,
    ) -> frontend.Checkpointer:
        """Creates the checkpointer of this world; all hosts pass the same arguments.

        Args:
          tiers: see `ec.Checkpointer`; `ec.Local` needs `world.ram_directory`.
          run: the run name; see `ec.Checkpointer`.
          emit: a function called with the checkpointer's events; by default
            `world.emit`. A custom function must also pass the events on to
            `world.emit`.

        Raises:
          ConfigError: if `ec.Local` has a directory other than `ram_directory`.
          Exception: see `ec.Checkpointer`.
        """
        served = os.path.abspath(self.ram_directory or "")
        for tier in tiers:
            if (
                isinstance(tier, choices.Local)
                and self.ram_directory is not None
                and os.path.abspath(tier.directory) != served
            ):
                raise errors.ConfigError(
                    f"Local({os.fspath(tier.directory)!r}) is not the directory that"
                    f" the agent of slice {self.slice_name} serves"
                    f" ({self.ram_directory}), so other hosts would not find the steps"
                    " in it; use ec.Local(world.ram_directory, ...)"
                )
        return frontend.Checkpointer(
            tiers,
            mesh=self.mesh,
            run=run,
            slice_name=self.slice_name,
            world=run_world.RunWorld(
                number=self.number,
                claimant=self._between.claimant,
                # A process that continues completes its backups before it leaves.
                is_leaving_world=lambda: (
                    self.devices is None and self._between.resumes()
                ),
                loses_memory=lambda: self._between.loses_memory,
                await_check=self._between.await_check,
            ),
            emit=emit or self.emit,
        )
