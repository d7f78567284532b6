"""Converts a checkpoint by a layout, in one or several processes of this machine.

    convert.convert(Job(source="model", target="run/persistent/0", rules="llama.yml"))

Killed at any point, the same call continues: what is complete and reads back as it was
written is kept. The checkpoint is not visible before all of it was verified.

JAX and Orbax, whose import takes seconds of each process, are imported for Orbax
checkpoints alone.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator

from elastic_ckpt.core import errors, storage
from elastic_ckpt.universal.writing import worker_process
from elastic_ckpt.universal.writing.conversion import Conversion, Job
from elastic_ckpt.universal.writing.destination import Destination

_ROOM = "elastic_ckpt.universal.writing"
_DESTINATIONS = {
    "orbax": "OrbaxDestination",
    "safetensors": "SafetensorsDestination",
    "deepspeed": "DeepSpeedDestination",
}
FORMATS = tuple(_DESTINATIONS)


def destination_of(conversion: Conversion) -> Destination:
    """The destination that a conversion writes.

    Raises:
      ConfigError: if there is no such format.
      CheckpointError: if the format cannot have such targets.
    """
    to = conversion.job.to
    if to not in _DESTINATIONS:
        raise errors.ConfigError(
            f"{to!r} is no format that is written; choose one of {', '.join(FORMATS)}"
        )
    module = importlib.import_module(f"{_ROOM}.{to}_destination")
    return getattr(module, _DESTINATIONS[to])(conversion)


def convert(
    job: Job,
    *,
    num_processes: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Writes a checkpoint in the layout and format of another program.

    Args:
      job: what is converted.
      num_processes: that read and write; 1 is this one.
      progress: called with the bytes that are done and those of all, now and then.

    Returns:
      The conversion that was written.

    Raises:
      FormatError: if the source is of no format that is read, or damaged.
      LayoutError: if the layout does not fit.
      CheckpointError: if the target exists, the source cannot be read, or storage
        fails; what is complete is kept for the next call.
      RunError: if another process writes to the same directory, or one of steps.
    """
    conversion = Conversion(job)
    destination = destination_of(conversion)
    with _alone(job):
        attempt = destination.prepare()
        conversion.checkpoint.check(conversion.files)
        done = {}

        def note(host: int, num_bytes: int) -> None:
            done[host] = num_bytes
            if progress is not None:
                progress(sum(done.values()), conversion.num_bytes)

        if num_processes == 1:
            destination.write(attempt, 0, 1, lambda part, _: note(0, part))
        else:
            worker_process.run_all(job, attempt, num_processes, note)
        destination.commit(attempt, num_processes)
    return conversion


def write_share(
    job: Job,
    attempt: str,
    host: int,
    num_hosts: int,
    progress: Callable[[int, int], None],
) -> None:
    """Writes the share of one process; see `Destination.write`."""
    destination_of(Conversion(job)).write(attempt, host, num_hosts, progress)


@contextlib.contextmanager
def _alone(job: Job) -> Iterator[None]:
    # No other conversion writes to the target, and no run to the directory of its step.
    directory = storage.absolute(job.target)
    if job.to == "orbax":
        from elastic_ckpt.tiers.persistent import writer, writers

        steps = directory.parent
        advice = "wait for it or stop it, or convert into another directory"
        with (
            storage.exclusive_lock(steps / writers.LOCK),
            writer.Writer(steps, advice=advice),
        ):
            yield
        return
    lock = directory.parent / f"{directory.name}.lock"
    with storage.exclusive_lock(lock, target=str(directory)):
        try:
            yield
        finally:
            # No process can write to a target that exists.
            if storage.is_local(lock) and directory.exists():
                storage.remove(lock)
