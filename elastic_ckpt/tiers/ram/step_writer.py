"""The writer of one save of a step in a RAM disk: files first, the manifest last.

A writer that continues a step with a manifest adds copies from peers to it: until it
commits, the existing manifest stays valid.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from etils import epath

from elastic_ckpt.core import background, boxes, checked_json, digest, errors, storage
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.steps import layout, manifest_file
from elastic_ckpt.steps.manifest import Contents, Manifest, Parts
from elastic_ckpt.tiers import preserved
from elastic_ckpt.tiers.captured import Captured, CapturedLeaf, Values, fetched
from elastic_ckpt.tiers.ram import ram_disk
from elastic_ckpt.tiers.ram.chunk_files import LEAST_BYTES, ChunkFiles, ChunkWriter

# As many chunks are written, and are in host memory that devices send, at a time.
_NUM_THREADS = max(1, min(8, len(os.sched_getaffinity(0)) // 2))


class WrittenFile(NamedTuple):
    """A file that a component wrote.

    Attributes:
      path: relative to the step's directory.
      num_bytes: its length.
      digest: `core.digest.values_digest` of its bytes, 16 bytes.
    """

    path: str
    num_bytes: int
    digest: bytes


class StepWriter:
    """Writes what a host holds of one save of a step; any thread may put copies.

    It ends with `commit` or `abandon`. A write that fails abandons it. If it is one of
    several copies, `commit` does so: other threads may still be writing.

    Attributes:
      directory: of the step.
      manifest: of what was there when it began.
      parts: what is there by now: the digests of parts, by leaf and box.
    """

    def __init__(
        self,
        directory: epath.Path,
        manifest: Manifest,
        *,
        files: ChunkFiles,
        ended: Callable[[], None],
    ) -> None:
        """Continues with the parts in `manifest`; calls `ended` once, at the end."""
        self.directory = directory
        self.manifest = manifest
        self._ended = ended
        self._chunk_files = files
        self._chunks = ChunkWriter(directory, files)
        self.parts = {(leaf, box): named for leaf, box, named in manifest.rows()}
        # Why a copy could not be written.
        self._failure: errors.CheckpointError | None = None

    def write(self, captured: Captured) -> None:
        """Writes the values of all boxes; `captured` may be released then.

        Raises:
          CheckpointError: if they do not fit any more or cannot be written; nothing of
            the writer is left then.
        """
        leaves = self.manifest.contents.leaves
        numbers = {leaf.path: number for number, leaf in enumerate(leaves)}
        items = [(part, *each) for part in captured.parts for each in part.boxes]

        def write(item: tuple[CapturedLeaf, Box, Values]) -> None:
            part, box, values = item
            number, file = numbers[part.leaf.path], part.files.get(box)
            named = self._chunks.write(part.leaf, box, fetched(values), file)
            self.parts[number, box] = named

        with self._abandoned_on_failure(), contextlib.ExitStack() as pools:
            for part in captured.parts:
                if part.boxes:
                    self._chunks.describe(part.leaf)
            each = map
            if _NUM_THREADS > 1:
                pool = background.pool(_NUM_THREADS, "write")
                each = pools.enter_context(pool).map
            list(each(write, items))

    def put(
        self,
        number: int,
        box: Box,
        named: bytes,
        read: Callable[[np.ndarray], None],
    ) -> None:
        """Writes a copy of another host's part, in the place that it has here.

        Args:
          number: of its leaf.
          box: of the part.
          named: its digest.
          read: fills memory, uint8, with its values, and compares their digest.

        Raises:
          CheckpointError: if it cannot be written; then no more copies are taken, and
            `commit` fails. Or of `read`, after which the writer goes on.
        """
        if self._failure is not None:
            raise self._failure
        leaf = self.manifest.contents.leaves[number]
        num_bytes, file = leaf.num_bytes(box), None
        if num_bytes >= LEAST_BYTES and not leaf.is_file:
            with self._failing():
                file = self._chunk_files.take(num_bytes)
        memory = np.empty(num_bytes, np.uint8) if file is None else file.memory
        try:
            read(memory[:num_bytes])
            with self._failing():
                if leaf.is_file:
                    storage.write_atomic(self.directory / leaf.path, memory.data)
                else:
                    self._chunks.describe(leaf)
                    values = np.ndarray(box.shape, np.dtype(leaf.dtype), memory)
                    self._chunks.write(leaf, box, values, file, named=named)
                self.parts[number, box] = named
        finally:
            if file is not None:
                self._chunk_files.discard(file)

    def put_written(self, contents: Mapping[str, bytes]) -> None:
        """Writes files that components have written elsewhere, by path.

        Raises:
          CheckpointError: as `write`.
        """
        with self._abandoned_on_failure():
            for path, content in contents.items():
                storage.write_atomic(self.directory / path, content)

    def commit(
        self,
        files: Mapping[str, bytes] = types.MappingProxyType({}),
        *,
        contents: Contents | None = None,
    ) -> Manifest:
        """Writes the manifest, which makes all that was written a part of the step.

        Args:
          files: what components wrote here, by path, with their digests; copies are
            known already.
          contents: of the whole step, where not all of them were known when it was
            begun; the arrays are the same.

        Raises:
          CheckpointError: as `write`; or if a copy could not be written.
        """
        if self._failure is not None:
            self.abandon()
            raise self._failure
        contents = contents or self.manifest.contents
        for path, named in files.items():
            number = contents.files[path]
            whole = boxes.whole(contents.leaves[number].shape)
            self.parts[number, whole] = named
        rows = [(*part, named) for part, named in self.parts.items()]
        manifest = dataclasses.replace(
            self.manifest, contents=contents, parts=Parts.of_rows(rows, contents)
        )
        with self._abandoned_on_failure():
            manifest_file.write(self.directory, manifest)
        storage.remove(self.directory / ram_disk.RESERVED)
        self._ended()
        return manifest

    def abandon(self) -> None:
        """Removes what was written and is in no manifest."""
        sweep(self.directory / manifest_file.file_name(self.manifest.host.id))
        self._chunk_files.forget_removed(os.fspath(self.directory))
        self._ended()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._failure = self._not_written(error)
            raise self._failure from error

    @contextlib.contextmanager
    def _abandoned_on_failure(self) -> Iterator[None]:
        try:
            yield
        except errors.CheckpointError:
            self.abandon()
            raise
        except OSError as error:
            failure = self._not_written(error)
            self.abandon()
            raise failure from error

    def _not_written(self, error: OSError) -> errors.CheckpointError:
        system = os.statvfs(self.directory)
        free = system.f_bavail * system.f_frsize
        return errors.CheckpointError(
            f"step {self.manifest.step_id.step} could not be written to"
            f" {self.directory} ({error}), where {free} bytes were free; give it more"
            " space, or keep fewer steps"
        )


def written_files(root: epath.Path, components: Iterable[str]) -> list[WrittenFile]:
    """The files that components have written by now, durable, ordered by path.

    Args:
      root: of the step; paths are relative to it.
      components: the names of their directories.
    """
    written = []
    for place in components:
        storage.sync_tree(root / place)
        for directory, _, names in os.walk(root / place):
            for name in names:
                path = os.path.join(directory, name)
                content = np.fromfile(path, np.uint8)
                written.append(
                    WrittenFile(
                        path=os.path.relpath(path, root),
                        num_bytes=content.nbytes,
                        digest=digest.values_digest(content),
                    )
                )
    return sorted(written)


def sweep(path: epath.Path) -> list[str]:
    """Removes the files of a step that the manifest at `path` does not name.

    Without a readable manifest these are all of them. Files that a program of a later
    version wrote stay.

    Returns:
      The paths that were removed.
    """
    directory = path.parent
    try:
        manifest = Manifest.parse(path.read_bytes())
    except checked_json.LaterVersionError:
        return []
    except (FileNotFoundError, checked_json.UnreadableError):
        # After a crash between the two it is still a leftover.
        storage.remove(path)
        storage.remove(directory)
        return [os.fspath(directory)]
    leaves = manifest.contents.leaves
    named = {layout.part_file(leaves[leaf], box) for leaf, box, _ in manifest.rows()}
    named |= {path.name, preserved.FILE}
    removed = []
    for parent, _, files in os.walk(directory):
        for file in files:
            entry = os.path.join(parent, file)
            is_named = os.path.relpath(entry, directory) in named
            if not is_named and file != "zarr.json":
                storage.remove(entry)
                removed.append(entry)
    return removed
