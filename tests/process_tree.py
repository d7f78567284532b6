"""A process with all that it has started: agents have sessions of their own."""

import contextlib
import os
import pathlib
import signal
import time

# Put before a command, it has the process killed when its parent ends. A `preexec_fn`
# that does so would fork this process, whose JAX has threads.
ENDS_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")


def kill(process):
    """Kills a process of `subprocess` with all that it has started, and waits."""
    pids = of(process.pid)
    send(pids, signal.SIGKILL)
    process.wait()
    wait_for_end(pids)


def wait_for_end(pids):
    """Returns when no process is alive."""
    while any(map(is_alive, pids)):
        time.sleep(0.01)


def of(pid):
    """A process and all that it has started, and these."""
    pids = [pid]
    for task in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for child in task.read_text().split():
                pids += of(int(child))
    return pids


def send(pids, number):
    """Sends a signal to processes, of which some may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def is_alive(pid):
    """Whether a process has not ended."""
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def host(started, directory, number):
    """The process of a host of the run in a directory, found by its log."""
    while True:
        assert started.poll() is None
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                output = os.readlink(path / "fd/1")
                if output.startswith(f"{directory}/") and output.endswith(
                    f"host-{number}.log"
                ):
                    return int(path.name)
        time.sleep(0.01)
