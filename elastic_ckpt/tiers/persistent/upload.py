"""Upload: each host writes its share of a step to storage, and one commits it.

A host writes chunks and files in any order, from any number of threads; every few
seconds, and at the end, it lists in its manifest what is durable. Parts that an upload
of this save which was killed has listed are not written again, whichever host wrote
them.

    <unfinished>/state/ocdbt.process_<save, host>/   its store: the chunks of `state`
    <unfinished>/data/shards-00000-00063.json        a file of the component `data`
    <unfinished>/manifest-<host id>                  what it wrote of all this

When all hosts have finished, one of them makes an ordinary Orbax checkpoint of it: it
merges their stores, adds the files that Orbax requires, and only then makes the step
visible, by a rename or by a last file (see `persistent_root`). Killed at any point it
can be repeated, by any host: until the very end the step does not exist, for us or for
Orbax, and from then on it is whole.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from elastic_ckpt.core import boxes, checked_json, clock, errors, storage
from elastic_ckpt.steps.manifest import (
    Contents,
    Holder,
    Host,
    Manifest,
    Parts,
    is_manifest_name,
    manifest_name,
)
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.steps.table import StepTable
from elastic_ckpt.tiers.persistent import claims, ocdbt, orbax_view
from elastic_ckpt.tiers.persistent.persistent_root import (
    COMMIT_FILE,
    PersistentRoot,
    commit_text,
)
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
      stores: the save in the names of the hosts' stores; by default that of the step.
    """

    run: str
    step_id: StepId
    contents: Contents
    stores: str | None = None

    def store(self, host_id: str) -> str:
        """The name of a host's store."""
        save = self.step_id.save if self.stores is None else self.stores
        return ocdbt.store_name(host_id, save)


class Part(NamedTuple):
    """A part to upload.

    Attributes:
      leaf: the number of its leaf in the contents.
      box: of the part.
      digest: of its values, which the caller has verified.
    """

    leaf: int
    box: boxes.Box
    digest: bytes


