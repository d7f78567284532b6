"""Constructs the checkpointer over some tiers, in any kind of world."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import checkpointer, hosts, rendezvous, writing
from elastic_ckpt.checkpoint.other_layouts import Layouts
from elastic_ckpt.checkpoint.run_world import ALONE, RunWorld
from elastic_ckpt.core import allgather, events, topology
from elastic_ckpt.host.endpoint import HostEndpoint, HostTiers
from elastic_ckpt.host.world import HostConfig
from elastic_ckpt.tiers.choices import Chosen, TierChoice
from elastic_ckpt.tiers.persistent import persistent_root

_PATIENCE_SECS = 600.0


def Checkpointer(
    tiers: Sequence[TierChoice],
    *,
    run: str | None = None,
    slice_name: str | None = None,
    world: RunWorld = ALONE,
    emit: events.Emit = events.nobody,
    layouts: Layouts | None = None,
    context: ocp.Context | None = None,
    read_only: bool = False,
) -> checkpointer.Checkpointer:
    """A checkpointer with the verbs of Orbax's `training.Checkpointer`.

    Every process of a world calls it, and it returns when all have.

    Args:
      tiers: at most one of each kind. With a local tier, hosts save to their RAM first;
        without one, a save goes to persistent storage from captured memory.
      run: the identity of the run; see `run_of`.
      slice_name: the slice that this process's devices are in; by default the
        hardware's.
      world: among those of the run.
      emit: called for each event.
      layouts: read trees of other layouts; None if there are none.
      context: Orbax's; see `orbax_context`.
      read_only: whether to write nothing; see `frontend.Checkpointer`.

    Raises:
      ConfigError: if the tiers do not fit together.
      RunError: if hosts cannot be reached, a RAM disk is in use or has steps of another
        run, or another program writes to storage.
    """
    chosen = Chosen.from_choices(tiers)
    messages = allgather.of_this_world()
    if run is None:
        # Storage may change while the processes start: host 0 decides for all.
        known_run = run_of(chosen) if messages.host == 0 else None
        run = messages.gather("run", known_run, timeout_secs=_PATIENCE_SECS)[0]
    if read_only:
        chosen = chosen.for_reading()
    config = HostConfig(
        run=run,
        number=topology.this_host(),
        slice_name=slice_name or topology.hardware_slice(),
        directory=chosen.ram_directory(),
        chosen=chosen,
    )
    members = hosts.InEveryProcess(HostEndpoint(config, HostTiers), messages)
    return over(
        members, chosen, world=world, emit=emit, layouts=layouts, context=context
    )


def run_of(chosen: Chosen) -> str:
    """The identity of a run that has no name: that of the local tier's directory.

    Without a local tier it is the run that saved the steps in persistent storage, so
    that a run can drop its local tier; if there are none, the directory's name.
    """
    if chosen.local is None:
        assert chosen.persistent is not None
        known_run = persistent_root.find_run(chosen.persistent.directory)
        if known_run is not None:
            return known_run
    return chosen.run


def over(
    members: hosts.Hosts,
    chosen: Chosen,
    *,
    world: RunWorld = ALONE,
    emit: events.Emit = events.nobody,
    layouts: Layouts | None = None,
    context: ocp.Context | None = None,
) -> checkpointer.Checkpointer:
    """A checkpointer over hosts of any kind, which it joins to a world.

    Args:
      members: the hosts; the checkpointer closes them.
      chosen: the tiers.
      world: among those of the run.
      emit: called for each event.
      layouts: read trees of other layouts; None if there are none.
      context: Orbax's; see `orbax_context`.

    Raises:
      HostsFailedError: if a host cannot take part, with the reason.
      RunError: if another program writes to storage, or a RAM disk has steps of another
        run.
    """
    with contextlib.ExitStack() as on_error:
        on_error.callback(members.close)
        of_storage = writing.Writing(members, chosen, world)
        on_error.callback(of_storage.close)
        rendezvous.join(members, begin_writing=of_storage.begin)
        made = checkpointer.Checkpointer(
            members,
            chosen,
            world=world,
            emit=emit,
            layouts=layouts,
            context=context,
            of_storage=of_storage,
        )
        on_error.pop_all()
    return made
