import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import simulation
from elastic_ckpt.core import errors
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
def test_a_trace_that_is_written_is_read_back_by_time(events):
    content = cluster.to_bytes(events)
    read = cluster.parse(content, path="t", hardware=HARDWARE)
    assert read == sorted(events, key=lambda each: each.time)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "line 2, is not JSON"),
        ("[]", "line 2, has \\[\\]"),
        ('{"time": 1, "what": "kill_slice"}', "time, what and which"),
        ('{"time": -1, "what": "kill_slice", "which": 0}', "time -1"),
        ('{"time": NaN, "what": "kill_slice", "which": 0}', "time nan"),
        ('{"time": true, "what": "kill_slice", "which": 0}', "time True"),
        ('{"time": 1, "what": "burn", "which": 0}', "'burn'; it is one of"),
        ('{"time": 1, "what": "kill_slice", "which": 4}', "numbers 0 to 3"),
        ('{"time": 1, "what": "kill_host", "which": 8}', "numbers 0 to 7"),
        ('{"time": 1, "what": "kill_rack", "which": 0.5}', "which 0.5"),
    ],
)
def test_a_bad_line_is_named(line, named):
    content = b'{"version": 1}\n' + line.encode()
    with pytest.raises(errors.ConfigError, match=named):
        cluster.parse(content, path="t", hardware=HARDWARE)


@pytest.mark.parametrize("content", [b"", b'{"version": 2}\n', b'{"time": 1}\n'])
def test_a_file_of_another_version_is_refused(content):
    with pytest.raises(errors.ConfigError, match="does not begin with"):
        cluster.parse(content, path="t", hardware=HARDWARE)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(errors.ConfigError, match="missing"):
        cluster.read(str(tmp_path / "missing"), hardware=HARDWARE)


def test_a_slice_is_whole_while_all_of_its_machines_are_there():
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
        recheck_secs=0,
    )
    for _ in range(5):
        simulated.take_event()
    assert simulated.since == {2: 0.0}
    for _ in range(2):
        simulated.take_event()
    assert simulated.since == {0: 6.0, 1: 6.0, 2: 0.0, 3: 7.0}


@given(st.integers(0, 100))
def test_what_failed_comes_back_before_it_fails_again(seed):
    model = FailureModel(
        between_hours={"machine": 5.0, "slice": 8.0, "rack": 9.0, "hang": 7.0},
        seed=seed,
    )
    gone = set()
    for each in model.trace(HARDWARE, secs=50 * 3600.0):
        if each.what.keeps_machines:
            continue
        thing = (each.what.target, each.which)
        assert (thing in gone) == each.what.is_return
        gone ^= {thing}


def test_a_changed_rate_leaves_other_failures_alone():
    secs = 1e6
    one = FailureModel(between_hours={"machine": 50.0, "slice": 99.0})
    other = FailureModel(between_hours={"machine": 50.0, "slice": 9.0, "rack": 60.0})

    def of_machines(model):
        events = model.trace(HARDWARE, secs=secs)
        return [each for each in events if each.what.target == "machine"]

    assert of_machines(one) == of_machines(other) != []


def test_failures_are_as_frequent_as_the_model_has_them():
    model = FailureModel(between_hours={"process": 100.0})
    events = model.trace(ClusterSize(slices=100, hosts_per_slice=10), secs=3.6e6)
    # 10,000 are expected: four standard deviations.
    assert abs(len(events) - 10_000) < 400


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_an_unknown_kind_of_failure_is_named(kind):
    with pytest.raises(errors.ConfigError, match=f"--fails {kind}=5"):
        FailureModel(between_hours={kind: 5.0})
    with pytest.raises(errors.ConfigError, match="--repair process=1"):
        FailureModel(repair_hours={"process": 1.0})


def test_the_faults_of_a_run_are_named_by_their_places_in_the_cluster():
    def fault(time, kind, target):
        name = {"event": "fault_injected", "step": 3}
        return {"time": time, **name, "kind": kind, "target": target}

    events = [
        {"time": 100.0, "event": "world_started", "slices": [0, 2, 3]},
        fault(110.0, "kill_host", 3),
        fault(120.0, "slow_host", 0),
        fault(130.0, "kill_slice", 3),
        {"time": 140.0, "event": "world_started", "slices": [0, 2]},
        fault(150.0, "hang_host", 2),
        fault(160.0, "return_slice", 3),
    ]
    assert simulation.trace_of(events, hosts_per_slice=2) == [
        event(10.0, "kill_host", 5),
        event(30.0, "kill_slice", 3),
        event(50.0, "hang_host", 4),
        event(60.0, "return_slice", 3),
    ]
