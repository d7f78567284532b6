"""Agents of nodes in threads of this process, and directories of runs below them."""

import asyncio
import contextlib
from concurrent import futures

from elastic_ckpt.tiers.peers import agent, agent_server
from elastic_ckpt.tiers.ram import machine
from tests.tiers import served

FILES = {"data/part": b"part"}
PART = "/hosts/0/30-0/data/part"


@contextlib.contextmanager
def serving(directory, *, port=0, **options):
    """The agent of a node; yields a list, to which its lines are added."""
    service = agent.Service(root=str(directory), port=port)
    ended, lines, started = asyncio.Event(), [], futures.Future()

    def announce(line):
        lines.append(line)
        if not started.done():
            started.set_result(None)

    with (
        futures.ThreadPoolExecutor(1, "node") as executor,
        contextlib.closing(asyncio.new_event_loop()) as loop,
    ):
        options = {"domains": {}, "announce": announce, **options}
        serve = agent_server.serve_node(service, ended, **options)
        node_ended = executor.submit(loop.run_until_complete, serve)
        futures.wait([node_ended, started], return_when=futures.FIRST_COMPLETED)
        if not started.done():
            node_ended.result()
        try:
            yield lines
        finally:
            loop.call_soon_threadsafe(ended.set)
            node_ended.result()


def save_run(directory, path="run", **options):
    """Saves a step of a run below the directory of a node; returns the run's."""
    root = directory / path
    served.save(root, 30, FILES, **options)
    (root / machine.FILE).write_text(served.MACHINE)
    return root
