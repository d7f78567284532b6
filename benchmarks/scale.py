"""Suite `scale`: a save and a restore of 10,000 hosts, driven by the product's stages.

The world has 100 slices, or one for each 10 hosts if there are fewer. Each host has 100
boxes: one of each of 100 leaves, no two alike. The first host of a slice also has a
component file. The world saves a step with copies and restores it after hosts have
changed places.

All hosts are simulated in one process and pass messages like real hosts. Each has the
product's own side of an exchange (`host.copies`), a RAM disk with its manifest, mail
and a share of the coordination service (both count messages), and no devices. A call
runs on one host after the other; its time is the time of the slowest host, because real
hosts run simultaneously. All hosts restore from the same table, so only the last host
parses the table and plans its reads; the hosts in between just pass the message on.

* `messages_per_host_10k`: the decision messages of a save to RAM with copies, at the
  host that passes the most; requests for values do not count.
  `restore_messages_per_host_10k`: the same for the restore.
* `decision_secs_10k`: for this save and a restore, from manifests on disks to the reads
  of all hosts: processor time of the slowest host in each pass. Existing objects of the
  simulation are excluded from garbage collection.
* `traffic_peak_gib_10k`: for the process that simulates all hosts, not for one host.

Each size runs in a separate process; `_100` and `_1000` are for fewer hosts.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import itertools
import pathlib
import tempfile
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, ParamSpec, TypeVar, cast
from unittest import mock

import numpy as np

from benchmarks import report, sized, turns
from elastic_ckpt.checkpoint import restore
from elastic_ckpt.checkpoint.host import copies, reader, verified_read
from elastic_ckpt.checkpoint.host.answers import ReadParts
from elastic_ckpt.checkpoint.host.exchange import GIVEN, Exchange
from elastic_ckpt.checkpoint.host.reader import HostReader
from elastic_ckpt.checkpoint.host.saver import HostSaver, Written
from elastic_ckpt.checkpoint.host.trees import WantedLeaf
from elastic_ckpt.checkpoint.host.world import HeldStep, HostWorld
from elastic_ckpt.checkpoint.hosts import Hosts, Method
from elastic_ckpt.checkpoint.run_world import ALONE
from elastic_ckpt.checkpoint.saving import CapturedStep
from elastic_ckpt.checkpoint.schedule import BackupClock
from elastic_ckpt.checkpoint.stages import SaveStages
from elastic_ckpt.checkpoint.structure import StepDescription
from elastic_ckpt.core import allgather, boxes, calls, codec, events
from elastic_ckpt.steps import owners
from elastic_ckpt.steps.manifest import (
    Contents,
    Holder,
    Host,
    Leaf,
    Manifest,
    Parts,
    write_manifest,
)
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.steps.table import StepTable
from elastic_ckpt.tiers.choices import Chosen, Local, Peers
from elastic_ckpt.tiers.find import FoundStep
from elastic_ckpt.tiers.ram.local import LocalHost
from elastic_ckpt.tiers.ram.ram_disk import RamDisk
from elastic_ckpt.tiers.source import ReadError, Source

AnswerT = TypeVar("AnswerT")
P = ParamSpec("P")
_SIZES = {"10k": sized(10_000, 40), "1000": sized(1000, 30), "100": sized(100, 20)}
# The unit and the bound of each figure.
_FIGURES = {
    "messages_per_host": ("messages", "at most 60"),
    "restore_messages_per_host": ("messages", "no bound"),
    "decision_secs": ("secs", "at most 9"),
    "traffic_peak_gib": ("gib", "no bound"),
}
_STEP = 30
_BRIEF_SECS = 60.0
# Each host has one box of each leaf.
_LEAVES = 100
# Each host has this many columns of a leaf.
_ROWS = 16
_COLUMNS = 512
# By host. A message counts at the host that reads it and, if another host has left it
# on its RAM disk, also at that host; a request to the coordination service counts at
# the host that makes it.
_Messages = collections.Counter[int]


def measure() -> dict[str, report.Figure]:
    """Runs the suite."""
    return {
        f"{figure}_{name}": report.figure(*_FIGURES[figure], [value])
        for name, num_hosts in _SIZES.items()
        for figure, value in turns.in_new_process(_costs, num_hosts).items()
    }


def _costs(num_hosts: int) -> dict[str, float]:
    # The costs of a save with copies and of a restore by hosts in different places.
    with (
        mock.patch.object(copies, "fetch", _fetched),
        tempfile.TemporaryDirectory(prefix="scale-", dir="/dev/shm") as directory,
    ):
        hosts = _SimulatedHosts(pathlib.Path(directory), num_hosts)
        _save(hosts)
        saved = max(hosts.messages.values())
        hosts.messages.clear()
        _restore(hosts)
    return {
        "messages_per_host": saved,
        "restore_messages_per_host": max(hosts.messages.values()),
        "decision_secs": hosts.secs,
        "traffic_peak_gib": turns.peak_gib(),
    }


def _save(hosts: _SimulatedHosts) -> None:
    names: list[str] = []
    chosen = Chosen(local=Local("unused"), peers=None, persistent=None)
    driver = cast(Hosts, hosts)
    stages = SaveStages(
        driver,
        chosen,
        clock=BackupClock(),
        world=ALONE,
        emit=lambda name, **_: names.append(name),
        write_claim=None,
    )
    saving = CapturedStep(
        step_id=StepId(_STEP, "0"),
        # The step's manifests already exist.
        write_components=lambda: None,
        back_up=False,
        overwrite=False,
        description=StepDescription.from_trees(
            {"n": 1}, {}, metrics=None, custom_metadata=None
        ),
        began_secs=time.monotonic(),
    )
    stages.begin(saving).result()
    stages.wait()
    assert names == ["saved", "replicated"], names


def _restore(hosts: _SimulatedHosts) -> None:
    driver = cast(Hosts, hosts)
    step = restore.find(driver, None, emit=events.nobody).checkpoint
    assert step is not None
    driver.all(HostReader.open_step, step.step_id)
    contents = hosts.opened()
    hosts.select(lambda number: _wanted(contents, number, hosts.num_hosts))
    read = enumerate(driver.read(()))
    planned = {n: each.num_bytes["planned"] for n, each in read if each.num_bytes}
    num_planned = dict.fromkeys([0, hosts.num_hosts - 1], _LEAVES)
    assert planned == num_planned, planned
    hosts.all(HostReader.close_step)


def _wanted(contents: Contents, number: int, num_hosts: int) -> list[WantedLeaf]:
    # The rows that the next host saved.
    start = (number + 1) % num_hosts * _ROWS
    box = boxes.Box(start=(start, 0), stop=(start + _ROWS, _COLUMNS))
    return [
        WantedLeaf(
            path=leaf.path,
            shape=leaf.shape,
            boxes=(box,),
            place=lambda _, values: values,
            join=list,
        )
        for leaf in contents.arrays
    ]


class _CountedStore:
    # The coordination service, as used by one `host` at a time.

    def __init__(self, messages: _Messages) -> None:
        self.host = 0
        self._messages = messages
        self._values: dict[str, bytes] = {}

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        self._messages[self.host] += 1
        self._values[key] = value

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        del timeout_in_ms
        self._messages[self.host] += 1
        # A host asks for the round of the host above, which is still empty.
        return self._values.get(key, b"")

    def key_value_delete(self, key: str) -> None:
        self._messages[self.host] += 1
        for each in [each for each in self._values if each.startswith(key)]:
            del self._values[each]


class _Mail(Exchange):
    # One host's mail; all hosts can read messages left on any host's RAM disk.

    def __init__(
        self,
        world: HostWorld,
        posted: dict[int, dict[str, bytes]],
        messages: _Messages,
    ) -> None:
        host, agents = world.number, cast(Any, None)
        super().__init__(world.disk, hosts=world.hosts, number=host, endpoint=agents)
        self._posted = posted
        self._own = posted[host]
        self._num = messages
        self._host = host

    def post(self, name: str, content: bytes) -> None:
        self._own[name] = content

    def read(self, host: int, name: str) -> bytes:
        content = self._posted[host].get(name)
        if content is None:
            raise ReadError(f"cannot be read: host {host} has no {name}")
        self._num[self._host] += 1
        self._num[host] += 1
        return content

    def remove(self, prefix: str) -> None:
        for name in [name for name in self._own if name.startswith(prefix)]:
            del self._own[name]


class _WorldAlone(HostWorld):
    # Without agents: messages pass through `_Mail`, and no values are read.

    @property
    def passes(self) -> bool:
        return True

    made: ClassVar[owners.Owners | None] = None

    @functools.cached_property
    def owners(self) -> owners.Owners:
        # The first host computes them for all: they follow from the world's hosts.
        if _WorldAlone.made is None:
            _WorldAlone.made = owners.Owners(self.hosts, self.copy_policy)
        return _WorldAlone.made

    def source(self, holder: Holder, step_id: StepId) -> Source:
        del holder, step_id
        return cast(Any, None)


def _fetched(own: LocalHost, found: FoundStep) -> copies.Replicated:
    # Takes copies without their values: the number of hosts does not affect the values
    # that a host fetches.
    table = found.table
    saved = own.disk.manifest(own.slot, table.step_id)
    parts = dict.fromkeys([*saved.rows(), *table.manifest.rows()])
    copied = dataclasses.replace(saved, parts=Parts.of_rows(parts, saved.contents))
    directory = own.disk.step_directory(own.slot, table.step_id)
    write_manifest(directory, copied)
    return copies.Replicated(copies=len(table), num_bytes=int(table.num_bytes.sum()))


class _ReaderAlone(reader.HostReader):
    # Plans its reads but does not read values.

    def open_step(self, step_id: StepId) -> None:
        world = self._world
        if world.number in (0, len(world.hosts) - 1):
            super().open_step(step_id)
        else:
            self._exchange.take(GIVEN)

    def read(self, components: tuple[str, ...]) -> ReadParts:
        del components
        restoring, num_bytes = self._restoring, {}
        if restoring is not None and restoring.reader.near is not None:
            plan = verified_read.planned(restoring.reader.near, restoring.wanted)
            num_bytes = {"planned": len(plan.item)}
        return ReadParts(num_bytes=num_bytes, directory="", bad=())


class _SaverAlone(HostSaver):
    # Writes nothing: the step's manifest already exists.

    def __init__(self, world: HostWorld) -> None:
        self._world = world

    def write(
        self, step_id: StepId, components: tuple[str, ...], problem: str | None
    ) -> Written:
        del components, problem
        saved = self._saved(step_id)
        leaves = [saved.contents.leaves[n] for n, *_ in saved.rows()[_LEAVES:]]
        files = {leaf.path: leaf.shape[0] for leaf in leaves}
        return Written(files=files, time_ms=0, shared={}, preserved=(), problem="")

    def commit(
        self,
        step_id: StepId,
        contents: Contents,
        files: Mapping[str, tuple[int, ...]],
        in_ram: bool,
    ) -> None:
        del contents, files
        assert in_ram
        table = StepTable([self._saved(step_id)])
        world = self._world
        holders = [(world.number,)] * len(table)
        world.held[step_id] = HeldStep(FoundStep(table, [cast(Any, None)]), holders)
        self._add_others(step_id)

    def collect(
        self,
        step_id: StepId,
        in_flight: tuple[StepId, ...],
        preserved: tuple[int, ...],
        parents: tuple[StepId, ...],
    ) -> None:
        del step_id, in_flight, preserved, parents

    def _saved(self, step_id: StepId) -> Manifest:
        return self._world.disk.manifest(0, step_id)


class _SimulatedHosts:
    # All hosts of a world; a `checkpoint.hosts.Hosts` for saves.

    own = 0

    def __init__(self, directory: pathlib.Path, num_hosts: int) -> None:
        # The time of each host so far; and of all calls, each at the slowest host.
        self.messages: _Messages = collections.Counter()
        self.secs = 0.0
        self.num_hosts = num_hosts
        self._store = _CountedStore(self.messages)
        posted: dict[int, dict[str, bytes]] = collections.defaultdict(dict)
        manifests = list(_manifests(num_hosts))
        hosts = [manifest.host for manifest in manifests]
        worlds, _WorldAlone.made = [], None
        for number, manifest in enumerate(manifests):
            world = _world(directory / str(number), manifest, hosts, number)
            world.mail = _Mail(world, posted, self.messages)
            worlds.append(world)
        self._hosts = [_roles(world) for world in worlds]
        self._allgathers = [
            allgather.Allgather(self._store, "scale", host=number, num_hosts=num_hosts)
            for number in range(num_hosts)
        ]
        self._tree = allgather.HostTree(num_hosts=num_hosts)
        self._rounds: collections.Counter[str] = collections.Counter()

    def all(
        self, method: Method[P, AnswerT], *args: P.args, **kwargs: P.kwargs
    ) -> list[AnswerT]:
        call = calls.of(method)
        arguments = call.bind(*args, **kwargs)
        values: dict[int, Any] = {}
        # A host does not collect the other hosts' garbage.
        gc.collect()
        gc.freeze()
        for group in self._tree.in_order(call.order):
            # The hosts of a group run simultaneously.
            self.secs += max(self._run(call, arguments, n, values) for n in group)
        answers = self._gather(call.name, values, call.order)
        began = time.process_time()
        distinct = {id(each): each for each in answers}
        decoded = {n: call.decode_answer(each) for n, each in distinct.items()}
        self.secs += time.process_time() - began
        return [decoded[id(each)] for each in answers]

    def first(
        self, method: Method[P, AnswerT], *args: P.args, **kwargs: P.kwargs
    ) -> AnswerT:
        call = calls.of(method)
        arguments = call.bind(*args, **kwargs)
        values: dict[int, Any] = {}
        self.secs += self._run(call, arguments, 0, values)
        answers = self._gather(f"first/{call.name}", values)
        return call.decode_answer(answers[0])

    def gather(self, name: str, value: AnswerT) -> list[AnswerT]:
        # All drivers have the same value.
        values = dict.fromkeys(range(self.num_hosts), codec.encode(value))
        return [value for _ in self._gather(f"share/{name}", values)]

    def read(self, components: Sequence[str]) -> list[ReadParts]:
        return self.all(HostReader.read, tuple(components))

    def opened(self) -> Contents:
        return self._hosts[0].role("HostReader").opened()

    def select(self, wanted: Callable[[int], Sequence[WantedLeaf]]) -> None:
        # Sets the leaves that each host reads from the open step, by host number.
        for number in (0, self.num_hosts - 1):
            self._hosts[number].role("HostReader").select(wanted(number), ())
        self._gather("check", {})

    def _run(
        self,
        call: calls.Call,
        arguments: Mapping[str, Any],
        number: int,
        answers: dict[int, Any],
    ) -> float:
        # Adds a host's answer; returns the time that it took.
        began = time.process_time()
        answers[number] = codec.encode(call.run(self._hosts[number], arguments))
        return time.process_time() - began

    def _gather(
        self, kind: str, values: Mapping[int, Any], order: allgather.Order = "together"
    ) -> list[Any]:
        # Hosts pass answers up their tree, all hosts of a level simultaneously.
        round_number = self._rounds[kind]
        self._rounds[kind] += 1
        of_level: dict[int, float] = collections.defaultdict(float)
        for number in itertools.chain.from_iterable(self._tree.in_order("up")):
            began = time.process_time()
            self._store.host = number
            self._allgathers[number].pass_up(
                kind,
                round_number,
                lambda number=number: {"answer": values.get(number)},
                order=order,
                timeout_secs=_BRIEF_SECS,
            )
            level, secs = len(self._tree.way(number)), time.process_time() - began
            of_level[level] = max(of_level[level], secs)
        for number in range(1, self.num_hosts):
            self._store.host = number
            key = f"scale/{kind}/{round_number}/all"
            self._store.blocking_key_value_get_bytes(key, 0)
        self._store.host = 0
        began = time.process_time()
        taken = self._allgathers[0].take(kind, round_number, timeout_secs=_BRIEF_SECS)
        self.secs += sum(of_level.values()) + time.process_time() - began
        return [each["answer"] for each in taken]


def _world(
    root: pathlib.Path, manifest: Manifest, hosts: Sequence[Host], number: int
) -> HostWorld:
    step = root / "hosts" / "0" / str(manifest.step_id)
    step.mkdir(parents=True)
    machine, _, _ = manifest.host.id.rpartition(".")
    (root / "machine").write_text(machine)
    write_manifest(step, manifest)
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
    return _WorldAlone(cast(Any, config), **more)


def _roles(world: HostWorld) -> Any:
    # A host's objects that a save and a restore call.
    roles = {
        "HostWorld": world,
        "HostSaver": _SaverAlone(world),
        "HostCopies": copies.HostCopies(world),
        "HostReader": _ReaderAlone(world),
    }
    return types.SimpleNamespace(role=roles.__getitem__)


def _manifests(num_hosts: int) -> Iterator[Manifest]:
    # The manifests that hosts write when they save.
    shape = (num_hosts * _ROWS, _COLUMNS)
    chunk = (_ROWS, _COLUMNS)
    leaves = [
        Leaf(path=f"params/{number:03d}/w", shape=shape, dtype="float32", chunk=chunk)
        for number in range(_LEAVES)
    ]
    slice_hosts = max(10, num_hosts // 100)
    num_slices = -(-num_hosts // slice_hosts)
    files = [Leaf.of_file(f"data/shards-{n:05d}.json", 150) for n in range(num_slices)]
    contents = Contents(leaves=(*leaves, *files), components=("data",))
    generator = np.random.default_rng(_STEP)
    for number in range(num_hosts):
        rows = number * _ROWS
        box = boxes.Box(start=(rows, 0), stop=(rows + _ROWS, _COLUMNS))
        held = [(leaf, box) for leaf in range(_LEAVES)]
        if number % slice_hosts == 0:
            held.append((_LEAVES + number // slice_hosts, boxes.whole((150,))))
        host = Host(
            id=f"{number:016x}.0",
            number=number,
            domains={"slice": str(number // slice_hosts)},
        )
        parts = [(*each, generator.bytes(16)) for each in held]
        yield Manifest(
            run="scale",
            step_id=StepId(_STEP, "0"),
            contents=contents,
            holders=(Holder(host),),
            parts=Parts.of_rows(parts, contents),
        )
