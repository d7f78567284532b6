"""Tiers that fail during a run: the run continues, and reports the missing copies.

No step waits for more than its own copy and its own write: steps are reported as saved
while the failed operation still hangs. Afterwards the newest whole step is restored.
"""

import functools
import pathlib

import pytest

from elastic_ckpt.core import errors
from tests.faults import degraded_loop, middleman
from tests.multiprocess import machines, tier_worlds

LIMIT_BYTES = 2**20


@pytest.fixture
def ram():
    with machines.Machines() as started:
        yield started


@pytest.fixture
def world(ram, tmp_path):
    """Runs a loop on four machines, in two slices; the events of host 0."""

    def run(last_step, *, paced=True, happens=None, **options):
        loop = {k: options.pop(k) for k in ("sharded", "wrong") if k in options}
        ram.start_agents(range(4))
        (tmp_path / "gates").mkdir()
        return tier_worlds.run(
            functools.partial(
                degraded_loop.train,
                steps=range(1, last_step + 1),
                happens=happens or {},
                gates=str(tmp_path / "gates"),
                paced=paced,
                **loop,
            ),
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

    def run(step, numbers=range(4), *, sharded=True, **options):
        ram.start_agents(numbers)
        return tier_worlds.run(
            functools.partial(tier_worlds.restore, step=step, sharded=sharded),
            num_hosts=len(numbers),
            directories=[ram.directory(number) for number in numbers],
            logs=tmp_path / "logs",
            **options,
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
def test_what_goes_bad_before_a_backup_is_told_and_put_right(
    world, restored, ram, tmp_path
):
    events = world(
        2,
        happens={2: degraded_loop.spoil_what_is_backed_up_next},
        persistent=str(tmp_path / "steps"),
        every=1,
    )
    assert steps(events, "backed_up") == [1, 2]
    reasons = degraded(events, "local")
    assert reasons.keys() == {2}
    for why in reasons[2]:
        assert why.startswith("state/")
        assert "its digest differs; it was backed up from elsewhere" in why
    (event,) = [each for each in restored(2) if each["event"] == "restored_from"]
    assert event["bad_copies"] == 0
    # In storage, too, is what was saved.
    for number in range(4):
        ram.lose(number)
    (event,) = [
        each
        for each in restored(2, persistent=str(tmp_path / "steps"))
        if each["event"] == "restored_from"
    ]
    assert event["persistent_bytes"] > 0


@pytest.mark.slow
def test_storage_is_gone_for_a_while_and_the_backup_is_made_later(
    world, restored, tmp_path
):
    storage = str(tmp_path / "steps")
    events = world(
        6,
        happens={
            3: functools.partial(degraded_loop.take_away, storage),
            5: functools.partial(degraded_loop.bring_back, storage),
        },
        persistent=storage,
        every=2,
    )
    assert steps(events, "saved") == [1, 2, 3, 4, 5, 6]
    reasons = degraded(events, "persistent")
    assert reasons.keys() == {4}
    for why in reasons[4]:
        assert why.startswith("it was not backed up: host ")
        assert storage in why
        assert "Not a directory" in why
    # The step that follows goes in place of the one that was not backed up.
    assert steps(events, "backed_up") == [2, 5, 6]
    restored(6, persistent=storage)


@pytest.mark.slow
def test_the_ram_disk_of_a_machine_is_full_for_a_while(world, restored, ram):
    root = ram.directory(0)
    fill = functools.partial(
        degraded_loop.fill, root, limit_bytes=LIMIT_BYTES, leave=1000
    )
    events = world(
        5,
        happens={2: fill, 4: functools.partial(degraded_loop.empty, root)},
        limit_bytes=LIMIT_BYTES,
    )
    assert steps(events, "save_started") == [1, 2, 3, 4, 5]
    assert steps(events, "saved") == [1, 4, 5]
    reasons = degraded(events, "local")
    assert reasons.keys() == {2, 3}
    for step, (why,) in reasons.items():
        assert why.startswith(f"it was not saved: host 0: step {step} needs ")
        assert f" bytes in {root} (limit {LIMIT_BYTES} bytes)" in why
        assert "raise the limit" in why
    for number in range(4):
        assert degraded_loop.steps_of(ram.directory(number)) == [5]
    restored(5)


@pytest.mark.slow
def test_a_replica_that_differs_is_told_and_its_step_is_not_restored(
    world, restored, ram, tmp_path
):
    storage = str(tmp_path / "steps")
    events = world(3, wrong=(3, 2), sharded=False, persistent=storage)
    assert steps(events, "saved") == [1, 2, 3]
    # The wrong part is not stored where it would be the only copy.
    assert steps(events, "backed_up") == [1, 2]
    reasons = degraded(events, "persistent")
    assert reasons.keys() == {3}
    assert all("different values at different hosts" in why for why in reasons[3])
    (why,) = (each for each in degraded(events, "peer")[3] if "different" in each)
    assert why.startswith("state/w[0:48, 0:40] has different values at the hosts ")
    for number in range(4):
        assert pathlib.Path(ram.directory(number), "machine").read_text() in why
    events = restored(2, sharded=False)
    ((step, why),) = {
        (each["step"], each["why"])
        for each in events
        if each["event"] == "step_passed_over"
    }
    assert step == 3
    assert "state/w[0:48, 0:40]" in why
    for number in range(4):
        ram.lose(number)
    restored(2, [0], sharded=False, persistent=storage)


@pytest.mark.slow
def test_a_host_that_fails_ends_its_world_with_its_error(ram, tmp_path):
    ram.start_agents(range(4))
    with pytest.raises(errors.RunError, match="the loss is not a number"):
        tier_worlds.run(
            functools.partial(degraded_loop.fail, host=2),
            num_hosts=4,
            directories=[ram.directory(number) for number in range(4)],
            logs=tmp_path,
        )


@pytest.mark.slow
def test_an_agent_hangs_for_a_while_and_its_host_does_without(world, restored, ram):
    root = ram.directory(1)
    events = world(
        9,
        paced=False,
        happens={
            3: functools.partial(degraded_loop.stop_agent, root),
            7: functools.partial(
                degraded_loop.in_turn,
                # It has its copies, or an older one would be there too.
                functools.partial(degraded_loop.expect_steps, ram.directory(0), [6]),
                functools.partial(degraded_loop.continue_agent, root),
            ),
        },
        timeout_secs=3.0,
    )
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
def test_a_peer_that_answers_late_holds_up_copies_and_no_step(world, restored, ram):
    ram.start_agents(range(4))
    with middleman.instead_of(ram.directory(1), late_secs=lambda: 0.2):
        events = world(6, paced=False)
        restored(6, [0, 2, 3])
    assert steps(events, "saved") == [1, 2, 3, 4, 5, 6]
    late = degraded(events, "peer")
    assert late
    for whys in late.values():
        assert whys == ["copies of an earlier step are not done; it gets none yet"]
    first = [each["event"] for each in events].index("replicated")
    assert steps(events[:first], "saved") > [1]


@pytest.mark.slow
def test_a_peer_that_lies_is_believed_nothing(world, restored, ram):
    ram.start_agents(range(4))
    liar = pathlib.Path(ram.directory(1), "machine").read_text()
    with middleman.instead_of(ram.directory(1), lie=middleman.flip_values):
        events = world(2)
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
