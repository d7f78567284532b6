"""The agent of a machine serves its RAM disk, and outlives the training processes.

It is a separate process (`elastic-ckpt agent DIRECTORY`; where that is not installed,
`python -m elastic_ckpt.tiers.peers.agent_command DIRECTORY`), so that a new world can
read the machine's steps before, while and after a training process runs there. It
serves bytes, and replaces bad files by what was saved (`agent_server`); it writes
`<root>/agent.json`, which holds its address.

The same program is the agent of a node, which serves every run's directory below one,
those of later pods too, under the limits of the node (`node_agent`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ipaddress
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from etils import epath

from elastic_ckpt.core import errors, storage
from elastic_ckpt.tiers.peers import bandwidth, records, secret
from elastic_ckpt.tiers.ram import machine

ADDRESS_FILE = "agent.json"
_LOCK_FILE = "agent.lock"
_STDIN = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Address:
    """The address of an agent.

    Attributes:
      url: `http://` or `https://`, an IP address and a port.
      pid: of its process.
      machine: the id of the machine's memory.
    """

    url: str
    pid: int
    machine: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Service:
    """The options of an agent: its directory, address, secret and limits.

    Attributes:
      root: of the RAM disk.
      interface: the name or address at which others reach this machine; with TLS, that
        of its certificate.
      port: 0 for one that the system picks.
      secret_file: that holds the run's secret; None for that in `root`, which is made
        if it is missing.
      tls_certificate: a PEM file, with its chain; None for no TLS.
      tls_key: its private key, a PEM file; None if it is in the same file.
      max_bytes_per_sec: to all clients together; None without a bound.
      max_connections: at a time.
      max_connections_of_client: at a time, from one address.
      is_beside: whether another agent serves `root` and does not answer: then this one
        is not found there, and those who need it are told its address.
    """

    root: str
    interface: str = "127.0.0.1"
    port: int = 0
    secret_file: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    max_bytes_per_sec: float | None = None
    max_connections: int = 512
    max_connections_of_client: int = 64
    is_beside: bool = False


def find(root: epath.PathLike) -> Address | None:
    """The address that the agent of `root` published; None if it has not."""
    fields = records.read(root, ADDRESS_FILE)
    return None if fields is None else records.decoded(Address, fields)


def is_alive(root: epath.PathLike) -> bool:
    """Whether an agent serves `root` now, or is about to."""
    return storage.is_locked(os.path.join(root, _LOCK_FILE))


def wait_for(root: epath.PathLike, *, within_secs: float = 60) -> Address:
    """Waits for the agent of `root` and returns its address.

    Raises:
      RunError: if it did not publish its address in time.
    """
    # The agent of a node serves directories that have an id.
    machine_id = machine.machine_id(root)
    deadline = time.monotonic() + within_secs
    while (address := find(root)) is None or address.machine != machine_id:
        if time.monotonic() > deadline:
            raise errors.RunError(
                f"no agent has served {os.fspath(root)} for {within_secs:g} s; look at"
                " its log, or end it: the agent of a node needs the user of this"
                " program"
            )
        time.sleep(0.01)
    return address


def run(
    serving: Callable[[asyncio.Event], Awaitable[None]],
    *,
    until_stdin_closes: bool = False,
) -> None:
    """Runs the agent of a role until this process gets SIGTERM or SIGINT.

    Args:
      serving: `serve`, or that of a node, until an event is set.
      until_stdin_closes: whether it also ends when its standard input closes, so that
        it ends with the process that started it, even if that is killed.
    """

    async def main() -> None:
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ended.set)
        if until_stdin_closes:
            threading.Thread(
                target=_at_end_of_stdin, args=(loop, ended), daemon=True
            ).start()
        await serving(ended)

    asyncio.run(main())


async def serve(
    service: Service,
    ended: asyncio.Event,
    *,
    announce: Callable[[str], object],
) -> None:
    """Serves one directory until an event is set.

    Args:
      service: what to serve.
      ended: set by another task.
      announce: called with a line for each event that people read, the address first.

    Raises:
      RunError: if `root` does not exist, another agent serves it, the interface, the
        port or the certificate cannot be had, or the secret is not private.
    """
    async with serving(service) as address:
        announce(f"serving {service.root} at {address.url}")
        await ended.wait()


@contextlib.asynccontextmanager
async def serving(service: Service) -> AsyncIterator[Address]:
    """Serves a directory while the block lasts.

    Raises:
      RunError: as `serve`.
    """
    root, rate = service.root, service.max_bytes_per_sec
    if not os.path.isdir(root):
        raise errors.RunError(
            f"{root}: no such directory; name the RAM disk of a run"
            " (local_checkpoint_directory), or create it first"
        )
    machine_id = machine.machine_id(root)
    with contextlib.ExitStack() as stack:
        if not service.is_beside:
            try:
                lock = os.path.join(root, _LOCK_FILE)
                stack.enter_context(storage.exclusive_lock(lock))
            except errors.RunError:
                raise errors.RunError(
                    f"another agent serves {root}"
                    f" ({find(root) or 'it is just beginning'}); use it, or end it"
                    " first"
                ) from None
        if service.secret_file is None:
            secret.read_or_create(root)
        secret_file = service.secret_file or secret.path(root)
        secret.read(secret_file)
        tls = _tls(service)
        listening = stack.enter_context(_bound(service))
        host, port = service.interface, listening.getsockname()[1]
        at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        address = Address(
            url=f"https://{at}" if tls else f"http://{at}",
            pid=os.getpid(),
            machine=machine_id,
        )
        # Hosts import this module, and need none of the HTTP server that it imports.
        from elastic_ckpt.tiers.peers import agent_server

        answers = agent_server.Answers(
            root,
            machine=machine_id,
            secret_file=secret_file,
            bandwidth_bound=bandwidth.Bandwidth(rate) if rate else None,
        )
        async with agent_server.serving(
            answers,
            listening=listening,
            tls=tls,
            most_connections=service.max_connections,
            most_connections_of_client=service.max_connections_of_client,
        ):
            if not service.is_beside:
                records.write(root, ADDRESS_FILE, dataclasses.asdict(address))
                path = os.path.join(root, ADDRESS_FILE)
                stack.callback(storage.remove, path)
            yield address


def _bound(service: Service) -> socket.socket:
    try:
        addresses = socket.getaddrinfo(service.interface, None, type=socket.SOCK_STREAM)
        family, _, _, _, (host, *_) = addresses[0]
        if ipaddress.ip_address(str(host)).is_unspecified:
            raise errors.RunError(
                f"the agent of {service.root} cannot listen at {service.interface},"
                " which is every network of this machine; name the address at which"
                " the other machines reach it"
            )
        listening = socket.create_server(
            (str(host), service.port), family=family, backlog=128
        )
    except OSError as error:
        raise errors.RunError(
            f"the agent of {service.root} cannot listen at {service.interface}, port"
            f" {service.port} ({error}); give an address of this machine, and"
            " a port that is free or 0"
        ) from None
    listening.setblocking(False)
    return listening


def _tls(service: Service) -> ssl.SSLContext | None:
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


def _at_end_of_stdin(loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    # Not `sys.stdin`, whose lock an interpreter that ends would wait for.
    while os.read(_STDIN, 4096):
        pass
    # The loop may have ended on its own.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(ended.set)
