"""Upload: each host writes its share of a step to storage, and one host commits it.

A host writes chunks and files in any order, from any number of threads. Every few
seconds, and at the end, it lists the durable parts in its manifest. If an earlier
upload of this save was killed, the parts that any host had listed are not written
again.

    <unfinished>/state/ocdbt.process_<save, host>/   its store: the chunks of `state`
    <unfinished>/data/shards-00000-00063.json.gz     a file of the component `data`
    <unfinished>/manifest-<host id>                  lists what the host has written

When all hosts have finished, one of them turns the upload into an ordinary Orbax
checkpoint: it merges the stores, adds the files that Orbax requires, and then makes the
step visible with a rename or with a last file (see `persistent_root`). If that host is
killed at any point, any host can repeat this. Until the very end, the step does not
exist for this library or for Orbax; then it is complete.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from etils import epath

from elastic_ckpt.core import boxes, clock, errors, storage
from elastic_ckpt.steps.manifest import (
    Contents,
    Holder,
    Host,
    Manifest,
    Parts,
    manifest_name,
)
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.steps.table import StepTable
from elastic_ckpt.tiers.persistent import claims, ocdbt, orbax_view, retries
from elastic_ckpt.tiers.persistent.persistent_root import (
    COMMIT_FILE,
    PersistentRoot,
    commit_text,
    read_manifests,
)

# The minimum pause between manifests, in seconds and as a multiple of the time that the
# last manifest took.
_PROGRESS_SECS = 5.0
_PROGRESS_SHARE = 20


# A part to upload, as `Manifest.rows` lists it: its leaf's index, its box and the
# digest of its values; the caller has verified them.
PartRow = tuple[int, boxes.Box, bytes]


@dataclasses.dataclass(frozen=True, kw_only=True)
class UploadedStep:
    """The step to upload, the same on all hosts."""

    run: str
    step_id: StepId
    contents: Contents

    def store(self, host_id: str) -> str:
        """The name of a host's store for this save."""
        return ocdbt.store_name(host_id, self.step_id.save)


class Upload:
    """One host's side of an upload.

    Args:
      claim: the number of the claimed world; 0 for no world. The world must be the
        latest whenever a file is written to a directory that another launch may share.

    Attributes:
      there: the parts that hosts already uploaded, if an upload was interrupted.
    """

    def __init__(
        self,
        root: PersistentRoot,
        saved: UploadedStep,
        host: Host,
        *,
        claim: int = 0,
    ) -> None:
        self._root, self._saved, self._host = root, saved, host
        # Another launch can write to the same directory only if steps are in place.
        self._claim = claim if root.in_place else 0
        self._directory = root.unfinished(saved.step_id)
        self._context = ocdbt.new_context()
        self._lock = threading.RLock()
        self.there: set[PartRow] = set()
        # The parts that this host has written.
        self._parts: dict[tuple[int, boxes.Box], PartRow] = {}
        self._next_list_secs = clock.monotonic() + _PROGRESS_SECS

    def begin(self) -> None:
        """Prepares the directory, or continues an interrupted upload of this save.

        Raises:
          CheckpointError: if the step is already committed, or storage fails
            permanently.
        """
        retries.call(f"preparing an upload to {self._directory}", self._begin)

    def _begin(self) -> None:
        saved, root = self._saved, self._root
        if not root.is_pending(saved.step_id, run=saved.run):
            raise errors.CheckpointError(
                f"step {saved.step_id.step} in {root.path} is already committed by this"
                f" save, {saved.step_id.save!r}; nothing is left to upload"
            )
        for each in _listed(self._directory, saved, [self._host.id]):
            self.there.update(each.rows())
            if each.host.id == self._host.id:
                self._parts = {part[:2]: part for part in each.rows()}
        # When a store continues, remove an index that a killed process was about to
        # rename: TensorStore writes the next one over its first bytes, and if that is
        # shorter, the store becomes unreadable.
        stale = ocdbt.NEW_MANIFEST if self._parts else ""
        for name in {leaf.checkpointable for leaf in saved.contents.arrays}:
            store = self._directory / name / saved.store(self._host.id)
            storage.remove(store / stale)
        # The upload is visible from now on, even if this host is killed.
        storage.make_directory(self._directory)

    def write(self, parts: Sequence[PartRow], values: Sequence[np.ndarray]) -> None:
        """Writes parts durably, with all chunks in one commit of the host's store.

        A commit takes as long for one chunk as for thousands of small ones.

        Args:
          parts: parts of any leaves.
          values: the values of each part, which must not change during the call.

        Raises:
          CheckpointError: if storage fails permanently or for longer than the retries.
          ReplacedError: if another launch of the run has claimed it since.
        """
        stored: dict[str, list[ocdbt.Chunk]] = {}
        for (number, box, _), each in zip(parts, values, strict=True):
            leaf = self._saved.contents.leaves[number]
            if leaf.is_file:
                self._put(leaf.path, each.tobytes())
            else:
                chunk = ocdbt.Chunk(leaf=leaf, box=box, values=each)
                stored.setdefault(leaf.checkpointable, []).append(chunk)
        for name, chunks in stored.items():
            path = self._directory / name / self._saved.store(self._host.id)
            retries.call(
                f"writing {len(chunks)} chunks to {path}",
                functools.partial(ocdbt.write, path, chunks, self._context),
            )
        with self._lock:
            self._parts |= {part[:2]: part for part in parts}
            began_secs = clock.monotonic()
            if began_secs >= self._next_list_secs:
                self.finish()
                secs = clock.monotonic() - began_secs
                pause_secs = max(_PROGRESS_SECS, _PROGRESS_SHARE * secs)
                self._next_list_secs = clock.monotonic() + pause_secs

    def finish(self) -> Manifest:
        """Writes the manifest of all written parts and returns it.

        Raises:
          CheckpointError: if storage fails permanently or for longer than the retries.
          ReplacedError: if another launch of the run has claimed it since.
        """
        saved = self._saved
        with self._lock:
            written = Manifest(
                run=saved.run,
                step_id=saved.step_id,
                contents=saved.contents,
                holders=(Holder(self._host, "persistent"),),
                parts=Parts.of_rows(self._parts.values(), saved.contents),
            )
            self._put(manifest_name(self._host.id), written.to_bytes())
        return written

    def _put(self, name: str, content: bytes) -> None:
        path = self._directory / name

        def put() -> None:
            if self._claim:
                claims.check(self._root.path, self._claim)
            storage.write_atomic(path, content)

        retries.call(f"writing {path}", put)


