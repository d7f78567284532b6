"""A run in one process: hosts as objects, one clock, files that fail at any operation.

The code is the product's: its checkpointer drives the hosts (`checkpoint.host`) through
`SimulatedHosts`, a transport that runs their methods by name, with arguments and
answers as JSON, as the real ones do. Instead of processes, threads, sockets and time
there are

* `Files`: counts the changes of files, which all pass through `core.storage`, and ends
  a host, or all of them, before the n-th one
* `ScriptedThreads`: one thread does everything; what the product begins in the
  background is done at once or later, as the test chooses
* `SimulatedNetwork`: peers read each other's RAM disks through what agents serve
* `VirtualClock`: sleeping takes no time

RAM disks and storage are directories in memory: TensorStore writes files of the file
system only. Storage survives all; a RAM disk survives its hosts, and not its machine.
"""

# Stand-ins take the arguments of what they stand for.
# ruff: noqa: ARG002

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import itertools
import json
import os
import pathlib
import shutil
import traceback
import urllib.parse
from concurrent import futures
from unittest import mock

import numpy as np
from absl import logging
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.checkpoint import checkpointer, component_io
from elastic_ckpt.checkpoint.host import capture, trees
from elastic_ckpt.checkpoint.host.endpoint import HostEndpoint
from elastic_ckpt.checkpoint.host.world import HostConfig
from elastic_ckpt.checkpoint.run_world import RunWorld
from elastic_ckpt.core import allgather, boxes, calls, codec, errors, process, storage
from elastic_ckpt.core.allgather import HostTree
from elastic_ckpt.steps.manifest import Leaf
from elastic_ckpt.tiers import choices, source
from elastic_ckpt.tiers.peers import agent, agent_server, peer_client
from elastic_ckpt.tiers.persistent import persistent_root, run_files
from elastic_ckpt.tiers.persistent.claims import Claimant
from elastic_ckpt.tiers.ram import machine, ram_disk
from tests import seams

RUN = "run"
# The shapes of the leaves, as hosts share them: over all hosts, over pairs of replicas,
# and whole on each host.
SHAPES = {"b": (3,), "v": (4, 2), "w": (12,)}
DTYPES = {"b": "uint8", "v": "int16", "w": "float32"}
COMPONENT = "data"


class Crash(BaseException):
    """The host that runs now, or all of them, end here."""


class Gone(errors.RunError):
    """A host does not answer, so the world ends."""


class VirtualClock:
    """Time passes when the product sleeps, and a millisecond each time it looks."""

    def __init__(self):
        self.secs = 1_700_000_000.0

    def time_ns(self):
        return int(self.monotonic() * 1000) * 1_000_000

    def monotonic(self):
        self.secs += 0.001
        return self.secs

    def sleep(self, secs):
        self.secs += secs


