"""The agent program, which serves RAM disks to hosts that know the runs' secrets.

    elastic-ckpt agent /dev/shm/run --interface 10.0.0.7
    elastic-ckpt agent --node /mnt/runs --interface 10.0.0.7 --kubernetes-node node-7

    GET        /v1/<run>/steps                               the machine's ID and its
                                                             manifests, as JSON
    GET, HEAD  /v1/<run>/hosts/<slot>/<step>-<save>/<path>   a file, or a range of it
    PUT        /v1/<run>/hosts/<slot>/<step>-<save>/<path>   replaces a bad copy of a
                                                             file (`ram.ram_disk`)
    PUT        /v1/<run>/holds/<step>-<save>                 keeps the step for a number
                                                             of seconds (`preserved`)

Every request needs the run's secret (`Authorization: Bearer ...`). The secret is in a
file, never on a command line, where others on the machine could read it. The agent
answers a rejected repair with 409 and the reason.

A node's agent serves the directories of all runs on the node and sweeps them:

    <directory>/<run>        the RAM disk of a run, or one level below if slices share
                             a machine
    <directory>/agent.json   the failure domains of the node

On Kubernetes, a DaemonSet runs the agent on a memory-backed `hostPath` of the node,
which the runs' pods mount. A pod cannot see its node's labels, but the agent can: the
agent's manifest binds its service account to a role that may read them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import http.client
import json
import logging
import math
import os
import pathlib
import ssl
import time
import urllib.parse
from collections.abc import AsyncIterator, Callable, Mapping

from aiohttp import http_exceptions, web
from etils import epath

from elastic_ckpt.core import errors, storage
from elastic_ckpt.tiers import preserved
from elastic_ckpt.tiers.peers import agent, secret
from elastic_ckpt.tiers.ram import machine, ram_disk
from elastic_ckpt.tiers.source import RepairError

# A chunk is at most 64 MiB plus a checksum, unless it cannot be cut.
MOST_FILE_BYTES = 2**28
# The maximum number of connections, and the time for the TLS handshake and the first
# headers.
MOST_CONNECTIONS = 512
HEADERS_WITHIN_SECS = 10.0
# Clients finish interrupted transfers with other agents.
_ENDING_SECS = 0.1
# The label for each kind of domain, from large to small. Zone and region are well-known
# Kubernetes labels; GKE sets the others on compactly placed machines ("Schedule GKE
# workloads with Topology Aware Scheduling", 2026).
LABELS = {
    "region": "topology.kubernetes.io/region",
    "zone": "topology.kubernetes.io/zone",
    "block": "cloud.google.com/gce-topology-block",
    "rack": "cloud.google.com/gce-topology-subblock",
}
ACCOUNT_DIRECTORY = "/var/run/secrets/kubernetes.io/serviceaccount"
_HOST, _PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
_TIMEOUT_SECS = 30.0
_REMOVED = ".removed-"
_POLL_SECS = 0.2
# Longer than replacing a pod takes.
_LEAST_UNUSED_SECS = 600.0
# Names under `hosts` and `holds`, in which nothing is percent-encoded.
_SAVE = "{step:[0-9]+-[0-9A-Za-z]+}"
_STEP = "{slot:[0-9]+}/" + _SAVE
_log = logging.getLogger(__name__)


# The content of a malformed request may contain a secret.
_log.addFilter(
    lambda record: (
        not isinstance(
            record.exc_info and record.exc_info[1], http_exceptions.HttpProcessingError
        )
    )
)


def listing(root: epath.PathLike) -> dict[str, storage.Json]:
    """A RAM disk's ID, and the path, size and time of each manifest on it."""
    hosts = pathlib.Path(root, "hosts")
    found = []
    for path in sorted(hosts.glob("*/*-*/manifest-*")):
        name = str(path.relative_to(hosts))
        # A step may be removed in the meantime.
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if served(root, name) is not None:
                found.append([name, status.st_size, status.st_mtime])
    return {"machine": machine.find(root), "manifests": found}


def served(root: epath.PathLike, name: str) -> str | None:
    """The path of the `hosts/<name>` file; None if the file does not belong to a step.

    Never serves hidden files or follows links.
    """
    names = name.split("/")
    path = os.path.join(os.path.realpath(root), "hosts", *names)
    is_hidden = any(not each or each.startswith(".") or "\0" in each for each in names)
    if is_hidden or len(names) < 3 or os.path.realpath(path) != path:
        return None
    return path if os.path.isfile(path) else None


