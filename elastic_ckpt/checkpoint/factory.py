"""Constructs the checkpointer over some tiers, in any kind of world."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from etils import epath
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import checkpointer, hosts, rendezvous, writing
from elastic_ckpt.checkpoint.host.endpoint import HostEndpoint
from elastic_ckpt.checkpoint.host.world import HostConfig
from elastic_ckpt.checkpoint.other_layouts import Layouts
from elastic_ckpt.checkpoint.run_world import ALONE, RunWorld
from elastic_ckpt.core import (
    allgather,
    bucket_clients,
    errors,
    events,
    storage,
    topology,
)
from elastic_ckpt.tiers.choices import Chosen, Tier
from elastic_ckpt.tiers.persistent import persistent_root

_PATIENCE_SECS = 600.0


def Checkpointer(
    tiers: Sequence[Tier],
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
      run: the name of the run; by default that of its steps, see `find_run`, or of the
        directory of its local tier.
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
    chosen = Chosen.from_choices(tiers, read_only=read_only)
    messages = allgather.of_this_world()
    # Storage may change while the processes start: host 0 decides for all.
    found = find_run(chosen) if messages.host == 0 else None
    found = messages.gather("run", found, timeout_secs=_PATIENCE_SECS)[0]
    run = run or found or chosen.run
    if read_only:
        chosen = chosen.for_reading()
    config = HostConfig(
        run=run,
        number=topology.this_host(),
        slice_name=slice_name or topology.hardware_slice(),
        directory=chosen.ram_directory(),
        chosen=chosen,
    )
    members = hosts.InEveryProcess(HostEndpoint(config), messages)
    return over(
        members,
        chosen,
        run=run,
        found=found,
        world=world,
        emit=emit,
        layouts=layouts,
        context=context,
    )


def find_run(chosen: Chosen) -> str | None:
    """The run whose steps are in the local tier, or in the persistent one.

    A run that has no name keeps this one when tiers come, go or move.

    Returns:
      None if there are no steps, or if storage is out of reach: there may be some in
      the RAM of other hosts.

    Raises:
      CheckpointError: if storage is out of reach, and there is no local tier.
    """
    if chosen.local is None:
        assert chosen.persistent is not None
        return persistent_root.find_run(chosen.persistent.directory)
    found = _run_in_ram(storage.absolute(chosen.local.directory))
    if found is None and chosen.persistent is not None:
        with contextlib.suppress(errors.CheckpointError, *bucket_clients.failures()):
            found = persistent_root.find_run(chosen.persistent.directory)
    return found


def _named_otherwise(chosen: Chosen, run: str, found: str | None) -> errors.RunError:
    tiers = [tier for tier in (chosen.local, chosen.persistent) if tier]
    where = " or ".join(os.fspath(tier.directory) for tier in tiers)
    return errors.RunError(
        f"{where} contains the steps of another run, {found!r}, and this run is"
        f" {run!r}; to continue that run, use its name (if the directory was renamed,"
        " rename it back), otherwise save to another directory"
    )


def _run_in_ram(disk: epath.Path) -> str | None:
    # A directory that cannot be read is refused, with the reason, by those who use it.
    with contextlib.suppress(OSError):
        for slot in (disk / "hosts").iterdir():
            for step in slot.iterdir():
                if step.is_dir() and (run := persistent_root.run_of(step)):
                    return run
    return None


def over(
    members: hosts.Hosts,
    chosen: Chosen,
    *,
    run: str = "",
    found: str | None = None,
    world: RunWorld = ALONE,
    emit: events.Emit = events.nobody,
    layouts: Layouts | None = None,
    context: ocp.Context | None = None,
) -> checkpointer.Checkpointer:
    """A checkpointer over hosts of any kind, which it joins to a world.

    Args:
      members: the hosts; the checkpointer closes them.
      chosen: the tiers.
      run: the name of the run.
      found: what `find_run` has found in the tiers, which is then compared.
      world: among those of the run.
      emit: called for each event.
      layouts: read trees of other layouts; None if there are none.
      context: Orbax's; see `orbax_context`.

    Raises:
      HostsFailedError: if a host cannot take part, with the reason.
      RunError: if another program writes to storage, or a tier has steps of another
        run.
    """
    with contextlib.ExitStack() as on_error:
        on_error.callback(members.close)
        of_storage = writing.Writing(members, chosen, world)
        on_error.callback(of_storage.close)
        rendezvous.join(members, begin_writing=of_storage.begin)
        if found not in (None, run):
            raise _named_otherwise(chosen, run, found)
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
