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
    tiers_alone,
    tiers_hosts,
    tiers_managers,
    turns,
)
from elastic_ckpt.core import host_memory, storage
from elastic_ckpt.elastic import supervisor
from elastic_ckpt.tiers.peers import agent, agent_process, peer_client, secret

_GIB = 2**30
# The share that half of the hosts restore from peers.
_OF_PEERS = 3 / 4
_SERVED = "hosts/0/1-served/file"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured."""

    num_leaves: int = 32  # large ones of the state
    leaf_mib: int = 32
    num_small: int = 64  # leaves of 8 KiB besides
    rounds: int = 7
    file_bytes: int = _GIB  # read from an agent at once
    small_alone: int = 20_000  # leaves of 1 kB that one process saves
    huge_mib: int = 1024  # of the one leaf that one process saves
    rounds_alone: int = 3
    managers: bool = True  # of Orbax, one of which hangs now and then


# Shows that the suite runs, and measures nothing.
SMALL = Size(
    num_leaves=2,
    leaf_mib=1,
    num_small=2,
    rounds=1,
    file_bytes=2**20,
    small_alone=20,
    huge_mib=2,
    rounds_alone=1,
)


def measure(size: Size = Size()) -> dict[str, report.Figure]:
    """Runs the suite."""
    supervisor.warm_up([tiers_managers.__name__])
    prefix = f"elastic_ckpt_benchmark_{os.getpid()}_"
    with tempfile.TemporaryDirectory(prefix=prefix, dir="/dev/shm") as d:
        machines = [f"{d}/machine-{number}" for number in range(tiers_hosts.HOSTS)]
        place = tiers_hosts.Place(
            machines=tuple(machines),
            results=f"{d}/results",
            orbax=f"{d}/orbax",
            num_leaves=size.num_leaves,
            leaf_mib=size.leaf_mib,
            num_small=size.num_small,
            rounds=size.rounds,
        )
        with _agents(machines) as urls:
            saved = tiers_hosts.run(tiers_hosts.save, place)
            restored = tiers_hosts.run(tiers_hosts.restore, place)
            program = functools.partial(tiers_hosts.restore_half, urls=tuple(urls))
            half = tiers_hosts.run(program, place, num_hosts=tiers_hosts.HOSTS // 2)
        figures = _of_hosts(saved, restored, half, place.num_bytes / _GIB)
        for directory in (*machines, place.orbax):
            shutil.rmtree(directory)
        figures |= tiers_alone.figures(
            f"{d}/alone",
            leaves=size.small_alone,
            mib=size.huge_mib,
            rounds=size.rounds_alone,
        )
        shutil.rmtree(f"{d}/alone")
        if size.managers:
            # As large on each host, of which two have the same.
            halved = dataclasses.replace(place, num_leaves=size.num_leaves // 2)
            figures |= _beside(tiers_hosts.run(tiers_managers.save_and_restore, halved))
        return figures | _transferred(f"{d}/served", size)


def _of_hosts(
    saved: turns.Secs, restored: turns.Secs, half: turns.Secs, num_gib: float
) -> dict[str, report.Figure]:
    return {
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
            restored["copy"], restored["load"], "at least 0.5; over the speed of cp"
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
    }


def _speed(num_gib: float, secs: list[float], against: str) -> report.Figure:
    return report.figure("GiB/s", against, [num_gib / each for each in secs])


def _beside(secs: turns.Secs) -> dict[str, report.Figure]:
    figures = {}
    for name in ("p2p", "emergency", "replicator"):
        figures[f"save_block_ratio_{name}"] = report.ratio(
            secs["block_ours"], secs[f"block_{name}"], f"over Orbax's {name} manager"
        )
        figures[f"ram_restore_ratio_{name}"] = report.ratio(
            secs[f"load_{name}"], secs["load_ours"], f"over the speed of {name}"
        )
    return figures


def _transferred(root: str, size: Size) -> dict[str, report.Figure]:
    storage.write_atomic(f"{root}/{_SERVED}", os.urandom(size.file_bytes))
    with _agents([root]) as (url,):
        secs = turns.in_new_process(
            _reads, url, secret.path(root), size.file_bytes, size.rounds
        )
    return {
        "peer_ratio_curl": report.ratio(
            secs["curl"], secs["client"], "at least 0.5; over the speed of curl"
        )
    }


def _reads(url: str, secret_file: str, num_bytes: int, rounds: int) -> turns.Secs:
    # Ours reads into memory that was written before.
    memory = host_memory.allocate(num_bytes)
    memory[:] = 0
    known = secret.read(secret_file)

    def read_curl() -> None:
        # The secret is not for the command line.
        subprocess.run(
            [
                *("curl", "--silent", "--fail", "--config", "-"),
                *("--output", "/dev/null", "--range", f"0-{num_bytes - 1}"),
                f"{url}/v1/{_SERVED}",
            ],
            input=f'header = "Authorization: Bearer {known}"'.encode(),
            check=True,
        )

    with contextlib.closing(peer_client.PeerClient(known)) as client:
        endpoint = client.endpoint(url)
        sides: dict[str, Callable[[], None]] = {
            "client": lambda: endpoint.read_into(f"/v1/{_SERVED}", 0, memory.data),
            "curl": read_curl,
        }
        return turns.timed(sides, rounds)


@contextlib.contextmanager
def _agents(roots: list[str]) -> Iterator[list[str]]:
    # Yields the URL of each agent.
    with contextlib.ExitStack() as stack:
        urls = []
        for root in roots:
            pathlib.Path(root).mkdir(parents=True, exist_ok=True)
            serving = agent_process.AgentProcess(agent.Service(root=root))
            stack.callback(serving.close)
            urls.append(serving.address.url)
        yield urls
