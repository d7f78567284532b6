"""Backup: a host's share of a checkpoint in persistent storage, from what is in RAM."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent import futures

import numpy as np

from elastic_ckpt.core import host_memory
from elastic_ckpt.tiers import layout, uploads
from elastic_ckpt.tiers.holdings import Holdings
from elastic_ckpt.tiers.manifest import Host
from elastic_ckpt.tiers.upload import Upload
from elastic_ckpt.tiers.verified_read import VerifiedReader

# Small chunks want many at a time; of large ones each is in memory.
_THREADS = 16


def back_up(
    holdings: Holdings,
    hosts: Sequence[Host],
    upload: Upload,
    reader: VerifiedReader,
    *,
    host: Host,
) -> int:
    """Uploads a host's share of a step, and returns its bytes.

    What is uploaded was verified: a copy that went bad in RAM is read elsewhere.

    Args:
      holdings: of the step.
      hosts: that take part, the same list everywhere.
      upload: of this host.
      reader: of the step.
      host: this one.

    Raises:
      CheckpointError: if no good copy of a part is left, or storage fails.
    """
    shared = uploads.uploads(holdings, hosts)
    num_boxes = len(holdings.leaf)

    def write(item: int) -> int:
        own = int(shared.row[item])
        rows = range(int(holdings.first_row[item]), int(holdings.first_row[item + 1]))
        ordered = sorted(rows, key=lambda row: row != own)
        offers = [holdings.offers[holdings.holder[row]] for row in ordered]
        if item >= num_boxes:
            file = holdings.files[item - num_boxes]
            upload.write_file(file, reader.file(file, offers))
            return file.stored_bytes
        fragments = [holdings.fragment(row) for row in ordered]
        first = fragments[0]
        leaf = holdings.contents.leaves[first.leaf]
        memory = host_memory.allocate(layout.num_bytes(first.box, leaf.dtype))
        choices = list(zip(offers, fragments, strict=True))
        reader.fragment(choices, memory, name=holdings.name(item))
        values = memory.view(np.dtype(leaf.dtype)).reshape(first.box.shape)
        upload.write_chunk(first.leaf, first.box, values, digest=first.digest)
        return memory.nbytes

    upload.begin()
    with futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="upload") as pool:
        num_bytes = sum(pool.map(write, shared.of(host.id).tolist()))
    upload.finish()
    return num_bytes
