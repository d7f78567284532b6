"""A crash at each change of a file, of one host or of all, loses nothing that is sure.

Each history is run once to count its changes, and then once for each of them.
"""

import contextlib

import pytest

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
HISTORIES |= {
    f"{name}, in place": (*history, {**tiers, "in_place": True})
    for name, (*history, tiers) in HISTORIES.items()
    if name in ("back up", "clean", "retention")
}


def _sampled(fast):
    """Each history with each kind of victims; slow ones but for some of all hosts."""
    return [
        pytest.param(
            name,
            victims,
            marks=() if name in fast and victims == "all" else pytest.mark.slow,
        )
        for name in HISTORIES
        for victims in ("all", "one")
    ]


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
        assert run.is_open
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
        assert not run.is_open, number
        yield run


@pytest.mark.parametrize(
    ("name", "victims"), _sampled({"save", "overwrite", "back up, in place"})
)
def test_a_crash_at_any_change_loses_nothing_that_is_sure(name, victims):
    for number in range(1, num_changes(*HISTORIES[name]) + 1):
        with crash_at(name, victims, number, torn=bool(number % 2)) as run:
            # It compares what it restores with the model.
            run.open(WORLD)
            run.wait()
            assert run.is_open
            run.check_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["save", "back up", "overwrite", "go back"])
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
