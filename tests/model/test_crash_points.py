"""A crash at each change of a file, of one host or of all, loses nothing that is sure.

Each history is run once to count its changes, and then once for each of them.
"""

import contextlib

import pytest
from orbax.checkpoint import v1 as ocp

from elastic_ckpt.core import storage
from elastic_ckpt.tiers.persistent import persistent_root
from tests import shared_memory
from tests.model.checked_run import CheckedRun

WORLD = (0, 1)


# What comes before (steps that are saved, and other acts), the act in which hosts
# crash, and how the run is stored.
HISTORIES = {
    "save": ((), lambda run: run.save(1), {"store_every": 1000}),
    "save twice": ((1,), lambda run: run.save(2), {"store_every": 1000}),
    "back up": ((), lambda run: run.save(1), {"store_every": 1}),
    "overwrite": ((1,), lambda run: run.save(1, overwrite=True), {"store_every": 1}),
    "go back": ((1, 2, 3, "load 1"), lambda run: run.save(2), {"store_every": 1}),
    "repair": (
        (1, "flip", "close"),
        lambda run: run.open(WORLD),
        {"store_every": 1000},
    ),
    "clean": ((1, "cut short"), lambda run: run.open(WORLD), {"store_every": 1}),
    "resize": ((1, "close"), lambda run: run.open((2, 1, 0)), {"store_every": 1}),
    "retention": (
        (1, 2),
        lambda run: run.save(3),
        {"store_every": 1, "stored_steps": 1},
    ),
}
HISTORIES["too little RAM"] = (
    (1,),
    lambda run: run.save(2),
    {"store_every": 1, "limit_bytes": 100},
)
HISTORIES["storage alone"] = (
    (1,),
    lambda run: run.save(2),
    {"store_every": 1, "local": False},
)
HISTORIES["delete"] = (
    (1, 2),
    lambda run: run.delete(run.sure_steps()[0]),
    {"store_every": 1},
)
HISTORIES |= {
    f"{name}, in place": (*history, {**tiers, "in_place": True})
    for name, (*history, tiers) in HISTORIES.items()
    if name in ("back up", "clean", "retention", "delete")
}


# Those that crash at each change by default, and at each ninth.
ALWAYS = {"overwrite": 1, "back up, in place": 1, "delete": 1}


# Before a change lands, and before a release.
OFTEN = {("go back", "all"), ("go back", "one")}


def _sampled():
    """Each history with each kind of victims at each change, or at some."""
    sampled = [
        pytest.param(name, "all", every, id=f"{name}-some")
        for name, every in ALWAYS.items()
    ]
    for name in HISTORIES:
        for victims in ("all", "one"):
            mark = "slow" if (name, victims) in OFTEN else "night"
            if victims == "one" or ALWAYS.get(name) != 1:
                marks = getattr(pytest.mark, mark)
                each = pytest.param(
                    name, victims, 1, id=f"{name}-{victims}", marks=marks
                )
                sampled.append(each)
    return sampled


@contextlib.contextmanager
def prepared(before, tiers):
    with (
        shared_memory.directory("model") as directory,
        CheckedRun(directory, num_machines=3, **tiers) as run,
    ):
        run.open(WORLD)
        for each in before:
            if each == "flip":
                assert run.flip(0, 0)
            elif each == "close":
                run.close()
            elif each == "open":
                run.open(WORLD)
            elif each == "cut short":
                run.sim.files.crash_at = run.sim.files.count + 70
                run.save(2)
                assert not run.is_open
            elif each == "load 1":
                run.load(1)
            else:
                run.save(each)
                run.wait()
        yield run


def num_changes(before, act, tiers):
    with prepared(before, tiers) as run:
        count = run.sim.files.count
        act(run)
        assert run.is_open or not run.has_ended
        return run.sim.files.count - count


@contextlib.contextmanager
def crash_at(name, victims, number, *, torn):
    """Runs a history until a change, which is not made, or in part."""
    before, act, tiers = HISTORIES[name]
    with prepared(before, tiers) as run:
        files = run.sim.files
        files.crash_at, files.victims = files.count + number, victims
        files.torn = torn
        act(run)
        assert run.has_ended, number
        files.crash_at = None
        yield run


@pytest.mark.parametrize(("name", "victims", "every"), _sampled())
def test_a_crash_at_any_change_loses_nothing_that_is_sure(name, victims, every):
    for number in range(1, num_changes(*HISTORIES[name]) + 1, every):
        with crash_at(name, victims, number, torn=bool(number % 2)) as run:
            check_orbax_sees_the_same_steps(run)
            # It compares what it restores with the model.
            run.open(WORLD)
            run.wait()
            assert run.is_open
            run.check_nothing_is_left()
            run.follow()


def check_orbax_sees_the_same_steps(run):
    """A step is committed for us if it is for stock Orbax, and only then."""
    in_place = run.sim.in_place
    path = storage.absolute(run.sim.storage)
    root = persistent_root.PersistentRoot(path=path, in_place=in_place)
    there = [each for each in run.sim.storage.glob("*") if each.name.isdecimal()]
    for directory in there:
        committed = root.is_committed(int(directory.name))
        assert committed or in_place
        assert ocp.is_orbax_checkpoint(directory) or not committed
        for name in ("_CHECKPOINT_METADATA", "state/manifest.ocdbt"):
            assert (directory / name).exists() or not committed


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("save", marks=pytest.mark.slow),
        *(
            pytest.param(name, marks=pytest.mark.night)
            for name in ("back up", "overwrite", "go back")
        ),
    ],
)
def test_a_lack_of_room_at_any_change_loses_nothing_that_is_sure(name):
    before, act, tiers = HISTORIES[name]
    for number in range(1, num_changes(*HISTORIES[name]) + 1):
        with prepared(before, tiers) as run:
            files = run.sim.files
            files.full_at = files.count + number
            act(run)
            run.end()
            run.open(WORLD)
            assert run.is_open


@pytest.mark.night
@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("victims", ["all", "one"])
@pytest.mark.parametrize("name", HISTORIES)
def test_a_run_goes_on_after_a_crash_at_any_change(name, victims, torn):
    for number in range(1, num_changes(*HISTORIES[name]) + 1):
        with crash_at(name, victims, number, torn=torn) as run:
            run.open(WORLD)
            run.wait()
            run.save(9)
            run.wait()
            run.close()
            run.evict(1)
            run.open((0, 2))
            assert run.head.step == 9, number
