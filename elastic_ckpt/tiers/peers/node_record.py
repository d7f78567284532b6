"""The record of a node's agent: its failure domains, and answers to requests.

    <directory>/node.json    the failure domains, the answers to requests for memory,
                             and the addresses of the runs below; each is also in the
                             run's own `agent.json`, where programs look for it
    <directory>/node.lock    held while the node's agent runs
    <root>/request.json      of a run: the bytes that it uses at most, and an id

A run's directory is `<directory>/<run>`, or one level below, as for the slices that
share a machine. The first host of a run on the node asks for memory before the run
writes a step.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from etils import epath

from elastic_ckpt.core import errors, storage
from elastic_ckpt.tiers.peers import agent, protocol, records

FILE = "node.json"
LOCK_FILE = "node.lock"
REQUEST_FILE = "request.json"
# The levels between a run's directory and that of the node.
MOST_LEVELS = 2
_POLL_SECS = 0.05
# Until the agent has measured all runs, and removed those that ended.
_ANSWER_SECS = 600.0


class Request(NamedTuple):
    """A request for memory.

    Attributes:
      id: of this request alone.
      num_bytes: that the run uses at most, with what its directory has already.
    """

    id: str
    num_bytes: int


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
    records.write(record.directory, FILE, fields)


def find(root: epath.PathLike) -> NodeRecord | None:
    """The record of the node's agent that serves the run's directory `root`.

    Returns:
      None if no agent of a node runs.

    Raises:
      RunError: if its version is not this program's.
    """
    directory = os.fspath(root)
    for _ in range(MOST_LEVELS):
        directory = os.path.dirname(directory)
        if storage.is_locked(os.path.join(directory, LOCK_FILE)):
            return read(directory)
    return None


def read(directory: str) -> NodeRecord | None:
    """The record in `directory`, also of an agent that was killed; None without one.

    Raises:
      RunError: as `find`.
    """
    fields = records.read(directory, FILE)
    if fields is None:
        return None
    problem = protocol.problem(str(fields["protocol"]))
    if problem:
        raise errors.RunError(f"the agent of the node in {directory} {problem}")
    answers = fields.get("answers")
    return NodeRecord(
        directory=directory,
        domains=fields["domains"],
        agents={
            path: records.decoded(agent.Address, address)
            for path, address in fields["agents"].items()
        },
        answers=None
        if answers is None
        else {
            path: Answer(*each[: len(Answer._fields)]) for path, each in answers.items()
        },
    )


def read_request(root: epath.PathLike) -> Request | None:
    """The newest request of the run whose directory is `root`; None without one."""
    try:
        # A later version may send more.
        request, num_bytes, *_ = records.read(root, REQUEST_FILE)
        return Request(str(request), int(num_bytes))
    except (TypeError, ValueError):
        return None


def ask_for_memory(
    root: epath.PathLike, num_bytes: int, *, within_secs: float = _ANSWER_SECS
) -> None:
    """Asks the agent of the node for memory, if one runs that gives answers.

    Args:
      root: the directory of the run.
      num_bytes: that the run uses at most.
      within_secs: for the answer.

    Raises:
      RunError: if the run does not fit, or the agent does not answer.
    """
    request = Request(secrets.token_hex(8), num_bytes)
    records.write(root, REQUEST_FILE, [*request])
    deadline = time.monotonic() + within_secs
    while (record := find(root)) is not None and record.answers is not None:
        answer = record.answers.get(record.path_of(root))
        if answer is not None and answer.request == request.id:
            if answer.refusal:
                raise errors.RunError(answer.refusal)
            return
        if time.monotonic() > deadline:
            raise errors.RunError(
                f"the agent of the node has not answered for {within_secs:g} s whether"
                f" {num_bytes} bytes fit in {record.directory}; look at its log"
            )
        time.sleep(_POLL_SECS)
