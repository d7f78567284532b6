"""Upload: each host writes its share of a step to storage, and one commits it.

A host writes chunks and files in any order, from any number of threads, and its
manifest last. Chunks that an upload of this save which was killed has left are not
written again, whichever host wrote them.

    <unfinished>/state/ocdbt.process_<save, host>/   its store: the chunks of `state`
    <unfinished>/data/shards-00000-00063.json        a file of the component `data`
    <unfinished>/manifest-<host id>.json             what it wrote, or has found

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
import tensorstore as ts
from etils import epath

from elastic_ckpt.core import boxes, errors, storage
from elastic_ckpt.steps import layout, manifest_file
from elastic_ckpt.steps.holdings import Offer
from elastic_ckpt.steps.manifest import (
    ComponentFile,
    Contents,
    Fragment,
    Fragments,
    Host,
    Manifest,
)
from elastic_ckpt.steps.search import Step
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers import stored_part
from elastic_ckpt.tiers.persistent import claims, ocdbt, orbax_view
from elastic_ckpt.tiers.persistent.persistent_root import (
    COMMIT_FILE,
    PersistentRoot,
    commit_text,
    read_manifests,
)
from elastic_ckpt.tiers.persistent.retries import PATIENT, Retries


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
        self._manifest = self._directory / manifest_file.file_name(host.id)
        self._store = ocdbt.store_name(host.id, saved.step_id.save)
        self._context = ocdbt.new_context()
        self._lock = threading.Lock()
        self._fragments: list[Fragment] = []
        self._files: list[ComponentFile] = []
        # By checkpointable, the names and stores of an upload that was cut short.
        self._there: dict[str, list[tuple[str, ts.KvStore]]] = {}
        # The newest claim when the upload began.
        self._claim: claims.Claim | None = None

    def begin(self) -> None:
        """Makes room, and looks for what an upload of this save has left.

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
        self._retries.call(f"preparing {self._directory}", self._prepare)

    def write_chunks(self, chunks: Sequence[Chunk]) -> int:
        """Writes chunks, durably, in one commit of the host's store.

        A commit takes as long for one chunk as for thousands of small ones.

        Args:
          chunks: of any leaves; their values must not change meanwhile.

        Returns:
          The bytes that were written: chunks that are there already are not.

        Raises:
          CheckpointError: if storage fails for good, or longer than is waited.
        """
        leaves = self._saved.contents.leaves
        arrays = [self._saved.arrays[leaves[each.leaf].path] for each in chunks]
        found = self._found(chunks, arrays)
        stored: dict[str, list[ocdbt.Chunk]] = {}
        fragments = []
        for number, (each, array) in enumerate(zip(chunks, arrays, strict=True)):
            leaf, box, values, digest = each
            if number not in found:
                stored.setdefault(array.checkpointable, []).append(
                    ocdbt.Chunk(leaf=leaves[leaf], array=array, box=box, values=values)
                )
            store = found.get(number, self._store)
            fragments.append(
                Fragment(
                    leaf=leaf,
                    box=box,
                    digest=digest,
                    file=f"{array.checkpointable}/{store}//{array.key(box)}",
                    offset=0,
                    stored_bytes=layout.num_bytes(box, leaves[leaf].dtype),
                )
            )
        for checkpointable, some in stored.items():
            path = self._directory / checkpointable / self._store
            self._retries.call(
                f"writing {len(some)} chunks to {path}",
                lambda path=path, some=some: ocdbt.write(path, some, self._context),
            )
        with self._lock:
            self._fragments += fragments
        return sum(each.values.nbytes for some in stored.values() for each in some)

    def write_file(self, file: ComponentFile, content: bytes | memoryview) -> int:
        """Writes a file of a component, durably; `content` was verified by the caller.

        Returns:
          Its bytes.

        Raises:
          CheckpointError: if storage fails for good, or longer than is waited.
          ReplacedError: if another start of the run has written the file since.
        """
        path = self._directory / file.path
        self._retries.call(f"writing {path}", lambda: self._put(path, content))
        with self._lock:
            self._files.append(file)
        return len(content)

    def finish(self) -> Manifest:
        """Writes the manifest of all that was written, and returns it.

        Raises:
          CheckpointError: if storage fails for good, or longer than is waited.
          ReplacedError: if another start of the run has written it since.
        """
        saved = self._saved
        manifest = Manifest(
            run=saved.run,
            step=saved.step_id.step,
            save=saved.step_id.save,
            host=self._host,
            contents=saved.contents,
            fragments=Fragments.from_rows(self._fragments, contents=saved.contents),
            component_files=tuple(self._files),
        )
        self._retries.call(
            f"writing {self._manifest}",
            lambda: self._put(self._manifest, manifest_file.to_bytes(manifest)),
        )
        return manifest

    def _prepare(self) -> None:
        storage.remove(self._manifest)
        storage.make_directory(self._directory)
        for part in {each.checkpointable for each in self._saved.arrays.values()}:
            ocdbt.remove_stale_lock(self._directory / part / self._store)
            self._there[part] = ocdbt.stores_of(
                self._directory / part, self._saved.step_id.save, self._context
            )

    def _found(
        self, chunks: Sequence[Chunk], arrays: Sequence[ocdbt.StoredArray]
    ) -> dict[int, str]:
        # The stores that have chunks with these values, by their checksums, by the
        # numbers of the chunks.
        last = slice(-layout.CHECKSUM_BYTES, None)
        readings = [
            (number, name, store.read(array.key(chunk.box), byte_range=last))
            for number, (chunk, array) in enumerate(zip(chunks, arrays, strict=True))
            for name, store in self._there.get(array.checkpointable, ())
        ]
        found: dict[int, str] = {}
        for number, name, reading in readings:
            flat = np.ascontiguousarray(chunks[number].values).reshape(-1)
            try:
                there = reading.result().value
            except ValueError:
                # Of TensorStore: it cannot be read, and is written again.
                continue
            if there == stored_part.checksum(flat.view(np.uint8)):
                found[number] = name
        return found

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
        stores = _stores(manifests)
        _drop_unnamed(unfinished, manifests)
        for part, names in stores.items():
            ocdbt.merge(unfinished / part, names)
        for part, arrays in _empty_arrays(saved).items():
            ocdbt.write(unfinished / part, arrays, ocdbt.new_context())
        digests = {orbax_view.FILE: orbax_view.to_bytes(orbax_files)}
        for name, content in {**orbax_files, **digests}.items():
            _write(unfinished / name, content)

    def publish() -> None:
        names = [*orbax_files, *_files(manifests), *saved.contents.components]
        parts = {name.partition("/")[0] for name in names}
        # Orbax commits each part of a step, and last the step. A component without
        # files is a directory to Orbax.
        for part in sorted(parts):
            if part in saved.contents.components or (unfinished / part).is_dir():
                _write(unfinished / part / COMMIT_FILE, success)
        _write(unfinished / COMMIT_FILE, success)
        # Over NFS an attempt that seemed to fail may have been carried out.
        if not root.in_place and (unfinished.exists() or not final.exists()):
            storage.rename(unfinished, final)

    doing = f"committing {unfinished}"
    if retries.call(doing, is_pending):
        manifests = _manifests(unfinished, saved, sorted(hosts))
        for act in (assemble, make_way, publish):
            retries.call(doing, act)


