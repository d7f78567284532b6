"""A world of simulated hosts in one process, which pass messages as real ones do.

Each host has the product's own part of an exchange (`host.copies`), a RAM disk with its
manifest, mail and a share of the coordination service that count, and no devices. A
call runs on one host after the other; the time that it takes is that of the slowest
host, because real ones run at the same time.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import itertools
import pathlib
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np

from elastic_ckpt.checkpoint.host import copies, reader, recovery, trees
from elastic_ckpt.checkpoint.host.answers import Replicated, Written
from elastic_ckpt.checkpoint.host.step_notes import WrittenStep
from elastic_ckpt.checkpoint.host.world import HostWorld
from elastic_ckpt.checkpoint.hosts import Method
from elastic_ckpt.core import boxes, calls, codec, host_tree
from elastic_ckpt.core.tree_allgather import TreeAllgather
from elastic_ckpt.steps import manifest_file
from elastic_ckpt.steps.holdings import Holdings
from elastic_ckpt.steps.manifest import (
    ComponentFile,
    Contents,
    Fragments,
    Host,
    Leaf,
    Manifest,
)
from elastic_ckpt.steps.part_table import PartTable
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.choices import Peers
from elastic_ckpt.tiers.ram.ram_disk import RamDisk
from elastic_ckpt.tiers.source import ReadError, Source

AnswerT = TypeVar("AnswerT")
P = ParamSpec("P")
_BRIEF_SECS = 60.0
# Of a host: one box of each leaf.
_LEAVES = 100
# Each host has as many of a leaf.
_ROWS = 16
_BOX_BYTES = 2**20


# By host. A message counts at the host that reads it and, if another host has left it
# in its RAM disk, at that host too; a request to the coordination service at the host
# that makes it.
Messages = collections.Counter[int]


class _CountedStore:
    """The coordination service as one `host` after the other uses it."""

    def __init__(self, messages: Messages) -> None:
        self.host = 0
        self._messages = messages
        self._values: dict[str, bytes] = {}

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        self._messages[self.host] += 1
        self._values[key] = value

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        del timeout_in_ms
        self._messages[self.host] += 1
        return self._values[key]

    def key_value_delete(self, key: str) -> None:
        self._messages[self.host] += 1
        for each in [each for each in self._values if each.startswith(key)]:
            del self._values[each]


class _Mail:
    # Of one host; all can read what any of them has left in its RAM disk.

    def __init__(
        self, posted: dict[int, dict[str, bytes]], messages: Messages, host: int
    ) -> None:
        self._posted = posted
        self._own = posted[host]
        self._messages = messages
        self._host = host

    def post(self, name: str, content: bytes) -> None:
        self._own[name] = content

    def read(self, host: int, name: str) -> bytes:
        content = self._posted[host].get(name)
        if content is None:
            raise ReadError(f"cannot be read: host {host} has no {name}")
        self._messages[self._host] += 1
        self._messages[host] += 1
        return content

    def deliver(self, host: int, name: str, content: bytes) -> None:
        del host, name, content

    def remove(self, prefix: str) -> None:
        for name in [name for name in self._own if name.startswith(prefix)]:
            del self._own[name]


class _WorldAlone(HostWorld):
    # Without agents: messages pass through `_Mail`, and no values are read.

    @property
    def is_connected(self) -> bool:
        return True

    def source(self, host: Host, url: str, step_id: StepId) -> Source:
        del host, url, step_id
        return cast(Any, None)


class _CopiesAlone(copies.HostCopies):
    # Takes copies without their values: what a host fetches does not depend on how many
    # other hosts there are.

    def __init__(self, world: HostWorld) -> None:
        super().__init__(world)
        self._disk = world.disk

    def fetch(self, tables: Sequence[PartTable]) -> Replicated:
        offers = [each for table in tables for each in table.offers(named=True)]
        if not offers:
            return Replicated()
        held = Holdings.from_offers(offers)
        step_id = tables[0].saved.step_id
        own = self._disk.manifest(0, step_id)
        copied = _with_copies(own, [offer.manifest for offer in offers])
        manifest_file.write(self._disk.step_directory(0, step_id), copied)
        num_bytes = int(held.stored_bytes.sum())
        return Replicated(copies=held.num_items, num_bytes=num_bytes)


class _ReaderAlone(reader.HostReader):
    # Plans its reads, and reads no values.

    def __init__(self, world: HostWorld) -> None:
        super().__init__(world)
        self._simulated = world
        self.wanted: Sequence[trees.WantedLeaf] = ()
        self.open = StepId(0, "")

    def open_step(self, step_id: StepId, *, is_dealt: bool = False) -> None:
        super().open_step(step_id, is_dealt=is_dealt)
        self.open = step_id

    def read(self) -> dict[str, int]:
        world = self._simulated
        plan = recovery.planned(
            self.sharing.parts(self.open).step,
            self.wanted,
            host=world.own.host,
            domain=world.peers.domain,
        )
        return {"planned": len(plan)}


def _with_copies(own: Manifest, copied: Sequence[Manifest]) -> Manifest:
    fragments = [
        each.fragments.row(number, contents=own.contents)
        for each in (own, *copied)
        for number in range(len(each.fragments))
    ]
    files = [file for each in (own, *copied) for file in each.component_files]
    return dataclasses.replace(
        own,
        fragments=Fragments.from_rows(fragments, contents=own.contents),
        component_files=tuple(files),
    )


class _SaverAlone:
    # Writes nothing: the manifest of the step is there already.

    def __init__(self, number: int) -> None:
        name = f"shards-{number:05d}-{number:05d}.json"
        self._written = Written(files={"data": (name,)}, time_ms=number)

    def write(self, **arguments: Any) -> Written:
        del arguments
        return self._written

    def commit(self, written: WrittenStep) -> None:
        del written

    def collect(self, **arguments: Any) -> None:
        del arguments


class SimulatedHosts:
    """All hosts of a simulated world; a `checkpoint.hosts.Hosts` for saves.

    Args:
      directory: of the RAM disks.
      manifests: of each host, by number, of a step that is committed.
      num_hosts: of the world.

    Attributes:
      messages: so far, of each host.
      secs: the time that the calls so far took, of the slowest host each.
      step: that the manifests are of.
    """

    own = 0

    def __init__(
        self, directory: pathlib.Path, manifests: Iterator[Manifest], num_hosts: int
    ) -> None:
        self.messages: Messages = collections.Counter()
        self.secs = 0.0
        self._store = _CountedStore(self.messages)
        posted: dict[int, dict[str, bytes]] = collections.defaultdict(dict)
        hosts: list[Host] = []
        worlds = []
        self.step = 0
        for number, manifest in enumerate(manifests):
            hosts.append(manifest.host)
            self.step = manifest.step
            world = _world(directory / str(number), manifest, hosts, number)
            world.mail = cast(Any, _Mail(posted, self.messages, number))
            worlds.append(world)
        assert len(hosts) == num_hosts
        self.num_hosts = num_hosts
        self._hosts = [_Endpoint(world) for world in worlds]
        self._allgathers = [
            TreeAllgather(self._store, "scale", host=number, num_hosts=num_hosts)
            for number in range(num_hosts)
        ]
        self._tree = host_tree.HostTree(num_hosts=num_hosts)
        self._turns: collections.Counter[str] = collections.Counter()

    def all(
        self, method: Method[P, AnswerT], *args: P.args, **kwargs: P.kwargs
    ) -> list[AnswerT]:
        """See `Hosts`."""
        call = calls.of(method)
        arguments = call.bind(*args, **kwargs)
        outcomes: dict[int, tuple[Any, float]] = {}
        # A host does not collect the garbage of all others.
        gc.collect()
        gc.freeze()
        for group in self._tree.in_order(call.order):
            run = {n: self._run(call, arguments, self._hosts[n]) for n in group}
            # Those of one group run at the same time.
            self.secs += max(secs for _, secs in run.values())
            outcomes |= run
        values = [outcomes[number][0] for number in range(self.num_hosts)]
        answers = self._gather(call.turn(arguments), values, call.order)
        began = time.process_time()
        distinct = {id(each): each for each in answers}
        decoded = {n: call.decode_answer(each) for n, each in distinct.items()}
        self.secs += time.process_time() - began
        return [decoded[id(each)] for each in answers]

    def first(
        self, method: Method[P, AnswerT], *args: P.args, **kwargs: P.kwargs
    ) -> AnswerT:
        """See `Hosts`."""
        call = calls.of(method)
        arguments = call.bind(*args, **kwargs)
        answer, secs = self._run(call, arguments, self._hosts[0])
        self.secs += secs
        turn = f"first/{call.turn(arguments)}"
        others = [None] * (len(self._hosts) - 1)
        return call.decode_answer(self._gather(turn, [answer, *others])[0])

    def share(self, name: str, value: AnswerT) -> list[AnswerT]:
        """See `Hosts`; all drivers have the same value."""
        shared = [codec.encode(value)] * len(self._hosts)
        return [value for _ in self._gather(f"share/{name}", shared)]

    def opened(self) -> Contents:
        """See `Hosts`."""
        return self._hosts[0].part("HostReader").opened()

    def forget_costs(self) -> None:
        """Begins to count messages and time anew."""
        self.messages.clear()
        self.secs = 0.0

    def select(self, wanted: Callable[[int], Sequence[trees.WantedLeaf]]) -> None:
        """Selects what the hosts read of the step that is open, by their numbers."""
        for number, host in enumerate(self._hosts):
            of_host = host.part("HostReader")
            of_host.wanted = wanted(number)
            of_host.select(of_host.wanted, ())
        self._gather("check", [None] * len(self._hosts))

    def _run(
        self, call: calls.Call, arguments: Mapping[str, Any], host: calls.Host
    ) -> tuple[Any, float]:
        # The answer, and the time that it took.
        began = time.process_time()
        answer = codec.encode(call.run(host, arguments))
        return answer, time.process_time() - began

    def _gather(
        self, kind: str, values: Sequence[Any], order: host_tree.Order = "together"
    ) -> list[Any]:
        # Hosts pass answers up their tree, those of one level at the same time.
        turn = self._turns[kind]
        self._turns[kind] += 1
        if order == "down":
            self._pass_down(f"scale/{kind}/{turn}/below")
        of_level: dict[int, float] = collections.defaultdict(float)
        for number in itertools.chain.from_iterable(self._tree.in_order("up")):
            began = time.process_time()
            self._store.host = number
            self._allgathers[number].pass_up(
                kind,
                turn,
                lambda value=values[number]: {"answer": value},
                timeout_secs=_BRIEF_SECS,
            )
            level, secs = self._tree.level(number), time.process_time() - began
            of_level[level] = max(of_level[level], secs)
        for number in range(1, len(self._hosts)):
            self._store.host = number
            key = f"scale/{kind}/{turn}/all"
            self._store.blocking_key_value_get_bytes(key, 0)
        self._store.host = 0
        began = time.process_time()
        taken = self._allgathers[0].take(kind, turn, timeout_secs=_BRIEF_SECS)
        self.secs += sum(of_level.values()) + time.process_time() - began
        return [each["answer"] for each in taken]

    def _pass_down(self, prefix: str) -> None:
        # What `TreeAllgather` does before a host's part, in the order of the hosts.
        for number in range(len(self._hosts)):
            self._store.host = number
            parent = self._tree.parent(number)
            if parent is not None:
                self._store.blocking_key_value_get_bytes(f"{prefix}/{parent}", 0)
            if self._tree.children(number):
                self._store.key_value_set_bytes(f"{prefix}/{number}", b"")


def _world(
    root: pathlib.Path, manifest: Manifest, hosts: Sequence[Host], number: int
) -> HostWorld:
    step = root / "hosts" / "0" / str(manifest.step_id)
    step.mkdir(parents=True)
    machine, _, _ = manifest.host.id.rpartition(".")
    (root / "machine").write_text(machine)
    manifest_file.write(step, manifest)
    disk = RamDisk(root, run=manifest.run)
    config = types.SimpleNamespace(
        run=manifest.run,
        number=number,
        peer_tier=Peers(copies=2),
        chosen=types.SimpleNamespace(
            local=None, persistent=None, is_read_only=False, read_ram=None
        ),
    )
    own = types.SimpleNamespace(slot=0, host=manifest.host, disk=disk)
    more: Any = {"own": own, "hosts": hosts, "client": None, "agents": {}}
    return _WorldAlone(cast(Any, config), service=None, **more)


class _Endpoint:
    # The parts of a host that a save and a restore call.

    def __init__(self, world: HostWorld) -> None:
        reader_of_host = _ReaderAlone(world)
        self._parts = {
            "HostWorld": world,
            "HostSaver": _SaverAlone(world.number),
            "HostCopies": _CopiesAlone(world),
            "HostReader": reader_of_host,
            "StepSearch": reader_of_host.sharing,
        }

    def part(self, name: str) -> Any:
        return self._parts[name]


def _contents(num_hosts: int) -> Contents:
    shape = (num_hosts * _ROWS, 512)
    leaves = [
        Leaf(path=f"params/layer_{number:03d}/w", shape=shape, dtype="float32")
        for number in range(_LEAVES)
    ]
    return Contents(leaves=tuple(leaves), components={"data": num_hosts})


def manifests(num_hosts: int, *, step: int) -> Iterator[Manifest]:
    """The manifests that hosts write when they save, by number."""
    contents = _contents(num_hosts)
    slice_hosts = max(10, num_hosts // 100)
    generator = np.random.default_rng(step)
    for number in range(num_hosts):
        yield Manifest(
            run="scale",
            step=step,
            save="0",
            host=Host(
                id=f"{number:016x}.0",
                number=number,
                domains={"slice": str(number // slice_hosts)},
            ),
            contents=contents,
            fragments=_fragments(number, generator),
            component_files=(
                ComponentFile(
                    component="data",
                    parts=(number, number + 1),
                    path=f"data/shards-{number:05d}-{number:05d}.json",
                    digest=generator.bytes(16),
                    stored_bytes=150,
                ),
            ),
        )


def _fragments(number: int, generator: np.random.Generator) -> Fragments:
    start = np.tile([number * _ROWS, 0], (_LEAVES, 1))
    return Fragments(
        leaf=np.arange(_LEAVES, dtype=np.int32),
        boxes=boxes.Boxes(start=start, stop=start + np.array([_ROWS, 512])),
        digest=generator.integers(0, 2**64, (_LEAVES, 2), np.uint64),
        file=np.zeros(_LEAVES, np.int32),
        offset=np.arange(_LEAVES) * _BOX_BYTES,
        stored_bytes=np.full(_LEAVES, _BOX_BYTES),
        files=("arrays.bin",),
    )
