"""Converts a checkpoint by a layout.

    convert.convert(Job(source="model", target="run/persistent/0", rules="llama.yml"))

The checkpoint is not visible before all of it is durable. Killed at any point, the same
call begins anew.

JAX and Orbax, whose import takes seconds, are imported for Orbax checkpoints alone.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from concurrent import futures

from elastic_ckpt.core import errors
from elastic_ckpt.universal.writing.conversion import Conversion, Job
from elastic_ckpt.universal.writing.writer import Destination, Writer

_ROOM = "elastic_ckpt.universal.writing"
_DESTINATIONS = {
    "orbax": ("orbax_destination", "OrbaxDestination"),
    "safetensors": ("safetensors_destination", "SafetensorsDestination"),
    "hf": ("hugging_face_destination", "HuggingFaceDestination"),
}
FORMATS = tuple(_DESTINATIONS)
# Units that are written at a time.
_THREADS = 2
_PROGRESS_SECS = 0.2


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
    module, name = _DESTINATIONS[to]
    return getattr(importlib.import_module(f"{_ROOM}.{module}"), name)(conversion)


def convert(
    job: Job,
    *,
    progress: Callable[[int, int], None] | None = None,
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
    total = conversion.num_bytes
    writer = Writer(destination, num_threads=_THREADS)
    with destination.alone():
        attempt = writer.prepare()
        conversion.checkpoint.check(conversion.files)

        def show(done: int) -> None:
            if progress is not None:
                progress(done, total)

        show(0)
        _write_all(writer, attempt, show)
        writer.commit(attempt)
    return conversion


def _write_all(writer: Writer, attempt: str, show: Callable[[int], None]) -> None:
    stopped = threading.Event()
    written: list[int] = []

    def write(number: int) -> None:
        writer.write(attempt, number, written.append, stopped.is_set)

    pool = futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="convert")
    try:
        waiting = {pool.submit(write, n) for n in range(len(writer.units))}
        while waiting:
            ended, waiting = futures.wait(
                waiting, _PROGRESS_SECS, futures.FIRST_EXCEPTION
            )
            for each in ended:
                each.result()
            show(sum(written))
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)
