"""Suite `tiers`: what saves and restores cost, beside a plain copy and beside Orbax.

1 GiB of float32 and 1/2 MiB of small leaves, sharded over four processes under
`jax.distributed`, each a machine: a directory on the RAM disk with its own agent. Orbax
saves to the RAM disk too. All sides take turns in one world; a turn is as long as its
slowest host's. The state is computed anew before each turn.

Saved, in the steady state: the save before is done, and no waiting is counted.

* `save_block_ratio_copy`: the trainer is blocked by a save, over `np.copyto` of the
  same shards to memory that was written before; `save_block_ratio_orbax` over what
  Orbax's save of that state blocks; `save_block_ms`, and `save_secs` until a save is
  committed.

Restored, in a separate world, until the arrays are ready:

* `ram_restore_ratio_copy`: the speed on the same four hosts over that of four
  processes `cp -r` which copy the same files on the RAM disk.
* `ram_restore_ratio_orbax`: over the speed of Orbax's load from the RAM disk.
* `ram_restore_half_hosts`: on two hosts, which read three quarters from peers: hosts
  need rows in their order, and the second one holds none of its rows. Beside it
  `ram_restore_half_peers_transfer`: the peers' files alone to the same two hosts, in
  four threads, by the client.
* `peer_ratio_curl`: one client process reads 1 GiB from an agent, over curl's speed.

In one process, on the devices that JAX finds, beside Orbax (`tiers_alone`):

* `small_backup_ratio_orbax`: 20,000 leaves of 1 kB, ours by way of RAM into storage.
* `storage_durable_ratio_orbax_few`, `..._staged_few`: few large leaves until they are
  in storage, without a RAM tier, over Orbax, and over a save that is staged in RAM.
* `huge_block_ratio_orbax_donated`, `..._kept`: one leaf of 1 GiB blocks the trainer,
  over Orbax, where each step donates it and where none does. A view that is held makes
  a step copy what it donates: `huge_block_and_step_ratio_orbax_...` counts the next
  step too.

Beside Orbax's own managers of RAM tiers, on the state that they require:

* `save_block_ratio_p2p`, `ram_restore_ratio_p2p`, and so on: as over Orbax's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator

from benchmarks import (
    report,
    sized,
    tiers_alone,
    tiers_hosts,
    tiers_managers,
    turns,
)
from elastic_ckpt.core import host_memory, storage
from elastic_ckpt.elastic import station
from elastic_ckpt.tiers.peers import agent, peer_client, secret

_GIB = 2**30
# The share that half of the hosts restore from peers.
_OF_PEERS = 3 / 4
_SERVED = "hosts/0/1-served/file"


_NUM_LEAVES = sized(32, 2)  # large ones of the state, of 32 MiB
_ROUNDS = sized(7, 1)
_SERVED_BYTES = sized(_GIB, 2**20)  # read from an agent at once


def measure() -> dict[str, report.Figure]:
    """Runs the suite."""
    station.warm_up([tiers_managers.__name__])
    prefix = f"elastic_ckpt_benchmark_{os.getpid()}_"
    with tempfile.TemporaryDirectory(prefix=prefix, dir="/dev/shm") as d:
        machines = [f"{d}/machine-{number}" for number in range(tiers_hosts.HOSTS)]
        place = tiers_hosts.Place(
            machines=tuple(machines),
            results=f"{d}/results",
            orbax=f"{d}/orbax",
            num_leaves=_NUM_LEAVES,
            leaf_mib=sized(32, 1),
            num_small=sized(64, 2),
            rounds=_ROUNDS,
        )
        with _agents(machines) as urls:
            saved = tiers_hosts.run(tiers_hosts.save, place)
            restored = tiers_hosts.run(tiers_hosts.restore, place)
            program = functools.partial(tiers_hosts.restore_half, urls=tuple(urls))
            half = tiers_hosts.run(program, place, num_hosts=tiers_hosts.HOSTS // 2)
        for directory in (*machines, place.orbax):
            shutil.rmtree(directory)
        alone = tiers_alone.measure(f"{d}/alone")
        shutil.rmtree(f"{d}/alone")
        # As large on each host, of which two have the same.
        halved = dataclasses.replace(place, num_leaves=_NUM_LEAVES // 2)
        managed = tiers_hosts.run(tiers_managers.save_and_restore, halved)
        storage.write_atomic(f"{d}/served/{_SERVED}", os.urandom(_SERVED_BYTES))
        with _agents([f"{d}/served"]) as (url,):
            reads = turns.in_new_process(_reads, url, secret.path(f"{d}/served"))
    num_gib = place.num_bytes / _GIB
    figures = {
        "save_block_ratio_copy": report.ratio(
            saved["block"], saved["copy"], "at most 1.2; over a copy to warm memory"
        ),
        "save_block_ratio_orbax": report.ratio(
            saved["block"], saved["block_orbax"], "below 1; over Orbax's"
        ),
        "save_block_ms": report.figure(
            "ms", f"{num_gib:.1f} GiB", [1000 * each for each in saved["block"]]
        ),
        "save_secs": report.figure("secs", "until it is committed", saved["save"]),
        "ram_restore_ratio_copy": report.ratio(
            restored["copy"], restored["load"], "at least 0.9; over the speed of cp"
        ),
        "ram_restore_ratio_orbax": report.ratio(
            restored["load_orbax"], restored["load"], "over the speed of Orbax"
        ),
        "ram_restore": _speed(num_gib, restored["load"], "on four hosts"),
        "ram_restore_half_hosts": _speed(num_gib, half["load"], "on two hosts"),
        "ram_restore_half_peers_transfer": _speed(
            num_gib * _OF_PEERS,
            half["read_peers_files"],
            "the peers' files, read alone",
        ),
        **alone,
    }
    for name in ("p2p", "emergency", "replicator"):
        figures[f"save_block_ratio_{name}"] = report.ratio(
            managed["block_ours"],
            managed[f"block_{name}"],
            f"over Orbax's {name} manager",
        )
        figures[f"ram_restore_ratio_{name}"] = report.ratio(
            managed[f"load_{name}"], managed["load_ours"], f"over the speed of {name}"
        )
    return figures | {
        "peer_ratio_curl": report.ratio(
            reads["curl"], reads["client"], "at least 1.1; over the speed of curl"
        )
    }


def _speed(num_gib: float, secs: list[float], against: str) -> report.Figure:
    return report.figure("GiB/s", against, [num_gib / each for each in secs])


def _reads(url: str, secret_file: str) -> turns.Secs:
    # Ours reads into memory that was written before.
    memory = host_memory.allocate(_SERVED_BYTES)
    memory[:] = 0
    known = secret.read(secret_file)

    def read_curl() -> None:
        # The secret is not for the command line.
        subprocess.run(
            [
                *("curl", "--silent", "--fail", "--config", "-"),
                *("--output", "/dev/null", "--range", f"0-{_SERVED_BYTES - 1}"),
                f"{url}/{_SERVED}",
            ],
            input=f'header = "Authorization: Bearer {known}"'.encode(),
            check=True,
        )

    with contextlib.closing(peer_client.PeerClient(known)) as client:
        endpoint = client.endpoint(url)
        sides: dict[str, Callable[[], object]] = {
            "client": lambda: endpoint.read_into(f"/{_SERVED}", memory.data),
            "curl": read_curl,
        }
        return turns.timed(sides, _ROUNDS)


@contextlib.contextmanager
def _agents(roots: list[str]) -> Iterator[list[str]]:
    # Yields the URL of each agent.
    with contextlib.ExitStack() as stack:
        urls = []
        for root in roots:
            pathlib.Path(root).mkdir(parents=True, exist_ok=True)
            serving = agent.AgentProcess(agent.Service(root=root))
            stack.callback(serving.close)
            urls.append(serving.address.url)
        yield urls
