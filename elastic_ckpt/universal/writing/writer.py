"""The writer of all formats: files of boxes, which appear together.

A format is a `Destination`: which files a checkpoint has, where in them the boxes of
its targets lie, and how all become visible at once. The rest is the same for all.

A *unit* is some files whose boxes are read together, and which are made durable. When
all units are written, the destination commits. What a conversion that was killed has
left is never visible, and the next one to the same target removes it.
"""

from __future__ import annotations

import abc
import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent import futures

import numpy as np
from etils import epath

from elastic_ckpt.core import bucket_clients, errors, storage
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.reading.reused_memory import ReusedMemory
from elastic_ckpt.universal.writing import files
from elastic_ckpt.universal.writing.conversion import (
    BUDGET_BYTES,
    REUSED_BYTES,
    Conversion,
)
from elastic_ckpt.universal.writing.files import File, Held, Needed, Write

# What was written to each file of a checkpoint, by its name.
Written = Mapping[str, Sequence[Held]]
_UNFINISHED = ".unfinished"


class Destination(abc.ABC):
    """A checkpoint that a conversion writes, in one format.

    Args:
      conversion: that is planned.

    Attributes:
      conversion: the same.
      target: the path of the checkpoint.
      files: that have targets, in the order in which their sources lie.
      most_unit_bytes: of the files that are read together.

    Raises:
      CheckpointError: if the format cannot have such targets, or such a path.
    """

    most_unit_bytes = 2**29
    files: Sequence[File]

    def __init__(self, conversion: Conversion) -> None:
        self.conversion = conversion
        self.target = storage.absolute(conversion.job.target)

    @abc.abstractmethod
    def writes(
        self, file: File, target: TargetTensor, box: Box, values: np.ndarray
    ) -> Iterable[Write]:
        """The places of a box, and the bytes that depend on its values."""

    @abc.abstractmethod
    def commit(self, attempt: str, contents: Written) -> None:
        """Makes the checkpoint visible; its files are durable.

        Raises:
          OSError: if storage fails, or another of `bucket_clients.failures`.
        """

    def head(self, file: File) -> Iterable[Write]:
        """The writes of a file that depend on no values."""
        del file
        return ()

    def directory(self, attempt: str) -> epath.Path:
        """The directory of the files before `commit`."""
        del attempt
        if not storage.is_local(self.target):
            return self.target
        return self.unfinished

    @property
    def unfinished(self) -> epath.Path:
        """What tells that the target is not committed: its directory, or a file."""
        return self.target.parent / f"{self.target.name}{_UNFINISHED}"

    @abc.abstractmethod
    def make_room(self) -> bool:
        """Removes what a conversion that was killed has left.

        Returns:
          Whether the target is free; if it exists, nothing is removed.

        Raises:
          OSError: if storage fails, or another of `bucket_clients.failures`.
        """

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While the block runs, no other conversion writes to the target.

        Raises:
          RunError: if another does.
          CheckpointError: if there cannot be such a path.
        """
        lock = self.target.parent / f"{self.target.name}.lock"
        with self.locked(storage.exclusive_lock(lock, target=str(self.target))):
            try:
                yield
            finally:
                # No process can write to a target that exists.
                if storage.is_local(lock) and self.target.exists():
                    storage.remove(lock)

    @contextlib.contextmanager
    def locked(
        self, *locks: contextlib.AbstractContextManager[object]
    ) -> Iterator[None]:
        """Holds the locks while the block runs; see `alone` for errors."""
        with contextlib.ExitStack() as stack:
            try:
                for lock in locks:
                    stack.enter_context(lock)
            # A path may have a zero byte.
            except (OSError, ValueError) as error:
                raise errors.CheckpointError(
                    f"{str(self.target)!r} cannot be written ({error}); give another"
                    " path, or access to this one"
                ) from None
            yield


class Writer:
    """Writes the files of a destination.

    Args:
      destination: that is written.
      num_threads: that call `write` at a time, and share its memory.

    Attributes:
      units: the files of each.
    """

    def __init__(self, destination: Destination, *, num_threads: int = 1) -> None:
        self.units = units_of(destination)
        self._destination = destination
        self._budget_bytes = BUDGET_BYTES // num_threads
        self._memory = ReusedMemory(REUSED_BYTES)
        self._contents: dict[str, Sequence[Held]] = {}

    def prepare(self) -> str:
        """Begins an attempt, and returns its name.

        Raises:
          CheckpointError: if the checkpoint exists, or storage fails.
        """
        destination = self._destination
        with self._storage_errors():
            if not destination.make_room():
                raise errors.CheckpointError(
                    f"{destination.target} exists already; remove it, or give another"
                    " path"
                )
        return f"{time.time_ns() // 1_000_000:015d}"

    def write(
        self,
        attempt: str,
        number: int,
        note: Callable[[int], None] = lambda _: None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        """Writes the files of a unit, durably.

        Args:
          attempt: its name.
          number: of the unit.
          note: called with the bytes of each box that was written.
          is_stopped: asked before each box whether to end.

        Raises:
          CheckpointError: if the source cannot be read, or storage fails.
        """
        directory = self._destination.directory(attempt)
        with self._storage_errors():
            self._write(directory, self.units[number], note, is_stopped)

    def commit(self, attempt: str) -> None:
        """Makes the checkpoint visible; one process does it, when all have written.

        Raises:
          CheckpointError: if storage fails.
        """
        destination = self._destination
        with self._storage_errors():
            directory = destination.directory(attempt)
            if storage.is_local(directory):
                # The files are durable, their names may not be.
                for each, _, _ in os.walk(directory):
                    storage.sync(each)
            destination.commit(attempt, self._contents)

    def _write(
        self,
        directory: epath.Path,
        unit: Sequence[File],
        note: Callable[[int], None],
        is_stopped: Callable[[], bool],
    ) -> None:
        destination = self._destination
        file_of = {
            (target.name, box): (file, target)
            for file in unit
            for target, boxes in file.parts.items()
            for box in boxes
        }
        left = {file.name: sum(map(len, file.parts.values())) for file in unit}
        with contextlib.ExitStack() as stack:
            opened: dict[str, tuple[contextlib.ExitStack, files.OpenFile]] = {}

            def opened_file(file: File) -> files.OpenFile:
                if file.name not in opened:
                    own = stack.enter_context(contextlib.ExitStack())
                    path = directory / file.name
                    made = own.enter_context(files.created(path, file.num_bytes))
                    opened[file.name] = own, made
                    self._contents[file.name] = made.held
                    for write in destination.head(file):
                        made.put(write)
                return opened[file.name][1]

            def finish(file: File) -> None:
                opened_file(file)
                opened[file.name][0].close()

            for file in unit:
                if not left[file.name]:
                    finish(file)
            read = stack.enter_context(contextlib.closing(self._read(unit)))
            for name, box, values in read:
                if is_stopped():
                    raise futures.CancelledError
                file, target = file_of.pop((name, box))
                for write in destination.writes(file, target, box, values):
                    opened_file(file).put(write)
                note(values.nbytes)
                self._memory.give_back(values)
                left[file.name] -= 1
                if not left[file.name]:
                    finish(file)
            if file_of:
                (name, box), *_ = file_of
                raise errors.CheckpointError(
                    f"{name}{box} was not read; report this as a bug of the plan"
                )

    def _read(
        self, unit: Sequence[File]
    ) -> Generator[tuple[str, Box, np.ndarray], None, None]:
        return self._destination.conversion.read(
            needed_of(unit), budget_bytes=self._budget_bytes, memory=self._memory
        )

    @contextlib.contextmanager
    def _storage_errors(self) -> Iterator[None]:
        try:
            yield
        except bucket_clients.failures() as error:
            raise errors.CheckpointError(
                f"{self._destination.target} cannot be written ({error}); make room or"
                " give access, and convert again"
            ) from error


def units_of(destination: Destination) -> list[list[File]]:
    """The files of each unit."""
    units: list[list[File]] = []
    total = 0
    for file in destination.files:
        size = _size(file)
        if not units or total + size > destination.most_unit_bytes:
            units.append([])
            total = 0
        units[-1].append(file)
        total += size
    return units


def needed_of(unit: Sequence[File]) -> Needed:
    """The boxes of all files of a unit."""
    needed: dict[TargetTensor, list[Box]] = {}
    for file in unit:
        for target, boxes in file.parts.items():
            needed.setdefault(target, []).extend(boxes)
    return needed


def _size(file: File) -> int:
    return sum(
        box.volume * target.dtype.itemsize
        for target, boxes in file.parts.items()
        for box in boxes
    )
