"""Faults of real host processes."""

import dataclasses
import functools
import time

import pytest

from elastic_ckpt.core import metrics, topology
from elastic_ckpt.elastic import (
    decision,
    faults,
    host_start,
    multicontroller,
    processes,
    slow_hosts,
    supervisor,
    watch,
)
from elastic_ckpt.elastic.cluster import Assignment
from elastic_ckpt.elastic.host_failure import WorldLostError
from elastic_ckpt.training import schema
from tests.elastic import tiny_hosts
from tests.recorded_events import RecordedEvents

# Hosts train on until the world is lost.
MANY = 1_000_000


def trained(
    cluster, recorded, directory, slices, *, number=1, steps=MANY, train=None, **changed
):
    work = decision.Train(slices=slices, spares=(), rows=24, accumulated=1)
    train = train or tiny_hosts.counts
    return cluster.run_world(
        functools.partial(train, steps=steps, directory=directory),
        Assignment(number=number, work=work),
        emit=recorded,
        **{"has_changed": lambda: None, **changed},
    )


def waits_for_data(world, **arguments):
    """Trains as `counts`, but host 1 reads the batch of each step slowly."""

    def should_stop(step):
        if topology.this_host() == 1:
            with metrics.DATA_WAIT.timed():
                time.sleep(0.2)
        return world.should_stop(step)

    tiny_hosts.counts(dataclasses.replace(world, should_stop=should_stop), **arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "kinds", "phase", "why"),
    [
        (
            tiny_hosts.counts,
            [faults.Kind.SLOW_HOST],
            watch.TRAIN,
            "it was stopped, or had no processor, ",
        ),
        (waits_for_data, [], "data", "it waited for its data "),
    ],
    ids=["stopped", "data"],
)
def test_a_slow_host_is_named_with_its_phase_and_left_out(
    tmp_path, monkeypatch, train, kinds, phase, why
):
    monkeypatch.setattr(slow_hosts, "WINDOW_SECS", 3.0)
    recorded = RecordedEvents()
    cluster = processes.configured(
        schema.WorldSection(hosts=3, slices=3, devices_per_host=1),
        log_directory=str(tmp_path / "logs"),
        limits=watch.unlimited(),
        injected=[faults.Fault(kind=kind, target=1, at_step=3) for kind in kinds],
        emit=recorded,
    )
    policy = decision.Policy(min_slices=2, leave_out_slow=True)
    work = decision.Work(
        num_slices=3, rows=24, devices_per_slice=1, max_rows_per_device=24
    )

    def has_changed():
        now = decision.decide(cluster.slices(frozenset(range(3))), policy, work)
        return None if now.slices == (0, 1, 2) else now

    try:
        over = trained(
            *(cluster, recorded, tmp_path, (0, 1, 2)),
            train=train,
            has_changed=has_changed,
        )
        assert not over
        (slow,) = recorded.named("slow_host")
        assert (slow["host"], slow["slice"], slow["phase"]) == (1, 1, phase)
        assert slow["why"].startswith(why)
        assert recorded.named("world_leaving") == [{"slices": [0, 2]}]
        assert not recorded.named("slice_lost")
    finally:
        cluster.close()


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 2])
def test_a_slice_that_is_cut_off_is_the_one_that_is_lost(tmp_path, monkeypatch, lost):
    # The host that is cut off may be slow to report it.
    monkeypatch.setattr(supervisor, "_DEVICES_GRACE_SECS", 600.0)
    recorded = RecordedEvents()
    listed = [
        faults.Fault(kind=faults.Kind.CUT_OFF, target=lost, at_step=3),
    ]
    cluster = processes.configured(
        schema.WorldSection(hosts=3, slices=3, devices_per_host=1),
        log_directory=str(tmp_path / "logs"),
        limits=watch.unlimited(),
        injected=listed,
        emit=recorded,
    )
    all_slices, left = frozenset(range(3)), tuple(sorted({0, 1, 2} - {lost}))
    try:
        with pytest.raises(WorldLostError):
            trained(cluster, recorded, tmp_path, (0, 1, 2))
        assert [each["slice"] for each in recorded.named("slice_lost")] == [lost]
        there = cluster.slices(all_slices)
        assert (there.current, set(there.present_secs)) == (set(left), set(left))
        assert trained(cluster, recorded, tmp_path, left, number=2, steps=5)
    finally:
        cluster.close()


def join(place, channel):
    multicontroller.configure(schema.WorldSection())
    with multicontroller.joined(place, begin=channel.begin):
        channel.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cut", "phases"),
    [
        (2, [watch.JOIN, watch.JOIN, watch.REACH]),
        (0, [watch.JOIN, watch.REACH, watch.REACH]),
    ],
)
def test_a_host_that_is_started_without_a_network_is_named(
    tmp_path, monkeypatch, cut, phases
):
    machines = [host_start.ThisMachine()] * 3
    machines[cut] = host_start.CutOffMachine(machines[cut])
    hosts = supervisor.HostProcesses(
        join,
        num_hosts=3,
        log_directory=tmp_path,
        emit=RecordedEvents(),
        limits=watch.Limits(heartbeat_secs=20.0),
        machines=machines,
    )
    monkeypatch.setattr(watch, "_REACH_SECS", 0.0)
    hosts.prepare()
    try:
        while [hosts.phase(host) for host in range(3)] != phases:
            assert not hosts.is_prepared()
            time.sleep(0.01)
        assert not hosts.not_joined()
        monkeypatch.setattr(supervisor, "_PREPARE_SECS", 0)
        assert hosts.not_joined() == {cut}
        # One that is started waits no longer for what is out of reach.
        with pytest.raises(WorldLostError, match=rf"host {cut} .*'{phases[cut]}' for"):
            hosts.run()
    finally:
        hosts.close()
