"""Suite `tiers`: the cost of saves and restores, compared with plain copies and Orbax.

1 GiB of float32 and 1/2 MiB of small leaves are sharded over four processes under
`jax.distributed`. Each process is a machine: a directory on the RAM disk with its own
agent. Orbax also saves to the RAM disk. All sides take turns in one world; a turn takes
as long as on its slowest host. The state is recomputed before each turn.

Saves, in the steady state: the previous save is done, and no waiting is counted.

* `save_block_ratio_copy`: how long a save blocks the trainer, relative to `np.copyto`
  of the same shards to memory that has been written before; `save_block_ratio_orbax`:
  relative to the blocking time of Orbax's save of the state. `save_block_ms` is the
  blocking time, `save_secs` the time until a save is committed.

Restores, in a separate world, until the arrays are ready:

* `ram_restore_ratio_copy`: the speed on the same four hosts relative to four `cp -r`
  processes that copy the same files on the RAM disk.
* `ram_restore_ratio_orbax`: relative to the speed of Orbax's load from the RAM disk.
* `ram_restore_half_hosts`: the speed on two hosts, which read three quarters from
  peers: hosts need rows in their order, and the second host has none of its rows. For
  comparison, `ram_restore_half_peers_transfer` is the client's speed for only the
  peers' files, to the same two hosts, in four threads.
* `peer_ratio_curl`: one client process reads 1 GiB from an agent, relative to curl.

In one process, on the devices that JAX finds, compared with Orbax (`tiers_alone`):

* `small_backup_ratio_orbax`: 20,000 leaves of 1 kB; ours go to storage by way of RAM.
* `storage_durable_ratio_orbax_few`, `..._staged_few`: time until a few large leaves are
  in storage, without a RAM tier, relative to Orbax and to a save staged in RAM.
* `huge_block_ratio_orbax_donated`, `..._kept`: how long a save of one 1 GiB leaf blocks
  the trainer, relative to Orbax, if each step donates the leaf and if none does. Since
  a step must copy a donated leaf while a view of it exists,
  `huge_block_and_step_ratio_orbax_...` also counts the next step.
* `restore_beside_mib_ram_rows`, `..._columns`, `..._everywhere`: the peak of memory
  beside the state in a restore of 1 GiB that was saved in rows over four CPU devices,
  under the same sharding, another one, and as a copy on each device; `..._storage_...`:
  the same from storage. Only for CPU devices.

Compared with Orbax's own managers of RAM tiers, on the state that they require:

* `save_block_ratio_p2p`, `ram_restore_ratio_p2p`, and so on: like the ratios to Orbax.
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
# The share of the state that half of the hosts restore from peers.
_OF_PEERS = 3 / 4
_SERVED = "hosts/0/1-served/file"


_NUM_LEAVES = sized(32, 2)  # large ones of the state, of 32 MiB
_ROUNDS = sized(7, 1)
_SERVED_BYTES = sized(_GIB, 2**20)  # read from an agent in one piece


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
        # The same size on each host, but two hosts have the same part.
        halved = dataclasses.replace(place, num_leaves=_NUM_LEAVES // 2)
        managed = tiers_hosts.run(tiers_managers.save_and_restore, halved)
        storage.write_atomic(f"{d}/served/{_SERVED}", os.urandom(_SERVED_BYTES))
        with _agents([f"{d}/served"]) as (url,):
            reads = turns.in_new_process(_reads, url, secret.path(f"{d}/served"))
    num_gib = place.num_bytes / _GIB
    figures = {
        "save_block_ratio_copy": report.ratio(
            saved["block"], saved["copy"], "at most 1.2; a copy to warm memory"
        ),
        "save_block_ratio_orbax": report.ratio(
            saved["block"], saved["block_orbax"], "below 1; Orbax's blocking time"
        ),
        "save_block_ms": report.figure(
            "ms", f"{num_gib:.1f} GiB", [1000 * each for each in saved["block"]]
        ),
        "save_secs": report.figure("secs", "until it is committed", saved["save"]),
        "ram_restore_ratio_copy": report.ratio(
            restored["copy"], restored["load"], "at least 0.9; the speed of cp"
        ),
        "ram_restore_ratio_orbax": report.ratio(
            restored["load_orbax"], restored["load"], "the speed of Orbax"
        ),
        "ram_restore": _speed(num_gib, restored["load"], "on four hosts"),
        "ram_restore_half_hosts": _speed(num_gib, half["load"], "on two hosts"),
        "ram_restore_half_peers_transfer": _speed(
            num_gib * _OF_PEERS,
            half["read_peers_files"],
            "only the peers' files",
        ),
        **alone,
    }
    for name in ("p2p", "emergency", "replicator"):
        figures[f"save_block_ratio_{name}"] = report.ratio(
            managed["block_ours"],
            managed[f"block_{name}"],
            f"Orbax's {name} manager",
        )
        figures[f"ram_restore_ratio_{name}"] = report.ratio(
            managed[f"load_{name}"], managed["load_ours"], f"the speed of {name}"
        )
    return figures | {
        "peer_ratio_curl": report.ratio(
            reads["curl"], reads["client"], "at least 1.1; the speed of curl"
        )
    }


def _speed(num_gib: float, secs: list[float], against: str) -> report.Figure:
    return report.figure("GiB/s", against, [num_gib / each for each in secs])


def _reads(url: str, secret_file: str) -> turns.Secs:
    # Our client reads into memory that was written before.
    memory = host_memory.allocate(_SERVED_BYTES)
    memory[:] = 0
    known = secret.read(secret_file)

    def read_curl() -> None:
        # The secret must not be on the command line.
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
    # Yields the agents' URLs.
    with contextlib.ExitStack() as stack:
        urls = []
        for root in roots:
            pathlib.Path(root).mkdir(parents=True, exist_ok=True)
            serving = agent.AgentProcess(agent.Service(root=root))
            stack.callback(serving.close)
            urls.append(serving.address.url)
        yield urls
