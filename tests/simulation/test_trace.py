from hypothesis import given
from hypothesis import strategies as st

from elastic_ckpt.elastic import decision
from elastic_ckpt.simulation import cluster
from elastic_ckpt.simulation.cluster import ClusterSize, Event, EventKind, FailureModel

HARDWARE = ClusterSize(slices=4, hosts_per_slice=2, hosts_per_rack=4)


def event(time, what, which):
    return Event(time=time, what=EventKind(what), which=which)


@given(
    st.lists(
        st.builds(
            Event,
            time=st.floats(0, 1e9),
            what=st.sampled_from(EventKind),
            which=st.integers(0, 1),
        )
    )
)
def test_trace_that_is_written_is_read_back_by_time(events):
    content = cluster.to_bytes(events)
    read = cluster.parse(content, path="t", hardware=HARDWARE)
    assert read == sorted(events, key=lambda each: each.time)


def test_slice_is_whole_while_all_of_its_machines_are_there():
    events = [
        event(1.0, "kill_machine", 2),
        event(2.0, "kill_rack", 0),
        event(3.0, "return_machine", 2),
        event(4.0, "kill_slice", 3),
        event(5.0, "kill_host", 7),
        event(6.0, "return_rack", 0),
        event(7.0, "return_slice", 3),
    ]
    work = decision.Work(
        num_slices=4, rows=8, devices_per_slice=2, max_rows_per_device=1
    )
    simulated = cluster.SimulatedCluster(
        HARDWARE,
        events,
        policy=decision.Policy(min_slices=1),
        work=work,
        check_secs=0,
    )
    for _ in range(5):
        simulated.take_event()
    assert simulated.since == {2: 0.0}
    for _ in range(2):
        simulated.take_event()
    assert simulated.since == {0: 6.0, 1: 6.0, 2: 0.0, 3: 7.0}


@given(st.integers(0, 100))
def test_what_failed_comes_back_first_and_rates_do_not_disturb_each_other(seed):
    rates = {"machine": 5.0, "slice": 8.0, "rack": 9.0, "hang": 7.0}
    events = FailureModel(between_hours=rates, seed=seed).trace(HARDWARE, secs=180e3)
    gone = set()
    for each in events:
        if each.what.keeps_machines:
            continue
        thing = (each.what.target, each.which)
        assert (thing in gone) == each.what.is_return
        gone ^= {thing}
    kinds = EventKind.KILL_MACHINE, EventKind.RETURN_MACHINE
    of_machines = [each for each in events if each.what in kinds]
    alone = FailureModel(between_hours={"machine": 5.0}, seed=seed)
    assert alone.trace(HARDWARE, secs=180e3) == of_machines != []


def test_failures_are_as_frequent_as_the_model_has_them():
    model = FailureModel(between_hours={"process": 100.0})
    events = model.trace(ClusterSize(slices=100, hosts_per_slice=10), secs=3.6e5)
    # 1,000 are expected: four standard deviations.
    assert abs(len(events) - 1000) < 127
