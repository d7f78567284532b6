"""The local tier: the steps that one process holds on its machine's RAM disk.

Each process has a directory, a slot, that it alone writes; it reads all slots of the
machine. Each step is written into a separate directory and exists when its manifest is
there (`step_writer`). So a crash leaves directories without a manifest, and files that
no manifest names, which `clean` removes.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Iterator, Mapping

from elastic_ckpt.core import checked_json, errors, storage
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.steps import layout, retention
from elastic_ckpt.steps.line import Line
from elastic_ckpt.steps.manifest import (
    Contents,
    Holder,
    Host,
    Leaf,
    Manifest,
    Parts,
)
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.ram import ram_disk, step_writer
from elastic_ckpt.tiers.ram.chunk_files import ChunkFiles


class LocalHost:
    """One process's part of the RAM disk of its machine, locked until it is closed.

    Attributes:
      disk: of the machine.
      slot: of this process.
      host: this process, as manifests name it.
      files: of chunks, mapped, that are in no step yet.
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

        Args:
          disk: of the machine.
          slot: that no other process of the machine has.
          domains: the failure domains that the process is in, by kind.
          number: of the process; for people only.

        Raises:
          RunError: if a live process has the slot.
        """
        self.disk = disk
        self.host = Host(id=disk.host_id(slot), number=number, domains=domains)
        self.slot = slot
        self._lock = threading.Lock()
        self._being_written: set[StepId] = set()
        self._held = contextlib.ExitStack()
        self._held.enter_context(self._locked(slot))
        spare = disk.host_directory(slot) / ram_disk.SPARE
        storage.remove(spare)
        self.files = ChunkFiles(spare)

    def close(self) -> None:
        """Frees the slot; the steps in it stay."""
        self.files.close()
        self._held.close()

    @property
    def being_written(self) -> frozenset[StepId]:
        """The steps and saves that are being written."""
        with self._lock:
            return frozenset(self._being_written)

    def held(self) -> list[StepId]:
        """The steps and saves that are committed, ascending."""
        return self.disk.committed(self.slot)

    def retained(self) -> list[retention.HeldStep]:
        """The committed saves as retention requires them, from the manifests."""
        retained = []
        for each in self.held():
            contents, complete = None, False
            try:
                contents = self.disk.manifest(self.slot, each).contents
                complete = True
            except (checked_json.LaterVersionError, OSError):
                complete = None
            except errors.CheckpointError:
                pass
            retained.append(
                retention.HeldStep.from_contents(each, contents, complete=complete)
            )
        return retained

    def begin(
        self, step_id: StepId, contents: Contents, *, num_bytes: int | None
    ) -> step_writer.StepWriter:
        """A writer for what this process holds of a step; leftovers of it are removed.

        Args:
          step_id: the step.
          contents: of the whole step.
          num_bytes: of what will be written, all in all; None leaves it to `reserve`,
            which takes its time.

        Raises:
          CheckpointError: if it does not fit, or is committed already.
        """
        if self.disk.manifest_path(self.slot, step_id).exists():
            raise errors.CheckpointError(
                f"step {step_id.step}, save {step_id.save!r}, is in"
                f" {self.disk.step_directory(self.slot, step_id)} already; remove"
                " it, or save under another name"
            )
        storage.remove(self.disk.step_directory(self.slot, step_id))
        empty = self._empty(step_id, contents)
        return self._writer(empty, num_bytes=num_bytes)

    def copy_writer(
        self, step_id: StepId, contents: Contents, *, num_bytes: int
    ) -> step_writer.StepWriter:
        """A writer for copies from peers, beside what is committed here of the step.

        Args:
          step_id: the step.
          contents: of the whole step.
          num_bytes: of what will be added, all in all.

        Raises:
          CheckpointError: if it does not fit.
        """
        try:
            present = self.disk.manifest(self.slot, step_id)
        except errors.CheckpointError:
            # It is missing or damaged, so its files cannot be read.
            self.remove(step_id)
            present = self._empty(step_id, contents)
        return self._writer(present, num_bytes=num_bytes)

    def put_right(self, step_id: StepId, leaf: Leaf, box: Box, content: bytes) -> None:
        """Writes a bad part of a step anew; the caller has compared the digest."""
        directory = self.disk.step_directory(self.slot, step_id)
        storage.write_atomic(directory / layout.part_file(leaf, box), content)

    def remove(self, step_id: StepId) -> None:
        """Removes a save of a step that is not being written, its manifest first."""
        assert step_id not in self.being_written
        # After a crash the rest has no manifest, so it counts as a leftover.
        directory = self.disk.step_directory(self.slot, step_id)
        storage.remove(self.disk.manifest_path(self.slot, step_id))
        self.files.recycle(os.fspath(directory))
        storage.remove(directory)

    def remove_idle(
        self,
        line: Line,
        *,
        before: int,
        kept: Collection[int],
        preserved: Collection[int],
    ) -> None:
        """Removes old steps from the slots of this machine whose process is gone.

        Args:
          line: steps that it abandons are removed too.
          before: the first step that stays.
          kept: steps before that which stay, unless the line abandons them.
          preserved: steps that stay whatever they are.
        """
        for slot in self._idle_slots():
            for each in self.disk.saves(slot):
                is_old = each.step < before and each.step not in kept
                if (is_old or line.abandons(each)) and each.step not in preserved:
                    self._remove_of_idle(slot, each)

    def remove_step_of_idle(self, step: int) -> bool:
        """Removes a step from such slots, too; returns whether one had it."""
        was_there = False
        for slot in self._idle_slots():
            for each in self.disk.saves(slot):
                if each.step == step:
                    self._remove_of_idle(slot, each)
                    was_there = True
        return was_there

    def _remove_of_idle(self, slot: int, step_id: StepId) -> None:
        storage.remove(self.disk.manifest_path(slot, step_id))
        storage.remove(self.disk.step_directory(slot, step_id))

    def clean(self) -> list[str]:
        """Removes leftovers of dead processes of the machine.

        In all slots whose process is dead, and in this one, these are steps without a
        readable manifest, files that no manifest names, files that a restore unpacked,
        and messages. Steps that are being written stay.

        Returns:
          The paths that were removed.
        """
        removed = self._clean(self.slot)
        for slot in self._idle_slots():
            removed += self._clean(slot)
        return removed

    def _idle_slots(self) -> Iterator[int]:
        # The slots of this machine whose process is gone, each locked meanwhile.
        for slot in self.disk.slots():
            if slot != self.slot:
                with contextlib.suppress(errors.RunError), self._locked(slot):
                    yield slot

    def _clean(self, slot: int) -> list[str]:
        removed = []
        leftovers = [ram_disk.RESTORED, ram_disk.MESSAGES]
        if slot != self.slot:
            leftovers.append(ram_disk.SPARE)
        for name in leftovers:
            leftover = self.disk.host_directory(slot) / name
            if leftover.exists():
                storage.remove(leftover)
                removed.append(os.fspath(leftover))
        for each in self.disk.saves(slot):
            if slot != self.slot or each not in self.being_written:
                path = self.disk.manifest_path(slot, each)
                removed += step_writer.sweep(path)
        return removed

    def _empty(self, step_id: StepId, contents: Contents) -> Manifest:
        return Manifest(
            run=self.disk.run,
            step_id=step_id,
            contents=contents,
            holders=(Holder(self.host),),
            parts=Parts.of_rows([], contents),
        )

    def _writer(
        self, manifest: Manifest, *, num_bytes: int | None
    ) -> step_writer.StepWriter:
        key = manifest.step_id

        def end() -> None:
            with self._lock:
                self._being_written.discard(key)

        with self._lock:
            assert key not in self._being_written
            self._being_written.add(key)
        directory = self.disk.step_directory(self.slot, key)
        writer = step_writer.StepWriter(
            directory, manifest, files=self.files, ended=end
        )
        if num_bytes is not None:
            self.reserve(writer, num_bytes)
        return writer

    def reserve(
        self, writer: step_writer.StepWriter, num_bytes: int, *, taken_bytes: int = 0
    ) -> None:
        """Makes sure that there is room for what will be written.

        Args:
          writer: of this process; abandoned if there is none.
          num_bytes: of what will be written, all in all.
          taken_bytes: of these, those in `files` already.

        Raises:
          CheckpointError: if it does not fit.
        """
        try:
            self._reserve(writer.manifest, num_bytes, taken_bytes)
        except BaseException:
            writer.abandon()
            raise

    def _reserve(self, manifest: Manifest, num_bytes: int, taken_bytes: int) -> None:
        # Reserved before it is measured: two processes that start together and do not
        # both fit cannot both find room.
        directory = self.disk.step_directory(self.slot, manifest.step_id)
        try:
            reserved = manifest.num_bytes + num_bytes - taken_bytes
            storage.write_atomic(directory / ram_disk.RESERVED, b"%d" % reserved)
            free = self.disk.free_bytes()
            if free < 0 and self.files.drop_spare():
                free = self.disk.free_bytes()
        except OSError:
            # Not even that fits.
            free = -num_bytes
        if free < 0:
            limit = self.disk.limit_bytes
            bound = "without a limit" if limit is None else f"limit {limit} bytes"
            raise errors.CheckpointError(
                f"step {manifest.step_id.step} needs {num_bytes} bytes in"
                f" {self.disk.root} ({bound}), and {max(0, free + num_bytes)} are free;"
                " raise the limit or the size of the file system, or keep fewer steps"
            )

    def _locked(self, slot: int) -> contextlib.AbstractContextManager[None]:
        return storage.exclusive_lock(self.disk.host_directory(slot) / "lock")
