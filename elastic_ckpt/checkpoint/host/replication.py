"""Replication: a host takes the copies that placement gives it.

Items that a host holds already are not placed again: a host that was killed half way
continues where it stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent import futures

from elastic_ckpt.checkpoint.host import verified_read
from elastic_ckpt.checkpoint.host.answers import Replicated
from elastic_ckpt.core import background, errors
from elastic_ckpt.steps import layout
from elastic_ckpt.steps.holdings import Holdings, Offer
from elastic_ckpt.steps.manifest import Host
from elastic_ckpt.tiers.ram.local import LocalHost
from elastic_ckpt.tiers.ram.step_writer import StepWriter
from elastic_ckpt.tiers.source import Source

_THREADS = 4


def fetch(
    own: LocalHost,
    sources: Mapping[Offer, Source],
    items: Sequence[tuple[int, Host]] | None = None,
    *,
    is_partial: bool = True,
) -> Replicated:
    """Fetches copies of parts of one step, and writes them to a host's RAM disk.

    Args:
      own: the host.
      sources: where to read what each holder offers.
      items: each with the holder that sends it; by default all that are offered, each
        sent by its first holder.
      is_partial: whether copies are committed if others cannot be fetched.

    Raises:
      CheckpointError: if they do not fit, or cannot be fetched and are not partial.
    """
    if not sources:
        return Replicated()
    holdings = Holdings.from_offers(list(sources))
    if items is None:
        senders = holdings.holder[holdings.first_row[:-1]].tolist()
        items = [(item, holdings.offers[n].host) for item, n in enumerate(senders)]
    num_bytes = int(holdings.stored_bytes[[item for item, _ in items]].sum())
    writer = own.copy_writer(
        holdings.offers[0].manifest.step_id,
        holdings.contents,
        num_bytes=num_bytes,
    )
    taken = take(holdings, items, verified_read.VerifiedReader(sources), writer)
    is_enough = is_partial or taken.copies == len(items)
    # A share may be empty, and is complete then.
    if is_enough and (taken.copies or not is_partial):
        writer.commit()
    else:
        writer.abandon()
    if not is_enough:
        raise errors.CheckpointError("; ".join(taken.problems))
    return taken


def take(
    holdings: Holdings,
    items: Sequence[tuple[int, Host]],
    reader: verified_read.VerifiedReader,
    writer: StepWriter,
) -> Replicated:
    """Fetches copies, a few at a time, each from its sender or else another holder.

    Args:
      holdings: of the step.
      items: see `fetch`.
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
    return Replicated(
        copies=len(sizes),
        num_bytes=sum(sizes),
        # What fails one write fails those after it.
        problems=tuple(dict.fromkeys(problems)),
    )
