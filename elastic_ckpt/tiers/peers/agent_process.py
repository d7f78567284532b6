"""The agent of this machine: a running one, or one that ends with this process.

If the agent of a node runs (`node_agent`), it serves the RAM disk.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from concurrent import futures

from elastic_ckpt.core import errors
from elastic_ckpt.tiers.peers import agent, agent_command, node_record
from elastic_ckpt.tiers.ram import machine


class AgentProcess:
    """An agent that serves a RAM disk.

    One that is there already is used, and outlives this process. Otherwise, and beside
    one that does not answer, one is started, and ends when this is closed, or when this
    process is killed.

    Args:
      service: what it serves.
      most_bytes: that the run writes to the RAM disk; None if that is unknown.

    Raises:
      RunError: if there is none and none can be started, or the run does not fit into
        the memory of the node.

    Attributes:
      address: of the agent.
    """

    def __init__(
        self, service: agent.Service, *, most_bytes: int | None = None
    ) -> None:
        self._process: subprocess.Popen[str] | None = None
        root = service.root
        if service.is_beside:
            url = self._start(service)
            assert self._process
            # No file has it.
            self.address = agent.Address(
                url=url, pid=self._process.pid, machine=machine.machine_id(root)
            )
            return
        of_node = node_record.find(root)
        if of_node is not None and most_bytes is not None:
            node_record.ask_for_memory(root, most_bytes)
        if of_node is None and not agent.is_alive(root):
            self._start(service)
        self.address = agent.wait_for(root)

    def close(self) -> None:
        """Ends the agent, if it was started here."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _start(self, service: agent.Service) -> str:
        options = {
            "--interface": service.interface,
            "--port": service.port or None,
            "--secret-file": service.secret_file,
            "--tls-certificate": service.tls_certificate,
            "--tls-key": service.tls_key,
            "--max-bytes-per-sec": service.max_bytes_per_sec,
        }
        given = [
            str(word)
            for option, value in options.items()
            if value is not None
            for word in (option, value)
        ]
        command = [
            *(sys.executable, "-m", agent_command.__name__, service.root),
            *given,
            *(["--beside"] if service.is_beside else []),
            "--until-stdin-closes",
        ]
        # In a thread of its own: this one goes on to receive the signals.
        with futures.ThreadPoolExecutor(1) as thread:
            process = thread.submit(_started, command).result()
        assert process.stdout
        line = process.stdout.readline()
        if not line:
            _end(process)
            raise errors.RunError(
                f"the agent of {service.root} could not be started; its messages are in"
                " this process's standard error"
            )
        self._process = process
        return line.split()[-1]


def _started(command: list[str]) -> subprocess.Popen[str]:
    # Neither Ctrl-C of a terminal nor SIGTERM to all processes of a job, Slurm's way,
    # is for it: it serves until the last save is done. It inherits the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    assert process.stdout
    # Its end is the agent's.
    process.stdin.close()
    process.wait()
    process.stdout.close()
