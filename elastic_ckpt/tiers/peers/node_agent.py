"""The agent of a node serves every run's directory below one, and outlives pods.

On Kubernetes a DaemonSet runs it over a memory-backed `hostPath` of the node, which the
pods of runs mount. It serves each run's directory as the agent of a machine would, with
the run's secret. It removes the directories of runs that ended (`node_runs`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping

from elastic_ckpt.core import errors, storage
from elastic_ckpt.tiers.peers import agent, node_record, node_runs
from elastic_ckpt.tiers.ram import machine, ram_disk

_POLL_SECS = 0.2
# How often all files are measured and unused runs looked for.
_SWEEP_SECS = 30.0
_LOCK_SECS = 5.0
_KEPT = node_runs.Lifetime()


async def serve(
    service: agent.Service,
    ended: asyncio.Event,
    *,
    announce: Callable[[str], object],
    domains: Mapping[str, str] | None = None,
    lifetime: node_runs.Lifetime = _KEPT,
    sweep_secs: float = _SWEEP_SECS,
) -> None:
    """Serves the runs of a node until an event is set.

    Args:
      service: of every run's agent; its root is the directory of the node.
      ended: set by another task.
      announce: called with a line for each event that people read.
      domains: the failure domains of the node, by kind.
      lifetime: of the directories of runs.
      sweep_secs: between two looks for runs that ended.

    Raises:
      RunError: if the directory does not exist, or another agent has it.
    """
    directory = service.root
    if not os.path.isdir(directory):
        raise errors.RunError(
            f"{directory}: no such directory; create it on a file system in memory"
        )
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(_locked(directory))
        node = _Node(service, domains or {}, lifetime, announce)
        stack.push_async_callback(node.close)
        # In place of what a former agent has served.
        node.publish()
        announce(f"serving {directory} at {service.interface}")
        await node.update()
        next_sweep = time.monotonic()
        while not ended.is_set():
            if time.monotonic() >= next_sweep:
                await node.sweep()
                next_sweep = time.monotonic() + sweep_secs
            await node.answer()
            await node.update()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), _POLL_SECS)


@contextlib.asynccontextmanager
async def _locked(directory: str) -> AsyncIterator[None]:
    # A program that checks whether an agent runs holds the lock for a moment.
    path = os.path.join(directory, node_record.LOCK_FILE)
    deadline = time.monotonic() + _LOCK_SECS
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(storage.exclusive_lock(path))
                break
            except errors.RunError:
                if time.monotonic() > deadline:
                    raise errors.RunError(
                        f"another agent serves the runs below {directory}; end it first"
                    ) from None
            await asyncio.sleep(_POLL_SECS)
        yield


class _Node:
    """The runs of a node, each with the server of its directory.

    Attributes:
      served: the address of each run, by its path.
    """

    def __init__(
        self,
        service: agent.Service,
        domains: Mapping[str, str],
        lifetime: node_runs.Lifetime,
        announce: Callable[[str], object],
    ) -> None:
        self.served: dict[str, agent.Address] = {}
        # What ends each server.
        self._stacks: dict[str, contextlib.AsyncExitStack] = {}
        self._service = service
        self._directory = service.root
        self._domains = domains
        self._lifetime = lifetime
        self._announce = announce
        self._last_used: dict[str, float] = {}
        self._problems: set[str] = set()
        self._answers: dict[str, node_record.Answer] = {}
        # The port of each run, so that others reach its memory after an upgrade.
        self._ports: dict[str, int] = {}
        # A former agent of a version too far away has none for this one.
        with contextlib.suppress(errors.RunError):
            former = node_record.read(self._directory)
            if former is not None:
                self._answers.update(former.answers or {})
                self._ports = {p: _port(a) for p, a in former.agents.items()}
        self._published: node_record.NodeRecord | None = None
        # Addresses that agents which were killed have left.
        for root in map(self._root, node_runs.runs(self._directory)):
            if not agent.is_alive(root):
                storage.remove(os.path.join(root, agent.ADDRESS_FILE))

    async def update(self) -> None:
        """Serves directories that are new, and no more what is gone."""
        paths = set(node_runs.runs(self._directory))
        for path, address in list(self.served.items()):
            # Another directory may have taken the place of the one that is served.
            if address.machine != machine.find(self._root(path)):
                await self._end(path)
        for path in sorted(paths - self.served.keys()):
            await self._begin(path)
        self.publish()

    def publish(self) -> None:
        """Writes the record, if it has changed."""
        record = node_record.NodeRecord(
            directory=self._directory,
            domains=self._domains,
            agents=dict(sorted(self.served.items())),
            answers={p: a for p, a in self._answers.items() if p in self.served},
        )
        if record != self._published:
            self._published = record
            node_record.write(record)

    async def sweep(self) -> None:
        """Removes runs that ended."""

        def to_remove() -> list[str]:
            node_runs.remove_leftovers(self._directory)
            return node_runs.to_remove(self._uses(), self._lifetime)

        for path in await asyncio.to_thread(to_remove):
            await self._remove(path)

    async def answer(self) -> None:
        """Answers the requests of runs for memory, and makes room for them."""
        for path in list(self.served):
            request = node_record.read_request(self._root(path))
            answer = self._answers.get(path)
            if request is None or (answer and answer.request == request.id):
                continue
            refusal = ""
            try:
                for other in await asyncio.to_thread(self._in_the_way, path, request):
                    await self._remove(other)
            except errors.RunError as error:
                refusal = str(error)
            self._answers[path] = node_record.Answer(request.id, refusal)

    async def close(self) -> None:
        """Ends all servers."""
        for path in list(self.served):
            await self._end(path)

    def _in_the_way(self, path: str, request: node_record.Request) -> list[str]:
        if self._lifetime.limit_bytes is None:
            return []
        others = self._uses()
        others.pop(path, None)
        removed = node_runs.to_remove(
            others, self._lifetime, needed_bytes=request.num_bytes
        )
        staying = {each: others[each] for each in others.keys() - set(removed)}
        node_runs.check_room(path, request.num_bytes, staying, self._lifetime)
        return removed

    def _uses(self) -> dict[str, node_runs.Use]:
        return {path: self._use(path) for path in node_runs.runs(self._directory)}

    def _use(self, path: str) -> node_runs.Use:
        root, now = self._root(path), time.monotonic()
        # A process may have used it without a change, when this was called before.
        last = max(now - node_runs.unused_secs(root), self._last_used.get(path, 0))
        self._last_used[path] = last
        request, granted_bytes = node_record.read_request(root), 0
        if request and self._answers.get(path) == (request.id, ""):
            granted_bytes = request.num_bytes
        is_limited = self._lifetime.limit_bytes is not None
        return node_runs.Use(
            unused_secs=now - last,
            num_bytes=ram_disk.used_bytes(root) if is_limited else 0,
            granted_bytes=granted_bytes,
        )

    async def _begin(self, path: str) -> None:
        taken = {*map(_port, self.served.values()), *self._ports.values()}
        port = self._service.port
        if port:
            port = next(each for each in itertools.count(port) if each not in taken)
        service = dataclasses.replace(
            self._service, root=self._root(path), port=self._ports.pop(path, port)
        )
        stack = contextlib.AsyncExitStack()
        try:
            address = await stack.enter_async_context(agent.serving(service))
        except (errors.ElasticCkptError, OSError) as error:
            # It is tried again, and a problem is shown once.
            problem = f"does not serve {path}: {error}"
            if problem not in self._problems:
                self._problems.add(problem)
                print(problem, file=sys.stderr, flush=True)
            return
        self.served[path], self._stacks[path] = address, stack
        self._announce(f"serving {path} at {address.url}")

    async def _end(self, path: str) -> None:
        del self.served[path]
        await self._stacks.pop(path).aclose()

    async def _remove(self, path: str) -> None:
        if not await asyncio.to_thread(node_runs.remove, self._root(path)):
            return
        self._announce(f"removed {path}, which no process has used for a while")
        if path in self.served:
            # Before another directory of that name is served.
            await self._end(path)

    def _root(self, path: str) -> str:
        return os.path.join(self._directory, path)


def _port(address: agent.Address) -> int:
    return int(address.url.rpartition(":")[2])
