"""The request of a run for memory of its node, and the answer of the node's agent.

    <root>/request.json      the bytes that the run uses at most, and an id
    node.json                the answer, by the path of the run

The first host of a run on the node sends it before the run writes a step.
"""

from __future__ import annotations

import json
import pathlib
import secrets
import time
from typing import NamedTuple

from etils import epath

from elastic_ckpt.core import errors, storage
from elastic_ckpt.tiers.peers import node_record

FILE = "request.json"
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


def read(root: epath.PathLike) -> Request | None:
    """The newest request of the run whose directory is `root`; None without one."""
    try:
        # A later version may send more.
        request, num_bytes, *_ = json.loads(pathlib.Path(root, FILE).read_bytes())
        return Request(str(request), int(num_bytes))
    except (FileNotFoundError, TypeError, ValueError):
        return None


def send(
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
    storage.write_atomic(pathlib.Path(root, FILE), storage.canonical_json([*request]))
    deadline = time.monotonic() + within_secs
    while (record := node_record.find(root)) is not None:
        if record.answers is None:
            return
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
