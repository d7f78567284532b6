"""Steps in the RAM of hosts are restored on any number of hosts, without storage."""

import functools

import pytest
import trustme

from elastic_ckpt.tiers.choices import TlsFiles
from tests.multiprocess import machines, tier_worlds


@pytest.fixture
def ram():
    with machines.Machines() as started:
        yield started


def on(ram, numbers, work, tmp_path, **options):
    """Runs `work` on a host on each of some machines, whose agents are started."""
    if "tls" not in options:
        ram.start_agents(numbers)
    return tier_worlds.run(
        work,
        num_hosts=len(numbers),
        directories=[ram.directory(number) for number in numbers],
        logs=tmp_path / "logs",
        **options,
    )


def saved(steps, *, sharded):
    return functools.partial(tier_worlds.save, steps=steps, sharded=sharded)


def restored(step, *, sharded):
    return functools.partial(tier_worlds.restore, step=step, sharded=sharded)


def read_bytes(events):
    """How many bytes were read from how near."""
    (event,) = (each for each in events if each["event"] == "restored_from")
    return {
        near: event[f"{near}_bytes"]
        for near in ("local", "close", "distant", "persistent")
    }


def reasons(events, name):
    return [each["why"] for each in events if each["event"] == name]


@pytest.mark.parametrize("sharded", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_four_hosts_save_and_others_restore_without_a_machine_and_without_most(
    ram, tmp_path, sharded
):
    options = {"slices": 2, "persistent": str(tmp_path / "steps"), "every": 2}
    on(ram, range(4), saved([2, 3], sharded=sharded), tmp_path, **options)
    for numbers in ([0, 1, 2, 3], [1], [3, 5, 0], range(8)):
        events = on(ram, numbers, restored(3, sharded=sharded), tmp_path)
        read_by_host = read_bytes(events)
        assert not reasons(events, "step_passed_over")
        assert read_by_host["persistent"] == 0
        # Nobody asks another machine for what its own has.
        if numbers == [0, 1, 2, 3]:
            assert read_by_host["close"] == 0
    ram.lose(3)
    events = on(ram, range(3), restored(3, sharded=sharded), tmp_path)
    assert not reasons(events, "step_passed_over")
    for number in range(3):
        ram.lose(number)
    events = on(ram, [8, 9], restored(2, sharded=sharded), tmp_path, **options)
    assert read_bytes(events)["persistent"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "step"), [((0, 1), 3), ((0, 2), 2)])
def test_a_lost_slice_is_covered_and_more_falls_back_to_storage_and_says_why(
    ram, tmp_path, lost, step
):
    options = {"copies": 1, "slices": 2, "persistent": str(tmp_path / "steps")}
    on(ram, range(4), saved([2, 3], sharded=True), tmp_path, every=2, **options)
    for number in lost:
        ram.lose(number)
    left = [number for number in range(4) if number not in lost]
    events = on(ram, left, restored(step, sharded=True), tmp_path, every=2, **options)
    whys = reasons(events, "step_passed_over")
    # Between the two searches the answers of agents that are gone may differ.
    lacks = "step 3 in local lacks parts of 2 of 4 leaves: [state/m["
    assert all(why.startswith(lacks) for why in whys)
    assert bool(whys) == (step == 2)
    assert (read_bytes(events)["persistent"] > 0) == (step == 2)


@pytest.mark.slow
def test_assumed_data_parallelism_copies_nothing_and_says_what_that_risks(
    ram, tmp_path
):
    options = {"assume_data_parallelism": True, "slices": 2}
    events = on(ram, range(4), saved([1], sharded=True), tmp_path, **options)
    # No step is said to be safe.
    assert not [each for each in events if each["event"] == "replicated"]
    # No item has a copy: 24 files of data, four parts of each leaf but the scalar.
    assert "36 of 37 items lack copies" in " ".join(reasons(events, "degraded"))


@pytest.mark.slow
def test_a_world_with_tls_saves_and_restores(ram, tmp_path):
    ca = trustme.CA()
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    issued = ca.issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / "host.pem")
    own = str(tmp_path / "host.pem")
    tls = TlsFiles(certificate=own, key=own, authority=str(tmp_path / "ca.pem"))
    on(ram, range(2), saved([1], sharded=True), tmp_path, tls=tls, copies=1)
    events = on(ram, [1, 0, 2], restored(1, sharded=True), tmp_path, tls=tls)
    assert read_bytes(events)["close"] > 0