class _Answers:
    """Answers requests for the RAM disks in `roots`, keyed by their names in URLs."""

    def __init__(self, roots: Mapping[str, str], secret_file: str | None) -> None:
        self._roots, self._secret_file = roots, secret_file
        self._repairing = asyncio.Lock()
        # Connections that have not presented a secret yet.
        self._fresh: set[asyncio.BaseProtocol] = set()
        self.app = web.Application(client_max_size=MOST_FILE_BYTES)
        self.app.add_routes(
            [
                web.get("/v1/{run}/steps", self._steps),
                web.get("/v1/{run}/hosts/{path:.+}", self._file),
                web.put(f"/v1/{{run}}/hosts/{_STEP}/{{path:.+}}", self._repair),
                web.put(f"/v1/{{run}}/holds/{_SAVE}", self._hold),
            ]
        )

    def connection(self, server: web.Server) -> asyncio.BaseProtocol:
        """The protocol for a new connection, which must present a secret in time."""
        if len(server.connections) >= MOST_CONNECTIONS:
            return _Closed()
        made, loop = server(), asyncio.get_running_loop()
        self._fresh.add(made)
        loop.call_later(HEADERS_WITHIN_SECS, self._end_fresh, made)
        return made

    def _end_fresh(self, made: web.RequestHandler) -> None:
        if made in self._fresh and made.transport is not None:
            made.transport.abort()
        self._fresh.discard(made)

    def _root(self, request: web.Request) -> str:
        # The run's RAM disk, if the request has the run's secret.
        root = self._roots.get(request.match_info["run"], "")
        known = root and secret.current(self._secret_file or secret.path(root))
        # A header may contain any bytes.
        given = request.headers.get("Authorization", "").encode(
            errors="surrogateescape"
        )
        if not known or not hmac.compare_digest(given, f"Bearer {known}".encode()):
            raise web.HTTPUnauthorized(headers={"WWW-Authenticate": "Bearer"})
        self._fresh.discard(request.protocol)
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
            # Makes aiohttp read large chunks, not the 16 KiB of asyncio's `sendfile`.
            response.enable_compression(web.ContentCoding.identity)
        return response

    async def _repair(self, request: web.Request) -> web.Response:
        slot, step, path = (request.match_info[n] for n in ("slot", "step", "path"))
        directory = os.path.join(self._root(request), "hosts", slot, step)
        async with self._repairing:
            content = await request.read()
            try:
                await asyncio.to_thread(ram_disk.repair, directory, path, content)
            except RepairError as error:
                raise web.HTTPConflict(text=str(error)) from None
        return web.Response(status=204)

    async def _hold(self, request: web.Request) -> web.Response:
        root = self._root(request)
        secs = await request.read()
        if not secs.isdigit():
            raise web.HTTPBadRequest(text="send the number of seconds")
        await asyncio.to_thread(
            preserved.hold, root, request.match_info["step"], int(secs)
        )
        return web.Response(status=204)


