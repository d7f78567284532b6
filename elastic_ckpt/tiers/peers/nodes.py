"""A node: its agent serves the directory of every run on it, and sweeps them.

    <directory>/<run>        the RAM disk of a run, or one level below, as for slices
                             that share a machine
    <directory>/agent.json   the failure domains of the node

On Kubernetes a DaemonSet runs the agent over a memory-backed `hostPath` of the node,
which the pods of runs mount. A pod does not get the labels of its node, but the agent
may read them: its manifest binds its service account to a role for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import json
import os
import pathlib
import ssl
import sys
import time
import urllib.parse
from collections.abc import Callable, Mapping

from elastic_ckpt.core import errors, storage
from elastic_ckpt.tiers.peers import agent, agent_server, secret
from elastic_ckpt.tiers.ram import machine, ram_disk

# The label of each kind of domain, from large to small. Zone and region are
# Kubernetes's well-known labels; GKE has the others on machines that are placed
# compactly ("Schedule GKE workloads with Topology Aware Scheduling", 2026).
LABELS = {
    "region": "topology.kubernetes.io/region",
    "zone": "topology.kubernetes.io/zone",
    "block": "cloud.google.com/gce-topology-block",
    "rack": "cloud.google.com/gce-topology-subblock",
}
ACCOUNT_DIRECTORY = "/var/run/secrets/kubernetes.io/serviceaccount"
_TIMEOUT_SECS = 30.0
_REMOVED = ".removed-"
_POLL_SECS = 0.2


def domains(
    named: Mapping[str, str], node: str | None, further: Mapping[str, str]
) -> dict[str, str]:
    """The failure domains of a node, by kind.

    Args:
      named: by whoever starts the agent; they come before those of labels.
      node: its name in Kubernetes, whose labels count; None without Kubernetes.
      further: labels by kind of domain, beside `LABELS` or in place of them.

    Raises:
      RunError: if the labels cannot be read.
    """
    labels = {} if node is None else read_labels(node)
    names = {kind: labels.get(each, "") for kind, each in {**LABELS, **further}.items()}
    return {kind: name for kind, name in names.items() if name} | dict(named)


def read_labels(
    node: str, *, account_directory: str = ACCOUNT_DIRECTORY
) -> dict[str, str]:
    """The labels of a node, from the Kubernetes API.

    Args:
      node: its name, `spec.nodeName` of a pod.
      account_directory: with the token, and the authority of the API's certificate.

    Raises:
      RunError: if they cannot be read.
    """
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    port = int(os.environ.get("KUBERNETES_SERVICE_PORT", "443"))
    if not host:
        raise errors.RunError(
            "the labels of a node are read from the Kubernetes API, but this is no pod"
            " (KUBERNETES_SERVICE_HOST is not set); name the domains with --domains"
        )
    account = pathlib.Path(account_directory)
    path = f"/api/v1/nodes/{urllib.parse.quote(node, safe='')}"
    try:
        token = (account / "token").read_text(encoding="ascii").strip()
        tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
        api = http.client.HTTPSConnection(
            host, port, timeout=_TIMEOUT_SECS, context=tls
        )
        with contextlib.closing(api):
            api.request("GET", path, headers={"Authorization": f"Bearer {token}"})
            with api.getresponse() as response:
                if response.status != http.HTTPStatus.OK:
                    raise ValueError(f"status {response.status}")
                return dict(json.load(response)["metadata"].get("labels", {}))
    except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
        raise errors.RunError(
            f"the labels of node {node} cannot be read from {host}:{port}{path}"
            f" ({error}); the service account needs the verb get on nodes, as the"
            " manifest of the node agent has it"
        ) from None


async def serve(
    service: agent.Service,
    ended: asyncio.Event,
    *,
    announce: Callable[[str], object],
    domains: Mapping[str, str],
    lifetime: Lifetime,
    sweep_secs: float = 30.0,
) -> None:
    """Serves the runs of a node until an event is set.

    Args:
      service: its root is the directory with those of the runs.
      ended: set by another task.
      announce: called with a line for each event that people read.
      domains: the failure domains of the node, by kind.
      lifetime: of the directories of runs.
      sweep_secs: between two looks for runs that ended.

    Raises:
      RunError: as `agent_server.serve`.
    """
    directory = os.path.realpath(service.root)
    node = Node(directory, service.secret_file, announce)
    with agent_server.locked(directory):
        node.forget()
        async with agent_server.listening(service, node.roots) as above:
            node_address = agent.Address(
                url=above, pid=os.getpid(), machine="", domains=domains
            )
            agent.publish(directory, node_address)
            announce(f"serving {service.root} at {above}")
            next_sweep = time.monotonic()
            while not ended.is_set():
                if time.monotonic() >= next_sweep:
                    for name in await asyncio.to_thread(lifetime.sweep, directory):
                        announce(f"removed {name}, which no process used for a while")
                    next_sweep = time.monotonic() + sweep_secs
                node.update(above)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), _POLL_SECS)
        node.forget()
        storage.remove(os.path.join(directory, agent.ADDRESS_FILE))


class Node:
    """The runs of a node.

    Args:
      directory: of the node.
      secret_file: as an agent has it.
      announce: called with a line for each event that people read.

    Attributes:
      roots: the RAM disk of each run that is served, by its path below `directory`.
    """

    def __init__(
        self,
        directory: str,
        secret_file: str | None,
        announce: Callable[[str], object],
    ) -> None:
        self.roots: dict[str, str] = {}
        self._directory, self._secret_file = directory, secret_file
        self._announce = announce
        self._machines: dict[str, str | None] = {}
        self._problems: set[str] = set()

    def update(self, above: str) -> None:
        """Serves runs that are new, and no more those that are gone.

        Args:
          above: the URL above the names of runs.
        """
        found = runs(self._directory)
        for name in self.roots.keys() - found.keys():
            del self.roots[name], self._machines[name]
        for name, root in found.items():
            try:
                self._serve(name, root, above)
            except (errors.ElasticCkptError, OSError) as error:
                # It is tried again, and a problem is shown once.
                problem = f"does not serve {name}: {error}"
                if problem not in self._problems:
                    self._problems.add(problem)
                    print(problem, file=sys.stderr, flush=True)

    def forget(self) -> None:
        """Removes the addresses of all runs without an agent of their own."""
        for root in runs(self._directory).values():
            if not storage.is_locked(os.path.join(root, agent.LOCK_FILE)):
                storage.remove(os.path.join(root, agent.ADDRESS_FILE))

    def _serve(self, name: str, root: str, above: str) -> None:
        machine_id = machine.find(root)
        # Another directory may have taken the place of the one that is served; an agent
        # of the run's own serves until it ends.
        is_served = self._machines.get(name) == machine_id
        if is_served or storage.is_locked(os.path.join(root, agent.LOCK_FILE)):
            return
        assert machine_id
        if self._secret_file is None:
            secret.read_or_create(root)
        url = f"{above}/{urllib.parse.quote(name, safe='')}"
        self.roots[name], self._machines[name] = root, machine_id
        address = agent.Address(url=url, pid=os.getpid(), machine=machine_id)
        agent.publish(root, address)
        self._announce(f"serving {name} at {url}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lifetime:
    """How long the directory of a run lasts after its last use.

    Attributes:
      unused_secs: it is removed after this time; None keeps it.
      limit_bytes: of all runs together; above it, the runs that were unused for the
        longest time are removed. None sets no limit.
      least_unused_secs: the time for which the limit removes no run, so that its pods
        can be replaced.
    """

    unused_secs: float | None = None
    limit_bytes: int | None = None
    least_unused_secs: float = 600.0

    def sweep(self, directory: str) -> list[str]:
        """Removes the runs that are to go from a node; returns their paths there."""
        for pattern in (f"{_REMOVED}*", f"*/{_REMOVED}*"):
            # Removals that a crash cut short.
            for path in pathlib.Path(directory).glob(pattern):
                storage.remove(path)
        found = runs(directory)
        unused = {name: unused_secs(root) for name, root in found.items()}
        sizes = {name: ram_disk.used_bytes(root) for name, root in found.items()}
        excess = -1
        if self.limit_bytes is not None:
            excess = sum(sizes.values()) - self.limit_bytes
        removed = []
        for name in sorted(found, key=lambda name: (-unused[name], name)):
            secs = unused[name]
            is_old = self.unused_secs is not None and secs > self.unused_secs
            is_over = excess > 0 and secs > self.least_unused_secs
            if (is_old or is_over) and remove(found[name]):
                removed.append(name)
                excess -= sizes[name]
        return removed


def runs(directory: str) -> dict[str, str]:
    """The directories of runs, by path below `directory`; no link is followed."""
    found = {}
    for pattern in ("*", "*/*"):
        for file in pathlib.Path(directory).glob(f"{pattern}/{machine.FILE}"):
            root, name = str(file.parent), str(file.parent.relative_to(directory))
            if os.path.realpath(root) == root and "/." not in f"/{name}":
                found[name] = root
    return found


def unused_secs(root: str) -> float:
    """The seconds since a process had a slot of a run; 0 while one has."""
    slots = [*pathlib.Path(root, "hosts").glob("*/")]
    if any(storage.is_locked(slot / "lock") for slot in slots):
        # It may be gone before the next look, without another change.
        os.utime(root)
        return 0.0
    newest = 0.0
    for each in (root, *slots):
        with contextlib.suppress(FileNotFoundError):
            newest = max(newest, os.stat(each).st_mtime)
    return max(0.0, time.time() - newest)


def remove(root: str) -> bool:
    """Removes a run's directory; returns False if a process has it."""
    parent, name = os.path.split(root)
    hidden = os.path.join(parent, f"{_REMOVED}{name}")
    try:
        with contextlib.ExitStack() as locks:
            for slot in pathlib.Path(root, "hosts").glob("*/"):
                locks.enter_context(storage.exclusive_lock(slot / "lock"))
            # A host that starts meanwhile finds no directory, rather than half of one.
            storage.remove(hidden)
            storage.rename(root, hidden)
    except errors.RunError:
        return False
    storage.remove(hidden)
    return True
