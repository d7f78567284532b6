"""A host's share of a checkpoint in persistent storage, from what is in RAM.

A backup goes through `chunk_shapes`, `back_up`, `commit` and `collect`. Before the
first one of a world comes `clean`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from concurrent import futures

import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.host import backlog, backup_collector, recovery, verified_read
from elastic_ckpt.host.answers import BackedUp
from elastic_ckpt.host.captured_step import CapturedStep
from elastic_ckpt.host.step_notes import OfBackup
from elastic_ckpt.host.world import HostWorld
from elastic_ckpt.manifests import layout, uploads
from elastic_ckpt.manifests.holdings import Holdings, Offer
from elastic_ckpt.manifests.line import Line
from elastic_ckpt.manifests.manifest import ComponentFile, Contents, Fragment, Host
from elastic_ckpt.tiers.persistent import (
    arrange,
    claims,
    commit,
    ocdbt,
    persistent_root,
    progress,
    upload,
    writers,
)
from elastic_ckpt.tiers.persistent.persistent_root import PersistentRoot
from elastic_ckpt.tiers.persistent.retries import PATIENT
from elastic_ckpt.tiers.source import Source

# Each thread has one batch in memory, and what TensorStore makes of it: with them a
# backup takes at most 2 * _THREADS * _BATCH_BYTES = 512 MiB, whatever it backs up.
_THREADS = 4
_BATCH_BYTES = layout.CHUNK_BYTES
# Small items are written together, but all threads have some of them.
_BATCH_ITEMS = 2048


class HostBackup:
    """Backs up what one host has.

    Args:
      world: the host among the others; with persistent storage.
    """

    def __init__(self, world: HostWorld) -> None:
        self._world = world
        self._arranged: tuple[int, str] | None = None
        # The claim of this world; None if its run claims none.
        self._claim: claims.Claim | None = None
        # The holdings of the step that is being backed up: large manifests are read
        # once.
        self._holdings: tuple[dict[Offer, Source], Holdings] | None = None

    def clean(self, save: str) -> list[tuple[int, str]]:
        """Removes leftovers of crashed uploads; host 0 does it (see `writers`).

        Those of steps that are whole in RAM stay: their uploads are continued.

        Args:
          save: of this world.

        Returns:
          The steps whose saves were interrupted, with the paths that were removed.
        """
        return [
            (each.step, str(each.path))
            for each in self._writing.discard_dead(
                before=save, is_needed=functools.partial(backlog.is_held, self._world)
            )
            if each.save != persistent_root.REMOVED
        ]

    def begin_line(self, line: Line, claimant: claims.Claimant | None) -> int:
        """Records the line of a committed step, or of a world that begins, in storage.

        Host 0 does it.

        Args:
          line: of the step, or of the first one to come.
          claimant: who claims the world; None records the line where it is needed.

        Returns:
          The number of the claimed world; 0 if none is claimed.

        Raises:
          CheckpointError: if storage cannot be listed.
          ReplacedError: if another start has claimed the world.
        """
        root = self._world.root
        if root is None:
            return 0
        if claimant is None:
            arrange.record(root, line, run=self._world.run)
            return 0
        if self._claim is not None:
            claimant = dataclasses.replace(claimant, has_claimed=True)
        self._claim = claims.claim(
            root.path, line, run=self._world.run, claimant=claimant
        )
        return self._claim.number

    def contents(self, step: int, save: str) -> Contents:
        """The contents of a step in RAM.

        Raises:
          CheckpointError: if nothing of it can be read.
        """
        return self._read(step, save)[1].contents

    def chunk_shapes(self, step: int, save: str) -> dict[str, tuple[int, ...]]:
        """The shapes of the chunks of each leaf of a step, by its path.

        Host 0 runs this first, and marks storage as being written by this world.
        """
        self._check_claim()
        self._writing.be_present()
        self._holdings = _, holdings = self._read(step, save)
        if self._root().in_place:
            # The upload would overwrite the present files.
            PATIENT.call(
                f"setting aside what step {step} replaces",
                lambda: self._arrange(holdings.contents, step, save),
            )
        return self._chunks(holdings, step, save)

    def back_up(self, backup: OfBackup) -> BackedUp:
        """Writes this host's share of a step to persistent storage.

        The host's bad copies are read from another holder, and repaired.

        Raises:
          CheckpointError: if holders disagree about values, or storage fails.
        """
        step, save = backup.step, backup.save
        sources, holdings = self._holdings or self._read(step, save)
        if len(holdings.diverged):
            # A later reader could not detect the wrong one.
            raise errors.CheckpointError(
                f"step {step} has different values at different hosts, such as"
                f" {holdings.name(int(holdings.diverged[0]))}; a later one is backed up"
            )
        uploading = upload.Upload(
            self._root(), self._saved_step(holdings, backup), self._world.own.host
        )
        reader = verified_read.VerifiedReader(sources)
        own = self._world.own
        num_bytes = upload_share(
            holdings,
            self._world.hosts,
            uploading,
            reader,
            host=own.host,
            captured=self._world.captured.get((step, save)),
        )
        bad = tuple(map(str, reader.bad))
        recovery.put_right(holdings, reader, own, map(recovery.report, reader.bad))
        return BackedUp(num_bytes=num_bytes, bad=bad)

    def commit(self, backup: OfBackup, orbax_files: Mapping[str, str]) -> None:
        """Makes a checkpoint of what all hosts have uploaded; one host does it.

        Args:
          backup: of the step.
          orbax_files: what Orbax adds to the values, by path.

        Raises:
          CheckpointError: if it cannot be committed.
          ReplacedError: if another start has continued the run.
        """
        step, save = backup.step, backup.save
        _, holdings = self._holdings or self._read(step, save)
        self._holdings = None
        self._check_claim()
        with self._writing.committing():
            commit.commit(
                self._root(),
                self._saved_step(holdings, backup),
                hosts=[host.id for host in self._world.hosts],
                orbax_files={path: text.encode() for path, text in orbax_files.items()},
                make_way=lambda: self._make_way(holdings.contents, step, save),
            )

    def collect(self, line: Line, step: int, overwrite: bool) -> None:
        """Removes steps that are no longer kept, after a commit; host 0 does it.

        Args:
          line: of the save that was committed.
          step: the training step.
          overwrite: whether older saves of the step that were set aside go too.
        """
        self._writing.discard_own(step, line.save)
        self.collector.collect(line, step, overwrite=overwrite)

    def holds(self, step: int, save: str) -> bool:
        """Whether that save of a step is committed to persistent storage.

        Args:
          step: the training step.
          save: which save of it; empty for one that Orbax alone wrote.

        Raises:
          CheckpointError: if storage cannot be reached.
        """
        root = self._root()
        if not root.is_committed(step):
            return False
        return not save or arrange.save_of(root, step, run=self._world.run) == save

    def remove(self, step: int) -> bool:
        """Removes all saves of a step from persistent storage; whether there were any.

        A step that Orbax alone saved stays.
        """
        tier = self._world.persistent
        assert tier is not None
        return tier.remove_all(step)

    def close(self) -> None:
        """Removes this world's mark from storage: it writes no more."""
        if self._world.root is not None:
            self._writing.close()

    def _read(self, step: int, save: str) -> tuple[dict[Offer, Source], Holdings]:
        sources, _ = self._world.in_ram(step, save)
        return sources, Holdings.from_offers(list(sources))

    def _make_way(self, contents: Contents, step: int, save: str) -> None:
        self._check_claim()
        self._arrange(contents, step, save)

    def _check_claim(self) -> None:
        claim = self._claim
        if claim is not None:
            PATIENT.call(
                "looking for the claim of another world",
                lambda: claims.check(self._root().path, claim),
            )

    def _arrange(self, contents: Contents, step: int, save: str) -> None:
        if self._arranged != (step, save):
            line = Line(save=save, parents=contents.parents)
            arrange.arrange(self._root(), line, run=self._world.run, step=step)
            self._arranged = (step, save)

    def _root(self) -> PersistentRoot:
        assert self._world.root is not None
        return self._world.root

    @functools.cached_property
    def collector(self) -> backup_collector.BackupCollector:
        """Removes the steps that are not kept, and records what ranks them."""
        return backup_collector.BackupCollector(self._world)

    @functools.cached_property
    def _writing(self) -> writers.WritingWorld:
        return writers.WritingWorld(self._root(), run=self._world.run)

    def _chunks(
        self, holdings: Holdings, step: int, save: str
    ) -> dict[str, tuple[int, ...]]:
        captured = self._world.captured.get((step, save))
        return chunk_shapes(holdings) if captured is None else captured.chunk_shapes

    def _saved_step(self, holdings: Holdings, backup: OfBackup) -> upload.SavedStep:
        chunks = self._chunks(holdings, backup.step, backup.save)
        return upload.SavedStep(
            run=self._world.run,
            step=backup.step,
            save=backup.save,
            contents=holdings.contents,
            arrays={
                path: ocdbt.StoredArray(
                    checkpointable=checkpointable, name=name, chunk=chunks[path]
                )
                for path, (checkpointable, name) in backup.names.items()
            },
        )


