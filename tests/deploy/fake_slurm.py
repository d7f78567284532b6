"""Slurm's commands on this machine, whose loopback addresses are nodes.

`sbatch` here is a function: it runs a script with the variables that its #SBATCH lines
stand for, again when the script has requeued the job. `srun` starts the tasks, forwards
SIGTERM to them, and ends with the highest of their statuses.
"""

import contextlib
import os
import pathlib
import random
import re
import signal
import socket
import stat
import subprocess
import sys
import time

_SCONTROL = """\
#!/bin/bash
case $1 in
  show) for n in $(seq "$SLURM_JOB_NUM_NODES"); do echo "127.0.0.$n"; done ;;
  requeue) echo "$2" >> "$FAKE_SLURM/requeued" ;;
esac
"""
# The number of nodes, without those that were lost.
_SQUEUE = """\
#!/bin/bash
lost=("$FAKE_SLURM"/lost-*)
[ -e "${lost[0]}" ] || lost=()
echo $((SLURM_JOB_NUM_NODES - ${#lost[@]}))
"""


def _job_id():
    """The number of a job whose ports are free: ours, and those that JAX derives."""
    while True:
        number = random.randrange(1, 2**24)
        with contextlib.ExitStack() as sockets, contextlib.suppress(OSError):
            for port in (20_000 + number % 20_000, 61_440 + number % 4096):
                found = sockets.enter_context(socket.socket())
                found.bind(("127.0.0.1", port))
            return number


JOB_ID = _job_id()


def install(directory):
    """Writes the commands, and returns the environment that finds them."""
    for name, text in (
        ("srun", f'#!/bin/bash\nexec {sys.executable} {__file__} "$@"\n'),
        ("scontrol", _SCONTROL),
        ("squeue", _SQUEUE),
    ):
        path = directory / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    path = os.pathsep.join(
        [str(directory), str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]
    )
    return os.environ | {"PATH": path, "FAKE_SLURM": str(directory)}


def options(script):
    """The options in the #SBATCH lines of a script."""
    return dict(re.findall(r"^#SBATCH --([^=\n]+)=?(.*)$", script, re.MULTILINE))


def start(script, directory, *, starts=0):
    """Starts a job; its output is that of the process."""
    path = directory / "job.sh"
    path.write_text(script)
    chosen = options(script)
    environment = install(directory) | {
        "SLURM_JOB_ID": str(JOB_ID),
        "SLURM_JOB_NAME": chosen["job-name"],
        "SLURM_JOB_NUM_NODES": chosen["nodes"],
        "SLURM_JOB_NODELIST": f"127.0.0.[1-{chosen['nodes']}]",
        "SLURM_NTASKS_PER_NODE": chosen["ntasks-per-node"],
        "SLURM_RESTART_COUNT": str(starts),
        "SLURM_SUBMIT_DIR": str(directory),
    }
    return subprocess.Popen(
        ["bash", str(path)],
        env=environment,
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def requeued(directory):
    """How often jobs have been requeued."""
    path = directory / "requeued"
    return len(path.read_text().splitlines()) if path.exists() else 0


def stop_steps(job):
    """Sends SIGTERM to the steps of a job, as Slurm does before the time limit."""
    for pid in _children(job.pid):
        os.kill(pid, signal.SIGTERM)


def cancel(job, directory):
    """`scancel`: a signal for all, and the job can start nothing more."""
    (directory / "cancelled").touch()
    stop_steps(job)
    job.terminate()


def lose_node(directory, node):
    """Kills the tasks on a node of a job with all that they started.

    Slurm takes the node out of the job.
    """
    (directory / f"lost-{node}").touch()
    for path in directory.glob(f"task-{node}-*"):
        os.killpg(int(path.name.rpartition("-")[2]), signal.SIGKILL)


def _children(pid):
    text = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def signal_all(pids):
    """Sends SIGTERM to processes and to all that they have started, as Slurm does."""
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            below = _children(pid)
            os.kill(pid, signal.SIGTERM)
            signal_all(below)


def _srun(arguments):
    known = {}
    while arguments[0].startswith("--"):
        name, _, value = arguments.pop(0).removeprefix("--").partition("=")
        known[name] = value
    nodes = int(known.get("nodes", os.environ["SLURM_JOB_NUM_NODES"]))
    on_node = int(known.get("ntasks-per-node", os.environ["SLURM_NTASKS_PER_NODE"]))
    directory = pathlib.Path(os.environ["FAKE_SLURM"])
    # Slurm would wait for the lost ones, for any time.
    lost = [*directory.glob("lost-*")]
    assert nodes + len(lost) <= int(os.environ["SLURM_JOB_NUM_NODES"])
    assert not (directory / "cancelled").exists()
    text = b"" if sys.stdin.isatty() else sys.stdin.buffer.read()
    tasks = [
        subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            start_new_session=True,
            env=os.environ
            | {
                "SLURM_NTASKS": str(nodes * on_node),
                "SLURM_PROCID": str(number),
                "SLURM_LOCALID": str(number % on_node),
                "SLURM_NODEID": str(number // on_node),
                "SLURM_STEP_NUM_NODES": str(nodes),
                "SLURM_STEP_NODELIST": "127.0.0.1",
                "SLURM_TOPOLOGY_ADDR": f"top.leaf{number // on_node}.node",
                "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
            },
        )
        for number in range(nodes * on_node)
    ]
    # All processes of a task get the signal, whoever has started them.
    signal.signal(signal.SIGTERM, lambda *_: signal_all([task.pid for task in tasks]))
    for task in tasks:
        task.stdin.write(text)
        task.stdin.close()
    for number, task in enumerate(tasks):
        place = f"task-{number // on_node}-{task.pid}"
        (pathlib.Path(os.environ["FAKE_SLURM"]) / place).touch()
    wait_secs = int(known.get("wait", 0))
    deadline = None
    while any(task.poll() is None for task in tasks):
        time.sleep(0.05)
        if wait_secs and any(task.poll() is not None for task in tasks):
            deadline = deadline or time.monotonic() + wait_secs
        if deadline and time.monotonic() > deadline:
            for task in tasks:
                task.kill()
    for path in pathlib.Path(os.environ["FAKE_SLURM"]).glob("task-*"):
        path.unlink()
    codes = [task.returncode for task in tasks]
    return max(128 - code if code < 0 else code for code in codes)


if __name__ == "__main__":
    sys.exit(_srun(sys.argv[1:]))
