"""Work in processes that are killed while they write."""

import multiprocessing
import os
import signal
import threading

from elastic_ckpt.universal.writing import chunks, safetensors_destination, writer
from elastic_ckpt.universal.writing import convert as converting


def run(work, *arguments):
    """Runs `work` in a process, which kills itself."""
    child = multiprocessing.get_context("forkserver").Process(
        target=work, args=arguments
    )
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL


def convert(job, num_records):
    """Converts in a process that is killed before the next of so many records.

    Files, units and chunks are small.
    """
    run(_write_until_killed, job, num_records)


def _write_until_killed(job, num_records):
    safetensors_destination.SafetensorsDestination.most_file_bytes = 7000
    chunks.CHUNK_BYTES = writer.Destination.most_unit_bytes = 2**12
    record = writer.Writer._record

    lock = threading.Lock()

    def recorded(self, name, fields):
        nonlocal num_records
        with lock:
            if name != "attempt.json":
                if not num_records:
                    os.kill(os.getpid(), signal.SIGKILL)
                num_records -= 1
            record(self, name, fields)

    writer.Writer._record = recorded
    converting.convert(job)
