"""Suite `tiers`: what saves and restores cost, beside a plain copy and beside Orbax.

1 GiB of float32 and 1/2 MiB of small leaves, sharded over four processes under
`jax.distributed`, each a machine: a directory on the RAM disk with its own agent. Orbax
saves to the RAM disk too. All sides take turns in one world; a turn is as long as its
slowest host's. The state is computed anew before each turn.

Blocked, in the steady state: the save before is done, and no waiting is counted.

* `save_block_ratio_copy`: the trainer is blocked by a save, over `np.copyto` of the
  same shards to memory that was written before; `..._ratio_fresh_copy` to memory that
  was not; `first_save_block_ratio_fresh_copy` of the first save of a process. Hosts
  share the cores here: the first ones write while the last one is still blocked.
* `save_block_ratio_orbax`: over what Orbax's save of that state blocks.

Checked, in a separate world, in turns with digests that cost nothing:

* `check_cost_percent_save`, `check_cost_percent_load`: of a save until it is committed
  and of a load, for digests, by the clock.
* `check_share_percent_save`, `..._load`: the time that processors spend inside of
  digests, over what they spend on all else; what disturbs the clock disturbs both.

Restored, in a separate world, until the arrays are ready:

* `ram_restore_ratio_copy`: the speed on the same four hosts over that of four
  processes `cp -r` which copy the same files on the RAM disk.
* `ram_restore_ratio_orbax`: over the speed of Orbax's load from the RAM disk.
* `ram_restore_half_hosts`: on two hosts, which read three quarters from peers: hosts
  need rows in their order, and the second one holds none of its rows. Beside it
  `ram_restore_half_transfer` of the same files to the same two hosts, in four threads,
  by the client's and the system's reads alone, and `..._peers_transfer` of the peers'
  files among them; `ram_restore_half_ratio_transfer` holds the first against the
  second, and `ram_restore_half_ratio_peers_transfer` against the third.

Sent:

* `peer_ratio_curl`: one client process reads 1 GiB from an agent, over curl's speed;
  `peer_tensorstore_ratio_curl` by TensorStore's driver for HTTP.
* `dp_bytes_sent`: of parts of leaves, for two copies of replicated state, without
  listings and manifests, which are `dp_listing_bytes_sent`; `sharded_bytes_sent` is
  what the same count gives for sharded state.

In one process, on the devices that JAX finds, beside Orbax (`tiers_alone`):

* `small_..._ratio_orbax`: 20,000 leaves of 1 kB, ours by way of RAM into storage.
* `huge_block_ratio_orbax_donated`, `..._kept`: one leaf of 1 GiB blocks the trainer,
  over Orbax, where each step donates it and where none does. A view that is held makes
  a step copy what it donates: `huge_block_and_step_ratio_orbax_...` counts the next
  step too, and `huge_step_ms_...` is a step without a save.
* `huge_memory_mib_...`: the most that such a save and its backup add to the process.

Started: see `tiers_fake_steps`. Storage alone, beside Orbax: see `tiers_storage`.

Beside Orbax's own managers of RAM tiers, on the state that they require:

* `save_block_ratio_p2p`, `ram_restore_ratio_p2p`, and so on: as over Orbax's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

from benchmarks import (
    report,
    tiers_alone,
    tiers_fake_steps,
    tiers_hosts,
    tiers_managers,
    tiers_peer,
    tiers_storage,
    tiers_turns,
)
from elastic_ckpt.core import storage
from elastic_ckpt.elastic import supervisor
from elastic_ckpt.tiers.peers import agent, agent_process, secret

_HOSTS = 4
_GIB = 2**30
# The share that half of the hosts restore from peers.
_OF_PEERS = 3 / 4
_SERVED = "hosts/0/1-served/file"

Samples = dict[str, list[float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
      num_leaves: large ones of the state.
      leaf_mib: of each of these.
      num_small: leaves of 8 KiB besides.
      rounds: that are counted.
      check_pairs: of a save and a load with and without digests.
      file_bytes: read from an agent at once.
      small_alone: leaves of 1 kB that one process saves.
      huge_mib: of the one leaf that one process saves.
      rounds_alone: of both that are counted.
      managers: whether Orbax's managers take part, one of which hangs now and then.
    """

    num_leaves: int
    leaf_mib: int
    num_small: int
    rounds: int
    check_pairs: int
    file_bytes: int
    small_alone: int
    huge_mib: int
    rounds_alone: int
    managers: bool = True


FULL = Size(
    num_leaves=32,
    leaf_mib=32,
    num_small=64,
    rounds=7,
    check_pairs=31,
    file_bytes=_GIB,
    small_alone=20_000,
    huge_mib=1024,
    rounds_alone=3,
)
# Shows that the suite runs, and measures nothing.
SMALL = Size(
    num_leaves=2,
    leaf_mib=1,
    num_small=2,
    rounds=1,
    check_pairs=1,
    file_bytes=2**20,
    small_alone=20,
    huge_mib=2,
    rounds_alone=1,
    managers=False,
)


