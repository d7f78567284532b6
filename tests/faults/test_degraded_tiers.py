"""Peers that hang or lie during a run of real hosts, and a host that fails.

No step waits for more than its own copy and its own write: steps are reported as saved
while the failed operation still hangs. Afterwards the newest whole step is restored.
`tests/checkpoint/test_save_stages.py` has what goes wrong in each stage.
"""

import functools
import pathlib

import pytest

from elastic_ckpt.core import errors
from tests.faults import degraded_loop, middleman
from tests.multiprocess import machines, tier_worlds


@pytest.fixture
def ram():
    with machines.Machines() as started:
        yield started


@pytest.fixture
def world(ram, tmp_path):
    """Runs work on four machines, in two slices; the events of host 0."""

    def run(work, **options):
        ram.start_agents(range(4))
        return tier_worlds.run(
            work,
            num_hosts=4,
            directories=[ram.directory(number) for number in range(4)],
            logs=tmp_path / "logs",
            slices=2,
            **options,
        )

    return run


@pytest.fixture
def restored(ram, tmp_path):
    """Restores a step on machines, bit by bit; the events of host 0."""

    def run(step, numbers=range(4)):
        ram.start_agents(numbers)
        return tier_worlds.run(
            functools.partial(tier_worlds.restore, step=step, sharded=True),
            num_hosts=len(numbers),
            directories=[ram.directory(number) for number in numbers],
            logs=tmp_path / "logs",
        )

    return run


def steps(events, name):
    return [each["step"] for each in events if each["event"] == name]


def degraded(events, tier):
    """By step, why that tier was degraded."""
    reasons = {}
    for each in events:
        if each["event"] == "degraded" and each["tier"] == tier:
            reasons.setdefault(each["step"], []).append(each["why"])
    return reasons


@pytest.mark.slow
def test_a_host_that_fails_ends_its_world_with_its_error(world):
    with pytest.raises(errors.RunError, match="the loss is not a number"):
        world(functools.partial(degraded_loop.fail, host=2))


@pytest.mark.slow
def test_an_agent_hangs_for_a_while_and_its_host_does_without(
    world, restored, ram, tmp_path
):
    root = ram.directory(1)
    train = functools.partial(
        degraded_loop.train,
        steps=range(1, 10),
        gates=str(tmp_path),
        happens={
            3: functools.partial(degraded_loop.stop_agent, root),
            7: functools.partial(
                degraded_loop.in_turn,
                # It has its copies, or an older one would be there too.
                functools.partial(degraded_loop.expect_steps, ram.directory(0), [6]),
                functools.partial(degraded_loop.continue_agent, root),
            ),
        },
    )
    events = world(train, timeout_secs=3.0)
    assert steps(events, "saved") == list(range(1, 10))
    # While copies wait for the agent, and for another one, steps are saved.
    first = next(
        n
        for n, each in enumerate(events)
        if each["event"] == "replicated" and each["step"] > 2
    )
    assert steps(events[:first], "saved")[-1] > 3
    assert steps(events, "replicated")[-1] == 9
    restored(9)
    ram.lose(2)
    restored(9, [0, 1, 3])


@pytest.mark.slow
def test_a_peer_that_lies_is_believed_nothing(world, restored, ram):
    ram.start_agents(range(4))
    liar = pathlib.Path(ram.directory(1), "machine").read_text()
    with middleman.instead_of(ram.directory(1), lie=middleman.flip_values):
        events = world(functools.partial(tier_worlds.save, steps=[1, 2], sharded=True))
        assert steps(events, "saved") == [1, 2]
        reasons = [why for whys in degraded(events, "peer").values() for why in whys]
        assert any(
            f"at host {liar}.0 it is not what was saved: its digest differs" in why
            for why in reasons
        )
        # Parts that only this host had were copied nowhere.
        with pytest.raises(errors.RunError, match=r"no good copy of .* is left"):
            restored(2, [0, 2, 3])
    # Its own reads return the true values.
    restored(2)
