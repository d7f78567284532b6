"""A host's share of an upload: which parts it writes to persistent storage, and how."""

from __future__ import annotations

import numpy as np

from elastic_ckpt.checkpoint.host import verified_read
from elastic_ckpt.checkpoint.host.captured_step import CapturedStep
from elastic_ckpt.core import background
from elastic_ckpt.steps import layout
from elastic_ckpt.steps.holdings import Holdings
from elastic_ckpt.steps.manifest import ComponentFile, Fragment, Host
from elastic_ckpt.tiers.persistent import upload

# Each thread has one batch in memory, and what TensorStore makes of it: with them a
# backup takes at most 2 * _THREADS * _BATCH_BYTES = 512 MiB, whatever it backs up.
_THREADS = 4
_BATCH_BYTES = layout.CHUNK_BYTES
# Small items are written together, but all threads have some of them.
_BATCH_ITEMS = 2048


def upload_share(
    holdings: Holdings,
    uploading: upload.Upload,
    reader: verified_read.VerifiedReader,
    *,
    host: Host,
    captured: CapturedStep | None = None,
) -> int:
    """Uploads a host's share of a step, and returns the bytes that it wrote.

    Everything is verified before the upload: a bad copy in RAM is read elsewhere.
    Captured values are uploaded from where they are, without a copy. An upload that was
    cut short is continued: chunks that are there are not sent again.

    Args:
      holdings: of the share; their holders have the same values.
      uploading: of this host.
      reader: of the step.
      host: this one.
      captured: the step, if it is uploaded from the memory that it was captured in.

    Raises:
      CheckpointError: if no good copy of a part is left, or storage fails.
    """

    def part(item: int) -> Fragment | ComponentFile:
        if item >= len(holdings.leaf):
            return holdings.files[item - len(holdings.leaf)]
        return holdings.fragment(int(holdings.first_row[item]))

    def write(batch: np.ndarray) -> int:
        chunks, num_bytes = [], 0
        for item in batch.tolist():
            fragment = part(item)
            if isinstance(fragment, ComponentFile):
                if captured is not None:
                    content = captured.content(fragment)
                else:
                    content = reader.content(fragment, holdings.holders(item))
                num_bytes += uploading.write_file(fragment, content)
                continue
            if captured is not None:
                values = captured.values(fragment)
            else:
                values = verified_read.read_item(holdings, item, reader, first=host.id)
            chunks.append(
                upload.Chunk(fragment.leaf, fragment.box, values, fragment.digest)
            )
        return num_bytes + uploading.write_chunks(chunks)

    uploading.begin()
    items = np.arange(holdings.num_items)
    sizes = holdings.stored_bytes
    runs = batches(items, sizes, most_bytes=_BATCH_BYTES, most_items=_BATCH_ITEMS)
    with background.pool(_THREADS, "upload") as pool:
        num_bytes = sum(pool.map(write, runs))
    uploading.finish()
    return num_bytes


def batches(
    items: np.ndarray, sizes: np.ndarray, *, most_bytes: int, most_items: int
) -> list[np.ndarray]:
    """Runs of items that are written together, each as large as allowed."""
    cuts = []
    begin, num_bytes = 0, 0
    for place, size in enumerate(sizes.tolist()):
        full = num_bytes + size > most_bytes or place - begin == most_items
        if place > begin and full:
            cuts.append(place)
            begin, num_bytes = place, 0
        num_bytes += size
    return np.split(items, cuts) if len(items) else []


def chunk_shapes(holdings: Holdings) -> dict[str, tuple[int, ...]]:
    """The shapes of the chunks of each leaf of a step, by its path.

    All chunks of a leaf are of one shape; a leaf without elements has none.
    """
    leaves = holdings.contents.leaves
    first = np.searchsorted(holdings.leaf, np.arange(len(leaves) + 1))
    sizes = (holdings.boxes.stop - holdings.boxes.start).tolist()
    return {
        leaf.path: tuple(sizes[begin][: len(leaf.shape)])
        if begin < end
        else tuple(max(1, size) for size in leaf.shape)
        for leaf, begin, end in zip(leaves, first[:-1], first[1:], strict=True)
    }
