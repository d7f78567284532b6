"""The steps in RAM, and which of them earlier worlds could not back up."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from elastic_ckpt.checkpoint.host.answers import StepInRam
from elastic_ckpt.checkpoint.host.world import HostWorld
from elastic_ckpt.core import bucket_clients, clock, errors
from elastic_ckpt.steps import retention, search
from elastic_ckpt.steps.line import Line
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers import find
from elastic_ckpt.tiers.persistent import arrange, claims
from elastic_ckpt.tiers.persistent.persistent_root import PersistentRoot
from elastic_ckpt.tiers.source import Leftover


def steps_in_ram(world: HostWorld, line: Line) -> list[StepInRam]:
    """The steps of a line that are whole in RAM, ascending.

    Args:
      world: a host of it.
      line: newer than all others; steps that it abandons are left out.
    """
    held = find.Search(world.ram_tiers, lines=[line]).complete_steps()
    stored = _stored_steps(world.root)
    owed = set()
    if world.root is not None and stored is not None:
        owed = {
            each.step.step_id
            for each in held
            if _is_owed(each.step, world.root, stored, run=world.run)
        }
        owed -= _not_kept(world, [each.step for each in held], owed)
    return [
        StepInRam(step_id=each.step.step_id, is_owed=each.step.step_id in owed)
        for each in held
    ]


def secs_since_backup(world: HostWorld) -> float:
    """The time since the newest step was committed in storage, in seconds.

    Before the first one it is that since the first world of the run was claimed; 0 if
    neither is known, or storage is out of reach.
    """
    root, tier = world.root, world.persistent
    if root is None or tier is None:
        return 0.0
    try:
        steps = root.steps()
        if steps:
            nsecs = tier.notes(steps[-1])["commit_timestamp_nsecs"] or clock.time_ns()
        else:
            first = claims.first(root.path)
            nsecs = clock.time_ns() if first is None else first.time_ms * 10**6
    except (errors.CheckpointError, *bucket_clients.failures()):
        return 0.0
    return max(0.0, (clock.time_ns() - nsecs) / 10**9)


def is_held(world: HostWorld, leftover: Leftover) -> bool:
    """Whether the step of an upload that was cut short is whole in RAM."""
    if leftover.save is None:
        return False
    try:
        sources = world.in_ram(StepId(leftover.step, leftover.save))
        return search.Step.from_offers(list(sources)).complete
    except errors.CheckpointError:
        return False


def _stored_steps(root: PersistentRoot | None) -> set[int] | None:
    # None if storage is out of reach, as the search of the restore has reported.
    if root is None:
        return None
    try:
        return set(root.steps())
    except (errors.CheckpointError, *bucket_clients.failures()):
        return None


def _is_owed(
    held: search.Step, root: PersistentRoot, stored: set[int], *, run: str
) -> bool:
    is_due = held.holdings.contents.is_due
    if held.step in stored:
        there = arrange.save_of(root, held.step, run=run)
        # A later save of the step may not have fitted into RAM.
        return is_due and (there is None or there < held.save)
    # One that was due by the clock alone has no mark.
    return is_due or root.unfinished(held.step_id).exists()


def _not_kept(
    world: HostWorld, held: Sequence[search.Step], owed: Collection[StepId]
) -> set[StepId]:
    # Those that retention would remove from storage as soon as they are there, which
    # has mostly been done before.
    keep = None if world.storage is None else world.storage.keep
    if keep is None or world.persistent is None or not owed:
        return set()
    late = {
        each.step: retention.HeldStep.from_contents(
            each.step_id, each.holdings.contents
        )
        for each in held
        if each.step_id in owed
    }
    try:
        stored = {each.step: each for each in world.persistent.held()}
    except (errors.CheckpointError, *bucket_clients.failures()):
        return set()
    removed = retention.steps_to_delete(
        list((stored | late).values()),
        keep,
        newest_complete=max(stored | late),
        in_flight=(),
        preserved=world.persistent.preserved(),
    )
    return {each.step_id for step, each in late.items() if step in removed}
