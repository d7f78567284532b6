"""Replication: a host takes the copies that placement gives it.

Items that a host holds already are not placed again: a host that was killed half way
continues where it stopped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from concurrent import futures

import numpy as np

from elastic_ckpt.checkpoint.host import verified_read
from elastic_ckpt.core import background, errors
from elastic_ckpt.steps import layout, placement
from elastic_ckpt.steps.holdings import Holdings, Offer
from elastic_ckpt.steps.manifest import Host
from elastic_ckpt.tiers.ram.local import LocalHost
from elastic_ckpt.tiers.ram.step_writer import StepWriter
from elastic_ckpt.tiers.source import Source

_THREADS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taken:
    """The copies that a host took.

    Attributes:
      copies: how many.
      num_bytes: of them.
      problems: copies that could not be fetched, or are bad at a holder, a sentence
        each with the reason.
    """

    copies: int
    num_bytes: int
    problems: tuple[str, ...]


def incoming(placed: placement.Placement, host: Host) -> list[tuple[int, Host]]:
    """Returns the items that `host` takes, each with the holder that sends it."""
    numbers = [n for n, each in enumerate(placed.hosts) if each.id == host.id]
    mine = np.flatnonzero(np.isin(placed.target, numbers))
    return [
        (int(placed.item[copy]), placed.hosts[placed.source[copy]]) for copy in mine
    ]


def fetch_all(
    own: LocalHost, sources: Mapping[Offer, Source], *, is_partial: bool = True
) -> Taken:
    """Fetches all parts of some offers of one step; see `fetch`.

    Args:
      own: the host.
      sources: where to read each offer, those of the senders first.
      is_partial: as `fetch`.

    Raises:
      CheckpointError: as `fetch`.
    """
    if not sources:
        return Taken(copies=0, num_bytes=0, problems=())
    holdings = Holdings.from_offers(list(sources))
    senders = holdings.holder[holdings.first_row[:-1]].tolist()
    items = [
        (item, holdings.offers[sender].host) for item, sender in enumerate(senders)
    ]
    return fetch(own, sources, holdings, items, is_partial=is_partial)


def fetch(
    own: LocalHost,
    sources: Mapping[Offer, Source],
    holdings: Holdings,
    items: Sequence[tuple[int, Host]],
    *,
    spare: int = 0,
    is_partial: bool = True,
) -> Taken:
    """Fetches copies, and writes them to a host's RAM disk.

    Args:
      own: the host.
      sources: where to read what each holder offers.
      holdings: of the step.
      items: as `incoming` gives them.
      spare: how many times as much has to be free besides.
      is_partial: whether copies are committed if others cannot be fetched.

    Raises:
      CheckpointError: if they do not fit, or cannot be fetched and are not partial.
    """
    num_bytes = int(holdings.stored_bytes[[item for item, _ in items]].sum())
    writer = own.copy_writer(
        holdings.offers[0].manifest.step_id,
        holdings.contents,
        num_bytes=(1 + spare) * num_bytes,
    )
    taken = take(holdings, items, verified_read.VerifiedReader(sources), writer)
    is_whole = taken.copies == len(items)
    if taken.copies and (is_partial or is_whole):
        writer.commit()
    else:
        writer.abandon()
    if not (is_partial or is_whole):
        raise errors.CheckpointError("; ".join(taken.problems))
    return taken


def take(
    holdings: Holdings,
    items: Sequence[tuple[int, Host]],
    reader: verified_read.VerifiedReader,
    writer: StepWriter,
) -> Taken:
    """Fetches copies, a few at a time, each from its sender or else another holder.

    Args:
      holdings: of the step.
      items: as `incoming` gives them.
      reader: of the step.
      writer: writes the copies.
    """
    num_boxes = len(holdings.leaf)

    def fetch(item: int, sender: Host) -> int:
        if item >= num_boxes:
            file = holdings.files[item - num_boxes]
            content = reader.file(file, holdings.holders(item))
            writer.put_file(file, content)
            return len(content)
        choices = verified_read.choices(holdings, item, first=sender.id)
        fragment, name = choices[0][1], holdings.name(item)
        writer.put(fragment, lambda into: reader.fragment(choices, into, name=name))
        dtype = holdings.contents.leaves[fragment.leaf].dtype
        return layout.num_bytes(fragment.box, dtype)

    sizes, problems = [], []
    with background.pool(_THREADS, "copy") as pool:
        # Its threads bound what is in memory: a copy is kept before the next begins.
        for got in futures.as_completed([pool.submit(fetch, *each) for each in items]):
            try:
                sizes.append(got.result())
            except errors.CheckpointError as error:
                problems.append(str(error))
    problems += map(str, reader.bad)
    return Taken(
        copies=len(sizes),
        num_bytes=sum(sizes),
        # What fails one write fails those after it.
        problems=tuple(dict.fromkeys(problems)),
    )
