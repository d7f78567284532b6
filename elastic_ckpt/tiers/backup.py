"""Backup: a host's share of a checkpoint in persistent storage, from what is in RAM."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent import futures

from elastic_ckpt.tiers import uploads, verified_read
from elastic_ckpt.tiers.holdings import Holdings
from elastic_ckpt.tiers.manifest import Host
from elastic_ckpt.tiers.upload import Upload

# Small chunks want many at a time; of large ones each is in memory.
_THREADS = 16


def back_up(
    holdings: Holdings,
    hosts: Sequence[Host],
    upload: Upload,
    reader: verified_read.VerifiedReader,
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
        if item >= num_boxes:
            file = holdings.files[item - num_boxes]
            upload.write_file(file, reader.file(file, holdings.holders(item)))
            return file.stored_bytes
        values = verified_read.read_item(holdings, item, reader, first=host.id)
        fragment = holdings.fragment(int(shared.row[item]))
        upload.write_chunk(fragment.leaf, fragment.box, values, digest=fragment.digest)
        return values.nbytes

    upload.begin()
    with futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="upload") as pool:
        num_bytes = sum(pool.map(write, shared.of(host.id).tolist()))
    upload.finish()
    return num_bytes
