"""Suite `every_step`: what it costs to make each step a checkpoint, and its memory.

Four processes under `jax.distributed`, each a machine with its own agent, hold 1 GiB of
float32 that is sharded over all of them, so that each copy is sent. A step donates the
state, adds to it, and multiplies matrices for about as long as the training step of
suite `recovery`. Turns of some steps alternate: without saves, and with a save of each
step to RAM (`every=1`) with no copy, and with one at a peer.

* `save_each_step_percent_ram`, `save_each_step_percent_sent`: what saves add to a step.
* `step_beside_save_percent`: of that, with copies, what is not the blocked call.
* `save_blocked_percent`: the blocked call alone, over a step.

In one process, with storage on the RAM disk too:

* `capture_us_per_leaf`: how long a save blocks, with 10,000 leaves of 1 KiB.
* `save_extra_memory_mib`: what a save of 1 GiB to RAM and its backup to storage add to
  the process's own memory, at most; `restore_in_flight_mib`: a restore, beside the
  arrays that it makes.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from benchmarks import report
from elastic_ckpt.core import events
from elastic_ckpt.elastic import member, supervisor

_HOSTS = 4
_SIDES = ("alone", "ram", "sent")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
      mib: of the state, all hosts together.
      step_secs: about, of a step.
      steps: of a turn.
      rounds: of all turns that are counted; one before them is not.
      small: leaves of 1 KiB.
    """

    mib: int
    step_secs: float
    steps: int
    rounds: int
    small: int


FULL = Size(mib=1024, step_secs=1.7, steps=6, rounds=5, small=10_000)
# Shows that the suite runs, and measures nothing.
SMALL = Size(mib=8, step_secs=0.01, steps=2, rounds=1, small=20)


def measure(size: Size = FULL) -> dict[str, report.Figure]:
    """Runs the suite."""
    supervisor.warm_up([])
    prefix = f"elastic_ckpt_benchmark_{os.getpid()}_"
    with tempfile.TemporaryDirectory(prefix=prefix, dir="/dev/shm") as d:
        results = pathlib.Path(d, "results")
        results.mkdir()
        supervisor.HostProcesses(
            functools.partial(_host, directory=d, size=size),
            num_hosts=_HOSTS,
            log_directory=f"{d}/logs",
            emit=events.nobody,
        ).run()
        of_hosts = [json.loads(file.read_bytes()) for file in results.glob("*.json")]
        figures = _of_steps(of_hosts)
        alone = [sys.executable, "-m", __spec__.name, d]
        text = json.dumps(dataclasses.asdict(size))
        done = subprocess.run([*alone, text], stdout=subprocess.PIPE, check=True)
    return figures | _of_one(json.loads(done.stdout.splitlines()[-1]))


def _of_steps(of_hosts: list[dict[str, list[float]]]) -> dict[str, report.Figure]:
    secs = {
        name: [max(turn) for turn in zip(*(h[name] for h in of_hosts), strict=True)]
        for name in of_hosts[0]
    }

    def more(name: str, less: str | None = None) -> list[float]:
        blocked = secs[less] if less else [0.0] * len(secs[name])
        turns = zip(secs[name], blocked, secs["alone"], strict=True)
        return [100 * (each - part - step) / step for each, part, step in turns]

    return {
        "each_step_ms": report.figure(
            "ms", "a step without saves", [1000 * each for each in secs["alone"]]
        ),
        "save_each_step_percent_ram": report.figure(
            "%", "of a step; a save to RAM in each, without copies", more("ram")
        ),
        "save_each_step_percent_sent": report.figure(
            "%", "at most 15; a save in each with a copy at a peer", more("sent")
        ),
        "save_blocked_percent": report.figure(
            "%",
            "of a step; the blocked call",
            [
                100 * a / b
                for a, b in zip(secs["sent_blocked"], secs["alone"], strict=True)
            ],
        ),
        "step_beside_save_percent": report.figure(
            "%", "at most 5; without the blocked call", more("sent", "sent_blocked")
        ),
    }


def _of_one(samples: dict[str, list[float]]) -> dict[str, report.Figure]:
    return {
        "capture_us_per_leaf": report.figure(
            "us", "at most 10; 1 KiB each", samples["capture_us_per_leaf"]
        ),
        "save_extra_memory_mib": report.figure(
            "MiB", "at most 512; of a save and its backup", samples["save_mib"]
        ),
        "restore_in_flight_mib": report.figure(
            "MiB", "at most 1024; beside the arrays", samples["restore_mib"]
        ),
    }


