"""The program of an agent: serves RAM disks to hosts that know the secrets of the runs.

    elastic-ckpt agent /dev/shm/run --interface 10.0.0.7
    elastic-ckpt agent --node /mnt/runs --interface 10.0.0.7 --kubernetes-node node-7

    GET        /v1/<run>/steps                               the machine's ID and its
                                                             manifests, as JSON
    GET, HEAD  /v1/<run>/hosts/<slot>/<step>-<save>/<path>   a file, or a range of it
    PUT        /v1/<run>/hosts/<slot>/<step>-<save>/<path>   a file in place of a bad
                                                             copy (`ram.ram_disk`)
    PUT        /v1/<run>/holds/<step>-<save>                 the seconds for which the
                                                             step is kept (`preserved`)

Every request needs the run's secret (`Authorization: Bearer ...`). The secret is in
a file, never on a command line: others on the machine could read it. A repair that is
refused is answered with 409 and the reason.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import hmac
import ipaddress
import logging
import os
import pathlib
import signal
import socket
import ssl
import sys
import urllib.parse
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

from aiohttp import http, web
from etils import epath

from elastic_ckpt.core import errors, option_numbers, storage
from elastic_ckpt.tiers import preserved
from elastic_ckpt.tiers.peers import agent, secret
from elastic_ckpt.tiers.ram import machine
from elastic_ckpt.tiers.source import RepairError

# A chunk has at most 64 MiB and its checksum, unless it cannot be cut.
MOST_FILE_BYTES = 2**28
# Connections at a time, and the time for the TLS handshake and the first headers.
MOST_CONNECTIONS = 512
HEADERS_WITHIN_SECS = 10.0
# Clients go on elsewhere with what is cut off.
_ENDING_SECS = 0.1
# Names below `hosts` and `holds` in which nothing is encoded.
_SAVE = "{step:[0-9]+-[0-9A-Za-z]+}"
_STEP = "{slot:[0-9]+}/" + _SAVE
# Headers may hold any bytes.
_RAW = ("utf-8", "surrogateescape")
_log = logging.getLogger(__name__)


def _is_for_the_log(record: logging.LogRecord) -> bool:
    # The content of a malformed request may be a secret.
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, http.HttpProcessingError)


_log.addFilter(_is_for_the_log)


def listing(root: epath.PathLike) -> dict[str, storage.Json]:
    """The ID of a RAM disk, and the path, size and time of each manifest in it."""
    hosts = pathlib.Path(root, "hosts")
    found = []
    for path in sorted(hosts.glob("*/*-*/manifest-*")):
        name = str(path.relative_to(hosts))
        # A step may be removed meanwhile.
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if served(root, name) is not None:
                found.append([name, status.st_size, status.st_mtime])
    return {"machine": machine.find(root), "manifests": found}


def served(root: epath.PathLike, name: str) -> str | None:
    """The path of the file `hosts/<name>`; None if it is no file of a step.

    Nothing hidden is served, and nothing that links lead to.
    """
    names = name.split("/")
    path = os.path.join(os.path.realpath(root), "hosts", *names)
    is_hidden = any(not each or each.startswith(".") or "\0" in each for each in names)
    if is_hidden or len(names) < 3 or os.path.realpath(path) != path:
        return None
    return path if os.path.isfile(path) else None


class _Answers:
    """Answers requests for the RAM disks in `roots`, by the names that URLs have."""

    def __init__(self, roots: Mapping[str, str], secret_file: str | None) -> None:
        self._roots = roots
        self._secret_file = secret_file
        self._repairing = asyncio.Lock()
        # The connections that have not shown a secret so far.
        self._fresh: set[asyncio.BaseProtocol] = set()

    def application(self) -> web.Application:
        """What there is below `/v1`."""
        app = web.Application(client_max_size=MOST_FILE_BYTES)
        app.add_routes(
            [
                web.get("/v1/{run}/steps", self._steps),
                web.get("/v1/{run}/hosts/{path:.+}", self._file),
                web.put(f"/v1/{{run}}/hosts/{_STEP}/{{path:.+}}", self._repair),
                web.put(f"/v1/{{run}}/holds/{_SAVE}", self._hold),
            ]
        )
        return app

    def connection(self, server: web.Server) -> asyncio.BaseProtocol:
        """The protocol of a new connection, which has to show a secret in time."""
        if len(server.connections) >= MOST_CONNECTIONS:
            return _Closed()
        made = server()
        self._fresh.add(made)
        loop = asyncio.get_running_loop()
        loop.call_later(HEADERS_WITHIN_SECS, self._end_fresh, made)
        return made

    def _end_fresh(self, made: web.RequestHandler) -> None:
        if made in self._fresh:
            self._fresh.remove(made)
            if made.transport is not None:
                made.transport.abort()

    def _root(self, request: web.Request) -> str:
        # The RAM disk of the run, for who has its secret.
        root = self._roots.get(request.match_info["run"])
        known = root and secret.current(self._secret_file or secret.path(root))
        given = request.headers.get("Authorization", "")
        expected = f"Bearer {known}".encode()
        if not known or not hmac.compare_digest(given.encode(*_RAW), expected):
            raise web.HTTPUnauthorized(headers={"WWW-Authenticate": "Bearer"})
        self._fresh.discard(request.protocol)
        assert root
        return root

    async def _steps(self, request: web.Request) -> web.Response:
        root = self._root(request)
        return web.json_response(await asyncio.to_thread(listing, root))

    async def _file(self, request: web.Request) -> web.StreamResponse:
        path = served(self._root(request), request.match_info["path"])
        if path is None:
            raise web.HTTPNotFound
        response = web.FileResponse(path)
        if request.secure:
            # Then it is read in its chunks, not in the 16 KiB of asyncio's `sendfile`.
            response.enable_compression(web.ContentCoding.identity)
        return response

    async def _repair(self, request: web.Request) -> web.Response:
        # Only a repair needs what checks manifests and digests.
        from elastic_ckpt.tiers.ram import ram_disk

        slot, step, path = (request.match_info[n] for n in ("slot", "step", "path"))
        directory = os.path.join(self._root(request), "hosts", slot, step)
        num_bytes = request.content_length or 0
        if num_bytes > MOST_FILE_BYTES:
            raise web.HTTPRequestEntityTooLarge(MOST_FILE_BYTES, num_bytes)
        async with self._repairing:
            content = await request.read()
            try:
                await asyncio.to_thread(ram_disk.put_right, directory, path, content)
            except RepairError as error:
                raise web.HTTPConflict(text=str(error)) from None
        return web.Response(status=204)

    async def _hold(self, request: web.Request) -> web.Response:
        root = self._root(request)
        preserved.hold(root, request.match_info["step"], await request.read())
        return web.Response(status=204)


class _Closed(asyncio.Protocol):
    """A connection too many; its client tries again later."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


