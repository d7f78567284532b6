"""Steps in the RAM of hosts are restored on any number of hosts, without storage."""

import functools

import pytest
import trustme

from elastic_ckpt.tiers.choices import TlsFiles
from tests.multiprocess import machines, tier_worlds

# The other layout takes as long again.
LAYOUTS = pytest.mark.parametrize(
    "sharded",
    [
        pytest.param(True, id="sharded"),
        pytest.param(False, id="replicated", marks=pytest.mark.slow),
    ],
)


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


@LAYOUTS
def test_four_hosts_save_and_any_number_restores(ram, tmp_path, sharded):
    on(ram, range(4), saved([3, 4], sharded=sharded), tmp_path)
    for num_hosts in (4, 1, 2, 3, 6, 8):
        events = on(ram, range(num_hosts), restored(4, sharded=sharded), tmp_path)
        read_by_host = read_bytes(events)
        assert not reasons(events, "step_passed_over")
        assert read_by_host["persistent"] == 0
        # Nobody asks another machine for what its own has.
        assert (read_by_host["close"] == 0) == (
            num_hosts == 4 or (not sharded and num_hosts < 4)
        )


@pytest.mark.slow
def test_hosts_of_another_order_and_newcomers_restore(ram, tmp_path):
    on(ram, range(4), saved([4], sharded=True), tmp_path)
    on(ram, [3, 5, 0], restored(4, sharded=True), tmp_path)


@LAYOUTS
@pytest.mark.parametrize("lost", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_a_machine_is_lost_with_its_ram(ram, tmp_path, sharded, lost):
    on(ram, range(4), saved([4], sharded=sharded), tmp_path, slices=2)
    ram.lose(lost)
    left = [number for number in range(4) if number != lost]
    events = on(ram, left, restored(4, sharded=sharded), tmp_path)
    assert not reasons(events, "step_passed_over")


@pytest.mark.slow
@LAYOUTS
def test_a_slice_is_lost_with_its_ram(ram, tmp_path, sharded):
    on(ram, range(4), saved([4], sharded=sharded), tmp_path, slices=2)
    ram.lose(0)
    ram.lose(1)
    on(ram, [2, 3], restored(4, sharded=sharded), tmp_path)
    on(ram, [2, 3, 4, 5], restored(4, sharded=sharded), tmp_path)


@pytest.mark.slow
def test_more_loss_than_is_covered_falls_back_to_storage_and_says_why(ram, tmp_path):
    options = {"copies": 1, "slices": 2, "persistent": str(tmp_path / "steps")}
    on(ram, range(4), saved([2, 3], sharded=True), tmp_path, every=2, **options)
    for number in (0, 2):
        ram.lose(number)
    events = on(ram, [1, 3], restored(2, sharded=True), tmp_path, every=2, **options)
    # Between the two searches the answers of agents that are gone may differ.
    lacks = "step 3 in local lacks parts of 2 of 4 leaves: [state/m["
    whys = reasons(events, "step_passed_over")
    assert whys
    assert all(why.startswith(lacks) for why in whys)
    assert read_bytes(events)["persistent"] > 0


@pytest.mark.slow
def test_assumed_data_parallelism_copies_nothing_and_says_what_that_risks(
    ram, tmp_path
):
    options = {"assume_data_parallelism": True, "slices": 2}
    for sharded in (True, False):
        events = on(ram, range(4), saved([1], sharded=sharded), tmp_path, **options)
        (copied,) = (each for each in events if each["event"] == "replicated")
        assert (copied["copies"], copied["bytes"]) == (0, 0)
        text = " ".join(reasons(events, "degraded"))
        # 24 files of data, and four parts of each sharded leaf but the scalar.
        lacking = "36 of 37" if sharded else "24 of 28"
        assert f"{lacking} items lack copies" in text
        for number in range(4):
            ram.lose(number)


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
