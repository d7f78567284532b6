"""Bad copies in RAM are put right from a good one.

Each host rewrites those in its own slot. Others lie on idle machines, in slots that the
present world does not use, or on backup hosts: their process is gone, or has no other
copy. They are dealt to the hosts of the world, each of which has the agent of the
machine write what was saved (`ram.file_repair`). What is written was read from another
holder, verified.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from absl import logging

from elastic_ckpt.checkpoint.host import verified_read
from elastic_ckpt.checkpoint.host.verified_read import BadCopy
from elastic_ckpt.core import errors
from elastic_ckpt.steps import manifest_file
from elastic_ckpt.steps.holdings import Holdings, Offer
from elastic_ckpt.steps.manifest import Host
from elastic_ckpt.tiers import stored_part
from elastic_ckpt.tiers.ram.local import LocalHost
from elastic_ckpt.tiers.source import (
    ReadError,
    RepairableSource,
    RepairError,
    Source,
)

# The id of a holder, and a file in its directory of the step.
Place = tuple[str, str]


def dealt(bad: Sequence[BadCopy], hosts: Sequence[Host], number: int) -> set[Place]:
    """The bad copies that one host of a world repairs.

    Args:
      bad: that any host detected, the same on all hosts.
      hosts: of the world, by number.
      number: of the host.
    """
    places = {(each.host, each.file) for each in bad if each.tier == "local"}
    present = {host.id for host in hosts}
    idle = sorted(each for each in places if each[0] not in present)
    own = {each for each in places if each[0] == hosts[number].id}
    return own.union(idle[number :: len(hosts)])


def put_right(
    holdings: Holdings,
    sources: Mapping[Offer, Source],
    own: LocalHost,
    bad: Collection[Place],
) -> list[str]:
    """Rewrites bad copies in a host's own slot, and elsewhere through agents.

    Args:
      holdings: of the step.
      sources: where to read what each holder offers.
      own: the host.
      bad: the copies.

    Returns:
      The names of the repaired items; why others were not is logged.
    """
    reader = verified_read.VerifiedReader(sources)
    reachable: dict[Offer, bool] = {}
    mended = []
    for row, item in enumerate(holdings.item.tolist()):
        offer = holdings.offers[holdings.holder[row]]
        file = _file(holdings, row, item) if offer.tier == "local" else ""
        if (offer.host.id, file) not in bad:
            continue
        source = sources[offer]
        try:
            if offer.host.id == own.host.id:
                content = _content(holdings, item, reader)
                own.put_right(offer.manifest.step_id, file, content)
            else:
                if offer not in reachable:
                    reachable[offer] = _answers(offer, source)
                if not (reachable[offer] and isinstance(source, RepairableSource)):
                    continue
                source.put_right(file, _content(holdings, item, reader))
        except (errors.CheckpointError, RepairError, OSError) as error:
            name = holdings.name(item)
            logging.warning("%s at host %s: %s", name, offer.host.id, error)
        else:
            mended.append(holdings.name(item))
    return mended


def _content(
    holdings: Holdings, item: int, reader: verified_read.VerifiedReader
) -> bytes:
    # The bytes of an item's file in a RAM disk, from any good copy.
    if item >= len(holdings.leaf):
        file = holdings.files[item - len(holdings.leaf)]
        return reader.file(file, holdings.holders(item))
    return stored_part.chunk_content(verified_read.read_item(holdings, item, reader))


def _file(holdings: Holdings, row: int, item: int) -> str:
    if item >= len(holdings.leaf):
        return holdings.files[item - len(holdings.leaf)].path
    return holdings.fragment(row).file


def _answers(offer: Offer, source: Source) -> bool:
    # Nothing is read for a machine that cannot be reached.
    try:
        source.size(manifest_file.file_name(offer.host.id))
    except ReadError as error:
        logging.warning("copies at host %s stay bad: %s", offer.host.id, error)
        return False
    return True