def _manifests(
    unfinished: epath.Path, saved: UploadedStep, hosts: Sequence[str]
) -> list[Manifest]:
    names = [manifest_file.file_name(host) for host in hosts]
    manifests = [
        each
        for each in read_manifests(
            unfinished, names, run=saved.run, step=saved.step_id.step
        )
        if isinstance(each, Manifest) and each.save == saved.step_id.save
    ]
    done = {each.host.id for each in manifests}
    missing = [host for host in hosts if host not in done]
    if missing or not manifests:
        raise errors.CheckpointError(
            f"{unfinished} cannot be committed: {len(missing)} of {len(hosts)} hosts"
            f" have not finished their uploads ({errors.first_of(missing)});"
            " wait for them, or upload the step again on the hosts that are there"
        )
    offers = [Offer(tier="persistent", manifest=each) for each in manifests]
    step = Step.from_offers(offers)
    if not step.complete:
        raise errors.CheckpointError(
            f"{unfinished} cannot be committed: {step.problem()}; upload the step again"
        )
    return manifests


def _files(manifests: Sequence[Manifest]) -> set[str]:
    return {file.path for each in manifests for file in each.component_files}


def _stores(manifests: Sequence[Manifest]) -> dict[str, set[str]]:
    # By checkpointable, the stores that have chunks of it.
    stores: dict[str, set[str]] = {}
    for each in manifests:
        for file in each.fragments.files:
            checkpointable, _, store = file.partition("//")[0].rpartition("/")
            stores.setdefault(checkpointable, set()).add(store)
    return stores


def _empty_arrays(saved: UploadedStep) -> dict[str, list[ocdbt.Chunk]]:
    # By checkpointable. They have no chunks that a host could upload, but Orbax
    # requires their metadata like that of others.
    empty: dict[str, list[ocdbt.Chunk]] = {}
    for leaf in saved.contents.leaves:
        if 0 in leaf.shape:
            array = saved.arrays[leaf.path]
            chunk = ocdbt.Chunk(
                leaf=leaf,
                array=array,
                box=boxes.whole(leaf.shape),
                values=np.empty(leaf.shape, leaf.dtype),
            )
            empty.setdefault(array.checkpointable, []).append(chunk)
    return empty


def _drop_unnamed(unfinished: epath.Path, manifests: Sequence[Manifest]) -> None:
    # Leaves the manifests and what they name.
    named = _files(manifests)
    named |= {manifest_file.file_name(each.host.id) for each in manifests}
    for checkpointable, stores in _stores(manifests).items():
        named |= {str(epath.Path(checkpointable) / store) for store in stores}
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


def _write(path: epath.Path, content: bytes) -> None:
    storage.make_directory(path.parent)
    storage.write_atomic(path, content)
