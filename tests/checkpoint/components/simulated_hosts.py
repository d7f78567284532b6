"""Hosts of a world that take turns in this process, over one directory."""

import asyncio

from etils import epath

from elastic_ckpt.checkpoint import component_io
from elastic_ckpt.core import topology


class Turns:
    """Replaces the host that this process is, and the number of hosts."""

    def __init__(self, monkeypatch):
        self._monkeypatch = monkeypatch

    def run(self, num_hosts, work):
        """The results of `work(host)` of each host."""
        results = []
        for host in range(num_hosts):
            self._monkeypatch.setattr(topology, "this_host", lambda host=host: host)
            self._monkeypatch.setattr(topology, "num_hosts", lambda: num_hosts)
            results.append(work(host))
        return results


def save(component, directory):
    """Saves a component into a directory, as a checkpointer does."""

    async def saved():
        await (await component.save(component_io.Created(epath.Path(directory))))

    asyncio.run(saved())


def load(component, directory):
    """Loads a component; returns its values."""
    component_io.load(component, directory)
    return component.get()
