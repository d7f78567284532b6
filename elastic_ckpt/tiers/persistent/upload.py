"""Upload: one host's part of a step, written from its memory to persistent storage.

The host writes chunks and files in any order, from any number of threads, and its
manifest last. When all hosts have done that, one of them commits the step (`commit`).
Every few seconds it also notes what is durable so far. An upload that was killed is
continued from these notes, by the same or by other hosts.

    <unfinished>/state/ocdbt.process_<host>/   its store: the chunks of `state`
    <unfinished>/data/shards-00000-00063.json  a file of the component `data`
    <unfinished>/manifest-<host id>.json       what it wrote of all this
    <unfinished>/progress-<host id>.json       the same, as long as it is not finished
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np
from etils import epath

from elastic_ckpt.core import boxes, clock, errors, storage
from elastic_ckpt.steps import layout, manifest_file
from elastic_ckpt.steps.manifest import (
    ComponentFile,
    Contents,
    Fragment,
    Fragments,
    Host,
    Manifest,
)
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.persistent import claims, ocdbt, progress
from elastic_ckpt.tiers.persistent.persistent_root import PersistentRoot
from elastic_ckpt.tiers.persistent.progress import Part
from elastic_ckpt.tiers.persistent.retries import PATIENT, Retries

# The least time between two manifests, and how many times what the last one took.
_PROGRESS_SECS = 5.0
_PROGRESS_SHARE = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class UploadedStep:
    """The step to upload, the same on all hosts.

    Attributes:
      run: the identity of the run.
      step_id: the step.
      contents: of the whole step.
      arrays: of each leaf, by its path, where Orbax looks for it
        (`checkpoint.orbax_format.stored_arrays`).
    """

    run: str
    step_id: StepId
    contents: Contents
    arrays: Mapping[str, ocdbt.StoredArray]


class Chunk(NamedTuple):
    """A chunk to upload.

    Attributes:
      leaf: the number of its leaf in the contents.
      box: of the chunk.
      values: of the leaf's dtype and the box's shape.
      digest: of the values, which the caller has verified.
    """

    leaf: int
    box: boxes.Box
    values: np.ndarray
    digest: bytes


class Upload:
    """One host's part of an upload.

    Args:
      root: of the steps.
      saved: what is uploaded.
      host: that uploads.
      retries: how long to wait for storage, and the callback for failures.

    Attributes:
      is_continued: whether an upload of this save was cut short before `begin`.
    """

    def __init__(
        self,
        root: PersistentRoot,
        saved: UploadedStep,
        host: Host,
        *,
        retries: Retries = PATIENT,
    ) -> None:
        self.is_continued = False
        self._root = root
        self._saved = saved
        self._host = host
        self._retries = retries
        self._directory = root.unfinished(saved.step_id)
        self._manifest = self._directory / manifest_file.file_name(host.id)
        self._progress = self._directory / progress.file_name(host.id)
        self._store = ocdbt.store_name(host.id, saved.step_id.save)
        self._context = ocdbt.new_context()
        self._lock = threading.Lock()
        # What this host has written, and what other hosts wrote before, in an upload
        # cut short.
        self._parts: dict[progress.Place, progress.Listed] = {}
        self._others: set[Part] = set()
        self._noting = threading.Lock()
        self._next_note_secs = 0.0
        # The claim of the world that writes.
        self._claim: claims.Claim | None = None

    def begin(self, held: Callable[[], Set[Part]] | None = None) -> None:
        """Makes room, or continues an upload of this save that was cut short.

        Args:
          held: returns the parts of the step; other parts in storage are of no use. By
            default what this host wrote before is removed.

        Raises:
          CheckpointError: if the step is committed already, or storage fails for good.
        """
        saved = self._saved
        if not self._retries.call(
            f"looking for step {saved.step_id.step} in {self._root.path}",
            lambda: self._root.is_pending(saved.step_id, run=saved.run),
        ):
            raise errors.CheckpointError(
                f"step {saved.step_id.step} in {self._root.path} is committed already,"
                f" by this save {saved.step_id.save!r}; nothing is left to upload"
            )
        if self._root.in_place:
            self._claim = claims.newest(self._root.path)
        if held is not None:
            self._retries.call(
                f"looking for an upload in {self._directory}",
                lambda: self._continue(held),
            )
        stores = {array.checkpointable for array in saved.arrays.values()}
        old = [self._directory / s / self._store for s in stores]
        if self._parts:
            for store in old:
                self._retries.call(
                    f"continuing {store}",
                    lambda store=store: ocdbt.remove_stale_lock(store),
                )
            self._note()
            old = []
        else:
            old.append(self._progress)
        for path in [self._manifest, *old]:
            self._retries.call(
                f"removing {path}", lambda path=path: storage.remove(path)
            )
        self._retries.call(
            f"creating {self._directory}",
            lambda: storage.make_directory(self._directory),
        )
        self._next_note_secs = clock.monotonic() + _PROGRESS_SECS

    def has(self, part: Fragment | ComponentFile) -> bool:
        """Whether a part is in storage already, with these values."""
        own, asked = self._parts.get(progress.place_of(part)), progress.part_of(part)
        is_own = own is not None and progress.part_of(own) == asked
        return is_own or asked in self._others

    def write_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Writes chunks, durably, in one commit of the host's store.

        A commit takes as long for one chunk as for thousands of small ones.

        Args:
          chunks: of any leaves; their values must not change meanwhile.

        Raises:
          CheckpointError: if storage fails for good, or longer than is waited.
        """
        stored: dict[str, list[ocdbt.Chunk]] = {}
        fragments = []
        for leaf, box, values, digest in chunks:
            description = self._saved.contents.leaves[leaf]
            array = self._saved.arrays[description.path]
            stored.setdefault(array.checkpointable, []).append(
                ocdbt.Chunk(leaf=description, array=array, box=box, values=values)
            )
            fragments.append(
                Fragment(
                    leaf=leaf,
                    box=box,
                    digest=digest,
                    file=f"{array.checkpointable}/{self._store}//{array.key(box)}",
                    offset=0,
                    stored_bytes=layout.num_bytes(box, description.dtype),
                )
            )
        for checkpointable, some in stored.items():
            self._write(checkpointable, some)
        self._list(fragments)

    def write_file(self, file: ComponentFile, content: bytes | memoryview) -> None:
        """Writes a file of a component, durably; `content` was verified by the caller.

        Raises:
          CheckpointError: if storage fails for good, or longer than is waited.
          ReplacedError: if another start of the run has written the file since.
        """
        path = self._directory / file.path
        self._retries.call(f"writing {path}", lambda: self._put(path, content))
        self._list([file])

    def finish(self) -> Manifest:
        """Writes the manifest of all that was written, and returns it.

        Raises:
          CheckpointError: if storage fails for good, or longer than is waited.
          ReplacedError: if another start of the run has written it since.
        """
        with self._noting:
            manifest = self._written()
            self._retries.call(
                f"writing {self._manifest}",
                lambda: self._put(self._manifest, manifest_file.to_bytes(manifest)),
            )
        return manifest

    def _put(self, path: epath.Path, content: bytes | memoryview) -> None:
        if not self._root.in_place:
            storage.write_atomic(path, content)
            return
        content = bytes(content)
        if not storage.create(path, content) and path.read_bytes() != content:
            # Another start may write the same step, into the same directory.
            if self._claim is not None:
                claims.check(self._root.path, self._claim)
            storage.write_atomic(path, content)

    def _continue(self, held: Callable[[], Set[Part]]) -> None:
        saved = self._saved
        uploads = progress.read(
            self._directory,
            run=saved.run,
            step_id=saved.step_id,
            contents=saved.contents,
        )
        self.is_continued = bool(uploads)
        parts = held() if uploads else set()
        for manifest in uploads:
            for each in progress.listed(manifest):
                part = progress.part_of(each)
                if part in parts and manifest.host.id == self._host.id:
                    self._parts[progress.place_of(each)] = each
                elif part in parts:
                    self._others.add(part)

    def _list(self, written: Sequence[progress.Listed]) -> None:
        # Notes what is durable now.
        with self._lock:
            self._parts |= {progress.place_of(each): each for each in written}
        is_time = clock.monotonic() >= self._next_note_secs
        if not (is_time and self._noting.acquire(blocking=False)):
            return
        try:
            began_secs = clock.monotonic()
            self._note()
            secs = clock.monotonic() - began_secs
            pause_secs = max(_PROGRESS_SECS, _PROGRESS_SHARE * secs)
            self._next_note_secs = clock.monotonic() + pause_secs
        finally:
            self._noting.release()

    def _note(self) -> None:
        written = self._written()
        self._retries.call(
            f"writing {self._progress}",
            lambda: progress.write(self._directory, written),
        )

    def _written(self) -> Manifest:
        # Lists the parts so far, which are durable.
        saved = self._saved
        with self._lock:
            parts = list(self._parts.values())
        nothing = Manifest(
            run=saved.run,
            step=saved.step_id.step,
            save=saved.step_id.save,
            host=self._host,
            contents=saved.contents,
            fragments=Fragments.from_rows([], contents=saved.contents),
            component_files=(),
        )
        return progress.listing(nothing, parts)

    def _write(self, checkpointable: str, chunks: Sequence[ocdbt.Chunk]) -> None:
        path = self._directory / checkpointable / self._store
        self._retries.call(
            f"writing {len(chunks)} chunks to {path}",
            lambda: ocdbt.write(path, chunks, self._context),
        )
