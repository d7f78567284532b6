"""Upload: one host's part of a step, written from its memory to persistent storage.

The host writes chunks and files in any order, from any number of threads, and its
manifest last. When all hosts have done that, one of them commits the step (`commit`). A
host that was killed begins anew, with or without the others, as often as need be.

    <unfinished>/state/ocdbt.process_<host>/   its store: the chunks of `state`
    <unfinished>/data/shards-00000-00063.json  a file of the component `data`
    <unfinished>/manifest-<host id>.json       what it wrote of all this
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from elastic_ckpt.core import boxes, errors, storage
from elastic_ckpt.manifests import layout, manifest_file
from elastic_ckpt.manifests.manifest import (
    ComponentFile,
    Contents,
    Fragment,
    Fragments,
    Host,
    Manifest,
)
from elastic_ckpt.tiers.persistent import ocdbt
from elastic_ckpt.tiers.persistent.persistent_root import PersistentRoot
from elastic_ckpt.tiers.persistent.retries import PATIENT, Retries


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedStep:
    """The step to upload, the same on all hosts.

    Attributes:
      run: the identity of the run.
      step: the training step.
      save: which save of it.
      contents: of the whole step.
      arrays: of each leaf, by its path, where Orbax looks for it
        (`checkpoint.orbax_format.stored_arrays`).
    """

    run: str
    step: int
    save: str
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
    """

    def __init__(
        self,
        root: PersistentRoot,
        saved: SavedStep,
        host: Host,
        *,
        retries: Retries = PATIENT,
    ) -> None:
        self._root = root
        self._saved = saved
        self._host = host
        self._retries = retries
        self._directory = root.unfinished(saved.step, saved.save)
        self._manifest = self._directory / manifest_file.file_name(host.id)
        self._store = ocdbt.store_name(host.id)
        self._context = ocdbt.new_context()
        self._lock = threading.Lock()
        self._fragments: dict[Fragment, None] = {}
        self._files: dict[ComponentFile, None] = {}

    def begin(self) -> None:
        """Makes room: what this host wrote before, in an upload cut short, is removed.

        Raises:
          CheckpointError: if the step is committed already, or storage fails for good.
        """
        saved = self._saved
        if not self._retries.call(
            f"looking for step {saved.step} in {self._root.path}",
            lambda: self._root.is_pending(saved.step, run=saved.run, save=saved.save),
        ):
            raise errors.CheckpointError(
                f"step {saved.step} in {self._root.path} is committed already, by this"
                f" save {saved.save!r}; nothing is left to upload"
            )
        stores = {array.checkpointable for array in saved.arrays.values()}
        old = [self._manifest, *(self._directory / s / self._store for s in stores)]
        for path in old:
            self._retries.call(
                f"removing {path}", lambda path=path: storage.remove(path)
            )
        self._retries.call(
            f"creating {self._directory}",
            lambda: storage.make_directory(self._directory),
        )

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
        with self._lock:
            self._fragments.update(dict.fromkeys(fragments))

    def write_file(self, file: ComponentFile, content: bytes) -> None:
        """Writes a file of a component, durably; `content` was verified by the caller.

        Raises:
          CheckpointError: if storage fails for good, or longer than is waited.
        """
        path = self._directory / file.path
        self._retries.call(
            f"writing {path}", lambda: storage.write_atomic(path, content)
        )
        with self._lock:
            self._files[file] = None

    def finish(self) -> Manifest:
        """Writes the manifest of all that was written, and returns it.

        Raises:
          CheckpointError: if storage fails for good, or longer than is waited.
        """
        saved = self._saved
        self._create_empty_arrays()
        manifest = Manifest(
            run=saved.run,
            step=saved.step,
            save=saved.save,
            host=self._host,
            contents=saved.contents,
            fragments=Fragments.from_rows(self._fragments, contents=saved.contents),
            component_files=tuple(self._files),
        )
        self._retries.call(
            f"writing {self._manifest}",
            lambda: manifest_file.write(self._directory, manifest),
        )
        return manifest

    def _create_empty_arrays(self) -> None:
        # They have no chunks, but Orbax requires their metadata like that of others.
        leaves = self._saved.contents.leaves
        with self._lock:
            written = {leaves[each.leaf].path for each in self._fragments}
        stores = {self._saved.arrays[path].checkpointable for path in written}
        empty: dict[str, list[ocdbt.Chunk]] = {}
        for leaf in leaves:
            array = self._saved.arrays[leaf.path]
            if 0 in leaf.shape and array.checkpointable in stores:
                empty.setdefault(array.checkpointable, []).append(
                    ocdbt.Chunk(
                        leaf=leaf,
                        array=array,
                        box=boxes.whole(leaf.shape),
                        values=np.empty(leaf.shape, leaf.dtype),
                    )
                )
        for checkpointable, arrays in empty.items():
            self._write(checkpointable, arrays)

    def _write(self, checkpointable: str, chunks: Sequence[ocdbt.Chunk]) -> None:
        store = self._directory / checkpointable / self._store
        several = f" and {len(chunks) - 1} more arrays" if len(chunks) > 1 else ""
        self._retries.call(
            f"writing {chunks[0].leaf.path}{several} to {store}",
            lambda: ocdbt.write(store, chunks, self._context),
        )
