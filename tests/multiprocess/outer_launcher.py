"""Starts a run as Slurm does: the same command once a host."""

import contextlib
import os
import signal
import socket
import subprocess

from tests import runs


@contextlib.contextmanager
def tasks(config, *settings, num_tasks=2, of_task=lambda _: ()):
    """Starts processes as `srun --ntasks=2` on one node; JAX itself detects Slurm.

    Each leads a process group, which is killed at the end of the block. `of_task(n)`
    are further settings of task n.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        common = os.environ | {
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS": str(num_tasks),
            "JAX_COORDINATOR_PORT": str(reserved.getsockname()[1]),
        }
        started = [
            subprocess.Popen(
                runs.command("train", config, *settings, *of_task(n)),
                env=common | {"SLURM_PROCID": str(n), "SLURM_LOCALID": str(n)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for n in range(num_tasks)
        ]
        try:
            yield started
        finally:
            for task in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(task.pid, signal.SIGKILL)
                task.communicate()