def _listed(
    directory: epath.Path, saved: UploadedStep, hosts: Collection[str]
) -> list[Manifest]:
    # The manifests of an upload.
    own = saved.step_id, saved.contents
    return [
        each
        for each in read_manifests(
            directory, run=saved.run, step=saved.step_id.step, hosts=hosts
        )
        if isinstance(each, Manifest) and (each.step_id, each.contents) == own
    ]


def commit(
    root: PersistentRoot,
    saved: UploadedStep,
    *,
    hosts: Collection[str],
    orbax_files: Mapping[str, bytes],
    make_way: Callable[[], None] = lambda: None,
) -> None:
    """Commits a step; does nothing if this save of it is already committed.

    Removes files that interrupted uploads left in the step's directory.

    Args:
      root: the directory of the steps.
      saved: the uploaded step.
      hosts: the IDs of the hosts that took part and have finished.
      orbax_files: Orbax's files, by path in the step (`checkpoint.orbax_format`).
      make_way: a function that is called before the step becomes visible and must move
        older saves away.

    Raises:
      CheckpointError: if the uploads do not make up the whole step, the step was
        committed by another save, or storage fails permanently.
    """
    unfinished, final = root.unfinished(saved.step_id), root.final(saved.step_id.step)
    success = commit_text(final, saved.run, saved.step_id.save)
    # Orbax expects a directory even for a component without files.
    checkpointables = {
        *saved.contents.components,
        *(leaf.checkpointable for leaf in saved.contents.arrays),
        *(name.partition("/")[0] for name in orbax_files if "/" in name),
    }

    def act() -> None:
        if not root.is_pending(saved.step_id, run=saved.run):
            if not root.in_place:
                # A host that missed the commit may have begun to upload again.
                storage.remove(unfinished)
            return
        manifests = _complete(unfinished, saved, hosts)
        _assemble(unfinished, saved, manifests, orbax_files)
        make_way()
        # Orbax commits each checkpointable, then the step.
        for name in sorted(checkpointables):
            storage.write_atomic(unfinished / name / COMMIT_FILE, success)
        storage.write_atomic(unfinished / COMMIT_FILE, success)
        # Over NFS, an attempt may succeed although it reports a failure.
        if not root.in_place and (unfinished.exists() or not final.exists()):
            storage.rename(unfinished, final)

    retries.call(f"committing {unfinished}", act)


def _assemble(
    unfinished: epath.Path,
    saved: UploadedStep,
    manifests: Sequence[Manifest],
    orbax_files: Mapping[str, bytes],
) -> None:
    # Pairs of a checkpointable and a store that contains chunks of it.
    stores = {
        (saved.contents.leaves[number].checkpointable, saved.store(each.host.id))
        for each in manifests
        for number in np.unique(each.parts.leaf)
        if not saved.contents.leaves[number].is_file
    }
    named = {
        *(manifest_name(each.host.id) for each in manifests),
        *saved.contents.files,
        *map("/".join, stores),
    }
    storage.keep_only(unfinished, named)
    for name in sorted({name for name, _ in stores}):
        ocdbt.merge(unfinished / name, [store for of, store in stores if of == name])
    for leaf in saved.contents.arrays:
        if 0 in leaf.shape:
            # This array has no chunks to upload, but Orbax requires its metadata.
            values = np.empty(leaf.shape, leaf.dtype)
            whole = ocdbt.Chunk(leaf=leaf, box=boxes.whole(leaf.shape), values=values)
            ocdbt.write(unfinished / leaf.checkpointable, [whole], ocdbt.new_context())
    digests = orbax_view.to_bytes(orbax_files)
    for name, content in {**orbax_files, orbax_view.FILE: digests}.items():
        storage.write_atomic(unfinished / name, content)


def _complete(
    unfinished: epath.Path, saved: UploadedStep, hosts: Collection[str]
) -> list[Manifest]:
    # Includes hosts of earlier worlds, which may have uploaded parts that others lack.
    manifests = _listed(unfinished, saved, hosts)
    problem = "no host has uploaded any of it"
    if manifests:
        table = StepTable(manifests)
        if table.complete:
            return manifests
        problem = table.problem()
        if len(table.diverged):
            # The next upload must start over.
            for each in manifests:
                storage.remove(unfinished / manifest_name(each.host.id))
    raise errors.CheckpointError(
        f"{unfinished} cannot be committed: {problem}; upload the step again"
    )
