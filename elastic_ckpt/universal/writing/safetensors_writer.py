"""Writes a safetensors checkpoint from boxes of tensors, on any number of processes.

Each process writes whole files, its share of the plan, into a directory beside the
final one; when all are done, one of them commits by a rename:

    <directory>.unfinished/model-00001-of-00003.safetensors
    <directory>.written/model-00001-of-00003.safetensors.json

The second is the record of the first: the boxes that were written, and the digests of
their values in memory. Every file is compared with them before it gets its name. If a
process was killed, the write is repeated: a file is kept if its record is of the same
plan and source, and it has these digests.

Directories cannot be renamed in an object store. There the files are in the final
directory at once, and the index commits them, or the removal of the record of a single
file. Objects are compared before they are uploaded; those of an earlier attempt are
kept if they have the right size.

Records have the layout of `core.checked_json`; those of another version count as
missing. Memory: for each thread the box that `read` has yielded, and a copy.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent import futures

import numpy as np
from etils import epath

from elastic_ckpt.core import (
    box_cover,
    boxes,
    bucket_clients,
    checked_json,
    digest,
    errors,
    staged_file,
    storage,
)
from elastic_ckpt.universal.writing.destination import Progress
from elastic_ckpt.universal.writing.safetensors_plan import (
    INDEX,
    PlannedFile,
    SafetensorsPlan,
)
from elastic_ckpt.universal.writing.tensor_file import TensorFile

# Yields the boxes of some tensors, in any order, each element once: name, box, values.
Read = Callable[[Sequence[str]], Iterable[tuple[str, boxes.Box, np.ndarray]]]
_VERSION = 1
_UNFINISHED, _WRITTEN = ".unfinished", ".written"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _WrittenBox:
    name: str
    box: boxes.Box
    digest: bytes


class SafetensorsWriter:
    """Writes the files of a plan.

    Args:
      directory: of the checkpoint, local or in a bucket; it does not exist yet.
      plan: of the files, the same in all processes.
      source: identifies the values; files that were written from another source are not
        kept. A digest of the paths, sizes and rules that they come from.
      host: the number of this process, from 0.
      num_hosts: processes that write.
      num_threads: files that this process writes at a time.

    Raises:
      CheckpointError: if the checkpoint exists.
    """

    def __init__(
        self,
        directory: epath.PathLike,
        plan: SafetensorsPlan,
        *,
        source: str,
        host: int = 0,
        num_hosts: int = 1,
        num_threads: int = 4,
    ) -> None:
        self._final = storage.absolute(directory)
        self._in_place = not storage.is_local(self._final)
        self._records = self._final.parent / (self._final.name + _WRITTEN)
        self._directory = self._final
        if not self._in_place:
            self._directory = self._final.parent / (self._final.name + _UNFINISHED)
        self._plan = plan
        self._source = source
        self._files = plan.files_of(host, num_hosts=num_hosts)
        self._num_threads = num_threads
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._stopped = threading.Event()
        if self._exists():
            raise errors.CheckpointError(
                f"{self._final} exists already; remove it, or give another directory"
            )

    def write(self, read: Read, *, progress: Progress | None = None) -> list[str]:
        """Writes this process's files, or keeps them.

        Args:
          read: called once for each file that is written, from several threads.
          progress: called after each box, and for each file that is kept.

        Returns:
          The names of the files that were kept.

        Raises:
          CheckpointError: if `read` does not yield each element of the tensors once, or
            a file reads back other values.
          OSError: if storage fails, or another of `bucket_clients.failures`.
        """
        storage.make_directory(self._directory)
        total = sum(file.num_bytes for file in self._files)

        def note(num_bytes: int) -> None:
            with self._lock:
                self._done_bytes += num_bytes
                if progress is not None:
                    progress(self._done_bytes, total)

        def write_file(file: PlannedFile) -> str | None:
            if self._is_written(file):
                note(file.num_bytes)
                return file.name
            self._write_file(file, read, note)
            return None

        with futures.ThreadPoolExecutor(
            self._num_threads, thread_name_prefix="safetensors"
        ) as pool:
            writing = [pool.submit(write_file, file) for file in self._files]
            try:
                kept = [each.result() for each in futures.as_completed(writing)]
            except BaseException:
                self._stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return sorted(name for name in kept if name is not None)

    def commit(self, others: Mapping[str, bytes] | None = None) -> None:
        """Makes the checkpoint visible; one process does it, when all have written.

        Args:
          others: files to add, by name, such as `config.json`.

        Raises:
          CheckpointError: if a process has not written its files.
        """
        records = {file.name: self._record(file) for file in self._plan.files}
        missing = [name for name, record in records.items() if record is None]
        if missing:
            raise errors.CheckpointError(
                f"{self._directory} lacks {len(missing)} of {len(records)} files"
                f" ({errors.first_of(missing)}); write it again: the others are kept"
            )
        for name, content in (others or {}).items():
            storage.write_atomic(self._directory / name, content)
        if self._plan.index is not None:
            storage.write_atomic(self._directory / INDEX, self._plan.index)
        if not self._in_place:
            named = {*records, *(others or {}), INDEX}
            for child in self._directory.iterdir():
                if child.name not in named:
                    storage.remove(child)
            storage.rename(self._directory, self._final)
        storage.remove(self._records)

    def _exists(self) -> bool:
        if not self._in_place:
            return self._final.exists()
        if self._plan.index is not None:
            return (self._final / INDEX).exists()
        (file,) = self._plan.files
        is_written = (self._final / file.name).exists()
        return is_written and not self._record_path(file).exists()

    def _write_file(
        self, file: PlannedFile, read: Read, note: Callable[[int], None]
    ) -> None:
        path = self._directory / file.name
        if not self._in_place:
            self._remove_temporary(file)
        written: list[_WrittenBox] = []
        with (
            staged_file.staged_path(path) as temporary,
            TensorFile(temporary, file.num_bytes) as opened,
        ):
            opened.write(file.header, 0)
            note(len(file.header))
            for name, box, given in read(sorted(file.spans)):
                _check_values(path, file, name, box, given)
                if self._stopped.is_set():
                    raise futures.CancelledError
                if not box.volume:
                    continue
                values = np.ascontiguousarray(given).reshape(given.shape)
                opened.put(file.spans[name], box, values)
                written.append(
                    _WrittenBox(name=name, box=box, digest=digest.values_digest(values))
                )
                note(values.nbytes)
            _check_cover(path, file, written)
            _compare(str(path), opened, file, written)
        storage.write_atomic(self._record_path(file), self._to_bytes(file, written))

    def _remove_temporary(self, file: PlannedFile) -> None:
        # Those of processes that were killed.
        for child in self._directory.iterdir():
            if child.name.startswith(f".{file.name}."):
                storage.remove(child)

    def _is_written(self, file: PlannedFile) -> bool:
        # Whether the file is there, as its record describes it.
        written = self._record(file)
        path = self._directory / file.name
        if written is None or not path.exists():
            return False
        if path.stat().length != file.num_bytes or self._in_place:
            return path.stat().length == file.num_bytes
        try:
            with TensorFile(str(path), file.num_bytes) as opened:
                if opened.head(len(file.header)) != file.header:
                    return False
                _compare(str(path), opened, file, written)
        except (errors.CheckpointError, OSError):
            return False
        return True

    def _record_path(self, file: PlannedFile) -> epath.Path:
        return self._records / f"{file.name}.json"

    def _to_bytes(self, file: PlannedFile, written: Sequence[_WrittenBox]) -> bytes:
        return checked_json.to_bytes(
            {
                "source": self._source,
                "header": _digest_of(file.header),
                "names": [each.name for each in written],
                "starts": [list(each.box.start) for each in written],
                "stops": [list(each.box.stop) for each in written],
                "digests": [each.digest.hex() for each in written],
            },
            version=_VERSION,
        )

    def _record(self, file: PlannedFile) -> list[_WrittenBox] | None:
        # The boxes of a file that was written whole, from this source; None if it was
        # not.
        with contextlib.suppress(
            checked_json.UnreadableError, *bucket_clients.failures()
        ):
            content = self._record_path(file).read_bytes()
            fields = checked_json.parse(content, what="record", version=_VERSION)
            ours = (self._source, _digest_of(file.header))
            if (fields["source"], fields["header"]) == ours:
                return [
                    _WrittenBox(
                        name=name,
                        box=boxes.Box(start=tuple(start), stop=tuple(stop)),
                        digest=bytes.fromhex(text),
                    )
                    for name, start, stop, text in zip(
                        fields["names"],
                        fields["starts"],
                        fields["stops"],
                        fields["digests"],
                        strict=True,
                    )
                ]
        return None


def _digest_of(content: bytes) -> str:
    return digest.values_digest(np.frombuffer(content, np.uint8)).hex()


def _check_values(
    path: epath.Path, file: PlannedFile, name: str, box: boxes.Box, values: np.ndarray
) -> None:
    span = file.spans.get(name)
    if span is None or (values.dtype, values.shape) != (span.dtype, box.shape):
        planned = "nothing" if span is None else f"{span.dtype}{list(span.shape)}"
        raise errors.CheckpointError(
            f"{path}: {values.dtype}{list(values.shape)} was read for {name}{box}, and"
            f" {planned} is planned there; report this as a bug of the plan"
        )


def _check_cover(
    path: epath.Path, file: PlannedFile, written: Sequence[_WrittenBox]
) -> None:
    held: dict[str, list[boxes.Box]] = collections.defaultdict(list)
    for each in written:
        held[each.name].append(each.box)
    for name, span in file.spans.items():
        if held[name] == [boxes.whole(span.shape)]:
            continue
        listed = boxes.Boxes.from_boxes(held[name], rank=len(span.shape))
        lacking = box_cover.gaps(span.shape, listed)
        volume = math.prod(span.shape)
        if len(lacking) or int(listed.volumes.sum()) != volume:
            problem = f"lacks {lacking[0]}" if len(lacking) else "has elements twice"
            raise errors.CheckpointError(
                f"{path}: {name}, of shape {list(span.shape)}, {problem} of what was"
                " read; report this as a bug of the plan"
            )


def _compare(
    path: str, opened: TensorFile, file: PlannedFile, written: Sequence[_WrittenBox]
) -> None:
    for each in written:
        values = opened.get(file.spans[each.name], each.box)
        if digest.values_digest(values) != each.digest:
            raise errors.CheckpointError(
                f"{path}: {each.name}{each.box} reads back other values than were"
                " written; have the disk of this machine checked, and write it again"
            )
