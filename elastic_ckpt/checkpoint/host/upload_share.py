"""A host's share of an upload: which parts it writes to persistent storage, and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence, Set

import numpy as np

from elastic_ckpt.checkpoint.host import verified_read
from elastic_ckpt.checkpoint.host.captured_step import CapturedStep
from elastic_ckpt.core import background
from elastic_ckpt.steps import layout, uploads
from elastic_ckpt.steps.holdings import Holdings
from elastic_ckpt.steps.manifest import ComponentFile, Fragment, Host
from elastic_ckpt.tiers.persistent import progress, upload

# Each thread has one batch in memory, and what TensorStore makes of it: with them a
# backup takes at most 2 * _THREADS * _BATCH_BYTES = 512 MiB, whatever it backs up.
_THREADS = 4
_BATCH_BYTES = layout.CHUNK_BYTES
# Small items are written together, but all threads have some of them.
_BATCH_ITEMS = 2048


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Share:
    """The parts of a step that a host uploads.

    Attributes:
      holdings: with these parts at least.
      uploads: which host uploads which of them.
      step_parts: returns all parts of the step, for an upload that is continued.
    """

    holdings: Holdings
    uploads: uploads.Uploads
    step_parts: Callable[[], Set[progress.Part]]

    @classmethod
    def of_step(cls, holdings: Holdings, hosts: Sequence[Host]) -> Share:
        """The shares of all hosts, by holdings of the whole step.

        Args:
          holdings: of the step.
          hosts: that take part, the same list everywhere.
        """
        shared = uploads.of_all_items(holdings, hosts)
        return cls(
            holdings=holdings,
            uploads=shared,
            step_parts=lambda: parts_of(holdings),
        )

    def part(self, item: int) -> Fragment | ComponentFile:
        """A box at the host that uploads it, or a file."""
        if item >= len(self.holdings.leaf):
            return self.holdings.files[item - len(self.holdings.leaf)]
        return self.holdings.fragment(int(self.uploads.row[item]))


def parts_of(holdings: Holdings) -> set[progress.Part]:
    """All parts of a step, without their places."""
    rows = holdings.first_row[: len(holdings.leaf)].tolist()
    held = [*map(holdings.fragment, rows), *holdings.files]
    return {progress.part_of(each) for each in held}


def upload_share(
    share: Share,
    uploading: upload.Upload,
    reader: verified_read.VerifiedReader,
    *,
    host: Host,
    captured: CapturedStep | None,
) -> int:
    """Uploads a host's share of a step, and returns the bytes that it wrote.

    Everything is verified before the upload: a bad copy in RAM is read elsewhere.
    Captured values are uploaded from where they are, without a copy. An upload that was
    cut short is continued.

    Args:
      share: of this host, or of all.
      uploading: of this host.
      reader: of the step.
      host: this one.
      captured: the step, if it is uploaded from the memory that it was captured in.

    Raises:
      CheckpointError: if no good copy of a part is left, or storage fails.
    """
    holdings, part = share.holdings, share.part

    def write(batch: np.ndarray) -> int:
        chunks = []
        for item in batch.tolist():
            fragment = part(item)
            if isinstance(fragment, ComponentFile):
                if captured is not None:
                    content = captured.content(fragment)
                else:
                    content = reader.content(fragment, holdings.holders(item))
                uploading.write_file(fragment, content)
                continue
            if captured is not None:
                values = captured.values(fragment)
            else:
                values = verified_read.read_item(holdings, item, reader, first=host.id)
            chunks.append(
                upload.Chunk(fragment.leaf, fragment.box, values, fragment.digest)
            )
        uploading.write_chunks(chunks)
        return int(holdings.stored_bytes[batch].sum())

    uploading.begin(share.step_parts)
    items = share.uploads.items_of(host.id)
    if uploading.is_continued:
        items = np.array([i for i in items.tolist() if not uploading.has(part(i))], int)
    sizes = holdings.stored_bytes[items]
    batches = uploads.batches(
        items, sizes, most_bytes=_BATCH_BYTES, most_items=_BATCH_ITEMS
    )
    with background.pool(_THREADS, "upload") as pool:
        num_bytes = sum(pool.map(write, batches))
    uploading.finish()
    return num_bytes


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
