"""The writer of one save of a step in a RAM disk: files first, the manifest last.

A writer that continues a step with a manifest adds copies from peers to it: until it
commits, the existing manifest stays valid.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from elastic_ckpt.core import background, checked_json, digest, errors, storage
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.steps import layout, manifest_file
from elastic_ckpt.steps.manifest import (
    ComponentFile,
    Contents,
    Fragment,
    Fragments,
    Manifest,
)
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
      digest: `core.digest.values_digest` of its bytes, 16 bytes.
      stored_bytes: its length.
    """

    path: str
    digest: bytes
    stored_bytes: int


class StepWriter:
    """Writes what a host holds of one save of a step; any thread may put copies.

    It ends with `commit` or `abandon`. A write that fails abandons it. If it is one of
    several copies, `commit` does so: other threads may still be writing.

    Attributes:
      directory: of the step.
      manifest: of what was there when it began.
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
        contents, listed = manifest.contents, manifest.fragments
        rows = [listed.row(n, contents=contents) for n in range(len(listed))]
        self._fragments = {(each.leaf, each.box): each for each in rows}
        self._files = {each.path: each for each in manifest.component_files}
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

        def write(item: tuple[CapturedLeaf, Box, Values]) -> Fragment:
            part, box, values = item
            number, file = numbers[part.leaf.path], part.files.get(box)
            return self._chunks.write(number, part.leaf, box, fetched(values), file)

        with self._abandoned_on_failure(), contextlib.ExitStack() as pools:
            for part in captured.parts:
                if part.boxes:
                    self._chunks.describe(part.leaf, part.chunk)
            each = map
            if _NUM_THREADS > 1:
                pool = background.pool(_NUM_THREADS, "write")
                each = pools.enter_context(pool).map
            self._list(*each(write, items))

    def put(self, fragment: Fragment, read: Callable[[np.ndarray], None]) -> None:
        """Writes a copy of another host's fragment, in the place that it has here.

        Args:
          fragment: as that host's manifest lists it: a whole chunk.
          read: fills memory, uint8, with its values, and compares their digest.

        Raises:
          CheckpointError: if it cannot be written; then no more copies are taken, and
            `commit` fails. Or of `read`, after which the writer goes on.
        """
        self._check_copies()
        leaf = self.manifest.contents.leaves[fragment.leaf]
        box, dtype = fragment.box, np.dtype(leaf.dtype)
        num_bytes, file = layout.num_bytes(box, leaf.dtype), None
        if num_bytes >= LEAST_BYTES:
            with self._failing():
                file = self._chunk_files.take(num_bytes)
        memory = np.empty(num_bytes, np.uint8) if file is None else file.memory
        try:
            read(memory[:num_bytes])
            with self._failing():
                self._chunks.describe(leaf, box.shape)
                values = np.ndarray(box.shape, dtype, memory)
                written = self._chunks.write(
                    fragment.leaf, leaf, box, values, file, named=fragment.digest
                )
                self._list(written)
        finally:
            if file is not None:
                self._chunk_files.discard(file)

    def put_file(self, file: ComponentFile, content: bytes) -> None:
        """Writes a copy of another host's file, whose digest the caller has compared.

        Raises:
          CheckpointError: as `put`.
        """
        self._check_copies()
        with self._failing():
            storage.write_atomic(self.directory / file.path, content)
        self._files[file.path] = file

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
        component_files: Sequence[ComponentFile] = (),
        *,
        contents: Contents | None = None,
    ) -> Manifest:
        """Writes the manifest, which makes all that was written a part of the step.

        Args:
          component_files: what components wrote here; copies are known already.
          contents: of the whole step, where not all of them were known when it was
            begun; the leaves are the same.

        Raises:
          CheckpointError: as `write`; or if a copy could not be written.
        """
        if self._failure is not None:
            self.abandon()
            raise self._failure
        self._files |= {file.path: file for file in component_files}
        manifest = dataclasses.replace(
            self.manifest,
            contents=contents or self.manifest.contents,
            fragments=Fragments.from_rows(
                self._fragments.values(), contents=self.manifest.contents
            ),
            component_files=tuple(self._files[path] for path in sorted(self._files)),
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

    def _list(self, *fragments: Fragment) -> None:
        self._fragments |= {(each.leaf, each.box): each for each in fragments}

    def _check_copies(self) -> None:
        if self._failure is not None:
            raise self._failure

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
            f"step {self.manifest.step} could not be written to {self.directory}"
            f" ({error}), where {free} bytes were free; give it more space, or keep"
            " fewer steps"
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
                        digest=digest.values_digest(content),
                        stored_bytes=content.nbytes,
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
        manifest = manifest_file.parse(path.read_bytes())
    except checked_json.LaterVersionError:
        return []
    except (FileNotFoundError, checked_json.UnreadableError):
        # After a crash between the two it is still a leftover.
        storage.remove(path)
        storage.remove(directory)
        return [os.fspath(directory)]
    named = {path.name, preserved.FILE, *manifest.fragments.files}
    named |= {file.path for file in manifest.component_files}
    removed = []
    for parent, _, files in os.walk(directory):
        for file in files:
            entry = os.path.join(parent, file)
            is_named = os.path.relpath(entry, directory) in named
            if not is_named and file != "zarr.json":
                storage.remove(entry)
                removed.append(entry)
    return removed
