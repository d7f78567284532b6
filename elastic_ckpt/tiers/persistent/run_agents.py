"""The agents of a run's newest world, recorded beside its steps in storage.

    <root>/agents.json    the run, and the address of the agent of each machine

A program in no world finds the machines of the run by it (`checkpoint.follow`). Host 0
writes it once its world has saved a step, after the world was claimed. It is a hint: an
agent may be gone, all that one sends is checked, and the run's secret is not in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from etils import epath

from elastic_ckpt.core import bucket_clients, checked_json, errors, storage
from elastic_ckpt.tiers.peers import agent_url, known_agents, world_record

FILE = "agents.json"
_VERSION = 1
_WHAT = "record of a run's agents"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunAgents:
    """The agents of one world.

    Attributes:
      run: the identity of the run.
      urls: by the id of a machine, the URL of its agent with its certificate, as
        `agent_url.pinned` joins them.
    """

    run: str
    urls: Mapping[str, str]


def write(steps: epath.PathLike, agents: RunAgents) -> None:
    """Records the agents of a world in place of those of the one before.

    A world without agents has no record.

    Args:
      steps: the directory of the run's steps.
      agents: of the world.

    Raises:
      CheckpointError: if storage is out of reach.
    """
    path = storage.absolute(steps) / FILE
    fields: dict[str, storage.Json] = {"run": agents.run, "urls": dict(agents.urls)}
    try:
        if not agents.urls:
            storage.remove(path)
            return
        storage.write_atomic(path, checked_json.to_bytes(fields, version=_VERSION))
    except bucket_clients.failures() as error:
        raise errors.CheckpointError(
            f"the addresses of this run's agents cannot be written to {path} ({error});"
            " until they are, programs that follow the run find its steps in storage"
            " alone"
        ) from error


def read(steps: epath.PathLike) -> RunAgents | None:
    """The agents that were recorded last; None if there is no record.

    Raises:
      CheckpointError: if storage is out of reach, or the record cannot be read.
    """
    path = storage.absolute(steps) / FILE
    try:
        fields = checked_json.parse(path.read_bytes(), what=_WHAT, version=_VERSION)
    except FileNotFoundError:
        return None
    except (checked_json.UnreadableError, *bucket_clients.failures()) as error:
        raise errors.CheckpointError(
            f"{path}, the {_WHAT}, {error}; the next world of the run writes it anew"
        ) from error
    urls = {
        machine: url
        for machine, url in fields["urls"].items()
        if agent_url.is_url(agent_url.unpinned(url)[0])
    }
    return RunAgents(run=fields["run"], urls=urls)


def of_ram_disk(root: epath.PathLike) -> RunAgents | None:
    """The agents of the world that this machine is, or was, in; None if there was none.

    Args:
      root: of its RAM disk.
    """
    world = world_record.read(root)
    if world is None:
        return None
    machines = {host.machine for host in world.hosts}
    urls = {
        machine: url
        for machine, url in known_agents.urls(known_agents.read(root)).items()
        if machine in machines
    }
    return RunAgents(run=world.run, urls=urls)
