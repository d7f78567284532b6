"""The agent of this machine: a running one, or one that ends with this process.

If the agent of a node runs (`node_agent`), it serves the RAM disk.
"""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys

from elastic_ckpt.core import errors
from elastic_ckpt.tiers.peers import (
    agent,
    agent_command,
    memory_request,
    node_record,
)


class AgentProcess:
    """An agent that serves a RAM disk.

    One that is there already is used, and outlives this process. Otherwise one is
    started, and ends when this is closed, or when this process is killed.

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
        self._process = None
        of_node = node_record.find(service.root)
        if of_node is not None and most_bytes is not None:
            memory_request.send(service.root, most_bytes)
        if agent.is_alive(service.root):
            self.address = agent.wait_for(service.root)
        elif of_node is not None:
            self.address = node_record.attach(service.root)
        else:
            self._process, _ = _start(service)
            self.address = agent.wait_for(service.root)

    def check(self) -> None:
        """Raises a RunError if the agent was started here and has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise errors.RunError(
                f"the agent at {self.address.url} has ended with status"
                f" {self._process.returncode}; start it again"
            )

    def close(self) -> None:
        """Ends the agent, if it was started here."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)


class AgentBeside:
    """An agent beside that of a RAM disk, which does not answer.

    It ends when this is closed, or when this process is killed.

    Args:
      service: what it serves.

    Raises:
      RunError: if it cannot be started.

    Attributes:
      url: of the agent, which no file names.
    """

    def __init__(self, service: agent.Service) -> None:
        beside = dataclasses.replace(service, port=0, is_beside=True)
        self._process, self.url = _start(beside)

    def close(self) -> None:
        """Ends the agent."""
        _end(self._process)


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    assert process.stdout
    # Its end is the agent's.
    process.stdin.close()
    process.wait()
    process.stdout.close()


def _start(service: agent.Service) -> tuple[subprocess.Popen[str], str]:
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
    # Neither Ctrl-C of a terminal nor SIGTERM to all processes of a job, Slurm's way,
    # is for it: it serves until the last save is done. It inherits the mask.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        _end(process)
        raise errors.RunError(
            f"the agent of {service.root} could not be started; its messages are in"
            " this process's standard error"
        )
    return process, line.split()[-1]
