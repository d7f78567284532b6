"""The local tier: the steps that one process keeps on its machine's RAM disk.

Each process writes only to its own directory, a slot, but reads all slots of the
machine. Each step has a directory there; the step exists once its manifest, which is
written last, exists. After a crash there may be directories without a manifest, and
files that no manifest lists; `clean` removes them. A writer that adds copies from peers
to a committed step leaves the existing manifest valid until it commits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import types
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from elastic_ckpt.core import background, checked_json, errors, storage
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.steps import layout, retention
from elastic_ckpt.steps.manifest import (
    Contents,
    Holder,
    Host,
    Manifest,
    Parts,
    write_manifest,
)
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers import preserved
from elastic_ckpt.tiers.captured import Captured, CapturedLeaf, Values, fetched
from elastic_ckpt.tiers.persistent import ocdbt
from elastic_ckpt.tiers.ram import ram_disk
from elastic_ckpt.tiers.ram.chunk_files import LEAST_BYTES, ChunkFile, ChunkFiles

# The maximum number of chunks fetched from devices and written at a time.
_NUM_THREADS = max(1, min(8, len(os.sched_getaffinity(0)) // 2))


class LocalHost:
    """One process's slot on its machine's RAM disk, locked until it is closed.

    Attributes:
      host: this process, as manifests identify it.
      files: the mapped files of chunks that are not in a step yet.
      being_written: the steps that have a writer.
    """

    def __init__(
        self,
        disk: ram_disk.RamDisk,
        *,
        slot: int,
        domains: Mapping[str, str],
        number: int,
    ) -> None:
        """Takes a slot.

        Raises:
          RunError: if a live process holds the slot.
        """
        self.disk, self.slot = disk, slot
        self.host = Host(id=disk.host_id(slot), number=number, domains=domains)
        self.being_written: set[StepId] = set()
        self._held = contextlib.ExitStack()
        directory = disk.host_directory(slot)
        lock = directory / ram_disk.LOCK
        # Once the file is removed, its lock no longer keeps other processes out.
        disk.keep(lock, lambda: self._held.enter_context(storage.exclusive_lock(lock)))
        spare = directory / ram_disk.SPARE
        storage.remove(spare)
        self.files = ChunkFiles(spare)
        self._held.callback(self.files.close)

    def close(self) -> None:
        """Frees the slot; the steps in it stay."""
        self._held.close()

    def prepare(self, sizes: Sequence[int]) -> None:
        """Creates files in advance for values of these sizes, if there is room."""
        large = [size for size in sizes if size >= LEAST_BYTES]
        if 0 < sum(large) - self.files.spare_bytes < self.disk.free_bytes():
            self.files.prepare(large)

    def held(self) -> list[StepId]:
        """The committed saves, in ascending order."""
        return self.disk.known_saves([self.slot])

    def retained(self) -> list[retention.TierStep]:
        """The committed saves for retention, as their manifests describe them."""
        retained = []
        for each in self.held():
            contents, complete = Contents(leaves=()), None
            try:
                contents = self.disk.manifest(self.slot, each).contents
                complete = True
            except (checked_json.LaterVersionError, OSError):
                pass
            except errors.CheckpointError:
                complete = False
            retained.append(
                retention.TierStep(
                    step=each.step,
                    save=each.save,
                    time_ms=contents.time_ms,
                    metrics=json.loads(contents.metrics or "null"),
                    complete=complete,
                )
            )
        return retained

    def begin(self, step_id: StepId, contents: Contents) -> StepWriter:
        """Returns a writer for this process's parts of a step; removes leftovers.

        Raises:
          CheckpointError: if the step is already committed.
        """
        directory = self.disk.step_directory(self.slot, step_id)
        if self.disk.manifest_path(self.slot, step_id).exists():
            raise errors.CheckpointError(
                f"step {step_id.step}, save {step_id.save!r}, is already in"
                f" {directory}; remove that directory, or save under a different name"
            )
        storage.remove(directory)
        return StepWriter(
            self,
            Manifest(
                run=self.disk.run,
                step_id=step_id,
                contents=contents,
                holders=(Holder(self.host),),
                parts=Parts.of_rows([], contents),
            ),
        )

    def copy_writer(self, step_id: StepId, contents: Contents) -> StepWriter:
        """Returns a writer that adds copies from peers to the parts committed here."""
        try:
            return StepWriter(self, self.disk.manifest(self.slot, step_id))
        except errors.CheckpointError:
            # Without a valid manifest, the files there are useless.
            self.remove(step_id)
            return self.begin(step_id, contents)

    def remove(self, step_id: StepId) -> None:
        """Removes a save of a step that is not being written, its manifest first."""
        assert step_id not in self.being_written
        self._remove(self.slot, step_id)

    def remove_idle(self, is_removed: Callable[[StepId], bool]) -> bool:
        """Removes steps from this machine's slots whose process is gone.

        Returns:
          Whether any step was removed.
        """
        removed = False
        for slot in self._idle_slots():
            for each in filter(is_removed, self.disk.saves(slot)):
                self._remove(slot, each)
                removed = True
        return removed

    def _remove(self, slot: int, step_id: StepId) -> None:
        # The manifest first: after a crash, the rest counts as a leftover.
        directory = self.disk.step_directory(slot, step_id)
        with ram_disk.repairing(directory.parent):
            storage.remove(self.disk.manifest_path(slot, step_id))
            self.files.recycle(os.fspath(directory))
            storage.remove(directory)

    def clean(self) -> None:
        """Removes leftovers of the machine's dead processes, before the first save.

        In this slot, and in slots whose process is dead, removes steps without a
        readable manifest, files that no manifest lists, files that a restore unpacked,
        and messages.
        """
        for slot in itertools.chain([self.slot], self._idle_slots()):
            for name in (
                ram_disk.RESTORED,
                ram_disk.STAGED,
                ram_disk.MESSAGES,
                ram_disk.SPARE,
            ):
                storage.remove(self.disk.host_directory(slot) / name)
            for each in self.disk.saves(slot):
                self.sweep(slot, each)

    def _idle_slots(self) -> Iterator[int]:
        # Slots whose process is gone, each locked while the caller uses it.
        for slot in self.disk.slots():
            if slot != self.slot:
                lock = self.disk.host_directory(slot) / ram_disk.LOCK
                with contextlib.suppress(errors.RunError), storage.exclusive_lock(lock):
                    yield slot

    def sweep(self, slot: int, step_id: StepId) -> None:
        """Removes any files of a step that its manifest does not list.

        If the manifest is missing or unreadable, removes all files. Keeps the step if a
        later version of elastic_ckpt wrote its manifest.
        """
        path = self.disk.manifest_path(slot, step_id)
        try:
            manifest = Manifest.parse(path.read_bytes())
        except checked_json.LaterVersionError:
            return
        except (FileNotFoundError, checked_json.UnreadableError):
            # The manifest first: after a crash, the rest is still a leftover.
            storage.remove(path)
            storage.remove(path.parent)
            return
        contents = manifest.contents
        directories = (layout.leaf_directory(leaf.path) for leaf in contents.arrays)
        named = {
            *(path.name, preserved.FILE),
            *(f"{directory}/{ocdbt.METADATA}" for directory in directories),
            *(
                layout.part_file(contents.leaves[number], box)
                for number, box, _ in manifest.rows()
            ),
        }
        storage.keep_only(path.parent, named)


class StepWriter:
    """Writes a host's parts of one save of a step; any thread may put copies.

    Finish with `commit` or `abandon`. A failed write abandons the step; a copy that
    cannot be written is only skipped.

    Args:
      own: the host that writes.
      manifest: the parts already written.

    Attributes:
      parts: the digests of all parts written so far, by leaf and box. Callers add the
        parts that components write.
    """

    def __init__(self, own: LocalHost, manifest: Manifest) -> None:
        assert manifest.step_id not in own.being_written
        own.being_written.add(manifest.step_id)
        self.directory = own.disk.step_directory(own.slot, manifest.step_id)
        self.manifest = manifest
        self.parts = {(leaf, box): named for leaf, box, named in manifest.rows()}
        self._own = own

    def reserve(self, num_bytes: int, *, taken_bytes: int = 0) -> None:
        """Reserves room for the bytes that will be written.

        Args:
          num_bytes: the total number of bytes to write.
          taken_bytes: the number of these bytes already in the host's `files`.

        Raises:
          CheckpointError: if the bytes do not fit; the writer is then abandoned.
        """
        disk, files = self._own.disk, self._own.files
        with self._abandoned_on_failure():
            # Reserves, then measures: of two processes that do not both fit, at most
            # one finds room.
            there = self.manifest.contents.num_bytes(self.manifest.parts).sum()
            reserved = there + num_bytes - taken_bytes
            storage.write_atomic(self.directory / ram_disk.RESERVED, b"%d" % reserved)
            free = disk.free_bytes()
            if free < 0:
                files.drop_spare()
                free = disk.free_bytes()
            if free < 0:
                bound = disk.limit_bytes and f"limit {disk.limit_bytes} bytes"
                raise errors.CheckpointError(
                    f"step {self.manifest.step_id.step} needs {num_bytes} bytes in"
                    f" {disk.root} ({bound or 'without a limit'}), but only"
                    f" {max(0, free + num_bytes)} are free; raise the limit, enlarge"
                    " the file system, or keep fewer steps"
                )

    def write(
        self,
        captured: Captured,
        files: Mapping[str, bytes] = types.MappingProxyType({}),
    ) -> None:
        """Writes the values of all boxes; afterwards, `captured` may be released.

        Raises:
          CheckpointError: if the values no longer fit or cannot be written; the writer
            is then abandoned.
        """
        leaves = self.manifest.contents.leaves
        numbers = {leaf.path: number for number, leaf in enumerate(leaves)}
        items = [(array, *each) for array in captured.arrays for each in array.boxes]

        # A task per small box would take longer than writing the box.
        shares = [items[first::_NUM_THREADS] for first in range(_NUM_THREADS)]

        def write(share: Sequence[tuple[CapturedLeaf, Box, Values]]) -> None:
            for array, box, values in share:
                values, file = fetched(values), array.files.get(box)
                if file is None:
                    file = self._own.files.take(values.nbytes)
                    target = np.ndarray(box.shape, values.dtype, file.memory)
                    np.copyto(target, values)
                self._place(numbers[array.leaf.path], box, file)

        with self._abandoned_on_failure():
            for path, content in files.items():
                storage.write_atomic(self.directory / path, content)
            with background.pool(_NUM_THREADS, "write") as pool:
                list(pool.map(write, shares))

    def put(
        self,
        number: int,
        box: Box,
        named: bytes,
        read: Callable[[np.ndarray], None],
    ) -> None:
        """Writes a copy of another host's part.

        Args:
          number: the index of the part's leaf.
          box: the part's box.
          named: the part's digest.
          read: a function that takes uint8 memory, fills it with the part's values and
            verifies them.

        Raises:
          CheckpointError: if the copy cannot be written, or if `read` raises it; the
            writer stays usable.
        """
        leaf, files = self.manifest.contents.leaves[number], self._own.files
        num_bytes = leaf.num_bytes(box)
        with self._failing(), contextlib.ExitStack() as stack:
            file = files.take(num_bytes)
            stack.callback(files.discard, file)
            read(file.memory[:num_bytes])
            if leaf.is_file:
                content = file.memory[:num_bytes].data
                storage.write_atomic(self.directory / leaf.path, content)
                self.parts[number, box] = named
            else:
                self._place(number, box, file, named)

    def commit(self, contents: Contents | None = None) -> Manifest:
        """Writes the manifest, which makes everything written part of the step.

        Args:
          contents: the whole step's contents, if they were not fully known at `begin`;
            the arrays must be the same.

        Raises:
          CheckpointError: see `write`.
        """
        contents = contents or self.manifest.contents
        rows = [(*part, named) for part, named in self.parts.items()]
        manifest = dataclasses.replace(
            self.manifest, contents=contents, parts=Parts.of_rows(rows, contents)
        )
        with self._abandoned_on_failure():
            arrays = {number for number, _ in self.parts} - set(contents.files.values())
            for number in arrays.difference(self.manifest.parts.leaf.tolist()):
                leaf = contents.leaves[number]
                path = f"{layout.leaf_directory(leaf.path)}/{ocdbt.METADATA}"
                storage.write_in_place(self.directory / path, ocdbt.metadata_file(leaf))
            write_manifest(self.directory, manifest)
        storage.remove(self.directory / ram_disk.RESERVED)
        self._own.being_written.discard(self.manifest.step_id)
        return manifest

    def abandon(self) -> None:
        """Removes written files that are not in the manifest."""
        self._own.sweep(self._own.slot, self.manifest.step_id)
        self._own.files.forget(os.fspath(self.directory))
        self._own.being_written.discard(self.manifest.step_id)

    def _place(
        self, number: int, box: Box, file: ChunkFile, named: bytes | None = None
    ) -> None:
        name = layout.part_file(self.manifest.contents.leaves[number], box)
        directory = os.fspath(self.directory)
        self.parts[number, box] = self._own.files.place(file, directory, name, named)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            free = shutil.disk_usage(self._own.disk.root).free
            raise errors.CheckpointError(
                f"step {self.manifest.step_id.step} could not be written to"
                f" {self.directory} ({error}), where {free} bytes were free; free up"
                " space, or keep fewer steps"
            ) from error

    @contextlib.contextmanager
    def _abandoned_on_failure(self) -> Iterator[None]:
        try:
            with self._failing():
                yield
        except errors.CheckpointError:
            self.abandon()
            raise
