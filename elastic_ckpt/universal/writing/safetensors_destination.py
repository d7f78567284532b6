"""A conversion to safetensors; see `safetensors_writer`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from elastic_ckpt.core import bucket_clients, errors
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal.reading.reused_memory import ReusedMemory
from elastic_ckpt.universal.writing import safetensors_plan
from elastic_ckpt.universal.writing.conversion import (
    BUDGET_BYTES,
    REUSED_BYTES,
    Conversion,
    Needed,
)
from elastic_ckpt.universal.writing.destination import Progress
from elastic_ckpt.universal.writing.safetensors_plan import SafetensorsPlan
from elastic_ckpt.universal.writing.safetensors_writer import SafetensorsWriter

# Files that a process writes at a time; each reads under its part of the budget.
_THREADS = 2


class SafetensorsDestination:
    """See `destination.Destination`.

    Args:
      conversion: that is planned.
      most_file_bytes: of the values in a file.
    """

    def __init__(
        self,
        conversion: Conversion,
        *,
        most_file_bytes: int = safetensors_plan.MOST_FILE_BYTES,
    ) -> None:
        self._conversion = conversion
        self._memory = ReusedMemory(REUSED_BYTES)
        self._most_file_bytes = most_file_bytes

    @functools.cached_property
    def plan(self) -> SafetensorsPlan:
        """The files that are written."""
        return safetensors_plan.plan(
            self._conversion.targets, most_file_bytes=self._most_file_bytes
        )

    def prepare(self) -> str:
        """See `Destination`."""
        self._writer(0, 1)
        return ""

    def needed(self, host: int, num_hosts: int) -> Needed:
        """See `Destination`."""
        files = self.plan.files_of(host, num_hosts=num_hosts)
        return self._conversion.boxes_of(name for file in files for name in file.spans)

    def write(
        self, attempt: str, host: int, num_hosts: int, progress: Progress
    ) -> None:
        """See `Destination`."""
        del attempt
        with _storage_errors(self._conversion.job.target):
            self._writer(host, num_hosts).write(self._read, progress=progress)

    def commit(self, attempt: str, num_hosts: int) -> None:
        """See `Destination`."""
        del attempt
        with _storage_errors(self._conversion.job.target):
            self._writer(0, num_hosts).commit()

    def _writer(self, host: int, num_hosts: int) -> SafetensorsWriter:
        return SafetensorsWriter(
            self._conversion.job.target,
            self.plan,
            source=self._conversion.identity,
            host=host,
            num_hosts=num_hosts,
            num_threads=_THREADS,
        )

    def _read(self, names: Sequence[str]) -> Iterator[tuple[str, Box, np.ndarray]]:
        needed = self._conversion.boxes_of(names)
        with contextlib.closing(
            self._conversion.read(
                needed, budget_bytes=BUDGET_BYTES // _THREADS, memory=self._memory
            )
        ) as read:
            for name, box, values in read:
                yield name, box, values
                # The writer keeps no values.
                self._memory.give_back(values)


@contextlib.contextmanager
def _storage_errors(path: str) -> Iterator[None]:
    try:
        yield
    except bucket_clients.failures() as error:
        raise errors.CheckpointError(
            f"{path} cannot be written ({error}); make room or give access, and convert"
            " again: files that are complete are kept"
        ) from error
