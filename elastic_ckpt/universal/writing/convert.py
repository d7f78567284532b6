"""Converts a checkpoint by a layout.

    convert.convert(Job(source="model", target="run/persistent/0", rules="llama.yml"))

The checkpoint is not visible before all of it is durable. Killed at any point, the same
call begins anew.

JAX and Orbax, whose import takes seconds, are imported for Orbax checkpoints alone.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
from collections.abc import Callable, Generator

from elastic_ckpt.core import bucket_clients, errors, storage
from elastic_ckpt.universal.writing.conversion import Conversion, Job

_ROOM = "elastic_ckpt.universal.writing"
_DESTINATIONS = {
    "orbax": ("orbax_step", "OrbaxStep"),
    "safetensors": ("safetensors_files", "SafetensorsFiles"),
    "hf": ("safetensors_files", "HuggingFaceModel"),
}


class Destination(abc.ABC):
    """A checkpoint to write, in one format.

    Args:
      conversion: what to write.

    Attributes:
      target: the path of the checkpoint.

    Raises:
      CheckpointError: if the format cannot have such tensors, or such a path.
    """

    def __init__(self, conversion: Conversion) -> None:
        self._conversion = conversion
        self.target = storage.absolute(conversion.job.target)
        if not conversion.targets:
            raise errors.CheckpointError(
                "there are no tensors to write; give rules that match some"
            )

    @abc.abstractmethod
    def cleared(self) -> contextlib.AbstractContextManager[None]:
        """Removes what a killed conversion has left, and keeps away other writers.

        Raises:
          CheckpointError: if the target exists.
          RunError: if a run writes there.
        """

    @abc.abstractmethod
    def write(self) -> Generator[int]:
        """Writes the checkpoint durably, and makes it visible at the end.

        Yields:
          The bytes that were written since the last time.

        Raises:
          CheckpointError: if the source cannot be read, or storage fails.
          OSError: if storage fails, or another of `bucket_clients.failures`.
        """

    def exists_already(self) -> errors.CheckpointError:
        """The error that the target exists."""
        return errors.CheckpointError(
            f"{self.target} exists already; remove it, or give another path"
        )


def destination_of(conversion: Conversion) -> Destination:
    """The destination that a conversion writes.

    Raises:
      ConfigError: if there is no such format.
      CheckpointError: if the format cannot have such targets.
    """
    to = conversion.job.to
    if to not in _DESTINATIONS:
        raise errors.ConfigError(
            f"{to!r} is no format that is written; choose one of"
            f" {', '.join(_DESTINATIONS)}"
        )
    module, name = _DESTINATIONS[to]
    return getattr(importlib.import_module(f"{_ROOM}.{module}"), name)(conversion)


def convert(
    job: Job, *, progress: Callable[[int, int], None] = lambda *_: None
) -> Conversion:
    """Writes a checkpoint in the layout and format of another program.

    Args:
      job: what is converted.
      progress: called with the bytes that are done and those of all, now and then.

    Returns:
      The conversion that was written.

    Raises:
      FormatError: if the source is of no format that is read, or damaged.
      LayoutError: if the layout does not fit.
      CheckpointError: if the target exists, the source cannot be read, or storage
        fails.
      RunError: if another process writes to the same directory, or one of steps.
    """
    conversion = Conversion(job)
    destination = destination_of(conversion)
    target, done = destination.target, 0
    lock = target.parent / f"{target.name}.lock"
    try:
        with storage.exclusive_lock(lock, target=str(target)):
            try:
                with destination.cleared():
                    conversion.checkpoint.check(conversion.files)
                    progress(done, conversion.num_bytes)
                    with contextlib.closing(destination.write()) as written:
                        for num_bytes in written:
                            done += num_bytes
                            progress(done, conversion.num_bytes)
            finally:
                # No other conversion writes to a target that exists.
                if storage.is_local(lock) and target.exists():
                    storage.remove(lock)
    except bucket_clients.failures() as error:
        raise errors.CheckpointError(
            f"{str(target)!r} cannot be written ({error}); make room, give access to"
            " it, or give another path, and convert again"
        ) from error
    return conversion
