"""Work in processes that are killed while they write."""

import multiprocessing
import os
import signal

from elastic_ckpt.tiers.persistent import upload
from elastic_ckpt.universal.writing import chunks, orbax_destination
from elastic_ckpt.universal.writing import convert as converting


def run(work, *arguments):
    """Runs `work` in a process, which kills itself."""
    child = multiprocessing.get_context("forkserver").Process(
        target=work, args=arguments
    )
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL


def convert(job, num_batches):
    """Converts in a process that is killed after so many batches, each noted."""
    run(_write_until_killed, job, num_batches)


def _write_until_killed(job, num_batches):
    upload._PROGRESS_SECS = upload._PROGRESS_SHARE = 0
    chunks.CHUNK_BYTES = 2**12
    orbax_destination._BATCH_BYTES = 2**12
    done = 0

    def progress(*_):
        nonlocal done
        done += 1
        if done > num_batches:
            os.kill(os.getpid(), signal.SIGKILL)

    converting.convert(job, progress=progress)
