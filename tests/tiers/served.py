"""RAM disks to serve, agents in threads and in processes, and raw requests to them."""

import asyncio
import contextlib
import pathlib
import socket
import subprocess
import sys
import time
import urllib.parse
from concurrent import futures

import numpy as np

from elastic_ckpt.core import boxes, storage
from elastic_ckpt.steps import manifest
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers.peers import agent, agent_server
from elastic_ckpt.tiers.ram import machine
from tests.tiers import saved_worlds

RUN = saved_worlds.RUN
MACHINE = "0123456789abcdef"
# The path of a file that tests save.
PART = "/hosts/0/30-0/data/part"


def save(root, step, files, *, slot="0", run=RUN):
    """Saves `files`, bytes by path, as a step of one slot, with their manifest."""
    directory = pathlib.Path(root, "hosts", slot, str(StepId(step, "0")))
    leaves = [manifest.Leaf.of_file(path, len(files[path])) for path in sorted(files)]
    for path, content in files.items():
        storage.write_atomic(directory / path, content)
    components = tuple(sorted({path.partition("/")[0] for path in files}))
    whole = manifest.Contents(leaves=tuple(leaves), components=components)
    host = manifest.Host(id=f"{MACHINE}.{slot}", number=0, domains={})
    held = [(number, boxes.whole(leaf.shape)) for number, leaf in enumerate(leaves)]

    def values(path, _):
        return np.frombuffer(files[path], np.uint8)

    saved = saved_worlds.saved_by(host, whole, held, step=step, run=run, values=values)
    manifest.write_manifest(directory, saved)
    return directory


def save_run(directory, path="run"):
    """Saves a step of a run below the directory of a node; returns the run's."""
    root = directory / path
    save(root, 30, {"data/part": b"part"})
    (root / machine.FILE).write_text(MACHINE)
    return root


@contextlib.contextmanager
def _in_thread(serve, service, **options):
    # An agent in a thread of this process; yields a list, to which its lines are added.
    ended, lines, started = asyncio.Event(), [], futures.Future()

    def announce(line):
        lines.append(line)
        if not started.done():
            started.set_result(None)

    with (
        futures.ThreadPoolExecutor(1, "agent") as executor,
        contextlib.closing(asyncio.new_event_loop()) as loop,
    ):
        served = serve(service, ended, announce=announce, **options)
        running = executor.submit(loop.run_until_complete, served)
        futures.wait([running, started], return_when=futures.FIRST_COMPLETED)
        if not started.done():
            running.result()
        try:
            yield lines
        finally:
            loop.call_soon_threadsafe(ended.set)
            running.result()


@contextlib.contextmanager
def serving(service):
    """The agent of a run; yields its address."""
    with _in_thread(agent_server.serve, service):
        yield agent.find(service.root)


def serving_node(directory, *, domains=(), **options):
    """The agent of a node; yields a list, to which its lines are added."""
    service, serve = agent.Service(root=str(directory)), agent_server.serve_node
    return _in_thread(serve, service, domains=dict(domains), **options)


@contextlib.contextmanager
def agent_process(root, *arguments):
    """An agent in a separate process, which ends with the block; yields both."""
    command = [sys.executable, "-m", "elastic_ckpt.cli.main", "agent", str(root)]
    with subprocess.Popen(
        [*command, "--until-stdin-closes", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        line = process.stdout.readline()
        assert line.startswith(f"serving {root} at "), process.stderr.read()
        # Leaving the `with` closes its standard input.
        yield process, line.split()[-1]


def until(condition):
    """Waits, however slow the machine is, and fails if it was in vain."""
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def connect(url):
    """A connection to an agent without TLS."""
    at = urllib.parse.urlsplit(url)
    return socket.create_connection((at.hostname, at.port), timeout=600)


def ask(url, path, secret, *headers, method="GET"):
    """Sends a request as it is, below the agent's URL; returns status and body."""
    lines = [
        f"{method} {urllib.parse.urlsplit(url).path}{path} HTTP/1.1",
        "Host: there",
        "Connection: close",
        *([f"Authorization: Bearer {secret}"] if secret else []),
        *headers,
    ]
    with connect(url) as connection:
        request = "\r\n".join(lines) + "\r\n\r\n"
        connection.sendall(request.encode("utf-8", "surrogateescape"))
        answer = until_closed(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def until_closed(connection):
    """All that comes until the other side ends the connection."""
    received = bytearray()
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(2**16):
            received += piece
    return bytes(received)
