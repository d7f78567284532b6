"""Faults of real host processes."""

import functools
import time

import pytest

from elastic_ckpt.config import schema
from elastic_ckpt.elastic import (
    decision,
    faults,
    host_start,
    multicontroller,
    processes,
    supervisor,
    watch,
)
from elastic_ckpt.elastic.cluster import Assignment
from elastic_ckpt.elastic.host_failure import WorldLostError
from tests.elastic import tiny_hosts

# Hosts train on until the world is lost.
MANY = 1_000_000


class Recorded:
    """The events of a cluster."""

    def __init__(self):
        self.events = []

    def __call__(self, name, **fields):
        self.events.append((name, fields))

    def named(self, name):
        return [fields for each, fields in self.events if each == name]


def trained(cluster, recorded, directory, slices, *, number=1, steps=MANY):
    work = decision.Train(slices=slices, spares=(), rows=24, accumulated=1)
    return cluster.run_world(
        functools.partial(tiny_hosts.counts, steps=steps, directory=directory),
        Assignment(number=number, work=work),
        emit=recorded,
        has_changed=lambda: None,
    )


@pytest.mark.slow(minutes=0.3)
@pytest.mark.parametrize("lost", [0, 2])
def test_a_slice_that_is_cut_off_is_the_one_that_is_lost(tmp_path, lost):
    recorded = Recorded()
    listed = [
        faults.Fault(kind=faults.Kind.CUT_OFF, target=lost, at_step=3),
    ]
    cluster = processes.Processes(
        schema.WorldSection(hosts=3, slices=3, devices_per_host=1),
        log_directory=str(tmp_path / "logs"),
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


@pytest.mark.slow(minutes=0.2)
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
        emit=Recorded(),
        limits=watch.Limits(),
        machines=machines,
    )
    hosts.prepare()
    try:
        while [hosts.phase(host) for host in range(3)] != phases:
            assert not hosts.is_prepared()
            time.sleep(0.01)
        assert not hosts.not_joined()
        monkeypatch.setattr(supervisor, "_PREPARE_SECS", 0)
        assert hosts.not_joined() == {cut}
    finally:
        hosts.close()
