"""Suite `every_step`: the cost of making each step a checkpoint.

Four processes under `jax.distributed`, each a machine with its own agent, have 1 GiB of
float32 that is sharded over all of them, so that each copy is sent. A step donates the
state, adds to it, and multiplies matrices for about as long as the training step of
suite `recovery`. Turns of a few steps alternate: without saves (`each_step_ms`), and
with a save of each step to RAM (`every=1`) and a copy at a peer.

* `save_each_step_percent_sent`: the time that saves add to a step.
* `floor_percent_sent`: the time that a step takes longer while the same number of bytes
  in memory is digested, sent to the next host over a plain socket, and digested there.
* `step_beside_save_percent`: the part of the saves' cost outside the blocking call.
"""

from __future__ import annotations

import functools
import itertools
import os
import socket
import tempfile
import time
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from benchmarks import report, sized, tiers_hosts, turns
from elastic_ckpt import frontend
from elastic_ckpt.core import digest
from elastic_ckpt.elastic import station
from elastic_ckpt.tiers import choices

_LEAF_MIB = sized(128, 1)  # of each of eight leaves, all hosts together
_STEP_SECS = sized(1.7, 0.01)  # about
_STEPS = sized(6, 2)  # of a turn
_ROUNDS = sized(5, 1)


def measure() -> dict[str, report.Figure]:
    """Runs the suite."""
    station.warm_up([__name__])
    prefix = f"elastic_ckpt_benchmark_{os.getpid()}_"
    with tempfile.TemporaryDirectory(prefix=prefix, dir="/dev/shm") as d:
        place = tiers_hosts.Place(
            machines=tuple(f"{d}/{number}" for number in range(tiers_hosts.HOSTS)),
            results=f"{d}/results",
            orbax="",
            num_leaves=8,
            leaf_mib=_LEAF_MIB,
            num_small=0,
            rounds=_ROUNDS,
        )
        secs = tiers_hosts.run(_host, place)

    alone = secs["alone"]

    def more(samples: list[float]) -> list[float]:
        pairs = zip(samples, alone, strict=True)
        return [100 * (each / step - 1) for each, step in pairs]

    return {
        "each_step_ms": report.figure(
            "ms", "without saves", [1000 * each for each in alone]
        ),
        "save_each_step_percent_sent": report.figure(
            "%", "at most 15; a save of each with a copy at a peer", more(secs["sent"])
        ),
        "floor_percent_sent": report.figure(
            "%", "the same bytes over a plain socket", more(secs["floor"])
        ),
        "step_beside_save_percent": report.figure(
            "%", "at most 5; without the blocking call", more(secs["beside"])
        ),
    }


def _host(host: tiers_hosts.Host) -> turns.Secs:
    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: tiers_hosts.State, count: Any) -> tiers_hosts.State:
        # All hosts wait for each other, as they do for gradients.
        mean = sum(jnp.mean(each) for each in state.values()) / len(state)
        matrix = jnp.full((512, 512), 1e-3) + mean * 0
        done = jax.lax.fori_loop(0, count, lambda _, x: x @ matrix, matrix)
        more = 1 + 0 * done[0, 0]
        return {name: each + more for name, each in state.items()}

    state = tiers_hosts.states(host.place, tiers_hosts.sharded(host.mesh))()
    count = 8
    for _ in range(4):
        state = jax.block_until_ready(step(state, count))
        began = time.perf_counter()
        state = jax.block_until_ready(step(state, count))
        took = time.perf_counter() - began
        count = max(1, round(count * _STEP_SECS / took))
        count = int(multihost_utils.broadcast_one_to_all(jnp.int32(count)))
    secs: turns.Secs = {"alone": [], "floor": [], "sent": [], "beside": []}
    floor = _Floor(host.number, host.place.num_bytes // tiers_hosts.HOSTS)
    local = choices.Local(f"{host.place.machines[host.number]}/sent", every=1)
    numbers = itertools.count(1)
    with frontend.Checkpointer(
        [local, choices.Peers(copies=1)], run="sent", slice_name=str(host.number)
    ) as checkpointer:
        for side in ["alone", "floor", "sent"] * (_ROUNDS + 1):
            multihost_utils.sync_global_devices(side)
            began, blocked = time.perf_counter(), 0.0
            for _ in range(_STEPS):
                state = jax.block_until_ready(step(state, count))
                if side == "floor":
                    floor.begin()
                if side == "sent":
                    save_began = time.perf_counter()
                    checkpointer.save_async(next(numbers), state)
                    blocked += time.perf_counter() - save_began
            took = time.perf_counter() - began
            checkpointer.wait()
            floor.wait()
            secs[side].append(took / _STEPS)
            if side == "sent":
                secs["beside"].append((took - blocked) / _STEPS)
    return secs


class _Floor:
    # Moves bytes to the next host in the background, once after each step.

    def __init__(self, number: int, num_bytes: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = np.int32(server.getsockname()[1])
            ports = multihost_utils.process_allgather(port)
            successor = int(ports[(number + 1) % len(ports)])
            self._to = socket.create_connection(("127.0.0.1", successor))
            self._from, _ = server.accept()
        self._own, self._copy = np.ones((2, num_bytes), np.uint8)
        self._threads = futures.ThreadPoolExecutor(2)
        self._moved: list[futures.Future[object]] = []

    def begin(self) -> None:
        self.wait()
        self._moved = [self._threads.submit(each) for each in (self._send, self._take)]

    def wait(self) -> None:
        for moved in self._moved:
            moved.result()

    def _send(self) -> None:
        digest.values_digest(self._own)
        self._to.sendall(self._own.data)

    def _take(self) -> None:
        left = self._copy.data
        while left:
            left = left[self._from.recv_into(left[: 2**20]) :]
        digest.values_digest(self._copy)