class _Closed(asyncio.Protocol):
    """Closes a connection over the limit; its client tries again later."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


@contextlib.asynccontextmanager
async def listening(
    service: agent.Service, roots: Mapping[str, str]
) -> AsyncIterator[str]:
    """Serves RAM disks as a directory's agent; yields the URL prefix of their names.

    Args:
      service: the service to run; its directory stays locked while the agent serves.
      roots: the RAM disks by name, looked up for each request.

    Raises:
      RunError: if the directory does not exist, another agent serves it, or the
        interface, the port or the certificate cannot be used.
    """
    root, host = service.root, service.interface
    if not os.path.isdir(root) or host in ("", "0.0.0.0", "::"):
        raise errors.RunError(
            f"{root} cannot be served at {host!r}; pass the existing directory of a"
            " run on a RAM disk (local_checkpoint_directory), and the address at which"
            " other machines reach this one"
        )
    answers = _Answers(roots, service.secret_file)
    runner = web.AppRunner(
        answers.app, access_log=None, logger=_log, shutdown_timeout=_ENDING_SECS
    )
    async with contextlib.AsyncExitStack() as stack:
        try:
            lock = storage.exclusive_lock(os.path.join(root, agent.LOCK_FILE))
            stack.enter_context(lock)
        except errors.RunError:
            raise errors.RunError(
                f"another agent already serves {root}"
                f" ({agent.find(root) or 'it is just starting'}); use that agent, or"
                " stop it first"
            ) from None
        # An agent that was killed may have left addresses.
        _forget(root)
        stack.callback(_forget, root)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        assert runner.server
        tls: ssl.SSLContext | None = None
        try:
            if service.tls_certificate is not None:
                tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                tls.load_cert_chain(service.tls_certificate, service.tls_key)
            server = await asyncio.get_running_loop().create_server(
                functools.partial(answers.connection, runner.server),
                host,
                service.port,
                ssl=tls,
                ssl_handshake_timeout=HEADERS_WITHIN_SECS if tls else None,
            )
        except OSError as error:
            raise errors.RunError(
                f"the agent cannot listen at {host}:{service.port} with the certificate"
                f" {service.tls_certificate} ({error}); pass an address of this"
                " machine, a free port or 0, and a certificate with its key as PEM"
                " files"
            ) from None
        stack.callback(server.close)
        at = f"[{host}]" if ":" in host else host
        port = server.sockets[0].getsockname()[1]
        yield f"{'https' if tls else 'http'}://{at}:{port}/v1"


def publish(root: str, above: str, name: str, secret_file: str | None) -> str:
    """Creates a run's secret if it does not exist, and publishes the run's address.

    Returns:
      The URL.

    Raises:
      RunError: if the secret is not private or is invalid.
    """
    url = f"{above}/{urllib.parse.quote(name, safe='')}"
    address = agent.Address(url=url, pid=os.getpid(), machine=machine.machine_id(root))
    if agent.find(root) != address:
        if secret_file is None:
            secret.read_or_create(root)
        else:
            secret.read(secret_file)
        agent.publish(root, address)
    return url


async def serve(
    service: agent.Service,
    ended: asyncio.Event,
    *,
    announce: Callable[[str], object],
) -> None:
    """Serves one RAM disk until an event is set.

    Raises:
      RunError: see `listening` and `publish`.
    """
    root = os.path.abspath(service.root)
    name = os.path.basename(root)
    async with listening(service, {name: root}) as above:
        url = publish(root, above, name, service.secret_file)
        announce(f"serving {service.root} at {url}")
        await ended.wait()


def node_domains(
    named: Mapping[str, str], node: str | None, further: Mapping[str, str]
) -> dict[str, str]:
    """Returns a node's failure domains, by kind.

    Args:
      named: domains from the agent's command line; they override labels.
      node: the node's name in Kubernetes; None outside Kubernetes.
      further: label keys, by kind of domain, that add to or override those in
        `LABELS`.

    Raises:
      RunError: if the labels cannot be read.
    """
    labels = {} if node is None else read_labels(node)
    names = {kind: labels.get(each, "") for kind, each in {**LABELS, **further}.items()}
    return {kind: name for kind, name in names.items() if name} | dict(named)


def read_labels(
    node: str, *, account_directory: str = ACCOUNT_DIRECTORY
) -> dict[str, str]:
    """Reads a node's labels from the Kubernetes API.

    Args:
      node: the node's name, which is the `spec.nodeName` of its pods.
      account_directory: the directory with the token and the API's certificate
        authority.

    Raises:
      RunError: if the labels cannot be read.
    """
    host, port = os.environ.get(_HOST, ""), int(os.environ.get(_PORT, "443"))
    account = pathlib.Path(account_directory)
    path = f"/api/v1/nodes/{urllib.parse.quote(node, safe='')}"
    try:
        token = (account / "token").read_text(encoding="ascii").strip()
        tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
        with contextlib.closing(
            http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_SECS, context=tls)
        ) as api:
            api.request("GET", path, headers={"Authorization": f"Bearer {token}"})
            with api.getresponse() as response:
                if response.status != http.HTTPStatus.OK:
                    raise ValueError(f"status {response.status}")
                return dict(json.load(response)["metadata"].get("labels", {}))
    except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
        raise errors.RunError(
            f"the labels of node {node} cannot be read from {host}:{port}{path}"
            f" ({error}); the pod's service account needs permission to get nodes, as"
            " in the node agent's manifest; outside a pod, specify the domains with"
            " --domains"
        ) from None


async def serve_node(
    service: agent.Service,
    ended: asyncio.Event,
    *,
    announce: Callable[[str], object],
    domains: Mapping[str, str],
    unused_after: float = math.inf,
    max_bytes: float = math.inf,
    sweep_secs: float = 30.0,
) -> None:
    """Serves a node's runs until an event is set.

    Args:
      service: the service to run; its root contains the run directories.
      ended: the event to wait for.
      announce: a function that is called with each human-readable line.
      domains: the node's failure domains, by kind.
      unused_after: see `sweep`.
      max_bytes: see `sweep`.
      sweep_secs: the time between sweeps.

    Raises:
      RunError: see `listening`.
    """
    directory = os.path.realpath(service.root)
    # May contain runs that are gone, along with their secrets.
    roots: dict[str, str] = {}
    announce_once = functools.cache(announce)
    async with listening(service, roots) as above:
        address = agent.Address(url=above, pid=os.getpid(), machine="", domains=domains)
        agent.publish(directory, address)
        announce(f"serving {service.root} at {above}")
        next_sweep = 0.0
        while not ended.is_set():
            if time.monotonic() >= next_sweep:
                for name in await asyncio.to_thread(
                    sweep, directory, unused_after=unused_after, max_bytes=max_bytes
                ):
                    announce(f"removed {name}, which no process has used for a while")
                next_sweep = time.monotonic() + sweep_secs
            for name, root in runs(directory).items():
                try:
                    url = publish(root, above, name, service.secret_file)
                    roots[name] = root
                    announce_once(f"serving {name} at {url}")
                except (errors.ElasticCkptError, OSError) as error:
                    roots.pop(name, None)
                    announce_once(f"cannot serve {name}, trying again: {error}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), _POLL_SECS)


def _forget(directory: str) -> None:
    # Removes the agent's addresses from its directory and, on a node, from the runs'.
    for root in [directory, *runs(os.path.realpath(directory)).values()]:
        storage.remove(os.path.join(root, agent.ADDRESS_FILE))


def sweep(
    directory: str, *, unused_after: float = math.inf, max_bytes: float = math.inf
) -> list[str]:
    """Removes unused runs; returns their paths relative to `directory`.

    Args:
      directory: a node's directory.
      unused_after: the time after its last use, in seconds, at which a run is removed.
        A run is in use as long as sweeps find a process in one of its slots.
      max_bytes: the maximum size of all runs together. Above this size, the runs that
        were unused the longest are removed, except runs that may just be waiting for a
        new pod.
    """
    # Finishes removals that a crash interrupted.
    for path in _below(directory, f"{_REMOVED}*"):
        storage.remove(path)
    found = []
    for name, root in runs(directory).items():
        slots = pathlib.Path(root, "hosts").glob("*/")
        # Another program may remove it in the meantime.
        with contextlib.suppress(FileNotFoundError):
            if any(storage.is_locked(slot / ram_disk.LOCK) for slot in slots):
                os.utime(root)
            unused_secs = time.time() - os.stat(root).st_mtime
            found.append((unused_secs, name, root, ram_disk.used_bytes(root)))
    excess = sum(num_bytes for *_, num_bytes in found) - max_bytes
    removed = []
    for unused_secs, name, root, num_bytes in sorted(found, reverse=True):
        is_over = excess > 0 and unused_secs > _LEAST_UNUSED_SECS
        if unused_secs > unused_after or is_over:
            parent, last = os.path.split(root)
            hidden = os.path.join(parent, f"{_REMOVED}{last}")
            with contextlib.suppress(errors.RunError), contextlib.ExitStack() as locks:
                for slot in pathlib.Path(root, "hosts").glob("*/"):
                    locks.enter_context(storage.exclusive_lock(slot / ram_disk.LOCK))
                # A host that starts during the removal must not find half a directory.
                storage.rename(root, hidden)
                storage.remove(hidden)
                removed.append(name)
                excess -= num_bytes
    return removed


def runs(directory: str) -> dict[str, str]:
    """Run directories, by path relative to `directory`; never follows links."""
    roots = {
        os.path.relpath(file.parent, directory): str(file.parent)
        for file in _below(directory, f"*/{machine.FILE}")
    }
    return {
        name: root
        for name, root in roots.items()
        if os.path.realpath(root) == root and "/." not in f"/{name}"
    }


def _below(directory: str, pattern: str) -> list[pathlib.Path]:
    # Runs are in a node's directory, or one level below.
    here = pathlib.Path(directory)
    return [*here.glob(pattern), *here.glob(f"*/{pattern}")]
