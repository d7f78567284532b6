"""Upload: what one host writes of a step to persistent storage, from its memory.

It writes chunks and files in any order, from any number of threads, and its manifest
last. When all hosts have done that, one of them commits the step (`commit`). A host
that was killed begins anew, with or without the others, as often as need be.

    <unfinished>/state/ocdbt.process_<host>/   its store: the chunks of `state`
    <unfinished>/data/shards-00000-00063.json  a file of the component `data`
    <unfinished>/manifest-<host id>.json       what it wrote of all this
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping

import numpy as np
import tensorstore as ts

from elastic_ckpt.core import boxes, errors, storage
from elastic_ckpt.tiers import layout, manifest_file
from elastic_ckpt.tiers.manifest import (
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
    """What is uploaded, the same at all hosts.

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


class Upload:
    """One host's part of an upload.

    Args:
      root: of the steps.
      saved: what is uploaded.
      host: who uploads.
      retries: how long storage is waited for, and who hears of it.
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
        self._open: dict[int, ts.TensorStore] = {}
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

    def write_chunk(
        self, leaf: int, box: boxes.Box, values: np.ndarray, *, digest: bytes
    ) -> Fragment:
        """Writes a chunk, durably.

        Each is a commit of the host's store, of as many chunks as are written at the
        same time: small ones want many threads.

        Args:
          leaf: its number in the contents.
          box: a chunk of the leaf.
          values: of the leaf's dtype and the box's shape.
          digest: of the values, which the caller has verified.

        Raises:
          CheckpointError: if storage fails for good, or longer than is waited.
        """
        described = self._saved.contents.leaves[leaf]
        array = self._saved.arrays[described.path]
        place = f"{array.checkpointable}/{self._store}//{array.key(box)}"
        self._retries.call(
            f"writing {self._directory}/{place}",
            lambda: ocdbt.write(self._array(leaf), box, values),
        )
        fragment = Fragment(
            leaf=leaf,
            box=box,
            digest=digest,
            file=place,
            offset=0,
            stored_bytes=layout.num_bytes(box, described.dtype),
        )
        with self._lock:
            self._fragments[fragment] = None
        return fragment

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
            fragments=Fragments.of(self._fragments, contents=saved.contents),
            component_files=tuple(self._files),
        )
        self._retries.call(
            f"writing {self._manifest}",
            lambda: manifest_file.write(self._directory, manifest),
        )
        return manifest

    def _create_empty_arrays(self) -> None:
        # They have no chunks, and Orbax wants to find them as it does others.
        leaves = self._saved.contents.leaves
        arrays = [self._saved.arrays[leaf.path] for leaf in leaves]
        with self._lock:
            stores = {arrays[each.leaf].checkpointable for each in self._fragments}
        for number, leaf in enumerate(leaves):
            if 0 in leaf.shape and arrays[number].checkpointable in stores:
                self._retries.call(
                    f"creating {leaf.path} in {self._directory}",
                    lambda number=number: self._array(number),
                )

    def _array(self, leaf: int) -> ts.TensorStore:
        with self._lock:
            if leaf not in self._open:
                described = self._saved.contents.leaves[leaf]
                array = self._saved.arrays[described.path]
                store = self._directory / array.checkpointable / self._store
                self._open[leaf] = ocdbt.open_array(
                    store, described, array, self._context
                )
            return self._open[leaf]
