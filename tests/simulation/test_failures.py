from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.simulation import failures
from elastic_ckpt.simulation.failures import Failure


@given(st.integers(0, 100))
def test_lost_slice_returns_before_it_is_lost_again(seed):
    size = {"slices": 4, "hosts_per_slice": 2}
    events = failures.draw(**size, secs=180e3, machine_hours=5.0, seed=seed)
    assert events == failures.draw(**size, secs=180e3, machine_hours=5.0, seed=seed)
    gone: set[int] = set()
    for event in events:
        assert (event.slice in gone) == (event.name == "slice_returned")
        gone ^= {event.slice}
    assert not gone


def test_failures_are_as_frequent_as_machines_fail():
    events = failures.draw(
        slices=10_000,
        hosts_per_slice=10,
        secs=3.6e4,
        machine_hours=1000.0,
        repair_hours=1e-6,
    )
    # 1,000 are expected: four standard deviations.
    assert abs(len(events) / 2 - 1000) < 127


def test_failures_of_a_log_are_counted_once_and_numbered_as_in_the_cluster():
    log = [
        {"time": 10.0, "event": "run_started"},
        {"time": 11.0, "event": "world_started", "slices": [0, 2, 3], "spares": []},
        # The first host of slice 2, then all of it.
        {"time": 20.0, "event": "host_lost", "host": 2},
        {"time": 20.1, "event": "host_lost", "host": 3},
        {"time": 20.2, "event": "slice_lost", "slice": 2},
        {"time": 21.0, "event": "world_started", "slices": [0, 3], "spares": []},
        # A process of slice 0 alone, which is used at once again.
        {"time": 25.0, "event": "slice_lost", "slice": 0},
        {"time": 26.0, "event": "world_started", "slices": [3], "spares": [0]},
        {"time": 30.0, "event": "slice_returned", "slice": 2},
        {"time": 35.0, "event": "slice_lost", "slice": 2},
        # It comes back before the next world.
        {"time": 36.0, "event": "slice_returned", "slice": 2},
        {"time": 40.0, "event": "host_lost", "host": 1},
    ]
    assert failures.of_log(log, slices=4, hosts_per_slice=2) == [
        Failure(10.0, "slice_lost", 2),
        Failure(15.0, "host_lost", 0),
        Failure(20.0, "slice_returned", 2),
        Failure(25.0, "slice_lost", 2),
        Failure(26.0, "slice_returned", 2),
        Failure(30.0, "slice_lost", 3),
    ]
    assert failures.of_log([], slices=4, hosts_per_slice=2) == []
