"""The agents of a run: one record beside its steps in storage, and in each RAM disk.

    <directory>/agents.json    by machine, the URL of its agent and when it was last in
                               a world, in seconds since 1970

Programs in no world find the machines of the run by the one in storage, and a new world
finds idle machines by those of its hosts. The record is a hint: an agent may be gone,
all that it sends is checked, and the run's secret is not in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from etils import epath

from elastic_ckpt.core import bucket_clients, checked_json, errors, storage

FILE = "agents.json"
_VERSION = 1
_WHAT = "record of a run's agents"
# Machines come and go: one that was in no world for so long is dropped.
_REMEMBERED_SECS = 14 * 24 * 3600


class Seen(NamedTuple):
    """The agent of a machine, and when its machine was last in a world."""

    url: str
    secs: float


@dataclasses.dataclass(frozen=True)
class RunAgents:
    """The agents of a run, by the id of their machine's memory."""

    run: str
    agents: Mapping[str, Seen]

    @property
    def urls(self) -> dict[str, str]:
        """The agents of the newest world, by machine."""
        newest = max((each.secs for each in self.agents.values()), default=0)
        of_world = {m: each for m, each in self.agents.items() if each.secs == newest}
        return {machine: each.url for machine, each in of_world.items()}


def write(directory: epath.PathLike, agents: RunAgents) -> None:
    """Records agents in place of those before; none leave no record.

    Raises:
      CheckpointError: if storage is out of reach.
    """
    path = storage.absolute(directory) / FILE
    fields: dict[str, storage.Json] = {
        "run": agents.run,
        "agents": {machine: list(each) for machine, each in agents.agents.items()},
    }
    try:
        if not agents.agents:
            storage.remove(path)
            return
        storage.write_atomic(path, checked_json.to_bytes(fields, version=_VERSION))
    except bucket_clients.failures() as error:
        raise errors.CheckpointError(
            f"the addresses of this run's agents cannot be written to {path} ({error});"
            " until they are, programs that follow the run find its steps in storage"
            " alone"
        ) from error


def read(directory: epath.PathLike) -> RunAgents | None:
    """The agents that were recorded last; None if there is no record.

    Raises:
      CheckpointError: if storage is out of reach, or the record cannot be read.
    """
    path = storage.absolute(directory) / FILE
    try:
        fields = checked_json.parse(path.read_bytes(), what=_WHAT, version=_VERSION)
    except FileNotFoundError:
        return None
    except (checked_json.UnreadableError, *bucket_clients.failures()) as error:
        raise errors.CheckpointError(
            f"{path}, the {_WHAT}, {error}; the next world of the run writes it anew"
        ) from error
    agents = {machine: Seen(*each) for machine, each in fields["agents"].items()}
    return RunAgents(fields["run"], agents)


def known(root: epath.PathLike) -> dict[str, Seen]:
    """The agents recorded in a RAM disk; none if its record is missing or damaged."""
    try:
        noted = read(root)
    except errors.CheckpointError:
        noted = None
    return {} if noted is None else dict(noted.agents)


def forget(root: epath.PathLike, url: str) -> None:
    """Drops the agent at `url`, whose machine is gone."""
    noted = read(root)
    if noted is not None:
        left = {m: each for m, each in noted.agents.items() if each.url != url}
        write(root, RunAgents(noted.run, left))


def joined(
    heard: Iterable[Mapping[str, Seen]], present: Mapping[str, str], *, now_secs: float
) -> dict[str, Seen]:
    """Merges the agents known to hosts, each as it was seen last.

    Args:
      heard: of each host, what its machine has recorded.
      present: the URLs of those of the machines of the world, by machine.
      now_secs: the time, in seconds since 1970.
    """
    newest: dict[str, Seen] = {}
    for agents in heard:
        for machine, each in agents.items():
            if each.secs > newest.get(machine, Seen("", 0)).secs:
                newest[machine] = each
    recent = {
        m: each for m, each in newest.items() if each.secs > now_secs - _REMEMBERED_SECS
    }
    return recent | {machine: Seen(url, now_secs) for machine, url in present.items()}