def _host(
    host: member.Member, emit: events.Emit, *, directory: str, size: Size
) -> None:
    del emit
    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils
    from jax.sharding import NamedSharding, PartitionSpec

    from elastic_ckpt import frontend
    from elastic_ckpt.core import topology
    from elastic_ckpt.elastic import multicontroller
    from elastic_ckpt.tiers import choices
    from elastic_ckpt.training import schema

    multicontroller.configure(schema.WorldSection())
    with multicontroller.joined(host):
        mesh = topology.mesh_of(topology.present(1))
        sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        rows = size.mib * 2**20 // 4 // 2048 // 8

        def checkpointer(name: str, copies: int) -> frontend.Checkpointer:
            local = choices.Local(f"{directory}/{name}-{host.host}", every=1)
            peers = choices.Peers(copies=copies)
            number = str(host.host)
            return frontend.Checkpointer([local, peers], run=name, slice_name=number)

        @functools.partial(jax.jit, out_shardings=sharding)
        def first() -> dict[str, Any]:
            return {f"w{n}": jnp.zeros((rows, 2048), jnp.float32) for n in range(8)}

        @functools.partial(jax.jit, donate_argnums=0)
        def step(state: dict[str, Any], count: Any) -> dict[str, Any]:
            # All hosts wait for each other, as they do for gradients.
            mean = sum(jnp.mean(each) for each in state.values()) / len(state)
            matrix = jnp.full((512, 512), 1e-3) + mean * 0
            done = jax.lax.fori_loop(0, count, lambda _, x: x @ matrix, matrix)
            more = 1 + 0 * done[0, 0]
            return {name: each + more for name, each in state.items()}

        state, count = first(), 8
        for _ in range(4):
            state = jax.block_until_ready(step(state, count))
            began = time.perf_counter()
            state = jax.block_until_ready(step(state, count))
            took = time.perf_counter() - began
            count = max(1, round(count * size.step_secs / took))
            count = int(multihost_utils.broadcast_one_to_all(jnp.int32(count)))
        secs: dict[str, list[float]] = {}
        numbers = itertools.count(1)
        with checkpointer("ram", 0) as ram, checkpointer("sent", 1) as sent:
            for number in range(size.rounds + 1):
                for side in _SIDES:
                    into = {"ram": ram, "sent": sent}.get(side)
                    multihost_utils.sync_global_devices(side)
                    began, blocked = time.perf_counter(), 0.0
                    for _ in range(size.steps):
                        state = jax.block_until_ready(step(state, count))
                        if into is not None:
                            save_began = time.perf_counter()
                            into.save_async(next(numbers), state)
                            blocked += time.perf_counter() - save_began
                    took = time.perf_counter() - began
                    if into is not None:
                        into.wait()
                    if number:
                        secs.setdefault(side, []).append(took / size.steps)
                        of_side = secs.setdefault(f"{side}_blocked", [])
                        of_side.append(blocked / size.steps)
    path = pathlib.Path(directory, "results", f"{host.host}.json")
    path.write_text(json.dumps(secs))


def _alone(directory: str, size: Size) -> dict[str, list[float]]:
    import jax
    import jax.numpy as jnp

    from elastic_ckpt import frontend
    from elastic_ckpt.tiers import choices

    samples: dict[str, list[float]] = {}

    def put(name: str, value: float) -> None:
        samples.setdefault(name, []).append(value)

    after = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    small = {f"leaf{n:05}": jnp.zeros(256, jnp.float32) for n in range(size.small)}
    small = after(small)
    local = choices.Local(f"{directory}/small", every=1)
    with frontend.Checkpointer([local], run="small") as made:
        for number in range(size.rounds + 1):
            small = jax.block_until_ready(after(small))
            began = time.perf_counter()
            made.save_async(number, small)
            took = time.perf_counter() - began
            made.wait()
            if number:
                put("capture_us_per_leaf", 1e6 * took / size.small)
    del small

    shape = (size.mib * 2**20 // 4 // 16,)
    local = choices.Local(f"{directory}/large", every=1)
    stored = choices.Persistent(f"{directory}/storage", every=1)
    with frontend.Checkpointer([local, stored], run="large") as made:
        large = {f"w{n:02}": jnp.full(shape, n, jnp.float32) for n in range(16)}
        for number in range(2):
            large = jax.block_until_ready(after(large))
            save = functools.partial(made.save, number, large)
            most = _most_mib(lambda save=save: (save(), made.wait()))
            if number:
                put("save_mib", most)
        del large
    with frontend.Checkpointer([local, stored], run="large") as made:
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        wanted = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=one)
        tree = {f"w{n:02}": wanted for n in range(16)}
        for number in range(2):
            most = _most_mib(lambda: jax.block_until_ready(made.load(1, tree)))
            if number:
                put("restore_mib", most - size.mib)
    return samples


def _most_mib(work: Callable[[], Any]) -> float:
    # What some work adds at most to the memory that is this process's alone.
    gc.collect()
    done, most, before = threading.Event(), [0], _own_bytes()

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], _own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return (most[0] - before) / 2**20


def _own_bytes() -> int:
    # Without the files of the RAM disk that are mapped.
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 2**10
    raise AssertionError


if __name__ == "__main__":
    print(json.dumps(_alone(sys.argv[1], Size(**json.loads(sys.argv[2])))))
