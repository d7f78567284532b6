"""The record of a node's agent: how programs attach to it.

    <directory>/node.json    the agents of the runs below, the failure domains, and the
                             answers to requests for memory (`memory_request`)
    <directory>/node.lock    held while the node's agent runs

A run's directory is `<directory>/<run>`, or one level below, as for the slices that
share a machine.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from etils import epath

from elastic_ckpt.core import errors, storage
from elastic_ckpt.tiers.peers import agent, protocol
from elastic_ckpt.tiers.ram import machine

FILE = "node.json"
LOCK_FILE = "node.lock"
# The levels between a run's directory and that of the node.
MOST_LEVELS = 2
_POLL_SECS = 0.05
_ATTACH_SECS = 60.0


class Answer(NamedTuple):
    """The answer to a request for memory.

    Attributes:
      request: its id.
      refusal: why the run does not fit; empty if it does.
    """

    request: str
    refusal: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeRecord:
    """The facts that the agent of a node publishes.

    Attributes:
      directory: of the node.
      domains: the failure domains of the node, by kind.
      agents: the address that serves each run's directory, by its path below
        `directory`.
      answers: to the newest request for memory of each run, by path; None if the agent
        gives no answers.
    """

    directory: str
    domains: Mapping[str, str]
    agents: Mapping[str, agent.Address]
    answers: Mapping[str, Answer] | None = None

    def path_of(self, root: epath.PathLike) -> str:
        """The path of a run's directory below that of the node."""
        return os.path.relpath(root, self.directory)


def write(record: NodeRecord) -> None:
    """Publishes a record."""
    fields: dict[str, Any] = {
        "protocol": protocol.VERSION,
        "domains": dict(record.domains),
        "agents": {
            path: dataclasses.asdict(address) for path, address in record.agents.items()
        },
    }
    if record.answers is not None:
        fields["answers"] = {
            path: list(answer) for path, answer in record.answers.items()
        }
    path = os.path.join(record.directory, FILE)
    storage.write_atomic(path, storage.canonical_json(fields))


def find(root: epath.PathLike) -> NodeRecord | None:
    """The record of the node's agent that serves the run's directory `root`.

    Returns:
      None if no agent of a node runs.

    Raises:
      RunError: if its version is too far away from this program's.
    """
    directory = os.fspath(root)
    for _ in range(MOST_LEVELS):
        directory = os.path.dirname(directory)
        if is_held(os.path.join(directory, LOCK_FILE)):
            return read(directory)
    return None


def read(directory: str) -> NodeRecord | None:
    """The record in `directory`, also of an agent that was killed; None without one.

    Raises:
      RunError: as `find`.
    """
    try:
        with open(os.path.join(directory, FILE), "rb") as file:
            fields = json.loads(file.read())
    except FileNotFoundError:
        return None
    problem = protocol.problem(str(fields["protocol"]))
    if problem:
        raise errors.RunError(f"the agent of the node in {directory} {problem}")
    return NodeRecord(
        directory=directory,
        domains=fields["domains"],
        agents={
            path: agent.Address.of_json(address)
            for path, address in fields["agents"].items()
        },
        answers={
            path: Answer(*answer[: len(Answer._fields)])
            for path, answer in fields["answers"].items()
        }
        if "answers" in fields
        else None,
    )


def attach(root: epath.PathLike, *, within_secs: float = _ATTACH_SECS) -> agent.Address:
    """Has the node's agent serve `root`, and returns its address.

    Raises:
      RunError: if it does not in time.
    """
    # The agent serves directories that have an id.
    machine_id = machine.machine_id(root)
    deadline = time.monotonic() + within_secs
    while time.monotonic() < deadline:
        record = find(root)
        if record is not None:
            address = record.agents.get(record.path_of(root))
            if address is not None and address.machine == machine_id:
                return address
        time.sleep(_POLL_SECS)
    raise errors.RunError(
        f"the agent of the node has not served {os.fspath(root)} for"
        f" {within_secs:g} s; look at its log: it needs the user of this program"
    )


def is_held(lock: str) -> bool:
    """Whether a process holds the exclusive lock of a file; False without the file."""
    try:
        with open(lock, "rb") as file:
            # Two processes that look at the same time do not see each other.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
