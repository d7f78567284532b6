"""Hosts that restore, save, and are killed with SIGKILL at named points of that.

A point is a call of a function: the host that reaches it kills itself, or all hosts of
its world. All that hosts find and save before is checked bit by bit.
"""

import dataclasses
import functools
import importlib
import os
import pathlib
import signal
import threading

from elastic_ckpt import frontend
from elastic_ckpt.core import events, topology
from elastic_ckpt.elastic import host
from elastic_ckpt.steps import layout, manifest
from elastic_ckpt.training import schema
from tests.processes import tier_worlds

RAM = "elastic_ckpt.tiers.ram"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """A call at which a host is killed.

    Attributes:
      at: the function, as `module:name` or `module:Class.name`.
      before: whether before the call, or after it.
      call: which of the calls, from 1.
      within: counts only calls in a thread that is in this function, if given.
      host: that is watched.
      is_saved: whether the step that was being saved is there afterwards.
    """

    at: str
    before: bool = False
    call: int = 1
    within: str = ""
    host: int = 1
    is_saved: bool = True


# By the phase that they are in.
POINTS = {
    "save": Point(
        at="os:replace",
        within=f"{RAM}.local:write_manifest",
        before=True,
        is_saved=False,
    ),
    "replicate": Point(at=f"{RAM}.local:StepWriter.put"),
    "collect": Point(at="os:unlink", within=f"{RAM}.local:LocalHost.remove", call=5),
    "back_up": Point(at="elastic_ckpt.tiers.persistent.ocdbt:merge", host=0),
    "restore": Point(
        at="elastic_ckpt.core.storage:write_atomic",
        within="elastic_ckpt.checkpoint.host.reader:HostReader.materialize",
        call=3,
    ),
}


def live(place, emit, *, directories, slices, expected, phase, everybody, path):
    """A host that restores and saves, and is killed meanwhile.

    Args:
      place: of the host.
      emit: called for each event.
      directories: the memory of each host.
      slices: of the world.
      expected: steps one of which it has to find; empty for none at all.
      phase: of `POINTS`, in which it is killed; empty lets it live.
      everybody: whether all hosts are killed, or the one that is watched.
      path: of the steps in storage, and of the process ids of hosts.
    """
    note_pid(path, place.host)
    point = POINTS.get(phase)
    is_watched = point is not None and place.host == point.host
    victims = len(directories) if everybody else 0
    host.configure(schema.WorldSection())
    with host.joined(place):
        world = topology.present(slices)
        mesh = topology.mesh_of(world)
        if is_watched and phase == "restore":
            _arm(point, path, victims)
        checkpointer = frontend.Checkpointer(
            tier_worlds.tiers(
                directories[place.host],
                persistent=f"{path}/steps",
                every=1 if phase == "back_up" else 10**9,
            ),
            run="run",
            slice_name=str(place.host * slices // world.hosts),
            emit=events.nobody,
        )
        with checkpointer:
            _check_clean(directories[place.host])
            step = restore(checkpointer, mesh)
            assert step in (expected or (0,)), f"step {step}, and not one of {expected}"
            if place.host == 0:
                emit("step_done", step=step)
            _save(checkpointer, mesh, step + 1, emit)
            if is_watched and phase != "restore":
                _arm(point, path, victims)
            _save(checkpointer, mesh, step + 2, emit)


def restore(checkpointer, mesh):
    """Restores the newest step, if there is one, and compares each bit."""
    if checkpointer.latest is None:
        return 0
    step = checkpointer.latest.step
    tier_worlds.restore(checkpointer, mesh, step=step, sharded=True)
    return step


def note_pid(path, host):
    """Notes the process id of a host, for `kill_host`."""
    pathlib.Path(path, f"pid-{host}").write_text(str(os.getpid()))


def kill_host(path, host):
    """Kills a host of the world."""
    os.kill(int(pathlib.Path(path, f"pid-{host}").read_text()), signal.SIGKILL)


def _save(checkpointer, mesh, step, emit):
    state = tier_worlds.state(mesh, step, True)
    checkpointables = {"state": state, "data": tier_worlds.Counter(step)}
    assert checkpointer.save_checkpointables(step, checkpointables)
    if topology.is_primary():
        emit("saved", step=step, secs=0)
    checkpointer.wait()


def _check_clean(root):
    # This host has whole steps, and nothing else but what it reports of them.
    for directory in pathlib.Path(root, "hosts", "0").iterdir():
        if directory.suffix == ".lock" or directory.name == "lock":
            continue
        if directory.name == "messages":
            # The restore goes on from the search of the start.
            assert {each.name for each in directory.iterdir()} <= {"exchange-report"}
            continue
        (path,) = directory.glob("manifest-*")
        saved = manifest.Manifest.parse(path.read_bytes())
        leaves = saved.contents.leaves
        rows = saved.rows()
        named = {layout.part_file(leaves[leaf], box) for leaf, box, _ in rows}
        named.add(path.name)
        there = {
            str(file.relative_to(directory))
            for file in directory.rglob("*")
            if file.is_file() and file.name != "zarr.json"
        }
        assert there == named, there ^ named


def _arm(point, path, victims):
    # The given call is the last one.
    left, lock, inside = [point.call], threading.Lock(), threading.local()

    def die():
        if point.within and not getattr(inside, "depth", 0):
            return
        with lock:
            left[0] -= 1
            if not left[0]:
                own = topology.this_host()
                for host in {*range(victims)} - {own}:
                    kill_host(path, host)
                kill_host(path, own)

    def deeper(by):
        inside.depth = getattr(inside, "depth", 0) + by

    _wrap(point.at, **{"before" if point.before else "after": die})
    if point.within:
        enter, leave = functools.partial(deeper, 1), functools.partial(deeper, -1)
        _wrap(point.within, before=enter, after=leave)


def _wrap(name, *, before=lambda: None, after=lambda: None):
    module, _, path = name.partition(":")
    owner = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*arguments, **keywords):
        before()
        result = original(*arguments, **keywords)
        after()
        return result

    setattr(owner, name, wrapped)
