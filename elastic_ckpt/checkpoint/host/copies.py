"""One host's side of copying: it offers its parts to other hosts and copies theirs.

A part's holders determine which hosts copy it (`steps.owners`), so each host knows
which parts it sends. The host leaves a message for each target that lists the parts to
copy (`offer`). The targets read the messages and the parts, verify the parts, and write
manifests (`take`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent import futures

import numpy as np

from elastic_ckpt.checkpoint.host.verified_read import VerifiedReader
from elastic_ckpt.checkpoint.host.world import HostWorld
from elastic_ckpt.core import background, calls, checked_json, errors
from elastic_ckpt.steps.manifest import Manifest
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers.find import FoundStep
from elastic_ckpt.tiers.ram.local import LocalHost
from elastic_ckpt.tiers.source import ReadError

_THREADS = 4
# How many of a part's holders to try, beginning with the sender.
_MOST = 3
_MESSAGE = "copies-"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replicated:
    """The copies that a host has made.

    Attributes:
      copies: the number of copies.
      num_bytes: the total size of the copies.
      problems: a message for each copy that could not be fetched or was corrupt on a
        host that holds it.
    """

    copies: int = 0
    num_bytes: int = 0
    problems: tuple[str, ...] = ()


class HostCopies:
    """Makes one host's copies of other hosts' parts."""

    def __init__(self, world: HostWorld) -> None:
        self._world = world

    @calls.call()
    def offer(self, step_id: StepId) -> tuple[tuple[int, ...], tuple[str, ...], int]:
        """Leaves each target a list of the parts to copy from this host.

        Returns:
          The targets; a message for each requirement that this host's parts do not meet
          even after all copies; and the minimum number of machines that then have a
          part, 0 if a part has no holder.
        """
        world, held = self._world, self._world.holding(step_id)
        table = held.found.table
        plan = world.owners.plan_copies(held.holders, table.num_bytes)
        # All hosts have read the messages of the previous copies.
        world.mail.remove(_MESSAGE)
        sent = plan.source == world.number
        targets = np.unique(plan.target[sent]).tolist()
        for target in targets:
            items = plan.item[sent & (plan.target == target)]
            # This host first, then a few others.
            hosts = [
                sorted(held.holders[item], key=lambda n: (n != world.number, n))
                for item in items.tolist()
            ]
            message = world.listed(table, items, [some[:_MOST] for some in hosts])
            world.mail.post(f"{_MESSAGE}{target}", message.to_bytes())
        return tuple(targets), plan.shortfalls, plan.num_machines

    @calls.call(limit_secs=calls.LONG_SECS)
    def take(self, step_id: StepId, targets: tuple[tuple[int, ...], ...]) -> Replicated:
        """Fetches the parts that this host must copy.

        Args:
          step_id: the step.
          targets: each host's targets, ordered by host index.

        Raises:
          CheckpointError: if copies do not fit.
        """
        world, offered, problems = self._world, [], []
        for sender in [n for n, some in enumerate(targets) if world.number in some]:
            try:
                message = Manifest.parse(
                    world.mail.read(sender, f"{_MESSAGE}{world.number}")
                )
                if message.step_id != step_id:
                    raise ReadError("belongs to a different step")
                offered.append(message)
            except (ReadError, checked_json.UnreadableError) as error:
                problems.append(f"the list of host {sender}'s parts {error}")
        taken = fetch(world.own, world.found(offered)) if offered else Replicated()
        return dataclasses.replace(taken, problems=(*problems, *taken.problems))


def fetch(
    own: LocalHost,
    found: FoundStep,
    items: Sequence[int] | None = None,
    *,
    is_partial: bool = True,
) -> Replicated:
    """Fetches parts of a step, a few at a time, and writes them to a RAM disk.

    Args:
      own: this host's slot of the RAM disk.
      found: the step, with the holders of each part in the order in which to try them.
      items: the items to fetch; None for all.
      is_partial: whether to commit parts even if others cannot be fetched.

    Raises:
      CheckpointError: if the parts do not fit or, without `is_partial`, if any of them
        cannot be fetched.
    """
    table, reader = found.table, VerifiedReader(found)
    listed = list(range(len(table)) if items is None else items)
    writer = own.copy_writer(table.step_id, table.contents)
    writer.reserve(int(table.num_bytes[listed].sum()))

    def take(item: int) -> int:
        number, box = int(table.items.leaf[item]), table.box(item)
        writer.put(
            number, box, table.digest(item), lambda into: reader.read_into(item, into)
        )
        return int(table.num_bytes[item])

    sizes, problems = [], []
    with background.pool(_THREADS, "copy") as pool:
        # The number of threads bounds memory use: each stores a copy before it fetches
        # the next.
        for got in futures.as_completed([pool.submit(take, item) for item in listed]):
            try:
                sizes.append(got.result())
            except (errors.CheckpointError, errors.OpenFilesError) as error:
                problems.append(str(error))
    # Without repetitions: a cause that fails one write fails all later writes.
    problems = list(dict.fromkeys([*problems, *map(str, reader.bad)]))
    is_enough = is_partial or len(sizes) == len(listed)
    # A backup host's share may be empty; in that case, it is complete.
    if is_enough and (sizes or not is_partial):
        writer.commit()
    else:
        writer.abandon()
    if not is_enough:
        raise errors.CheckpointError("; ".join(problems))
    return Replicated(copies=len(sizes), num_bytes=sum(sizes), problems=tuple(problems))