@contextlib.asynccontextmanager
async def listening(
    service: agent.Service, roots: Mapping[str, str]
) -> AsyncIterator[str]:
    """Serves RAM disks while the block lasts; yields the URL above their names.

    Args:
      service: where to listen, and how.
      roots: of the RAM disks by name, looked up for each request.
    """
    answers = _Answers(roots, service.secret_file)
    runner = web.AppRunner(
        answers.application(),
        access_log=None,
        logger=_log,
        shutdown_timeout=_ENDING_SECS,
    )
    tls = _tls(service)
    await runner.setup()
    assert runner.server
    try:
        server = await asyncio.get_running_loop().create_server(
            functools.partial(answers.connection, runner.server),
            sock=_bound(service),
            ssl=tls,
            ssl_handshake_timeout=HEADERS_WITHIN_SECS if tls else None,
        )
        host, port = service.interface, server.sockets[0].getsockname()[1]
        at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        yield f"{'https' if tls else 'http'}://{at}/v1"
        server.close()
    finally:
        await runner.cleanup()


async def serve(
    service: agent.Service,
    ended: asyncio.Event,
    *,
    announce: Callable[[str], object],
) -> None:
    """Serves one RAM disk until an event is set.

    Args:
      service: what to serve.
      ended: set by another task.
      announce: called with a line for people, which ends in the URL.

    Raises:
      RunError: if the directory does not exist, another agent serves it, the interface,
        the port or the certificate cannot be had, or the secret is not private.
    """
    root = os.path.abspath(service.root)
    with locked(root):
        if service.secret_file is None:
            secret.read_or_create(root)
        else:
            secret.read(service.secret_file)
        name = os.path.basename(root)
        machine_id = machine.machine_id(root)
        async with listening(service, {name: root}) as above:
            url = f"{above}/{urllib.parse.quote(name, safe='')}"
            address = agent.Address(url=url, pid=os.getpid(), machine=machine_id)
            agent.publish(root, address)
            announce(f"serving {service.root} at {url}")
            await ended.wait()
            storage.remove(os.path.join(root, agent.ADDRESS_FILE))


@contextlib.contextmanager
def locked(root: str) -> Iterator[None]:
    """Makes this process the agent of a directory while the block lasts."""
    if not os.path.isdir(root):
        raise errors.RunError(
            f"{root}: no such directory; name the RAM disk of a run"
            " (local_checkpoint_directory), or create it first"
        )
    with contextlib.ExitStack() as stack:
        lock = os.path.join(root, agent.LOCK_FILE)
        try:
            stack.enter_context(storage.exclusive_lock(lock))
        except errors.RunError:
            raise errors.RunError(
                f"another agent serves {root}"
                f" ({agent.find(root) or 'it is just beginning'}); use it, or end it"
                " first"
            ) from None
        yield


