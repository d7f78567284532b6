"""The hosts of suite `tiers`: each function is the program of one host.

All sides of a comparison take turns in one world. The hosts wait for each other before
each turn, and a turn of a round takes as long as on the slowest of them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, cast
from unittest import mock

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from benchmarks import tiers_turns
from benchmarks.tiers_turns import Place, Secs, State
from elastic_ckpt.core import digest, events
from elastic_ckpt.elastic import member
from elastic_ckpt.tiers.peers import peer_client

# Threads that read files without any more ado.
_THREADS = 4


def save(host: member.Member, emit: events.Emit, *, place: Place) -> None:
    """Saves, and copies the same bytes in other ways."""
    del emit
    with tiers_turns.joined(host, place, copies=0) as (mesh, ours):
        fresh_state = tiers_turns.states(place, tiers_turns.sharded(mesh))
        steps = itertools.count(1)
        kept = [np.empty_like(view) for view in tiers_turns.views(fresh_state())]
        orbax = _orbax_checkpointer(place)

        def copy(state: State) -> None:
            for into, view in zip(kept, tiers_turns.views(state), strict=True):
                np.copyto(into, view)

        def copy_to_fresh(state: State) -> list[np.ndarray]:
            return [np.array(view) for view in tiers_turns.views(state)]

        def save_ours(state: State) -> Callable[[], Any]:
            response = ours.save_async(next(steps), state)
            assert response is not None
            return response.result

        def save_orbax(state: State) -> Callable[[], Any]:
            response = orbax.save_checkpointables_async(
                next(steps), {"state": state}, force=True
            )
            assert response is not None
            return response.result

        sides = {
            "copy": copy,
            "copy_to_fresh": copy_to_fresh,
            "block": save_ours,
            "block_orbax": save_orbax,
        }
        secs: Secs = {name: [] for name in sides}
        for name in tiers_turns.turns(sides, place.rounds):
            state = fresh_state()
            turn = functools.partial(sides[name], state)
            took, done = tiers_turns.timed(place, turn)
            secs[name].append(took)
            if callable(done):
                done()
            ours.wait()
        orbax.close()
        # The last one is restored.
        assert save_ours(fresh_state())()
        ours.wait()
        tiers_turns.report(place, "save", host, secs)


def restore(host: member.Member, emit: events.Emit, *, place: Place) -> None:
    """Restores what the same number of hosts has saved, and copies the same files."""
    del emit
    with tiers_turns.joined(host, place, copies=0) as (mesh, ours):
        wanted = tiers_turns.abstract(place, tiers_turns.sharded(mesh))
        orbax = _orbax_checkpointer(place)
        machine = place.machines[host.host]
        copied = os.path.join(machine, "copied")
        (step,) = _step_directories(machine)

        def load_ours() -> State:
            return jax.block_until_ready(ours.load(None, wanted))

        def load_orbax() -> State:
            parts = {"state": wanted}
            return jax.block_until_ready(orbax.load_checkpointables(None, parts))

        def copy() -> None:
            subprocess.run(["cp", "-r", step, copied], check=True)

        sides = {"load": load_ours, "copy": copy, "load_orbax": load_orbax}
        secs: Secs = {name: [] for name in sides}
        for name in tiers_turns.turns(sides, place.rounds):
            secs[name].append(tiers_turns.timed(place, sides[name])[0])
            shutil.rmtree(copied, ignore_errors=True)
        orbax.close()
        tiers_turns.report(place, "restore", host, secs)


def check(host: member.Member, emit: events.Emit, *, place: Place) -> None:
    """Saves until it is committed, and loads, with digests and without."""
    del emit
    with tiers_turns.joined(host, place, copies=0) as (mesh, ours):
        fresh_state = tiers_turns.states(place, tiers_turns.sharded(mesh))
        wanted = tiers_turns.abstract(place, tiers_turns.sharded(mesh))
        steps = itertools.count(1)
        secs: Secs = {}

        def compare(verb: str, work: Callable[[State], Any]) -> None:
            for name in tiers_turns.pairs(
                (verb, f"{verb}_unchecked"), place.check_pairs
            ):
                with _digests(as_they_are=name == verb):
                    turn = functools.partial(work, fresh_state())
                    took, done = tiers_turns.timed(place, turn)
                assert done
                secs.setdefault(name, []).append(took)
                ours.wait()
            for _ in range(place.rounds + 1):
                with _timed_digests() as spent:
                    turn = functools.partial(_cpu_secs, work, fresh_state())
                    _, cpu_secs = tiers_turns.timed(place, turn)
                secs.setdefault(f"{verb}_cpu", []).append(cpu_secs)
                secs.setdefault(f"{verb}_digests_cpu", []).append(sum(spent))
                ours.wait()

        compare("save", lambda state: ours.save(next(steps), state))
        assert ours.save(next(steps), fresh_state())
        compare("load", lambda _: jax.block_until_ready(ours.load(None, wanted)))
        tiers_turns.report(place, "check", host, secs)


def restore_half(
    host: member.Member,
    emit: events.Emit,
    *,
    place: Place,
    urls: tuple[str, ...],
) -> None:
    """Restores on half of the hosts, and reads the same files without any more ado."""
    del emit
    with tiers_turns.joined(host, place, copies=0) as (mesh, ours):
        wanted = tiers_turns.abstract(place, tiers_turns.sharded(mesh))
        # Hosts need rows in their order: this one what two of the four have saved.
        needed = range(2 * host.host, 2 * host.host + 2)
        with open(f"{place.machines[host.host]}/secret", encoding="ascii") as file:
            client = peer_client.PeerClient(file.read())
        memory = {
            path: np.ones(os.path.getsize(path), np.uint8)
            for number in needed
            for path in _files(_step_directories(place.machines[number])[0])
        }

        def read_file(path: str) -> None:
            with open(path, "rb", buffering=0) as file:
                file.readinto(memory[path].data)

        def read_peers_file(number: int, path: str) -> None:
            name = os.path.relpath(path, place.machines[number])
            client.endpoint(urls[number]).read_into(f"/v1/{name}", 0, memory[path].data)

        def read_files(*, own: bool) -> None:
            with futures.ThreadPoolExecutor(_THREADS) as pool:
                reads = []
                for path in memory:
                    number = _machine_of(path, place)
                    if number != host.host:
                        reads.append(pool.submit(read_peers_file, number, path))
                    elif own:
                        reads.append(pool.submit(read_file, path))
                for read in reads:
                    read.result()

        def load() -> State:
            return jax.block_until_ready(ours.load(None, wanted))

        sides: dict[str, Callable[[], Any]] = {
            "load": load,
            "read_files": functools.partial(read_files, own=True),
            "read_peers_files": functools.partial(read_files, own=False),
        }
        secs: Secs = {name: [] for name in sides}
        for name in tiers_turns.turns(sides, place.rounds):
            secs[name].append(tiers_turns.timed(place, sides[name])[0])
        client.close()
        tiers_turns.report(place, "restore_half", host, secs)


def replicate(host: member.Member, emit: events.Emit, *, place: Place) -> None:
    """Counts what is sent for copies of replicated, and of sharded state."""
    del emit
    with tiers_turns.joined(host, place, copies=2) as (mesh, ours), _counted() as sent:
        counts: dict[str, list[float]] = {}
        layouts = {"replicated": NamedSharding(mesh, PartitionSpec())}
        layouts["sharded"] = tiers_turns.sharded(mesh)
        for step, (name, sharding) in enumerate(layouts.items(), start=1):
            before = dict(sent)
            assert ours.save(step, tiers_turns.states(place, sharding)())
            ours.wait()
            for kind in sent:
                counts[f"{name}_{kind}"] = [sent[kind] - before[kind]]
        tiers_turns.report(place, "replicate", host, counts)


def _cpu_secs(work: Callable[[State], Any], state: State) -> float:
    # The processor time of all threads of this process.
    began = time.process_time()
    assert work(state)
    return time.process_time() - began


@contextlib.contextmanager
def _timed_digests() -> Iterator[list[float]]:
    # The secs of a processor that each call for a digest takes.
    spent: list[float] = []
    values_hash = digest.values_hash

    def timed(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            began = time.thread_time()
            result = work(*arguments)
            spent.append(time.thread_time() - began)
            return result

        return call

    class Hash:
        def __init__(self) -> None:
            hashing = values_hash()
            self.update, self.digest = timed(hashing.update), timed(hashing.digest)

    with (
        mock.patch.object(digest, "values_digest", timed(digest.values_digest)),
        mock.patch.object(digest, "values_hash", Hash),
    ):
        yield spent


class _NoHash:
    # Takes no time.

    def update(self, piece: memoryview) -> None:
        pass

    def digest(self) -> bytes:
        return _Any()


class _Any(bytes):
    # Equal to every digest.

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def _orbax_checkpointer(place: Place) -> ocp.training.Checkpointer:
    return ocp.training.Checkpointer(
        place.orbax,
        preservation_policy=cast(Any, ocp.training.preservation_policies.LatestN(1)),
    )


@contextlib.contextmanager
def _digests(*, as_they_are: bool) -> Iterator[None]:
    if as_they_are:
        yield
        return
    with (
        mock.patch.object(digest, "values_digest", return_value=bytes(16)),
        mock.patch.object(digest, "values_hash", _NoHash),
    ):
        yield


@contextlib.contextmanager
def _counted() -> Iterator[dict[str, int]]:
    # Bytes that this host has taken from agents: parts of leaves, and what was listed.
    sent = {"parts": 0, "listings": 0}
    read_into = peer_client.Endpoint.read_into
    read = peer_client.Endpoint.read

    def counted_into(
        self: Any, path: str, offset: int, into: memoryview, *args: Any, **keywords: Any
    ) -> None:
        read_into(self, path, offset, into, *args, **keywords)
        sent["parts"] += len(into)

    def counted(self: Any, path: str, **keywords: Any) -> bytes:
        content = read(self, path, **keywords)
        sent["listings"] += len(content)
        return content

    with (
        mock.patch.object(peer_client.Endpoint, "read_into", counted_into),
        mock.patch.object(peer_client.Endpoint, "read", counted),
    ):
        yield sent


def _step_directories(machine: str) -> list[str]:
    slot = os.path.join(machine, "hosts", "0")
    entries = [entry for entry in os.scandir(slot) if entry.is_dir()]
    # Others are of messages and of files that a restore unpacks.
    return [entry.path for entry in entries if entry.name[0].isdigit()]


def _machine_of(path: str, place: Place) -> int:
    (number,) = (
        number
        for number, machine in enumerate(place.machines)
        if path.startswith(f"{machine}/")
    )
    return number


def _files(directory: str) -> list[str]:
    return [
        os.path.join(parent, name)
        for parent, _, names in os.walk(directory)
        for name in names
        if name != "zarr.json"
    ]