@dataclasses.dataclass(kw_only=True)
class Files:
    """Counts the changes of files, and ends hosts before one of them.

    Attributes:
      count: of changes so far.
      crash_at: the number of the change that is not made; None for none.
      victims: the hosts that end: the one that makes it (`one`), or all of them.
      torn: whether the change is made in part.
      full_at: the number of the change for which there is no room; None for none.
      host: that runs now; changes of the driver are those of host 0.
      ended: the hosts that have ended.
      is_off: whether others than the hosts change files now.
    """

    count: int = 0
    crash_at: int | None = None
    victims: str = "all"
    torn: bool = False
    full_at: int | None = None
    host: int = 0
    ended: set[int] = dataclasses.field(default_factory=set)
    is_off: bool = False

    def __call__(self, change, path):
        if self.is_off:
            return
        if self.host in self.ended:
            raise Crash
        there = os.path.lexists(path)
        if (change == "remove" and not there) or (change == "make" and there):
            return
        self.count += 1
        if self.count == self.full_at:
            self.full_at = None
            if change not in ("remove", "rename"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if self.count == self.crash_at:
            self.crash_at = None
            if self.torn:
                _make_in_part(change, path)
            self.end()
            raise Crash

    @contextlib.contextmanager
    def by_others(self):
        """Does not count what others than the hosts change in the block."""
        self.is_off = True
        try:
            yield
        finally:
            self.is_off = False

    def end(self):
        """Ends the victims."""
        everyone = self.victims == "all" or self.host == 0
        self.ended |= set(range(64)) if everyone else {self.host}


def _make_in_part(change, path):
    # What a crash in the midst of a change may leave.
    if change == "write" and os.path.isfile(path):
        pathlib.Path(path).write_bytes(b"torn")
    elif change == "remove" and os.path.isdir(path):
        for n, (directory, _, names) in enumerate(os.walk(path)):
            for name in sorted(names)[n % 2 :: 2]:
                os.unlink(os.path.join(directory, name))
    elif change == "create":
        parent = pathlib.Path(path).parent
        parent.mkdir(parents=True, exist_ok=True)


class _Inline(futures.Executor):
    def submit(self, call, /, *args, **kwargs):
        return _done(functools.partial(call, *args, **kwargs), futures.Future())


def _done(call, future):
    # What ends the host ends its threads.
    try:
        future.set_result(call())
    except Crash:
        raise
    except BaseException as error:
        future.set_exception(error)
    return future


class ScriptedThreads:
    """Calls beside the caller, made by one thread: at once, or when waited for.

    Attributes:
      late: the names of the threads that are late.
    """

    # They only renew something, in endless loops.
    _RENEWING = ("renewals", "lease")

    def __init__(self):
        self.late = frozenset()
        self._begun = {}

    def in_thread(self, call, *, name):
        future = futures.Future()
        if name in self.late or name in self._RENEWING:
            self._begun[future] = (name, call)
            return future
        return _done(call, future)

    def pool(self, num_threads, name):
        return _Inline()

    def wait(self, pending):
        for future in pending:
            if future in self._begun:
                _done(self._begun.pop(future)[1], future)

    def catch_up(self):
        """Makes the late calls, the oldest first."""
        while waiting := [
            each
            for each, (name, _) in self._begun.items()
            if name not in self._RENEWING
        ]:
            self.wait(waiting[:1])

    def drop(self):
        """Ends all threads."""
        self._begun.clear()


class SimulatedNetwork:
    """Agents by their urls; each serves the RAM disk of a machine.

    Attributes:
      failing: the numbers of the machines whose agents do not answer.
    """

    def __init__(self, sim):
        self._sim = sim
        self.failing = set()

    def serve(self, service):
        number = self._sim.roots.index(pathlib.Path(service.root))
        return _Agent(
            agent.Address(
                url=f"http://10.0.0.{number}:80/v1/run",
                pid=1,
                machine=machine.machine_id(service.root),
            )
        )

    def client(self, secret, **_):
        return _Client(self)

    def root(self, number):
        """The RAM disk of a machine whose agent answers."""
        root = self._sim.roots[number]
        if number in self.failing or not root.exists():
            raise source.ReadError(f"cannot be read: machine {number} fails")
        return root


@dataclasses.dataclass
class _Agent:
    address: agent.Address

    def close(self):
        """It is nothing but its address."""


@dataclasses.dataclass
class _Client:
    network: SimulatedNetwork

    def endpoint(self, url):
        number = int(url.rpartition(".")[2].partition(":")[0])
        return _Endpoint(self.network, number, url)

    def left_skipped_secs(self):
        return 0.0

    def close(self):
        """There are no connections."""


@dataclasses.dataclass
class _Endpoint:
    network: SimulatedNetwork
    number: int
    url: str
    manifests: dict = dataclasses.field(default_factory=dict)

    def left_skipped_secs(self):
        return 0.0

    def read(self, path, *, most_bytes):
        root = self.network.root(self.number)
        if path == "/steps":
            return storage.canonical_json(agent_server.listing(root))
        return self._opened(root, path)

    def read_into(self, path, into, on_piece=source.ignored):
        content = self._opened(self.network.root(self.number), path)
        if len(content) < len(into):
            raise source.ReadError(f"cannot be read: {path} is too short")
        into[:] = content[: len(into)]
        on_piece(into)
        return len(content)

    def put(self, path, content):
        try:
            root = self.network.root(self.number)
        except source.ReadError as error:
            raise source.RepairError(str(error)) from None
        slot, step, *file = self._name(path).split("/")
        directory = os.path.join(root, "hosts", slot, step)
        ram_disk.repair(directory, "/".join(file), content)

    def _name(self, path):
        return urllib.parse.unquote(path.removeprefix("/hosts/"))

    def _opened(self, root, path):
        file = agent_server.served(root, self._name(path))
        if file is None:
            raise source.ReadError(f"cannot be read: {path} is missing")
        return pathlib.Path(file).read_bytes()


def boxes_of(name, host, num_hosts):
    """The box that a host of a world holds of a leaf, and the hosts that hold it."""
    shape = SHAPES[name]
    parts, number = 1, 0
    if name == "w":
        # Those that are too many have what others have.
        parts = max(n for n in range(1, num_hosts + 1) if shape[0] % n == 0)
        number = host % parts
    elif name == "v" and num_hosts in (2, 4):
        parts, number = num_hosts // 2, host % (num_hosts // 2)
    rows = shape[0] // parts
    start = (number * rows, *(0 for _ in shape[1:]))
    box = boxes.Box(start=start, stop=(number * rows + rows, *shape[1:]))
    return box, [h for h in range(num_hosts) if parts == 1 or h % parts == number]


def state_of(seed):
    """A state of which no two are alike: leaves by name."""
    random = np.random.default_rng(seed)
    return {
        name: random.integers(0, 100, shape).astype(DTYPES[name])
        for name, shape in SHAPES.items()
    }


def abstract():
    """The state without its values."""
    return {
        name: trees.AbstractArray(shape=shape, dtype=np.dtype(DTYPES[name]))
        for name, shape in SHAPES.items()
    }


class Position:
    """A component: an integer in a file."""

    def __init__(self, value=None):
        self.value = value

    async def save(self, directory):
        return _Later(directory, str(self.value).encode())

    async def load(self, directory):
        value = int((directory / "position").read_bytes())

        async def finish():
            self.value = value

        return finish()


@dataclasses.dataclass
class _Later:
    # Not a coroutine: after a crash nobody awaits it.
    directory: component_io.Created
    content: bytes

    def __await__(self):
        path = yield from self.directory.await_creation().__await__()
        storage.write_atomic(path / "position", self.content)


class SimulatedHosts:
    """All hosts of a world, driven by one controller; a `checkpoint.hosts.Hosts`.

    Args:
      sim: in which they are.
      configs: of the hosts.

    Attributes:
      on_capture: called with each step that is captured.
      opened_id: the step that was opened last.
      lost_at: the number of the message that is lost, counted down; None for none.
      lost_answer: whether it is an answer.
      is_broken: whether a host has not answered; then none does any more.
    """

    own = 0

    is_apart = False

    def __init__(self, sim, configs):
        self._sim = sim
        self._hosts = [HostEndpoint(config) for config in configs]
        self.num_hosts = len(configs)
        self.on_capture = lambda _: None
        self.opened_id = None
        self.lost_at = None
        self.lost_answer = False
        self.is_broken = False

    def all(self, method, *args, **kwargs):
        """See `Hosts`; in an order that the simulation chooses."""
        self._sim.on_round("all", method)
        call, answered = calls.of(method), {}
        for group in HostTree(num_hosts=self.num_hosts).in_order(call.order):
            order = [group[number] for number in self._sim.order(len(group))]
            answered |= self._send(order, call, args, kwargs)
        return [answered[number] for number in range(self.num_hosts)]

    def first(self, method, *args, **kwargs):
        """See `Hosts`."""
        self._sim.on_round("first", method)
        return self._send([0], calls.of(method), args, kwargs)[0]

    def gather(self, name, value):
        """See `Hosts`; this is the only driver."""
        self._sim.on_round("gather", name)
        return [value]

    def capture(self, step_id, of_trees):
        """See `Hosts`."""
        self.on_capture(step_id)
        captured = []
        for number in range(self.num_hosts):
            shards = {
                path: self._shards(path, leaf, number)
                for path, leaf in trees.arrays(of_trees).items()
            }
            with self._on(number) as host:
                saver = host.role("HostSaver")
                captured.append(saver.begin(step_id, saver.captured(shards)))
        return captured[0]

    def opened(self):
        """See `Hosts`."""
        return self.first(_method("HostReader", "opened"))

    def check(self, of_trees, components, others):
        """See `Hosts`."""
        self._sim.on_round("check", None)
        asked = trees.asked(of_trees)
        for number in range(self.num_hosts):
            wanted = [self._wanted(leaf, number) for leaf in asked]
            with self._on(number) as host:
                host.role("HostReader").select(wanted, components)
        return 0

    def read(self, components):
        """See `Hosts`."""
        return self.all(_method("HostReader", "read"), tuple(components))

    def arrays(self, of_trees):
        """See `Hosts`; hosts that read the same elements have read the same values."""
        made = {}
        for number, host in enumerate(self._hosts):
            for path, (box, values) in host.role("HostReader").made().items():
                name = path.rpartition("/")[2]
                whole = made.setdefault(path, [np.empty(SHAPES[name], values.dtype), 0])
                place = tuple(map(slice, box.start, box.stop))
                if boxes_of(name, number, self.num_hosts)[1][0] == number:
                    whole[0][place] = values
                    whole[1] += values.size
                assert whole[0][place].tobytes() == values.tobytes()
            with self._on(number):
                host.role("HostReader").close_step()
        assert all(values.size == size for values, size in made.values())
        leaves = {path: values for path, (values, _) in made.items()}
        return {
            name: trees.rebuilt(tree, name, leaves) for name, tree in of_trees.items()
        }

    def are_leaving(self, error):
        """See `Hosts`."""
        return not self.is_broken

    def close(self):
        """See `Hosts`."""
        for number in range(self.num_hosts):
            with contextlib.suppress(Crash, errors.ElasticCkptError), self._on(number):
                self._hosts[number].close()

    @contextlib.contextmanager
    def _on(self, number):
        files = self._sim.files
        outer, files.host = files.host, number
        try:
            yield self._hosts[number]
        finally:
            files.host = outer

    def _send(self, order, call, args, kwargs):
        if self.is_broken:
            raise Gone(f"{call.name}: the world has ended")
        arguments = call.bind(*args, **kwargs)
        if call.name == "HostReader.open_step":
            self.opened_id = arguments["step_id"]
        message = json.dumps(call.encode(arguments))
        outcomes = {}
        for number in order:
            if self.lost_at is not None:
                self.lost_at -= 1
            is_lost = self.lost_at == 0
            if is_lost and not self.lost_answer:
                self._break()
                continue
            try:
                with self._on(number) as host:
                    made, arguments = calls.decode(json.loads(message))
                    answer = json.dumps(codec.encode(made.run(host, arguments)))
                outcomes[number] = {"answer": json.loads(answer)}
            except Crash:
                if 0 in self._sim.files.ended:
                    raise
                self.is_broken = True
            except Exception as error:
                outcomes[number] = allgather.failed(error)
                if not isinstance(error, errors.ElasticCkptError | OSError):
                    self._sim.bugs.append(f"{call.name}: {traceback.format_exc()}")
            if is_lost:
                self._break()
        if self.is_broken:
            raise Gone(f"{call.name}: a host has not answered")
        encoded = allgather.answers(outcomes)
        return dict(zip(outcomes, map(call.decode_answer, encoded), strict=True))

    def _break(self):
        self.is_broken, self.lost_at = True, None

    def _shards(self, path, leaf, number):
        name = path.rpartition("/")[2]
        box, holders = boxes_of(name, number, self.num_hosts)
        return capture.Shards(
            leaf=Leaf(path=path, shape=leaf.shape, dtype=leaf.dtype.name),
            shard_shape=box.shape,
            boxes=((box, leaf[tuple(map(slice, box.start, box.stop))]),),
            kept=False,
            holders=lambda _: tuple(holders),
        )

    def _wanted(self, leaf, number):
        box, _ = boxes_of(leaf.path.rpartition("/")[2], number, self.num_hosts)
        return trees.WantedLeaf(
            path=leaf.path,
            shape=leaf.shape,
            boxes=(box,),
            place=lambda _, values: values,
            join=lambda placed: (box, placed[0]),
        )


def _method(part, name):
    return calls.BY_NAME[f"{part}.{name}"].method


def latest(number):
    """The policy that keeps the newest steps."""
    return ocp.training.preservation_policies.LatestN(number)


def no_layout(*arguments):
    """All trees have the layout of the step."""
    raise AssertionError(arguments)


class Simulation:
    """The machines and the storage of a run, on which one world follows another.

    Use it in a `with` block.

    Args:
      directory: in memory.
      num_machines: how many there are.
      in_place: whether storage commits a step by a file, as a bucket does.
      claims: whether each world is one of another start, which claims the run.

    Attributes:
      in_place: as given.
      files: counts changes, and ends hosts.
      threads: of all hosts.
      network: between the machines.
      clock: of all machines.
      roots: the RAM disk of each machine.
      storage: the directory of the persistent tier.
      events: names and fields, of the world that is open.
      bugs: errors that no code raises on purpose.
      order: returns the order in which hosts run a call.
      on_round: called before each round of hosts, with its kind and its method or name.
    """

    def __init__(self, directory, *, num_machines=4, in_place=False, claims=False):
        self.in_place = in_place
        self._claims = claims
        self.files = Files()
        self.threads = ScriptedThreads()
        self.clock = VirtualClock()
        self.roots = [directory / f"machine-{n}" / RUN for n in range(num_machines)]
        self.network = SimulatedNetwork(self)
        self.storage = directory / "storage" / RUN
        self.events = []
        self.bugs = []
        self.order = lambda num_hosts: list(range(num_hosts))
        self.on_round = lambda *_: None
        self._generation = 0
        self._starts = itertools.count(1)
        self._resources = contextlib.ExitStack()
        self.world = None
        self.hosts = None
        # Whether the run goes on in another world, and the memory of a host is lost.
        self.is_leaving_world = self.loses_memory = False

    def __enter__(self):
        self._resources.enter_context(seams.watched(self.files))
        self._resources.enter_context(seams.made_by(self.threads))
        self._resources.enter_context(seams.by(self.clock))
        for module, name, made in (
            (agent, "AgentProcess", self.network.serve),
            (peer_client, "PeerClient", self.network.client),
        ):
            self._resources.enter_context(mock.patch.object(module, name, made))
        if self.in_place:
            in_place = mock.patch.object(
                persistent_root.PersistentRoot,
                "from_path",
                lambda path: persistent_root.PersistentRoot(
                    path=storage.absolute(path), in_place=True
                ),
            )
            self._resources.enter_context(in_place)
        self._resources.callback(logging.set_verbosity, logging.get_verbosity())
        # Thousands of histories fail on purpose.
        logging.set_verbosity(logging.FATAL)
        for number in range(len(self.roots)):
            self.evict(number)
        return self

    def __exit__(self, *_):
        self.end()
        self._resources.close()

    def evict(self, number):
        """Loses the memory of a machine; another machine takes its place."""
        root = self.roots[number]
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        # Ids determine orders: a history is to be the same each time.
        self._generation += 1
        (root / machine.FILE).write_text(f"{self._generation:016x}")

    def open(self, machines, *, copies=1, local=True, every=1, store_every=2, **more):
        """Opens a checkpointer over one host on each of some machines.

        Args:
          machines: their numbers; one that is named twice has two hosts.
          copies: of the peer tier.
          local: whether there is a local tier.
          every: steps between two saves.
          store_every: steps between two backups; None without storage.
          **more: `keep` of storage, `keep_local`, `limit_bytes`; `slices`, the name of
            that of each host, a letter each; by default each has its own.

        Raises:
          Crash: if the hosts crashed meanwhile.
        """
        self.files.ended = set()
        self.is_leaving_world = self.loses_memory = False
        self.events.clear()
        tiers = []
        if local:
            tiers.append(
                choices.Local(
                    self.roots[machines[0]],
                    every=every,
                    keep=more.get("keep_local"),
                    limit_bytes=more.get("limit_bytes"),
                )
            )
            tiers.append(choices.Peers(copies=copies, interface="10.0.0.1"))
        if store_every is not None:
            tiers.append(
                choices.Persistent(
                    self.storage, every=store_every, keep=more.get("keep")
                )
            )
        chosen = choices.Chosen.from_choices(tiers)
        configs = [
            HostConfig(
                run=RUN,
                number=number,
                slice_name=more.get("slices", "0123456789")[number],
                directory=self.roots[of_machine]
                if local
                else self.roots[of_machine].parent / "working",
                chosen=chosen
                if chosen.local is None
                else dataclasses.replace(
                    chosen,
                    local=dataclasses.replace(
                        chosen.local, directory=self.roots[of_machine]
                    ),
                ),
            )
            for number, of_machine in enumerate(machines)
        ]
        self.hosts = SimulatedHosts(self, configs)
        self.world = checkpointer.HostsCheckpointer(
            self.hosts,
            chosen,
            run=RUN,
            found=run_files.find_run(chosen),
            relayout=no_layout,
            world=RunWorld(
                claimant=self._claimant(),
                is_leaving_world=lambda: self.is_leaving_world,
                loses_memory=lambda: self.loses_memory,
            ),
            emit=self._note,
            context=None,
        )
        return self.world

    def _claimant(self):
        # Starts on different machines cannot tell whether the other one is alive.
        if not self._claims:
            return None
        number = next(self._starts)
        far = dataclasses.replace(
            process.this(), host=f"h{number}", boot_id=f"{number}"
        )
        return Claimant(name=f"start-{number}", owner=far)

    def end(self):
        """Ends all hosts now, as a crash does."""
        self.files.crash_at, self.files.ended = None, set(range(64))
        self.threads.drop()
        if self.hosts is not None:
            self.hosts.close()
        if self.world is not None:
            with contextlib.suppress(Crash):
                self.world.abandon()
        self.hosts = self.world = None
        self.files.ended = set()

    def _note(self, name, **fields):
        self.events.append((name, fields))
        if "Its traceback" in (why := str(fields.get("why"))):
            self.bugs.append(why)