def upload_share(
    holdings: Holdings,
    hosts: Sequence[Host],
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
      holdings: of the step.
      hosts: that take part, the same list everywhere.
      uploading: of this host.
      reader: of the step.
      host: this one.
      captured: the step, if it is uploaded from the memory that it was captured in.

    Raises:
      CheckpointError: if no good copy of a part is left, or storage fails.
    """
    shared = uploads.of_all_items(holdings, hosts)
    part = functools.partial(_part, holdings, shared)

    def write(batch: np.ndarray) -> int:
        chunks = []
        for item in batch.tolist():
            fragment = part(item)
            if isinstance(fragment, ComponentFile):
                content = reader.file(fragment, holdings.holders(item))
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

    everything = range(holdings.num_items)
    uploading.begin(lambda: {progress.part_of(part(item)) for item in everything})
    items = shared.items_of(host.id)
    if uploading.is_continued:
        items = np.array([i for i in items.tolist() if not uploading.has(part(i))], int)
    sizes = holdings.stored_bytes[items]
    batches = uploads.batches(
        items, sizes, most_bytes=_BATCH_BYTES, most_items=_BATCH_ITEMS
    )
    with futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="upload") as pool:
        num_bytes = sum(pool.map(write, batches))
    uploading.finish()
    return num_bytes


def _part(
    holdings: Holdings, shared: uploads.Uploads, item: int
) -> Fragment | ComponentFile:
    if item >= len(holdings.leaf):
        return holdings.files[item - len(holdings.leaf)]
    return holdings.fragment(int(shared.row[item]))


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
