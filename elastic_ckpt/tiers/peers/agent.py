"""A machine's agent, which its hosts find by its address, or start if there is none.

An agent is a separate process (`agent_server`), so that a new world can read the
machine's steps before, while and after a training process runs there. The agent's
address is in `<root>/agent.json`, and the agent holds the lock `<root>/agent.lock`. A
node's agent serves all runs in a directory: it holds the lock there and writes each
run's address to the run directory, replacing the address of the run's own agent.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from etils import epath

from elastic_ckpt.core import errors, storage
from elastic_ckpt.tiers.ram import machine

ADDRESS_FILE = "agent.json"
LOCK_FILE = "agent.lock"
_COMMAND = ("-m", "elastic_ckpt.cli.main", "agent")
_URL = re.compile(
    r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?"
    r"/v1/[A-Za-z0-9%._~-]+"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Address:
    """The address at which an agent serves a RAM disk.

    Attributes:
      url: the URL, which consists of `http://` or `https://`, host, port and
        `/v1/<run>`; a node's URL does not contain the run.
      machine: the ID of the machine's memory; empty for a node.
      domains: the node's failure domains, by kind.
    """

    url: str
    pid: int
    machine: str
    domains: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Service:
    """The RAM disks that an agent serves, and how it serves them.

    Attributes:
      root: the RAM disk; for a node, the directory that contains the RAM disks of its
        runs.
      interface: the name or address at which other machines reach this machine; with
        TLS, the name in its certificate.
      port: the port to listen on; 0 lets the system choose.
      secret_file: the file with the run's secret; None uses the file on the RAM disk,
        which is created if it is missing.
      tls_certificate: a PEM file with the certificate and its chain; None disables TLS.
      tls_key: a PEM file with the certificate's private key; None if the key is in the
        same file.
    """

    root: str
    interface: str = "127.0.0.1"
    port: int = 0
    secret_file: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None


def check_url(url: object, *, what: str, needs_tls: bool = False) -> None:
    """Checks that `url` is an agent URL, as an agent prints it.

    Args:
      url: the value to check.
      what: the name of the setting, used in error messages.
      needs_tls: whether the URL must begin with `https://`.

    Raises:
      ConfigError: if the value is not an agent URL.
    """
    match = _URL.fullmatch(url) if isinstance(url, str) else None
    is_url = match is not None and 0 < int(match[2] or 80) < 2**16
    if not is_url or (needs_tls and not match[0].startswith("https")):
        is_such = " with https, which this run requires" if needs_tls else ""
        raise errors.ConfigError(
            f"{what} has {url!r}, which is not an agent URL{is_such}; use the"
            f" URL that the agent prints, such as http{'s' * needs_tls}://10.0.0.7:8470/v1/my_run"
        )


def publish(root: epath.PathLike, address: Address) -> None:
    """Writes the address at which `root` is served."""
    content = storage.canonical_json(dataclasses.asdict(address))
    storage.write_atomic(os.path.join(root, ADDRESS_FILE), content)


def find(root: epath.PathLike) -> Address | None:
    """The address at which `root` is served; None if it is missing or damaged."""
    try:
        return Address(**json.loads(pathlib.Path(root, ADDRESS_FILE).read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def serving_directory(root: epath.PathLike) -> pathlib.Path | None:
    """`root` or its node's directory, whichever an agent serves now, or None."""
    path = pathlib.Path(root)
    for each in (path, *path.parents[:2]):
        address = find(each)
        # A parent may also be another run's RAM disk.
        is_its_own = each == path or (address is not None and not address.machine)
        if is_its_own and storage.is_locked(each / LOCK_FILE):
            return each
    return None


def domains(root: epath.PathLike) -> Mapping[str, str]:
    """The failure domains that the node's agent reports; empty if there is no agent."""
    directory = serving_directory(root)
    address = None if directory is None else find(directory)
    return {} if address is None else address.domains


def wait_for(root: epath.PathLike, *, within_secs: float = 60) -> Address:
    """Waits for the agent of `root` and returns its address.

    Raises:
      RunError: if the agent does not publish its address in time.
    """
    # A node's agent only serves directories with an ID.
    machine_id = machine.machine_id(root)
    deadline = time.monotonic() + within_secs
    while (address := find(root)) is None or address.machine != machine_id:
        if time.monotonic() > deadline:
            raise errors.RunError(
                f"no agent has served {os.fspath(root)} for {within_secs:g} s; check"
                " the agent's log. A node's agent must run as the same user as this"
                " program; if it runs as a different user, stop it"
            )
        time.sleep(0.01)
    return address


class AgentProcess:
    """The agent that serves a RAM disk.

    If an agent is already running, uses it; that agent outlives this process. If not,
    starts an agent, which exits when this object is closed or this process is killed.

    Raises:
      RunError: if no agent can be started.
    """

    def __init__(self, service: Service) -> None:
        self._process: subprocess.Popen[str] | None = None
        if serving_directory(service.root) is None:
            self._process = process = _started(service)
            assert process.stdout
            if not process.stdout.readline():
                self.close()
                raise errors.RunError(
                    f"the agent of {service.root} could not be started; see its"
                    " messages on this process's standard error"
                )
        self.address = wait_for(service.root)

    def close(self) -> None:
        """Stops the agent, if this object started it."""
        if self._process is not None:
            # The agent exits when its standard input is closed.
            self._process.communicate()


def _started(service: Service) -> subprocess.Popen[str]:
    command = [sys.executable, *_COMMAND, service.root, "--until-stdin-closes"]
    for name, value in dataclasses.asdict(service).items():
        if name != "root" and value:
            command += [f"--{name.replace('_', '-')}", str(value)]
    # Ctrl-C in a terminal, or SIGTERM to all processes of a Slurm job, must not stop
    # the agent, which serves until the last save is done. The agent inherits the mask.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
