"""The hosts of suite `tiers`: each function is the program of one host."""

from __future__ import annotations

import itertools
import os
import pathlib
import shutil
import subprocess
from collections.abc import Callable
from concurrent import futures
from typing import Any, cast

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from benchmarks import tiers_turns
from benchmarks.tiers_turns import Place, State
from elastic_ckpt.core import events
from elastic_ckpt.elastic import member
from elastic_ckpt.tiers.peers import peer_client

# Threads that read files without any more ado.
_THREADS = 4


def save(host: member.Member, emit: events.Emit, *, place: Place) -> None:
    """Saves, and copies the same bytes."""
    del emit
    with tiers_turns.joined(host, place) as (mesh, ours):
        fresh_state = tiers_turns.states(place, tiers_turns.sharded(mesh))
        steps = itertools.count(1)
        kept = [np.empty_like(view) for view in _views(fresh_state())]
        orbax = _orbax_checkpointer(place)

        def copy(state: State) -> None:
            for into, view in zip(kept, _views(state), strict=True):
                np.copyto(into, view)

        def save_ours(state: State) -> Callable[[], Any]:
            response = ours.save_async(next(steps), state)
            assert response is not None
            return response.result

        def save_orbax(state: State) -> Callable[[], Any]:
            parts = {"state": state}
            response = orbax.save_checkpointables_async(next(steps), parts, force=True)
            assert response is not None
            return response.result

        def committed(state: State) -> None:
            assert save_ours(state)()

        def finish(wait: Callable[[], Any] | None) -> None:
            if wait is not None:
                wait()
            ours.wait()

        sides = {"copy": copy, "block": save_ours, "block_orbax": save_orbax}
        # The last save is restored.
        secs = tiers_turns.in_turns(
            place, sides | {"save": committed}, prepare=fresh_state, finish=finish
        )
        orbax.close()
        tiers_turns.report(place, host, secs)


def restore(host: member.Member, emit: events.Emit, *, place: Place) -> None:
    """Restores what the same number of hosts has saved, and copies the same files."""
    del emit
    with tiers_turns.joined(host, place) as (mesh, ours):
        wanted = tiers_turns.abstract(place, tiers_turns.sharded(mesh))
        orbax = _orbax_checkpointer(place)
        copied = os.path.join(place.machines[host.host], "copied")
        step = _step_directory(place.machines[host.host])
        parts = {"state": wanted}

        def copy(_: object) -> None:
            subprocess.run(["cp", "-r", step, copied], check=True)

        sides = {
            "load": lambda _: jax.block_until_ready(ours.load(None, wanted)),
            "copy": copy,
            "load_orbax": lambda _: jax.block_until_ready(
                orbax.load_checkpointables(None, parts)
            ),
        }
        secs = tiers_turns.in_turns(
            place,
            sides,
            finish=lambda _: shutil.rmtree(copied, ignore_errors=True),
        )
        orbax.close()
        tiers_turns.report(place, host, secs)


def restore_half(
    host: member.Member, emit: events.Emit, *, place: Place, urls: tuple[str, ...]
) -> None:
    """Restores on half of the hosts, and reads the same files without any more ado."""
    del emit
    with tiers_turns.joined(host, place) as (mesh, ours):
        wanted = tiers_turns.abstract(place, tiers_turns.sharded(mesh))
        secret = pathlib.Path(place.machines[host.host], "secret").read_text()
        client = peer_client.PeerClient(secret)
        # Hosts need rows in their order: this one what two of the four have saved.
        peers = {2 * host.host, 2 * host.host + 1} - {host.host}
        files = [
            (urls[number], os.path.relpath(path, machine), path)
            for number in sorted(peers)
            for machine in [place.machines[number]]
            for path in _files(_step_directory(machine))
        ]
        into = {path: np.ones(os.path.getsize(path), np.uint8) for *_, path in files}

        def read(url: str, name: str, path: str) -> None:
            client.endpoint(url).read_into(f"/v1/{name}", 0, into[path].data)

        def read_peers_files(_: object) -> None:
            with futures.ThreadPoolExecutor(_THREADS) as pool:
                for done in [pool.submit(read, *each) for each in files]:
                    done.result()

        sides = {
            "load": lambda _: jax.block_until_ready(ours.load(None, wanted)),
            "read_peers_files": read_peers_files,
        }
        secs = tiers_turns.in_turns(place, sides)
        client.close()
        tiers_turns.report(place, host, secs)


def _views(state: State) -> list[np.ndarray]:
    # Views of the memory of this host's devices.
    return [
        np.asarray(shard.data)
        for array in state.values()
        for shard in array.addressable_shards
    ]


def _orbax_checkpointer(place: Place) -> ocp.training.Checkpointer:
    keep = cast(Any, ocp.training.preservation_policies.LatestN(1))
    return ocp.training.Checkpointer(place.orbax, preservation_policy=keep)


def _step_directory(machine: str) -> str:
    # Others are of messages and of files that a restore unpacks.
    slot = os.path.join(machine, "hosts", "0")
    (step,) = [
        entry.path
        for entry in os.scandir(slot)
        if entry.is_dir() and entry.name[0].isdigit()
    ]
    return step


def _files(directory: str) -> list[str]:
    return [
        os.path.join(parent, name)
        for parent, _, names in os.walk(directory)
        for name in names
        if name != "zarr.json"
    ]
