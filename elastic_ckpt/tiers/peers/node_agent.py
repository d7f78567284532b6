"""The agent of a node serves every run's directory below one, and outlives pods.

On Kubernetes a DaemonSet runs it over a memory-backed `hostPath` of the node, which the
pods of runs mount. It serves each run's directory as an agent of that run would, with
the run's secret. It removes the directories of runs that ended (`node_runs`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from elastic_ckpt.core import errors, storage
from elastic_ckpt.tiers.peers import (
    agent,
    memory_request,
    node_memory,
    node_record,
    node_refills,
    node_runs,
)
from elastic_ckpt.tiers.ram import machine, ram_disk

_POLL_SECS = 0.2
# How often all files are measured and unused runs looked for.
_SWEEP_SECS = 30.0
_LOCK_SECS = 5.0
_KEPT = node_runs.Lifetime()


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeService:
    """The options of a node's agent.

    Attributes:
      service: of every run's agent; its root is the directory of the node.
      domains: the failure domains of the node, by kind.
      lifetime: of the directories of runs.
      sweep_secs: between two looks for runs that ended.
      refill: a program that fills the directory of a run, its last argument, from peers
        if the node was replaced; see `node_refills`.
    """

    service: agent.Service
    domains: Mapping[str, str] = dataclasses.field(default_factory=dict)
    lifetime: node_runs.Lifetime = _KEPT
    sweep_secs: float = _SWEEP_SECS
    refill: Sequence[str] = ()


def run(
    node: NodeService,
    *,
    announce: Callable[[str], None],
    until_stdin_closes: bool = False,
) -> None:
    """Serves until this process gets SIGTERM or SIGINT.

    Args:
      node: what to serve.
      announce: called with a line for each event that people read.
      until_stdin_closes: see `agent.run`.

    Raises:
      RunError: if the directory does not exist, or another agent has it.
    """

    async def serving(ended: asyncio.Event) -> None:
        await serve(node, announce=announce, ended=ended)

    agent.run_until_signal(serving, until_stdin_closes=until_stdin_closes)


async def serve(
    node: NodeService, *, announce: Callable[[str], None], ended: asyncio.Event
) -> None:
    """Serves until `ended` is set; otherwise as `run`."""
    directory = node.service.root
    if not os.path.isdir(directory):
        raise errors.RunError(
            f"{directory}: no such directory; create it on a file system in memory"
        )
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(await _locked(directory))
        served = _ServedRuns(node, announce)
        stack.push_async_callback(served.close)
        served.update()
        announce(f"serving {directory} at {node.service.interface}")
        next_sweep = time.monotonic()
        while not ended.is_set():
            if time.monotonic() >= next_sweep:
                await served.sweep()
                next_sweep = time.monotonic() + node.sweep_secs
            await served.answer()
            served.update()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), _POLL_SECS)


async def _locked(directory: str) -> contextlib.AbstractContextManager[object]:
    # A program that checks whether an agent runs holds the lock for a moment.
    path = os.path.join(directory, node_record.LOCK_FILE)
    deadline = time.monotonic() + _LOCK_SECS
    while True:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(storage.exclusive_lock(path))
                return stack.pop_all()
            except errors.RunError:
                if time.monotonic() > deadline:
                    raise errors.RunError(
                        f"another agent serves the runs below {directory}; end it first"
                    ) from None
        await asyncio.sleep(_POLL_SECS)


@dataclasses.dataclass(kw_only=True)
class _Served:
    task: asyncio.Task[None]
    ended: asyncio.Event
    address: agent.Address | None = None


class _ServedRuns:
    """The agents of the runs' directories, one a directory."""

    def __init__(self, node: NodeService, announce: Callable[[str], None]) -> None:
        self._node = node
        self._directory = node.service.root
        self._announce = announce
        self._served: dict[str, _Served] = {}
        self._last_used: dict[str, float] = {}
        self._problems: set[str] = set()
        self._refills = node_refills.Refills(node.refill, announce)
        self._answers: dict[str, node_record.Answer] = {}
        # The port of each run, so that others reach its memory after an upgrade.
        self._ports: dict[str, int] = {}
        # A former agent of a version too far away has none for this one.
        with contextlib.suppress(errors.RunError):
            former = node_record.read(self._directory)
            self._ports = {} if former is None else _ports(former)
            if former is not None and former.answers is not None:
                self._answers.update(former.answers)
        self._published: node_record.NodeRecord | None = None

    def update(self) -> None:
        """Starts to serve directories that are new, and ends what is gone."""
        paths = set(node_runs.runs(self._directory))
        for path, served in list(self._served.items()):
            if path not in paths or self._is_other(path, served):
                served.ended.set()
            if served.task.done():
                del self._served[path]
                self._report(path, served.task.exception())
        for path in sorted(paths - self._served.keys()):
            self._start(path)
        self._publish()
        for path in self._served:
            self._refills.update(path, os.path.join(self._directory, path))

    async def sweep(self) -> None:
        """Removes runs that ended."""
        self._refills.retry()
        loop = asyncio.get_running_loop()
        for path in await loop.run_in_executor(None, self._to_remove):
            await self._remove(path)

    async def answer(self) -> None:
        """Answers the requests of runs for memory, and makes room for them."""
        loop = asyncio.get_running_loop()
        for path in list(self._served):
            request = memory_request.read(os.path.join(self._directory, path))
            answer = self._answers.get(path)
            if request is None or (answer and answer.request == request.id):
                continue
            refusal = ""
            try:
                in_the_way = await loop.run_in_executor(
                    None, self._in_the_way, path, request.num_bytes
                )
            except errors.RunError as error:
                refusal = str(error)
            else:
                for other in in_the_way:
                    await self._remove(other)
            self._answers[path] = node_record.Answer(request.id, refusal)

    async def close(self) -> None:
        """Ends all agents."""
        await self._refills.close()
        for served in self._served.values():
            served.ended.set()
        tasks = [served.task for served in self._served.values()]
        # Failures were reported, or are those of another agent of a run.
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _remove(self, path: str) -> None:
        loop = asyncio.get_running_loop()
        root = os.path.join(self._directory, path)
        if not await loop.run_in_executor(None, node_runs.remove, root):
            return
        self._announce(f"removed {path}, which no process has used for a while")
        if path in self._served:
            # Before another directory of that name is served.
            self._served[path].ended.set()
            await asyncio.wait([self._served[path].task])

    def _in_the_way(self, path: str, num_bytes: int) -> list[str]:
        lifetime = self._node.lifetime
        if lifetime.limit_bytes is None:
            return []
        others = {
            other: self._use(other)
            for other in node_runs.runs(self._directory)
            if other != path
        }
        return node_memory.to_make_room(path, num_bytes, others, lifetime)

    def _use(self, path: str) -> node_memory.Use:
        root = os.path.join(self._directory, path)
        request, granted_bytes = memory_request.read(root), 0
        if request and self._answers.get(path) == (request.id, ""):
            granted_bytes = request.num_bytes
        return node_memory.Use(
            unused_secs=self._unused_secs(path),
            num_bytes=ram_disk.used_bytes(root),
            granted_bytes=granted_bytes,
        )

    def _unused_secs(self, path: str) -> float:
        # A process may have used it without a change, when this was called before.
        now, root = time.monotonic(), os.path.join(self._directory, path)
        last = max(now - node_runs.unused_secs(root), self._last_used.get(path, 0))
        self._last_used[path] = last
        return now - last

    def _to_remove(self) -> list[str]:
        directory = self._directory
        node_runs.remove_leftovers(directory)
        unused, sizes = {}, {}
        for path in node_runs.runs(directory):
            unused[path], sizes[path] = self._unused_secs(path), 0
            if self._node.lifetime.limit_bytes is not None:
                sizes[path] = ram_disk.used_bytes(os.path.join(directory, path))
        return node_runs.to_remove(unused, sizes, self._node.lifetime)

    def _is_other(self, path: str, served: _Served) -> bool:
        # Another directory has taken the place of the one that is served.
        present = machine.find(os.path.join(self._directory, path))
        return served.address is not None and served.address.machine != present

    def _start(self, path: str) -> None:
        ended = asyncio.Event()
        service = dataclasses.replace(
            self._node.service,
            root=os.path.join(self._directory, path),
            port=self._ports.pop(path, 0),
        )

        def announce(address: agent.Address) -> None:
            self._served[path].address = address
            self._announce(f"serving {path} at {address.url}")

        serving = agent.serve(service, announce=announce, ended=ended)
        task = asyncio.ensure_future(serving)
        self._served[path] = _Served(task=task, ended=ended)

    def _report(self, path: str, error: BaseException | None) -> None:
        if error is None:
            return
        if not isinstance(error, errors.ElasticCkptError | OSError):
            raise error
        # It is tried again, and a problem is shown once.
        problem = f"does not serve {path}: {error}"
        if problem not in self._problems:
            self._problems.add(problem)
            print(problem, file=sys.stderr, flush=True)

    def _publish(self) -> None:
        agents = {
            path: served.address
            for path, served in sorted(self._served.items())
            if served.address is not None and not served.ended.is_set()
        }
        record = node_record.NodeRecord(
            directory=self._directory,
            domains=self._node.domains,
            agents=agents,
            answers={
                path: answer
                for path, answer in self._answers.items()
                if path in self._served
            },
        )
        if record != self._published:
            self._published = record
            node_record.write(record)


def _ports(record: node_record.NodeRecord) -> dict[str, int]:
    return {
        path: int(address.url.rpartition(":")[2])
        for path, address in record.agents.items()
    }
