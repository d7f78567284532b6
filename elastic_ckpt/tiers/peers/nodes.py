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
# A pod is replaced in less.
_LEAST_UNUSED_SECS = 600.0


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
    unused_after: float | None = None,
    max_bytes: int | None = None,
    sweep_secs: float = 30.0,
) -> None:
    """Serves the runs of a node until an event is set.

    Args:
      service: its root is the directory with those of the runs.
      ended: set by another task.
      announce: called with a line for each event that people read.
      domains: the failure domains of the node, by kind.
      unused_after: the seconds after which an unused run is removed; see `sweep`.
      max_bytes: of all runs together; see `sweep`.
      sweep_secs: between two sweeps.

    Raises:
      RunError: as `agent_server.serve`.
    """
    directory, pid = os.path.realpath(service.root), os.getpid()
    roots: dict[str, str] = {}
    problems: set[str] = set()
    with agent_server.locked(directory):
        _forget(directory)
        async with agent_server.listening(service, roots) as above:
            address = agent.Address(url=above, pid=pid, machine="", domains=domains)
            agent.publish(directory, address)
            announce(f"serving {service.root} at {above}")
            next_sweep = 0.0
            while not ended.is_set():
                if time.monotonic() >= next_sweep:
                    for name in await asyncio.to_thread(
                        sweep, directory, unused_after=unused_after, max_bytes=max_bytes
                    ):
                        announce(f"removed {name}, which no process used for a while")
                    next_sweep = time.monotonic() + sweep_secs
                found = runs(directory)
                for name in roots.keys() - found.keys():
                    del roots[name]
                for name, root in found.items():
                    url = f"{above}/{urllib.parse.quote(name, safe='')}"
                    try:
                        if _publish(root, url, service.secret_file):
                            roots[name] = root
                            announce(f"serving {name} at {url}")
                    except (errors.ElasticCkptError, OSError) as error:
                        # It is tried again, and a problem is shown once.
                        problem = f"does not serve {name}: {error}"
                        if problem not in problems:
                            print(problem, file=sys.stderr, flush=True)
                        problems.add(problem)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), _POLL_SECS)
        _forget(directory)
        storage.remove(os.path.join(directory, agent.ADDRESS_FILE))


def _publish(root: str, url: str, secret_file: str | None) -> bool:
    # Writes the address of a run, unless it is there or an agent of its own serves the
    # run; returns whether it did. Another directory may have taken the place of one.
    machine_id, address = machine.find(root), agent.find(root)
    is_published = address and (address.url, address.machine) == (url, machine_id)
    if is_published or storage.is_locked(os.path.join(root, agent.LOCK_FILE)):
        return False
    assert machine_id
    if secret_file is None:
        secret.read_or_create(root)
    agent.publish(root, agent.Address(url=url, pid=os.getpid(), machine=machine_id))
    return True


def _forget(directory: str) -> None:
    # Removes the addresses of all runs without an agent of their own.
    for root in runs(directory).values():
        if not storage.is_locked(os.path.join(root, agent.LOCK_FILE)):
            storage.remove(os.path.join(root, agent.ADDRESS_FILE))


def sweep(
    directory: str, *, unused_after: float | None, max_bytes: int | None
) -> list[str]:
    """Removes runs that no process has; returns their paths below `directory`.

    Args:
      directory: of a node.
      unused_after: the seconds after its last use when a run goes; None keeps it.
      max_bytes: of all runs together: above it, the runs that were unused the longest
        go, but for those whose pods may just be replaced. None sets no limit.
    """
    for pattern in (f"{_REMOVED}*", f"*/{_REMOVED}*"):
        # Removals that a crash cut short.
        for path in pathlib.Path(directory).glob(pattern):
            storage.remove(path)
    found = runs(directory)
    unused = {name: unused_secs(root) for name, root in found.items()}
    sizes = {name: ram_disk.used_bytes(root) for name, root in found.items()}
    excess = 0 if max_bytes is None else sum(sizes.values()) - max_bytes
    removed = []
    for name in sorted(found, key=lambda name: (-unused[name], name)):
        is_old = unused_after is not None and unused[name] > unused_after
        is_over = excess > 0 and unused[name] > _LEAST_UNUSED_SECS
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
