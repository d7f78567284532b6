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
import math
import os
import pathlib
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping

from elastic_ckpt.core import errors, storage
from elastic_ckpt.tiers.peers import agent, agent_server
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
_HOST, _PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
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
    host, account = os.environ.get(_HOST, ""), pathlib.Path(account_directory)
    at = f"[{host}]" if ":" in host else host
    url = f"https://{at}:{os.environ.get(_PORT, '443')}/api/v1/nodes/"
    try:
        tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
        token = (account / "token").read_text(encoding="ascii").strip()
        api = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls)
        )
        api.addheaders = [("Authorization", f"Bearer {token}")]
        name = urllib.parse.quote(node, safe="")
        with api.open(url + name, timeout=_TIMEOUT_SECS) as response:
            return dict(json.load(response)["metadata"].get("labels", {}))
    except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise errors.RunError(
            f"the labels of node {node} cannot be read from {url} ({error}); the"
            " service account of the pod needs the verb get on nodes, as the manifest"
            " of the node agent has it; outside of a pod name the domains with"
            " --domains"
        ) from None


async def serve(
    service: agent.Service,
    ended: asyncio.Event,
    *,
    announce: Callable[[str], object],
    domains: Mapping[str, str],
    unused_after: float = math.inf,
    max_bytes: float = math.inf,
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
      RunError: as `agent_server.listening`.
    """
    directory = os.path.realpath(service.root)
    roots: dict[str, str] = {}
    # What was announced of a run, by the line for it.
    told: set[str] = set()
    async with agent_server.listening(service, roots) as above:
        _forget(directory)
        address = agent.Address(url=above, pid=os.getpid(), machine="", domains=domains)
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
            roots.clear()
            roots.update(runs(directory))
            for name, root in roots.items():
                try:
                    url = agent_server.publish(root, above, name, service.secret_file)
                    line = f"serving {name} at {url}"
                except (errors.ElasticCkptError, OSError) as error:
                    line = f"does not serve {name}, and tries again: {error}"
                if line not in told:
                    announce(line)
                told.add(line)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), _POLL_SECS)
        _forget(directory)


def _forget(directory: str) -> None:
    # Removes the addresses of the node and of its runs.
    for root in [directory, *runs(directory).values()]:
        storage.remove(os.path.join(root, agent.ADDRESS_FILE))


def sweep(
    directory: str, *, unused_after: float = math.inf, max_bytes: float = math.inf
) -> list[str]:
    """Removes runs that no process has; returns their paths below `directory`.

    Args:
      directory: of a node.
      unused_after: the seconds after its last use when a run goes. A run is in use
        while a process has a slot of it, as sweeps see it.
      max_bytes: of all runs together: above it, the runs that were unused the longest
        go, but for those whose pods may just be replaced.
    """
    for pattern in (f"{_REMOVED}*", f"*/{_REMOVED}*"):
        # Removals that a crash cut short.
        for path in pathlib.Path(directory).glob(pattern):
            storage.remove(path)
    found = []
    for name, root in runs(directory).items():
        slots = pathlib.Path(root, "hosts").glob("*/")
        # Others may remove it meanwhile.
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
            with contextlib.suppress(errors.RunError):
                remove(root)
                removed.append(name)
                excess -= num_bytes
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


def remove(root: str) -> None:
    """Removes a run's directory.

    Raises:
      RunError: if a process has a slot of it.
    """
    parent, name = os.path.split(root)
    hidden = os.path.join(parent, f"{_REMOVED}{name}")
    with contextlib.ExitStack() as locks:
        for slot in pathlib.Path(root, "hosts").glob("*/"):
            locks.enter_context(storage.exclusive_lock(slot / ram_disk.LOCK))
        # A host that starts meanwhile finds no directory, rather than half of one.
        storage.rename(root, hidden)
    storage.remove(hidden)
