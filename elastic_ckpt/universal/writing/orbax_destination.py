"""A conversion to an Orbax checkpoint: a step of persistent storage, with digests.

Each process uploads its boxes as a host of a run uploads what it saves, and notes every
few seconds what is durable. When all have finished, the step is committed as all steps
are. An attempt that was killed is continued under its save: what it noted is read back
first, and kept where the digests agree.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import time
from collections.abc import Sequence
from concurrent import futures

import numpy as np
from etils import epath

from elastic_ckpt.core import (
    bucket_clients,
    checked_json,
    digest,
    errors,
    storage,
)
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.steps import layout, manifest_file
from elastic_ckpt.steps.manifest import Fragment, Fragments, Host, Manifest
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.persistent import commit, ocdbt, progress, upload
from elastic_ckpt.tiers.persistent.persistent_root import PersistentRoot
from elastic_ckpt.tiers.persistent.persistent_tier import StepSource
from elastic_ckpt.tiers.source import ReadError
from elastic_ckpt.universal.reading.reused_memory import ReusedMemory
from elastic_ckpt.universal.writing import chunks, converted_step
from elastic_ckpt.universal.writing.conversion import (
    REUSED_BYTES,
    Conversion,
    Needed,
)
from elastic_ckpt.universal.writing.destination import Progress
from elastic_ckpt.universal.writing.packed_store import PackedStore, PackedValues

_BATCH_BYTES = 2**25
_BATCH_ITEMS = 2048
# Batches that are written at a time.
_WRITERS = 2
_READERS = 4


class OrbaxDestination:
    """See `destination.Destination`.

    Args:
      conversion: that is planned.

    Raises:
      CheckpointError: if its target is not the directory of a step.
    """

    def __init__(self, conversion: Conversion) -> None:
        directory = storage.absolute(conversion.job.target)
        if not directory.name.isdecimal() or str(int(directory.name)) != directory.name:
            raise errors.CheckpointError(
                f"{directory} is not the directory of a step, whose name is its number;"
                f" convert to {directory / '0'}"
            )
        self._conversion = conversion
        self._root = PersistentRoot.from_path(directory.parent)
        self._step = int(directory.name)
        self._run = f"converted-{conversion.identity[:16]}"

    def prepare(self) -> str:
        """See `Destination`."""
        if self._root.is_committed(self._step):
            raise errors.CheckpointError(
                f"{self._root.final(self._step)} exists already; remove it, or give"
                " another step"
            )
        steps = self._root.steps()
        if steps:
            others = errors.first_of(map(str, steps))
            raise errors.CheckpointError(
                f"{self._root.path} has steps already ({others}), and a"
                " converted step is the first of a run; convert to another directory"
            )
        save = self._earlier_save()
        if save is None:
            return f"{time.time_ns() // 1_000_000:015d}"
        saved = self._saved(save)
        directory = self._root.unfinished(StepId(self._step, save))
        for manifest in self._noted(saved):
            # The index of a store that is damaged may be damaged too.
            kept = [] if _problems(directory, manifest) else manifest.rows
            rows = Fragments.from_rows(kept, contents=saved.contents)
            progress.write(directory, dataclasses.replace(manifest, fragments=rows))
            storage.remove(directory / manifest_file.file_name(manifest.host.id))
        return save

    def needed(self, host: int, num_hosts: int) -> Needed:
        """See `Destination`."""
        return self._shares(num_hosts)[host]

    def write(
        self, attempt: str, host: int, num_hosts: int, progress: Progress
    ) -> None:
        """See `Destination`."""
        saved = self._saved(attempt)
        noted = {
            (each.leaf, each.box): each
            for manifest in self._noted(saved)
            for each in manifest.rows
        }
        is_local = storage.is_local(self._root.path)
        uploading = upload.Upload(
            self._root,
            saved,
            _host(host),
            store=PackedStore if is_local else ocdbt.CommittedStore,
        )
        uploading.begin(lambda: {_part(each) for each in noted.values()})
        numbers = {leaf.path: n for n, leaf in enumerate(saved.contents.leaves)}
        number_of = {
            target.name: numbers[
                converted_step.leaf_path(self._conversion.tree, target.name)
            ]
            for target in self._conversion.targets
        }
        share = self.needed(host, num_hosts)
        left = {
            target: [box for box in of_it if (number_of[target.name], box) not in noted]
            for target, of_it in share.items()
        }
        left = {target: of_it for target, of_it in left.items() if of_it}
        writing = _Writing(uploading, progress, _size(share), _size(share, left))
        with (
            writing,
            contextlib.closing(
                self._conversion.read(left, memory=writing.memory)
            ) as read,
        ):
            for name, box, values in read:
                writing.add(number_of[name], box, values)
        manifest = uploading.finish()
        new = [each for each in manifest.rows if (each.leaf, each.box) not in noted]
        directory = self._root.unfinished(StepId(self._step, attempt))
        rows = Fragments.from_rows(new, contents=saved.contents)
        problems = _problems(directory, dataclasses.replace(manifest, fragments=rows))
        if problems:
            storage.remove(directory / manifest_file.file_name(manifest.host.id))
            raise errors.CheckpointError(
                f"{directory}: {len(problems)} chunks do not read back as they were"
                f" written ({errors.first_of(problems)}); have the storage checked, and"
                " convert again"
            )

    def commit(self, attempt: str, num_hosts: int) -> None:
        """See `Destination`."""
        saved = self._saved(attempt)
        commit.commit(
            self._root,
            saved,
            hosts=[_host(number).id for number in range(num_hosts)],
            orbax_files=converted_step.orbax_files(
                saved, self._conversion.tree, self._conversion.chunk_of
            ),
        )

    @functools.lru_cache(maxsize=1)  # noqa: B019
    def _shares(self, num_hosts: int) -> Sequence[Needed]:
        conversion = self._conversion
        return chunks.shares(conversion.targets, conversion.chunk_of, num_hosts)

    def _saved(self, save: str) -> upload.UploadedStep:
        return converted_step.saved_step(
            self._conversion.targets,
            self._conversion.chunk_of,
            tree=self._conversion.tree,
            lists=self._conversion.lists,
            run=self._run,
            step_id=StepId(self._step, save),
        )

    def _noted(self, saved: upload.UploadedStep) -> list[Manifest]:
        # The notes of earlier attempts; those of a host count once.
        manifests = progress.read(
            self._root.unfinished(saved.step_id),
            run=saved.run,
            step_id=saved.step_id,
            contents=saved.contents,
        )
        return list({each.host.id: each for each in reversed(manifests)}.values())

    def _earlier_save(self) -> str | None:
        # The save of an attempt that was cut short.
        for leftover in reversed(self._root.leftovers()):
            if leftover.step != self._step:
                continue
            for child in epath.Path(leftover.path).iterdir():
                with contextlib.suppress(
                    checked_json.UnreadableError, *bucket_clients.failures()
                ):
                    if child.name.endswith(".json"):
                        manifest = manifest_file.parse(child.read_bytes(), stores=True)
                        if manifest.run == self._run:
                            return manifest.save
        return None


class _Writing:
    """Writes batches of chunks in a few threads, which wait for each other.

    Attributes:
      memory: of the values, which gets back that of chunks that are durable.
    """

    def __init__(
        self, uploading: upload.Upload, progress: Progress, total: int, done: int
    ) -> None:
        self.memory = ReusedMemory(REUSED_BYTES)
        self._upload = uploading
        self._progress = progress
        self._total, self._done = total, done
        self._batch: list[upload.Chunk] = []
        self._bytes = 0
        self._pending: collections.deque[futures.Future[int]] = collections.deque()
        self._pool = futures.ThreadPoolExecutor(
            _WRITERS, thread_name_prefix="converted"
        )

    def __enter__(self) -> _Writing:
        self._progress(self._done, self._total)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._submit()
                while self._pending:
                    self._wait()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def add(self, leaf: int, box: Box, values: np.ndarray) -> None:
        """Adds a chunk, whose values are kept until they are durable."""
        self._batch.append(upload.Chunk(leaf, box, values, b""))
        self._bytes += values.nbytes
        if self._bytes >= _BATCH_BYTES or len(self._batch) >= _BATCH_ITEMS:
            self._submit()

    def _submit(self) -> None:
        batch, self._batch, self._bytes = self._batch, [], 0
        if len(self._pending) >= _WRITERS:
            self._wait()
        if batch:
            self._pending.append(self._pool.submit(self._write, batch))

    def _wait(self) -> None:
        self._done += self._pending.popleft().result()
        self._progress(self._done, self._total)

    def _write(self, batch: Sequence[upload.Chunk]) -> int:
        self._upload.write_chunks(
            [each._replace(digest=digest.values_digest(each.values)) for each in batch]
        )
        for each in batch:
            self.memory.give_back(each.values)
        return sum(each.values.nbytes for each in batch)


def _host(number: int) -> Host:
    return Host(id=f"convert-{number}", number=number, domains={})


def _part(fragment: Fragment) -> progress.Part:
    return progress.part_of(fragment)


def _size(share: Needed, left: Needed | None = None) -> int:
    # The bytes of a share, without those that are left to write.
    def size_of(needed: Needed) -> int:
        return sum(
            box.volume * target.dtype.itemsize
            for target, of_it in needed.items()
            for box in of_it
        )

    return size_of(share) - (0 if left is None else size_of(left))


def _problems(directory: epath.Path, manifest: Manifest) -> list[str]:
    # The fragments whose values do not have the digests of the manifest.
    context = ocdbt.new_context()
    read = PackedValues(directory, context).read
    if not storage.is_local(directory):
        read = functools.partial(_remote_values, StepSource(directory, context))
    leaves = manifest.contents.leaves

    def problem(fragment: Fragment) -> str | None:
        leaf = leaves[fragment.leaf]
        num_bytes = layout.num_bytes(fragment.box, leaf.dtype)
        try:
            values = read(fragment.file, num_bytes)
        except ReadError as error:
            return f"{leaf.path}{fragment.box} {error}"
        if digest.values_digest(values) != fragment.digest:
            return f"{leaf.path}{fragment.box} has another digest"
        return None

    with futures.ThreadPoolExecutor(_READERS, thread_name_prefix="verify") as pool:
        results = pool.map(problem, manifest.rows)
        return [each for each in results if each is not None]


def _remote_values(source: StepSource, file: str, num_bytes: int) -> np.ndarray:
    values = np.empty(num_bytes, np.uint8)
    source.read_into(file, 0, values.data)
    return values
