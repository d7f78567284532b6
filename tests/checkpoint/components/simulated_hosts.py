"""Hosts of a world that take turns in this process, over one directory."""

import asyncio

from etils import epath

from elastic_ckpt.checkpoint import component_io as step_components
from elastic_ckpt.core import topology


class Turns:
    """Runs functions as each host of a world.

    Args:
      monkeypatch: the fixture.
    """

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

    def save(self, directory, num_hosts, make):
        """Saves the component `make(host)` of each host."""
        self.run(num_hosts, lambda host: save(make(host), directory))

    def load(self, directory, num_hosts, make):
        """The values of each host's component after loading."""

        def loaded(host):
            component = make(host)
            load(component, directory)
            return component.get()

        return self.run(num_hosts, loaded)


def save(component, directory):
    """Saves a component into a directory, as a checkpointer does."""

    async def saved():
        await (await component.save(step_components.Created(epath.Path(directory))))

    asyncio.run(saved())


def load(component, directory):
    """Loads a component."""
    step_components.load(component, directory)
