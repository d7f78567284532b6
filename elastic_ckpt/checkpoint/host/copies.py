"""A host's part in making copies: it offers its parts to hosts, and takes theirs.

Who copies a part is a function of its holders (`steps.owners`), so each host knows what
it sends: it leaves every target a message with the parts meant for it (`offer`). The
targets read the messages and the parts, check them, and write their manifests (`take`).
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
# Holders of a part that are asked, the sender first.
_MOST = 3
_MESSAGE = "copies-"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replicated:
    """The copies that a host has taken.

    Attributes:
      copies: how many.
      num_bytes: of them.
      problems: copies that could not be fetched, or are bad at a holder, a sentence
        each with the reason.
    """

    copies: int = 0
    num_bytes: int = 0
    problems: tuple[str, ...] = ()


class HostCopies:
    """Makes the copies that one host takes.

    Args:
      world: the host among the others.
    """

    def __init__(self, world: HostWorld) -> None:
        self._world = world

    @calls.call()
    def offer(self, step_id: StepId) -> tuple[tuple[int, ...], tuple[str, ...], int]:
        """Leaves each other host the list of the parts that it is to copy from here.

        Returns:
          The hosts to which this one sends some; what its parts lack even after all
          copies, a sentence each; and the fewest machines that then have a part, 0 if
          one has no holder.
        """
        world, held = self._world, self._world.holding(step_id)
        table = held.found.table
        placed = world.owners.place(held.holders, table.num_bytes)
        # All hosts have read those of the copies before.
        world.mail.remove(_MESSAGE)
        sent = placed.source == world.number
        targets = np.unique(placed.target[sent]).tolist()
        for target in targets:
            items = placed.item[sent & (placed.target == target)]
            # This host first, and a few others.
            hosts = [
                sorted(held.holders[item], key=lambda n: (n != world.number, n))
                for item in items.tolist()
            ]
            message = world.listed(table, items, [some[:_MOST] for some in hosts])
            world.mail.post(f"{_MESSAGE}{target}", message.to_bytes())
        return tuple(targets), placed.shortfalls, placed.num_machines

    @calls.call(limit_secs=calls.LONG_SECS)
    def take(self, step_id: StepId, targets: tuple[tuple[int, ...], ...]) -> Replicated:
        """Takes the copies that are meant for this host.

        Args:
          step_id: the step.
          targets: by the number of each host, those that it has left a message.

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
                    raise ReadError("is that of another step")
                offered.append(message)
            except (ReadError, checked_json.UnreadableError) as error:
                problems.append(f"the parts of host {sender}: the list {error}")
        taken = fetch(world.own, world.found(offered)) if offered else Replicated()
        problems = dict.fromkeys([*problems, *taken.problems])
        return dataclasses.replace(taken, problems=tuple(problems))


def fetch(
    own: LocalHost,
    found: FoundStep,
    items: Sequence[int] | None = None,
    *,
    is_partial: bool = True,
) -> Replicated:
    """Fetches parts of a step, a few at a time, and writes them to a RAM disk.

    Args:
      own: this host's part of the RAM disk.
      found: the step; of the holders of a part the first sends it, or else the next.
      items: that are fetched; None for all.
      is_partial: whether parts are committed if others cannot be fetched.

    Raises:
      CheckpointError: if they do not fit, or cannot be fetched and are not partial.
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
        # Its threads bound what is in memory: a copy is kept before the next begins.
        for got in futures.as_completed([pool.submit(take, item) for item in listed]):
            try:
                sizes.append(got.result())
            except errors.CheckpointError as error:
                problems.append(str(error))
    # What fails one write fails those after it.
    problems = list(dict.fromkeys([*problems, *map(str, reader.bad)]))
    is_enough = is_partial or len(sizes) == len(listed)
    # A share may be empty, and is complete then.
    if is_enough and (sizes or not is_partial):
        writer.commit()
    else:
        writer.abandon()
    if not is_enough:
        raise errors.CheckpointError("; ".join(problems))
    return Replicated(copies=len(sizes), num_bytes=sum(sizes), problems=tuple(problems))
