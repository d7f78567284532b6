"""Hosts that restore, save, and are killed with SIGKILL at named points of that.

A point is a call of a function: the host that reaches it kills itself, or itself and
all others of its world. All that hosts find and save before is checked bit by bit.
"""

import dataclasses
import functools
import importlib
import os
import pathlib
import signal
import threading
from typing import Literal

from elastic_ckpt import frontend
from elastic_ckpt.core import topology
from elastic_ckpt.elastic import multicontroller
from elastic_ckpt.steps import manifest_file
from elastic_ckpt.training import schema
from tests.multiprocess import tier_worlds

HOST = "elastic_ckpt.checkpoint.host"
RAM = "elastic_ckpt.tiers.ram"
STORE = "elastic_ckpt.tiers.persistent"
STORAGE = "elastic_ckpt.core.storage"
MANIFEST = "elastic_ckpt.steps.manifest_file"

READER = f"{HOST}.reader:HostReader"
LOCAL = f"{RAM}.local:LocalHost"
WRITER = f"{RAM}.step_writer:StepWriter"

Then = Literal["older", "newer", "either"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """A call at which a host is killed.

    Attributes:
      at: the function, as `module:name` or `module:Class.name`.
      before: whether before the call, or after it.
      call: which of the calls, from 1.
      within: counts only calls in a thread that is in this function, if given.
      host: that is watched.
      then: whether the step that was being saved is there afterwards, or the one
        before.
    """

    at: str
    before: bool = False
    call: int = 1
    within: str | None = None
    host: int = 1
    then: Then = "newer"


# `tests/model` enumerates all points in a simulation; these are of real processes.
POINTS = {
    "with_the_manifest_half_written": Point(
        at="os:replace", within=f"{MANIFEST}:write", before=True, then="older"
    ),
    "with_the_first_copy_written": Point(at=f"{WRITER}.put"),
    "with_the_older_step_half_gone": Point(
        at="os:unlink", within=f"{LOCAL}.remove", call=5
    ),
    "with_stores_merged": Point(at=f"{STORE}.ocdbt:merge", host=0),
    "with_a_component_half_written": Point(
        at=f"{STORAGE}:write_atomic", within=f"{READER}.materialise", call=3
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Life:
    """The work of a world until it is killed.

    Attributes:
      expected: steps one of which it has to find; empty for none at all.
      point: where it is killed; None lets it live.
      of: the phase that the point is in.
      everybody: whether all hosts are killed, or the one that is watched.
      pids: a directory in which hosts record their process ids.
      storage: of the persistent tier.
    """

    expected: tuple[int, ...]
    point: Point | None
    phase: str
    everybody: bool
    pids: str
    storage: str


def live(place, emit, *, directories, slices, life):
    """A host that restores and saves, and is killed meanwhile."""
    pathlib.Path(life.pids, str(place.host)).write_text(str(os.getpid()))
    multicontroller.configure(schema.WorldSection())
    with multicontroller.joined(place):
        world = topology.present(slices)
        mesh = topology.mesh_of(world)
        if life.phase == "restore":
            _arm(life, place.host)
        every = 1 if life.phase == "back_up" else 10**9
        checkpointer = frontend.Checkpointer(
            tier_worlds.tiers(
                directories[place.host], persistent=life.storage, every=every
            ),
            run="run",
            slice_name=str(place.host * slices // world.hosts),
            emit=functools.partial(_tell_degraded, emit, place.host),
        )
        with checkpointer:
            _check_clean(directories[place.host])
            step = _restore(checkpointer, mesh, life.expected)
            if place.host == 0:
                emit("run_stopped", step=step, saved=True)
            _save(checkpointer, mesh, step + 1, emit)
            checkpointer.wait()
            if life.phase != "restore":
                _arm(life, place.host)
            _save(checkpointer, mesh, step + 2, emit)
            checkpointer.wait()


def _tell_degraded(emit, host, name, **fields):
    if host == 0 and name == "degraded":
        emit(name, **fields)


def _restore(checkpointer, mesh, expected):
    if not expected:
        assert checkpointer.latest is None
        return 0
    counter = tier_worlds.Counter()
    restored = checkpointer.load_checkpointables(
        None, {"state": tier_worlds.abstract(mesh, True), "data": counter}
    )
    step = checkpointer.latest.step
    assert step in expected, f"step {step} was restored, and not one of {expected}"
    tier_worlds.check(restored["state"], step)
    assert counter.step == step
    return step


def _save(checkpointer, mesh, step, emit):
    parts = {
        "state": tier_worlds.state(mesh, step, True),
        "data": tier_worlds.Counter(step),
    }
    assert checkpointer.save_checkpointables(step, parts)
    if topology.is_primary():
        emit("saved", step=step, secs=0)


def _check_clean(root):
    # This host has whole steps, and nothing else.
    slot = pathlib.Path(root, "hosts", "0")
    for directory in slot.iterdir():
        if directory.name == "lock":
            continue
        if directory.name == "messages":
            assert not list(directory.iterdir())
            continue
        (path,) = directory.glob("manifest-*.json")
        manifest = manifest_file.parse(path.read_bytes())
        named = {path.name, *manifest.fragments.files}
        named |= {file.path for file in manifest.component_files}
        there = {
            str(file.relative_to(directory))
            for file in directory.rglob("*")
            if file.is_file() and file.name != "zarr.json"
        }
        assert there == named, there ^ named


def _arm(life, host):
    point = life.point
    if point is None or host != point.host:
        return
    left = [point.call]
    lock = threading.Lock()
    inside = threading.local()
    inside.depth = 0

    def die():
        if point.within and not getattr(inside, "depth", 0):
            return
        with lock:
            left[0] -= 1
            if not left[0]:
                _kill(life)

    if point.before:
        _wrap(point.at, before=die)
    else:
        _wrap(point.at, after=die)
    if point.within:

        def enter():
            inside.depth = getattr(inside, "depth", 0) + 1

        def leave():
            inside.depth -= 1

        _wrap(point.within, before=enter, after=leave)


def _nothing():
    pass


def _wrap(name, *, before=_nothing, after=_nothing):
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


def _kill(life):
    own = os.getpid()
    if life.everybody:
        for file in pathlib.Path(life.pids).iterdir():
            if int(file.read_text()) != own:
                os.kill(int(file.read_text()), signal.SIGKILL)
    os.kill(own, signal.SIGKILL)
