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

from elastic_ckpt.checkpoint.host.answers import Offered, Replicated
from elastic_ckpt.checkpoint.host.verified_read import VerifiedReader
from elastic_ckpt.checkpoint.host.world import HeldStep, HostWorld
from elastic_ckpt.core import background, calls, checked_json, errors
from elastic_ckpt.steps.manifest import Manifest
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers.find import FoundStep
from elastic_ckpt.tiers.ram.local import LocalHost
from elastic_ckpt.tiers.source import ReadError

_THREADS = 4
# Holders of a part besides its sender, which are asked if that one fails.
_OTHERS = 2


class HostCopies:
    """Makes the copies that one host takes.

    Args:
      world: the host among the others.
    """

    def __init__(self, world: HostWorld) -> None:
        self._world = world
        # The parts that this host takes, where it knows those of all hosts.
        self._own: Manifest | None = None

    @calls.call()
    def offer(self, step_id: StepId) -> Offered:
        """Leaves each other host the list of the parts that it is to copy from here."""
        world, held = self._world, self._world.holding(step_id)
        placed = world.owners.place(held.holders, held.found.table.num_bytes)
        self._own, targets = None, []
        if held.is_whole:
            items = placed.item[placed.target == world.number]
            self._own = _whole(held, items)
        else:
            sent = placed.source == world.number
            for target in np.unique(placed.target[sent]).tolist():
                items = placed.item[sent & (placed.target == target)]
                message = _sent(world, held, items)
                world.mail.post(f"copies-{target}", message.to_bytes())
                targets.append(target)
        return Offered(
            targets=tuple(targets),
            shortfalls=placed.shortfalls,
            num_machines=placed.num_machines,
        )

    @calls.call(limit_secs=calls.LONG_SECS)
    def take(self, step_id: StepId, senders: tuple[tuple[int, ...], ...]) -> Replicated:
        """Takes the copies that are meant for this host.

        Args:
          step_id: the step.
          senders: of each host, by number, those that have left it a message.

        Raises:
          CheckpointError: if copies do not fit.
        """
        world, problems = self._world, []
        offered = [] if self._own is None else [self._own]
        for sender in senders[world.number]:
            try:
                content = world.mail.read(sender, f"copies-{world.number}")
                message = Manifest.parse(content)
                if message.step_id != step_id:
                    raise ReadError("is that of another step")
                offered.append(message)
            except (ReadError, checked_json.UnreadableError) as error:
                problems.append(f"the parts of host {sender}: the list {error}")
        taken = Replicated()
        if any(len(each.parts.leaf) for each in offered):
            taken = fetch(world.own, world.found(offered))
        problems += taken.problems
        return dataclasses.replace(
            taken,
            problems=tuple(dict.fromkeys(problems)),
            preserved=tuple(world.disk.kept()),
            failed=bool(problems),
        )

    @calls.call()
    def end(self) -> None:
        """Removes the messages of this host, which all hosts have read."""
        self._world.mail.remove("copies-")


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

        def read(into: np.ndarray) -> None:
            reader.read_into(item, into)

        writer.put(number, box, table.digest(item), read)
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


def _sent(world: HostWorld, held: HeldStep, items: np.ndarray) -> Manifest:
    # Some parts of this host, also at a few other holders.
    own, table = world.number, held.found.table
    hosts = [
        [own, *[each for each in held.holders[item] if each != own][:_OTHERS]]
        for item in items.tolist()
    ]
    return world.listed(table, items, hosts)


def _whole(held: HeldStep, items: np.ndarray) -> Manifest:
    # Some parts at all of their holders.
    table = held.found.table
    whole = table.manifest
    holders = [table.holders_of(item) for item in items.tolist()]
    rows = table.items.take(items.repeat([len(of_item) for of_item in holders]))
    holder = np.array([n for of_item in holders for n in of_item], np.int32)
    return dataclasses.replace(whole, parts=rows._replace(holder=holder))
