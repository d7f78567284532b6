"""The parts of a step in RAM that a host offers to the others, and where they lie.

A host offers what is in its slot. The host in the first slot of a machine offers what
lies in slots that no host of the world has, too, and idle machines are dealt to hosts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from elastic_ckpt.checkpoint.host.part_exchange import PartExchange
from elastic_ckpt.checkpoint.host.world import HostWorld
from elastic_ckpt.core import checked_json, errors
from elastic_ckpt.steps.holdings import Offer
from elastic_ckpt.steps.manifest import Host
from elastic_ckpt.steps.part_message import PartMessage
from elastic_ckpt.steps.part_table import Holder, PartTable, joined
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.peers.peer import Peers
from elastic_ckpt.tiers.source import ReadError, Source

_NO_ROWS = np.empty(0, np.int64)


def of_save(world: HostWorld, step_id: StepId) -> PartMessage:
    """The parts of a save of a step for which a host answers."""
    message = of_step(world, step_id.step)
    tables = [each for each in message.tables if each.saved.step_id == step_id]
    return dataclasses.replace(message, tables=tuple(tables))


def of_step(world: HostWorld, step: int) -> PartMessage:
    """The parts of all saves of a step for which a host answers."""
    tables: list[PartTable] = []
    problems: list[str] = []
    own = world.disk.offers(step, slots=_slots(world))
    for url, offered in [
        ("", own),
        *((peer.url, peer.offers(step)) for peer in world.idle_peers),
    ]:
        tables += [PartTable.from_offer(offer, url=url) for offer in offered.sources]
        problems += offered.problems
    return PartMessage(tables=tuple(joined(tables)), problems=tuple(problems))


def of_all(world: HostWorld) -> PartMessage:
    """The steps, with their saves, for which a host answers."""
    slots, peers = _slots(world), world.idle_peers
    saves = world.disk.listed_saves(slots)
    for peer in peers:
        saves.update(peer.known_saves())
    return PartMessage(
        saves=tuple(saves),
        refusing=tuple(Peers(peers).refusing()),
    )


def received(parts: PartExchange, step_id: StepId) -> list[PartTable]:
    """The parts of a save of a step that this host has received.

    Args:
      parts: the exchange that they passed through.
      step_id: the step.

    Raises:
      CheckpointError: if they cannot be had.
    """
    try:
        tables = parts.received()
    except (ReadError, checked_json.UnreadableError) as error:
        why = f"step {step_id.step}: the list of this host's parts {error}"
        raise errors.CheckpointError(why) from None
    return [each for each in tables if each.saved.step_id == step_id]


def sources(world: HostWorld, tables: Sequence[PartTable]) -> dict[Offer, Source]:
    """The offers of the holders in some tables, in their order, with their sources.

    Raises:
      CheckpointError: if the address of a holder is unknown.
    """
    return {
        offer: world.source(holder.host, holder.url, table.saved.step_id)
        for table in tables
        for holder, offer in zip(table.holders, table.offers(named=True), strict=True)
    }


def nothing(host: Host, tables: Sequence[PartTable]) -> Offer:
    """The offer of a host that has received nothing of a step.

    Raises:
      CheckpointError: if it has not even received the contents of the step.
    """
    if not tables:
        raise errors.CheckpointError(
            "the list of this host's parts is of another step; the next one is tried"
        )
    empty = dataclasses.replace(tables[0].take(_NO_ROWS, []), holders=(Holder(host),))
    return empty.offers()[0]


def _slots(world: HostWorld) -> set[int]:
    own, disk = world.own.slot, world.disk
    others = [slot for slot in disk.slots() if slot != own] if own == 0 else []
    ids = {host.id for host in world.hosts} if others else set()
    return {own, *(slot for slot in others if disk.host_id(slot) not in ids)}
