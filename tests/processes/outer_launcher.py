"""Starts a run as Slurm does: the same command once a host.

The tasks are forked from this session's warm server.
"""

import contextlib
import os
import signal
import socket
from concurrent import futures
from unittest import mock

from tests import runs


@contextlib.contextmanager
def tasks(config, *settings, num_tasks=2, of_task=lambda _: ()):
    """Starts processes as `srun --ntasks=2` on one node; JAX itself detects Slurm.

    Each leads a process group, which is killed at the end of the block. `of_task(n)`
    are further settings of task n.
    """
    tasks = []
    with socket.socket() as reserved, contextlib.ExitStack() as started:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        common = {
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS": str(num_tasks),
            "JAX_COORDINATOR_PORT": str(reserved.getsockname()[1]),
        }
        for n in range(num_tasks):
            own = {"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)}
            with mock.patch.dict(os.environ, common | own):
                task = runs.Started(
                    *("train", config, *settings, *of_task(n)), leads_group=True
                )
            started.enter_context(task)
            tasks.append(task)
        try:
            yield tasks
        finally:
            for task in tasks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(task.pid, signal.SIGKILL)


def outputs(tasks):
    """What each of them prints until all have ended, read at once: no pipe fills."""
    with futures.ThreadPoolExecutor(len(tasks)) as reading:
        read = list(reading.map(lambda task: task.stdout.read(), tasks))
    for task in tasks:
        task.wait()
    return read