def measure(size: Size = FULL) -> dict[str, report.Figure]:
    """Runs the suite."""
    supervisor.warm_up([tiers_managers.__name__])
    prefix = f"elastic_ckpt_benchmark_{os.getpid()}_"
    with tempfile.TemporaryDirectory(prefix=prefix, dir="/dev/shm") as d:
        machines = [f"{d}/machine-{number}" for number in range(_HOSTS)]
        place = tiers_turns.Place(
            machines=tuple(machines),
            results=f"{d}/results",
            orbax=f"{d}/orbax",
            num_leaves=size.num_leaves,
            leaf_mib=size.leaf_mib,
            num_small=size.num_small,
            rounds=size.rounds,
            check_pairs=size.check_pairs,
        )
        num_gib = place.num_bytes / _GIB
        with _agents(machines) as urls:
            saved = _slowest(_run(tiers_hosts.save, place))
            restored = _slowest(_run(tiers_hosts.restore, place))
            program = functools.partial(tiers_hosts.restore_half, urls=tuple(urls))
            half = _slowest(_run(program, place, num_hosts=_HOSTS // 2))
        figures = _saved(saved) | _restored(restored, num_gib) | _half(half, num_gib)
        for machine in machines:
            shutil.rmtree(machine)
        shutil.rmtree(place.orbax)
        figures |= _checked(_run_anew(tiers_hosts.check, place))
        figures |= _sent(_run_anew(tiers_hosts.replicate, place))
        for part in (tiers_alone, tiers_storage):
            alone = part.measure(
                f"{d}/alone",
                leaves=size.small_alone,
                mib=size.huge_mib,
                rounds=size.rounds_alone,
            )
            shutil.rmtree(f"{d}/alone")
            figures |= part.figures(**alone)
        if size.managers:
            # As large on each host, of which two have the same.
            halved = dataclasses.replace(place, num_leaves=size.num_leaves // 2)
            beside = _run(tiers_managers.save_and_restore, halved)
            figures |= _beside(_slowest(beside))
        figures |= tiers_fake_steps.figures(f"{d}/started", size.rounds)
        return figures | _transferred(_transfers(f"{d}/served", size))


def _saved(secs: Samples) -> dict[str, report.Figure]:
    warm = {side: took[1:] for side, took in secs.items()}
    first = secs["block"][0] / secs["copy_to_fresh"][0]
    return {
        "save_block_ratio_copy": report.ratio(
            warm["block"], warm["copy"], "at most 1.2; over a copy to warm memory"
        ),
        "save_block_ratio_fresh_copy": report.ratio(
            warm["block"], warm["copy_to_fresh"], "over a copy to fresh memory"
        ),
        "first_save_block_ratio_fresh_copy": report.figure(
            "ratio", "the first save, over a first copy", [first]
        ),
        "save_block_ratio_orbax": report.ratio(
            warm["block"], warm["block_orbax"], "below 1; over Orbax's"
        ),
        "save_block_ms": report.figure(
            "ms", "the copy is save_block_copy_ms", _millis(warm["block"])
        ),
        "save_block_copy_ms": report.figure("ms", "warm memory", _millis(warm["copy"])),
        "save_block_orbax_ms": report.figure(
            "ms", "Orbax", _millis(warm["block_orbax"])
        ),
    }


def _restored(secs: Samples, num_gib: float) -> dict[str, report.Figure]:
    warm = {side: took[1:] for side, took in secs.items()}
    first = secs["copy"][0] / secs["load"][0]
    return {
        "ram_restore_ratio_copy": report.ratio(
            warm["copy"], warm["load"], "at least 0.5; over the speed of cp"
        ),
        "first_ram_restore_ratio_copy": report.figure(
            "ratio", "the first load of a process", [first]
        ),
        "ram_restore_ratio_orbax": report.ratio(
            warm["load_orbax"], warm["load"], "over the speed of Orbax"
        ),
        "ram_restore": _speed(num_gib, warm["load"], "on four hosts"),
        "ram_restore_copy": _speed(num_gib, warm["copy"], "cp"),
    }


def _checked(of_hosts: list[Samples]) -> dict[str, report.Figure]:
    figures = {}
    secs = _slowest(of_hosts)
    for verb in ("save", "load"):
        figures[f"check_cost_percent_{verb}"] = _percent(
            secs[verb], secs[f"{verb}_unchecked"], "at most 5; for digests"
        )
        all_secs = _summed(of_hosts, f"{verb}_cpu")[1:]
        spent = _summed(of_hosts, f"{verb}_digests_cpu")[1:]
        figures[f"check_share_percent_{verb}"] = report.figure(
            "%",
            "processors' time in digests, over all else",
            [100 * a / (b - a) for a, b in zip(spent, all_secs, strict=True)],
        )
    save_secs = report.figure("secs", "until it is committed", secs["save"][1:])
    return figures | {"save_secs": save_secs}


def _half(secs: Samples, num_gib: float) -> dict[str, report.Figure]:
    warm = {side: took[1:] for side, took in secs.items()}
    return {
        "ram_restore_half_hosts": _speed(num_gib, warm["load"], "on two hosts"),
        "ram_restore_half_transfer": _speed(
            num_gib, warm["read_files"], "the same files, read alone"
        ),
        "ram_restore_half_peers_transfer": _speed(
            num_gib * _OF_PEERS,
            warm["read_peers_files"],
            "the peers' files, read alone",
        ),
        "ram_restore_half_ratio_transfer": report.ratio(
            warm["read_files"], warm["load"], "over the speed of the files alone"
        ),
        "ram_restore_half_ratio_peers_transfer": report.ratio(
            [each / _OF_PEERS for each in warm["read_peers_files"]],
            warm["load"],
            "over the speed of the peers' files alone",
        ),
    }


def _beside(secs: Samples) -> dict[str, report.Figure]:
    warm = {side: took[1:] for side, took in secs.items()}
    figures = {}
    for name in ("p2p", "emergency", "replicator"):
        figures[f"save_block_ratio_{name}"] = report.ratio(
            warm["block_ours"], warm[f"block_{name}"], f"over Orbax's {name} manager"
        )
        figures[f"ram_restore_ratio_{name}"] = report.ratio(
            warm[f"load_{name}"], warm["load_ours"], f"over the speed of {name}"
        )
    return figures


def _sent(counts: list[Samples]) -> dict[str, report.Figure]:
    total = {name: [sum(count[name][0] for count in counts)] for name in counts[0]}
    return {
        "dp_bytes_sent": report.figure(
            "bytes", "0; for copies of replicated state", total["replicated_parts"]
        ),
        "dp_listing_bytes_sent": report.figure(
            "bytes", "manifests and lists", total["replicated_listings"]
        ),
        "sharded_bytes_sent": report.figure(
            "bytes", "for two copies of sharded state", total["sharded_parts"]
        ),
    }


def _transferred(secs: Samples) -> dict[str, report.Figure]:
    return {
        "peer_ratio_curl": report.ratio(
            secs["curl"], secs["client"], "at least 0.5; over the speed of curl"
        ),
        "peer_tensorstore_ratio_curl": report.ratio(
            secs["curl"], secs["tensorstore"], "TensorStore's driver for HTTP"
        ),
    }


def _run(
    program: Callable[..., None], place: tiers_turns.Place, *, num_hosts: int = _HOSTS
) -> list[Samples]:
    # The measurements of each host.
    os.makedirs(place.results)
    supervisor.HostProcesses(
        functools.partial(program, place=place),
        num_hosts=num_hosts,
        log_directory=f"{place.results}/logs",
        emit=_nobody,
    ).run()
    files = sorted(pathlib.Path(place.results).glob("*.json"))
    samples = [json.loads(file.read_bytes()) for file in files]
    shutil.rmtree(place.results)
    return samples


def _run_anew(program: Callable[..., None], place: tiers_turns.Place) -> list[Samples]:
    # On machines that hold nothing before and afterwards.
    with _agents(list(place.machines)):
        samples = _run(program, place)
    for machine in place.machines:
        shutil.rmtree(machine)
    return samples


def _slowest(of_hosts: list[Samples]) -> Samples:
    return {
        name: [
            max(turn) for turn in zip(*(host[name] for host in of_hosts), strict=True)
        ]
        for name in of_hosts[0]
    }


def _summed(of_hosts: list[Samples], name: str) -> list[float]:
    return [sum(turn) for turn in zip(*(host[name] for host in of_hosts), strict=True)]


def _transfers(root: str, size: Size) -> Samples:
    storage.write_atomic(f"{root}/{_SERVED}", os.urandom(size.file_bytes))
    with _agents([root]) as (url,):
        done = subprocess.run(
            [
                *(sys.executable, "-m", tiers_peer.__name__, url, secret.path(root)),
                *(f"/v1/{_SERVED}", str(size.file_bytes), str(size.rounds)),
            ],
            stdout=subprocess.PIPE,
            check=True,
        )
    return json.loads(done.stdout)


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


def _nobody(name: str, **fields: storage.Json) -> None:
    del name, fields


def _millis(secs: list[float]) -> list[float]:
    return [1000 * each for each in secs]


def _percent(
    checked: list[float], unchecked: list[float], against: str
) -> report.Figure:
    pairs = list(zip(checked, unchecked, strict=True))[1:]
    return report.figure("%", against, [100 * (a / b - 1) for a, b in pairs])


def _speed(num_gib: float, secs: list[float], against: str) -> report.Figure:
    return report.figure("GiB/s", against, [num_gib / each for each in secs])