def _bound(service: agent.Service) -> socket.socket:
    try:
        addresses = socket.getaddrinfo(service.interface, None, type=socket.SOCK_STREAM)
        family, _, _, _, (host, *_) = addresses[0]
        if ipaddress.ip_address(str(host)).is_unspecified:
            raise errors.RunError(
                f"the agent of {service.root} cannot listen at {service.interface},"
                " which is every network of this machine; name the address at which"
                " the other machines reach it"
            )
        return socket.create_server((str(host), service.port), family=family)
    except OSError as error:
        raise errors.RunError(
            f"the agent of {service.root} cannot listen at {service.interface}, port"
            f" {service.port} ({error}); give an address of this machine, and"
            " a port that is free or 0"
        ) from None


def _tls(service: agent.Service) -> ssl.SSLContext | None:
    if service.tls_certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(service.tls_certificate, service.tls_key)
    except OSError as error:
        raise errors.RunError(
            f"the agent of {service.root} cannot use the certificate"
            f" {service.tls_certificate} with the key {service.tls_key} ({error}); give"
            " two PEM files that belong together"
        ) from None
    return context


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the agent's arguments."""
    add = parser.add_argument
    add("directory", help="the directory of the RAM disk to serve")
    add(
        "--interface",
        default="127.0.0.1",
        help="the name or address at which other machines reach this one; with TLS,"
        " that of the certificate",
    )
    add(
        "--port",
        type=option_numbers.port,
        default=0,
        help="the port to listen on; by default the system chooses one",
    )
    add(
        "--secret-file",
        help="a file with the secret of the run; by default DIRECTORY/secret",
    )
    add(
        "--tls-certificate",
        help="a PEM file with the certificate of this machine, to encrypt",
    )
    add("--tls-key", help="a PEM file with the private key of the certificate")
    add(
        "--until-stdin-closes",
        action="store_true",
        help="end when the standard input is closed, as by the program that started"
        " this",
    )
    add = parser.add_argument_group("the agent of a node").add_argument
    add(
        "--node",
        action="store_true",
        help="serve the RAM disks of all runs in the directory, those of later pods"
        " too",
    )
    add(
        "--domains",
        default="",
        help="failure domains of the node, such as rack=r7;zone=us-east5-a",
    )
    add(
        "--kubernetes-node",
        metavar="NAME",
        help="the node's name, to read its failure domains from its Kubernetes labels",
    )
    add(
        "--domain-labels",
        default="",
        help="further labels to read, by kind of domain: rack=example.com/rack",
    )
    add(
        "--remove-unused-after",
        type=option_numbers.positive_number,
        metavar="SECS",
        help="remove the directory of a run that no process has used for so long",
    )
    add(
        "--max-bytes",
        type=option_numbers.positive_count,
        help="the most bytes of all runs; above it, remove the longest unused",
    )


def service_of(arguments: argparse.Namespace) -> agent.Service:
    """What an agent with these arguments serves."""
    return agent.Service(
        root=arguments.directory,
        interface=arguments.interface,
        port=arguments.port,
        secret_file=arguments.secret_file,
        tls_certificate=arguments.tls_certificate,
        tls_key=arguments.tls_key,
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the agent's address, and serves until a signal ends it."""
    of_node = ("domains", "kubernetes_node", "domain_labels")
    of_node += ("remove_unused_after", "max_bytes")
    given = [name for name in of_node if getattr(arguments, name)]
    serving = functools.partial(serve, service_of(arguments))
    if arguments.node:
        from elastic_ckpt.steps import owners
        from elastic_ckpt.tiers.peers import nodes

        domains = nodes.domains(
            owners.parse_domains(arguments.domains, what="--domains"),
            arguments.kubernetes_node,
            owners.parse_domains(arguments.domain_labels, what="--domain-labels"),
        )
        serving = functools.partial(
            nodes.serve,
            service_of(arguments),
            domains=domains,
            unused_after=arguments.remove_unused_after,
            max_bytes=arguments.max_bytes,
        )
    elif given:
        option = f"--{given[0].replace('_', '-')}"
        raise errors.ConfigError(f"{option} is for the agent of a node; add --node")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ended.set)
        if arguments.until_stdin_closes:
            # Not `sys.stdin`, whose lock an interpreter that ends would wait for.
            loop.add_reader(0, lambda: os.read(0, 4096) or ended.set())
        await serving(ended, announce=functools.partial(print, flush=True))

    asyncio.run(main())
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the agent; returns 0, or 1 after an error."""
    parser = argparse.ArgumentParser(description="Serve the RAM disk of a machine.")
    add_arguments(parser)
    try:
        return run(parser.parse_args(arguments))
    except errors.ElasticCkptError as error:
        print(f"agent: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