class Upload:
    """One host's part of an upload.

    Args:
      root: of the steps.
      saved: what is uploaded.
      host: that uploads.
      retries: how long to wait for storage.
    """

    def __init__(
        self,
        root: PersistentRoot,
        saved: UploadedStep,
        host: Host,
        *,
        retries: Retries = PATIENT,
    ) -> None:
        self._root = root
        self._saved = saved
        self._host = host
        self._retries = retries
        self._directory = root.unfinished(saved.step_id)
        self._manifest = self._directory / manifest_name(host.id)
        self._store = saved.store(host.id)
        self._context = ocdbt.new_context()
        self._lock = threading.Lock()
        # What this host has written, and what any host has, in an upload cut short.
        self._parts: dict[tuple[int, boxes.Box], Part] = {}
        self._there: set[Part] = set()
        self._noting = threading.Lock()
        self._next_note_secs = 0.0
        # The newest claim when the upload began.
        self._claim: claims.Claim | None = None

    def begin(self) -> None:
        """Makes room, or continues an upload of this save that was cut short.

        Raises:
          CheckpointError: if the step is committed already, or storage fails for good.
        """
        saved, root, call = self._saved, self._root, self._retries.call
        if not call(
            f"looking for step {saved.step_id.step} in {root.path}",
            lambda: root.is_pending(saved.step_id, run=saved.run),
        ):
            raise errors.CheckpointError(
                f"step {saved.step_id.step} in {root.path} is committed already, by"
                f" this save {saved.step_id.save!r}; nothing is left to upload"
            )
        if root.in_place:
            self._claim = claims.newest(root.path)
        call(f"looking for an upload in {self._directory}", self._continue)
        clear = ocdbt.remove_stale_lock if self._parts else storage.remove
        for name in {leaf.part for leaf in saved.contents.arrays}:
            store = self._directory / name / self._store
            call(f"clearing {store}", lambda store=store: clear(store))
        call(
            f"creating {self._directory}",
            lambda: storage.make_directory(self._directory),
        )
        self._next_note_secs = clock.monotonic() + _PROGRESS_SECS

    def has(self, part: Part) -> bool:
        """Whether a part is in storage already, with these values."""
        return part in self._there

    def write(self, parts: Sequence[Part], values: Sequence[np.ndarray]) -> None:
        """Writes parts, durably: all chunks in one commit of the host's store.

        A commit takes as long for one chunk as for thousands of small ones.

        Args:
          parts: of any leaves.
          values: of each, as many; they must not change meanwhile.

        Raises:
          CheckpointError: if storage fails for good, or longer than is waited.
          ReplacedError: if another start of the run has written a file since.
        """
        stored: dict[str, list[ocdbt.Chunk]] = {}
        for part, each in zip(parts, values, strict=True):
            leaf = self._saved.contents.leaves[part.leaf]
            if leaf.is_file:
                self._put(self._directory / leaf.path, each.tobytes())
            else:
                chunk = ocdbt.Chunk(leaf=leaf, box=part.box, values=each)
                stored.setdefault(leaf.part, []).append(chunk)
        for name, chunks in stored.items():
            path = self._directory / name / self._store
            self._retries.call(
                f"writing {len(chunks)} chunks to {path}",
                lambda path=path, chunks=chunks: ocdbt.write(
                    path, chunks, self._context
                ),
            )
        self._note(parts)

    def finish(self) -> Manifest:
        """Writes the manifest of all that was written, and returns it.

        Raises:
          CheckpointError: if storage fails for good, or longer than is waited.
          ReplacedError: if another start of the run has written it since.
        """
        with self._noting:
            return self._list()

    def _put(self, path: epath.Path, content: bytes) -> None:
        self._retries.call(f"writing {path}", lambda: self._put_once(path, content))

    def _put_once(self, path: epath.Path, content: bytes) -> None:
        if (
            self._root.in_place
            and not storage.create(path, content)
            and path.read_bytes() != content
        ):
            # Another start may write the same step, into the same directory.
            if self._claim is not None:
                claims.check(self._root.path, self._claim)
            storage.write_atomic(path, content)
        elif not self._root.in_place:
            storage.write_atomic(path, content)

    def _continue(self) -> None:
        for each in listed(self._directory, self._saved):
            parts = {Part(*row) for row in each.rows()}
            self._there |= parts
            if each.host.id == self._host.id:
                self._parts = {(part.leaf, part.box): part for part in parts}

    def _note(self, written: Sequence[Part]) -> None:
        # Lists what is durable now, from time to time.
        with self._lock:
            self._parts |= {(each.leaf, each.box): each for each in written}
        is_time = clock.monotonic() >= self._next_note_secs
        if not (is_time and self._noting.acquire(blocking=False)):
            return
        try:
            began_secs = clock.monotonic()
            self._list()
            secs = clock.monotonic() - began_secs
            pause_secs = max(_PROGRESS_SECS, _PROGRESS_SHARE * secs)
            self._next_note_secs = clock.monotonic() + pause_secs
        finally:
            self._noting.release()

    def _list(self) -> Manifest:
        saved = self._saved
        with self._lock:
            rows = list(self._parts.values())
        written = Manifest(
            run=saved.run,
            step_id=saved.step_id,
            contents=saved.contents,
            holders=(Holder(self._host, "persistent"),),
            parts=Parts.of_rows(rows, saved.contents),
        )
        self._put(self._manifest, written.to_bytes())
        return written


def listed(directory: epath.Path, saved: UploadedStep) -> list[Manifest]:
    """What hosts have written of an upload, by their manifests in its directory.

    Raises:
      OSError: if storage is unavailable, or another of `bucket_clients.failures`.
    """
    if not directory.exists():
        return []
    found = []
    for name in filter(is_manifest_name, sorted(storage.names(directory))):
        try:
            each = Manifest.parse((directory / name).read_bytes())
        except (FileNotFoundError, checked_json.UnreadableError):
            continue
        identity = (each.run, each.step_id, each.contents)
        if identity == (saved.run, saved.step_id, saved.contents):
            found.append(each)
    return found


