"""Converts a checkpoint by a layout, in one or several processes of this machine.

    convert.convert(Job(source="model", target="run/persistent/0", rules="llama.yml"))

Killed at any point, the same call continues: what is complete and reads back as it was
written is kept. The checkpoint is not visible before all of it was verified.

JAX and Orbax, whose import takes seconds of each process, are imported for Orbax
checkpoints alone.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import Any

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
# Units that one process writes at a time; of several, each writes one.
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
    num_processes: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Writes a checkpoint in the layout and format of another program.

    Args:
      job: what is converted.
      num_processes: that read and write; 1 is this one. Others import the main module
        of the program, as those of `multiprocessing` do.
      progress: called with the bytes that are done and those of all, now and then; at
        first with those that an earlier call has completed.

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
    total = conversion.num_bytes
    writer = Writer(destination, num_threads=_THREADS)
    with destination.alone():
        attempt = writer.prepare()
        conversion.checkpoint.check(conversion.files)
        with futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="convert") as pool:
            numbers = range(len(writer.units))
            kept = list(pool.map(lambda n: writer.is_written(attempt, n), numbers))
        done = sum(writer.sizes[number] for number in numbers if kept[number])
        left = [number for number in numbers if not kept[number]]

        def show(written: int) -> None:
            if progress is not None:
                progress(done + written, total)

        show(0)
        if num_processes == 1:
            _in_threads(writer, attempt, left, show)
        else:
            _in_processes(writer, attempt, left, show, job, num_processes)
        writer.commit(attempt)
    return conversion


def _in_threads(
    writer: Writer, attempt: str, left: Iterable[int], show: Callable[[int], None]
) -> None:
    stopped = threading.Event()
    written: list[int] = []

    def write(number: int) -> None:
        writer.write(attempt, number, written.append, stopped.is_set)

    pool = futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="convert")
    _write_all(pool, write, left, stopped, lambda: show(sum(written)))


def _in_processes(
    writer: Writer,
    attempt: str,
    left: Iterable[int],
    show: Callable[[int], None],
    job: Job,
    num_processes: int,
) -> None:
    spawn = multiprocessing.get_context("spawn")
    stopped, written = spawn.Event(), spawn.Value("q", 0)
    given = (job, writer.identity, attempt, written, stopped)
    pool = futures.ProcessPoolExecutor(num_processes, spawn, _begin, given)
    try:
        _write_all(pool, _write, left, stopped, lambda: show(written.value))
    except BrokenProcessPool:
        raise errors.CheckpointError(
            "a process of the conversion ended before its work; look for its error"
            " above, or for a lack of memory, and convert again: what is complete is"
            " kept"
        ) from None


def _write_all(
    pool: futures.Executor,
    write: Callable[[int], None],
    left: Iterable[int],
    stopped: Any,
    show: Callable[[], None],
) -> None:
    try:
        waiting = {pool.submit(write, number) for number in left}
        while waiting:
            ended, waiting = futures.wait(
                waiting, _PROGRESS_SECS, futures.FIRST_EXCEPTION
            )
            for each in ended:
                each.result()
            show()
    finally:
        stopped.set()
        pool.shutdown(cancel_futures=True)


# In a worker process: writes a unit. `_begin` sets it.
_unit: Callable[[int], None]


def _begin(job: Job, identity: str, attempt: str, written: Any, stopped: Any) -> None:
    global _unit
    # It computes on no device.
    os.environ["JAX_PLATFORMS"] = "cpu"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    writer = Writer(destination_of(Conversion(job)))

    def note(num_bytes: int) -> None:
        with written.get_lock():
            written.value += num_bytes

    def write(number: int) -> None:
        if writer.identity != identity:
            raise errors.CheckpointError(
                f"{job.source} has changed since the conversion began; convert again"
            )
        writer.write(attempt, number, note, stopped.is_set)

    _unit = write


def _write(number: int) -> None:
    _unit(number)


def _end_with_parent() -> None:
    # A process of a pool would wait for its next task for ever.
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
