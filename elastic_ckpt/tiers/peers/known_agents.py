"""The agents known to a machine, through which a new world finds idle machines.

`<root>/agents.json` lists them, by the id of the machine's memory. It is a hint: an
agent that does not answer, or that turns out to serve other memory, is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from elastic_ckpt.tiers.peers import agent_url, records

FILE = "agents.json"
# Machines come and go: one that was in no world for so long is dropped.
_REMEMBERED_SECS = 14 * 24 * 3600


def read(root: epath.PathLike) -> dict[str, dict[str, Any]]:
    """The address of each machine's agent and when it was `seen`; empty at first.

    Malformed entries are left out, because the file is only a hint.
    """
    agents = records.read(root, FILE)
    if not isinstance(agents, dict):
        return {}
    return {machine: agent for machine, agent in agents.items() if _is_agent(agent)}


def write(root: epath.PathLike, agents: Mapping[str, Mapping[str, Any]]) -> None:
    """Notes `agents`, for the next world."""
    records.write(root, FILE, {machine: {**each} for machine, each in agents.items()})


def urls(agents: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The URLs of agents with their certificates (`agent_url.pinned`), by machine."""
    return {
        machine: agent_url.pinned(each["url"], each.get("certificate_sha256"))
        for machine, each in agents.items()
    }


def forget(root: epath.PathLike, url: str) -> None:
    """Removes the agent at `url`, whose machine is gone."""
    noted = read(root)
    left = {machine: agent for machine, agent in noted.items() if agent["url"] != url}
    if left != noted:
        write(root, left)


def joined(
    heard: Iterable[Mapping[str, Any]], present: Mapping[str, Any], *, now_secs: float
) -> dict[str, Any]:
    """Merges the agents known to hosts, each as it was seen last.

    Args:
      heard: of each host, what it has noted.
      present: those of the machines that are there now.
      now_secs: the time, in seconds since 1970.
    """
    newest: dict[str, Any] = {}
    for agents in heard:
        for machine, agent in agents.items():
            if agent["seen"] > max(
                now_secs - _REMEMBERED_SECS, newest.get(machine, {}).get("seen", 0)
            ):
                newest[machine] = agent
    return newest | {
        machine: {**agent, "seen": now_secs} for machine, agent in present.items()
    }


def _is_agent(agent: Any) -> bool:
    if not isinstance(agent, dict) or not isinstance(agent.get("seen"), int | float):
        return False
    is_certificate = isinstance(agent.get("certificate_sha256"), str | None)
    return is_certificate and agent_url.is_url(agent.get("url"))
