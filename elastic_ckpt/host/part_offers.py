"""The parts of a step in RAM that a host offers to the others, and where they lie.

A host offers what is in its slot. The host in the first slot of a machine offers what
lies in slots that no host of the world has, too, and idle machines are dealt to hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_ckpt.host.world import HostWorld
from elastic_ckpt.manifests.holdings import Offer
from elastic_ckpt.manifests.part_message import PartMessage
from elastic_ckpt.manifests.part_table import Holder, PartTable, joined
from elastic_ckpt.tiers.source import Source


def of_save(world: HostWorld, step: int, save: str) -> PartMessage:
    """The parts of a save of a step for which a host answers."""
    tables: list[PartTable] = []
    problems: list[str] = []
    offered = world.disk.offers(step, slots=_slots(world))
    problems += offered.problems
    for offer in offered.sources:
        if offer.manifest.save == save:
            tables.append(PartTable.from_manifest(offer.manifest))
    for peer in world.idle_peers:
        offered = peer.offers(step)
        problems += offered.problems
        tables += [
            PartTable.from_manifest(offer.manifest, url=peer.url)
            for offer in offered.sources
            if offer.manifest.save == save
        ]
    return PartMessage(tables=tuple(joined(tables)), problems=tuple(problems))


def sources(world: HostWorld, tables: Sequence[PartTable]) -> dict[Offer, Source]:
    """What the holders in some tables offer, in their order, and where to read it."""
    found_sources: dict[Offer, Source] = {}
    for table in tables:
        manifests = table.with_files().manifests()
        for holder, manifest in zip(table.holders, manifests, strict=True):
            offer = Offer(tier="local", manifest=manifest)
            found_sources[offer] = _source(world, holder, table)
    return found_sources


def _slots(world: HostWorld) -> set[int]:
    own, disk = world.own.slot, world.disk
    others = [slot for slot in disk.slots() if slot != own] if own == 0 else []
    ids = {host.id for host in world.hosts} if others else set()
    return {own, *(slot for slot in others if disk.host_id(slot) not in ids)}


def _source(world: HostWorld, holder: Holder, table: PartTable) -> Source:
    return world.source(holder.host, holder.url, table.saved.step, table.saved.save)
