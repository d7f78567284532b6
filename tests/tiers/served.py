"""RAM disks to serve, agents in separate processes, and raw requests to them."""

import asyncio
import contextlib
import pathlib
import socket
import subprocess
import sys
import urllib.parse
from concurrent import futures

import numpy as np

from elastic_ckpt.core import boxes, digest
from elastic_ckpt.steps import manifest
from elastic_ckpt.steps.manifest import write_manifest
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.tiers.peers import agent, agent_server

RUN = "run-7"
MACHINE = "0123456789abcdef"


def save(root, step, files, *, slot="0", run=RUN):
    """Saves `files`, bytes by path, as a step of one slot, with their manifest."""
    directory = pathlib.Path(root, "hosts", slot, str(StepId(step, "0")))
    for path, content in files.items():
        file = directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    write_manifest(directory, manifest_of(step, files, slot=slot, run=run))
    return directory


def manifest_of(step, files, *, slot="0", run=RUN):
    """The manifest of a host with `files` of components."""
    listed = sorted(files.items())
    contents = manifest.Contents(
        leaves=tuple(leaf_of(path, content) for path, content in listed),
        components=tuple(sorted({path.partition("/")[0] for path in files})),
    )
    host = manifest.Host(id=f"{MACHINE}.{slot}", number=0, domains={})
    rows = [
        (
            number,
            boxes.whole((len(content),)),
            digest.values_digest(np.frombuffer(content, np.uint8)),
        )
        for number, (_, content) in enumerate(listed)
    ]
    return manifest.Manifest(
        run=run,
        step_id=StepId(step, "0"),
        contents=contents,
        holders=(manifest.Holder(host),),
        parts=manifest.Parts.of_rows(rows, contents),
    )


def leaf_of(path, content=b""):
    """The leaf that a file is."""
    return manifest.Leaf.of_file(path, len(content))


@contextlib.contextmanager
def serving(service):
    """An agent in a thread of this process; yields its address."""
    ended = asyncio.Event()
    announced = futures.Future()
    announce = lambda _: announced.set_result(agent.find(service.root))  # noqa: E731
    serve = agent_server.serve(service, ended, announce=announce)
    with (
        futures.ThreadPoolExecutor(1, "agent") as executor,
        contextlib.closing(asyncio.new_event_loop()) as loop,
    ):
        agent_ended = executor.submit(loop.run_until_complete, serve)
        futures.wait([agent_ended, announced], return_when=futures.FIRST_COMPLETED)
        if not announced.done():
            agent_ended.result()
        try:
            yield announced.result()
        finally:
            loop.call_soon_threadsafe(ended.set)
            agent_ended.result()


@contextlib.contextmanager
def agent_process(root, *arguments, verb=("elastic_ckpt.cli.main", "agent"), cwd=None):
    """An agent in a separate process, which ends with the block; yields both.

    In another directory it is of the program that is there.
    """
    with subprocess.Popen(
        [
            *(sys.executable, "-m", *verb, str(root), "--until-stdin-closes"),
            *map(str, arguments),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
    ) as process:
        line = process.stdout.readline()
        assert line.startswith(f"serving {root} at "), process.stderr.read()
        # Leaving the `with` closes its standard input.
        yield process, line.split()[-1]


def connect(url, *, source="127.0.0.1"):
    """A connection to an agent without TLS."""
    at = urllib.parse.urlsplit(url)
    return socket.create_connection(
        (at.hostname, at.port), timeout=600, source_address=(source, 0)
    )


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
