"""Bad copies whose host is in no world, put right from a good one.

They lie on idle machines, in slots that this world does not use, or on backup hosts:
their process is gone, or has no other copy. A host of the world reads what was saved
from another holder, verified, and has the machine's agent write it
(`ram.file_repair`).
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence

from absl import logging

from elastic_ckpt.checkpoint.host import verified_read
from elastic_ckpt.checkpoint.host.answers import BadCopyReport
from elastic_ckpt.core import errors
from elastic_ckpt.steps import manifest_file
from elastic_ckpt.steps.holdings import Holdings, Offer
from elastic_ckpt.steps.manifest import Host
from elastic_ckpt.tiers import stored_part
from elastic_ckpt.tiers.source import (
    ReadError,
    RepairableSource,
    RepairError,
    Source,
)


def dealt(
    bad: Sequence[BadCopyReport], hosts: Sequence[Host], number: int
) -> dict[str, set[str]]:
    """The bad copies of no host of the world that one host of it repairs.

    Args:
      bad: that any host detected, the same on all hosts.
      hosts: of the world, by number.
      number: of the host.

    Returns:
      Files by the id of their holder.
    """
    present = {host.id for host in hosts}
    idle = sorted(
        {
            (each.host, each.file)
            for each in bad
            if each.tier == "local" and each.host not in present
        }
    )
    files: dict[str, set[str]] = collections.defaultdict(set)
    for holder, file in idle[number :: len(hosts)]:
        files[holder].add(file)
    return dict(files)


def put_right(
    holdings: Holdings,
    sources: Mapping[Offer, Source],
    bad: Mapping[str, Collection[str]],
) -> list[str]:
    """Rewrites bad copies through the agents of their machines.

    Args:
      holdings: of the step.
      sources: where to read what each holder offers.
      bad: files by the id of their holder.

    Returns:
      The names of the repaired items; why others were not is logged.
    """
    reader = verified_read.VerifiedReader(sources)
    reachable: dict[Offer, bool] = {}
    mended = []
    for row, item in enumerate(holdings.item.tolist()):
        offer = holdings.offers[holdings.holder[row]]
        if offer.tier != "local" or offer.host.id not in bad:
            continue
        file = _file(holdings, row, item)
        if file not in bad[offer.host.id]:
            continue
        if offer not in reachable:
            reachable[offer] = _answers(offer, sources[offer])
        source = sources[offer]
        if not (reachable[offer] and isinstance(source, RepairableSource)):
            continue
        try:
            source.put_right(file, content(holdings, item, reader))
        except (errors.CheckpointError, RepairError) as error:
            name = holdings.name(item)
            logging.warning("%s at host %s: %s", name, offer.host.id, error)
        else:
            mended.append(holdings.name(item))
    return mended


def content(
    holdings: Holdings, item: int, reader: verified_read.VerifiedReader
) -> bytes:
    """The bytes of an item's file in a RAM disk, from any good copy.

    Args:
      holdings: of the step.
      item: the number of a box or file.
      reader: of the step.

    Raises:
      CheckpointError: if no good copy is left.
    """
    if item >= len(holdings.leaf):
        file = holdings.files[item - len(holdings.leaf)]
        return reader.file(file, holdings.holders(item))
    values = verified_read.read_item(holdings, item, reader)
    return stored_part.chunk_content(values)


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