def commit(
    root: PersistentRoot,
    saved: UploadedStep,
    *,
    hosts: Collection[str],
    orbax_files: Mapping[str, bytes],
    make_way: Callable[[], None] = lambda: None,
    retries: Retries = PATIENT,
) -> None:
    """Commits a step; does nothing if this save of it is committed already.

    Files that interrupted uploads left in the step's directory are removed.

    Args:
      root: of the steps.
      saved: what was uploaded.
      hosts: the ids of those that took part; each has to have finished.
      orbax_files: contents by path in the step (`checkpoint.orbax_format`).
      make_way: called before the step becomes visible; older saves of it have to leave.
      retries: how long to wait for storage.

    Raises:
      CheckpointError: if hosts have not finished, what they wrote is not all of the
        step, the step exists by another save, or storage fails for good.
    """
    unfinished, final = root.unfinished(saved.step_id), root.final(saved.step_id.step)
    success = commit_text(final, saved.run, saved.step_id.save)

    def is_pending() -> bool:
        if root.is_pending(saved.step_id, run=saved.run):
            return True
        if not root.in_place:
            # A host may have begun again before it received the commit.
            storage.remove(unfinished)
        return False

    def assemble() -> None:
        stores = _stores(manifests, saved)
        _drop_unnamed(unfinished, manifests, stores)
        for part, names in stores.items():
            ocdbt.merge(unfinished / part, names)
        for part, arrays in _empty_arrays(saved).items():
            ocdbt.write(unfinished / part, arrays, ocdbt.new_context())
        digests = {orbax_view.FILE: orbax_view.to_bytes(orbax_files)}
        for name, content in {**orbax_files, **digests}.items():
            storage.write_atomic(unfinished / name, content)

    def publish() -> None:
        arrays = [leaf.part for leaf in saved.contents.arrays]
        parts = {name.partition("/")[0] for name in orbax_files}
        parts |= {*arrays, *saved.contents.components}
        # Orbax commits each part of a step, and last the step. A component without
        # files is a directory to Orbax.
        for part in sorted(parts):
            if part in saved.contents.components or (unfinished / part).is_dir():
                storage.write_atomic(unfinished / part / COMMIT_FILE, success)
        storage.write_atomic(unfinished / COMMIT_FILE, success)
        # Over NFS an attempt that seemed to fail may have been carried out.
        if not root.in_place and (unfinished.exists() or not final.exists()):
            storage.rename(unfinished, final)

    doing = f"committing {unfinished}"
    if retries.call(doing, is_pending):
        manifests = retries.call(doing, lambda: _manifests(unfinished, saved, hosts))
        for act in (assemble, make_way, publish):
            retries.call(doing, act)


def _manifests(
    unfinished: epath.Path, saved: UploadedStep, hosts: Collection[str]
) -> list[Manifest]:
    # Of the hosts, and of those of earlier worlds that have uploaded what is missing.
    there = listed(unfinished, saved)
    manifests = [each for each in there if each.host.id in hosts]
    missing = sorted(set(hosts) - {each.host.id for each in manifests})
    if missing or not manifests:
        raise errors.CheckpointError(
            f"{unfinished} cannot be committed: {len(missing)} of {len(hosts)} hosts"
            f" have not finished their uploads ({errors.first_of(missing)});"
            " wait for them, or upload the step again on the hosts that are there"
        )
    for several in (manifests, there):
        table = StepTable(several)
        if table.complete:
            return several
    if len(table.diverged):
        # The next upload of it begins anew.
        for each in there:
            storage.remove(unfinished / manifest_name(each.host.id))
    raise errors.CheckpointError(
        f"{unfinished} cannot be committed: {table.problem()}; upload the step again"
    )


def _stores(manifests: Sequence[Manifest], saved: UploadedStep) -> dict[str, set[str]]:
    # By checkpointable, the stores that hosts wrote chunks of it into.
    stores: dict[str, set[str]] = {}
    for each in manifests:
        store = saved.store(each.host.id)
        for number in np.unique(each.parts.leaf).tolist():
            leaf = saved.contents.leaves[number]
            if not leaf.is_file:
                stores.setdefault(leaf.part, set()).add(store)
    return stores


def _empty_arrays(saved: UploadedStep) -> dict[str, list[ocdbt.Chunk]]:
    # By checkpointable. They have no chunks that a host could upload, but Orbax
    # requires their metadata like that of others.
    empty: dict[str, list[ocdbt.Chunk]] = {}
    for leaf in saved.contents.arrays:
        if 0 in leaf.shape:
            values = np.empty(leaf.shape, leaf.dtype)
            chunk = ocdbt.Chunk(leaf=leaf, box=boxes.whole(leaf.shape), values=values)
            empty.setdefault(leaf.part, []).append(chunk)
    return empty


def _drop_unnamed(
    unfinished: epath.Path,
    manifests: Sequence[Manifest],
    stores: Mapping[str, Collection[str]],
) -> None:
    # Leaves the manifests and what they name.
    named = {manifest_name(each.host.id) for each in manifests}
    named |= manifests[0].contents.files.keys()
    named |= {f"{name}/{store}" for name, names in stores.items() for store in names}
    above = {str(parent) for name in named for parent in epath.Path(name).parents}
    pending = [(unfinished, "")]
    while pending:
        directory, prefix = pending.pop()
        for child in directory.iterdir():
            name = prefix + child.name
            if name in above:
                pending.append((child, f"{name}/"))
            elif name not in named:
                storage.remove(child)
