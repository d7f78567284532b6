"""Worlds on two machines: both supervisors are in this process, their hosts are not."""

import contextlib
import functools
import os
import socket
import threading

import pytest

from elastic_ckpt.core import events
from elastic_ckpt.elastic import (
    cluster,
    decision,
    faults,
    host_failure,
    local_slices,
    processes,
    watch,
)
from elastic_ckpt.elastic.machines import (
    follower,
    handover,
    leader_claim,
    slice_machines,
)
from elastic_ckpt.training import schema
from tests.elastic import tiny_hosts

# Hosts train on until they leave, or the world is lost.
MANY = 1_000_000
LOST_SECS = 600.0
WORK = decision.Work(num_slices=2, rows=8, devices_per_slice=1, max_rows_per_device=8)


class NoSignal:
    """SIGTERM reaches the leader's machine alone."""

    def __init__(self):
        self._reader, self._writer = socket.socketpair()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._reader.close()
        self._writer.close()

    def fileno(self):
        return self._reader.fileno()


class TwoMachines:
    """The leader's cluster, whose slice 1 is on the other machine."""

    def __init__(
        self, directory, train, *, compile_ahead=None, budget_secs=0.0, injected=()
    ):
        self.events = []
        self._train = train
        self._resources = contextlib.ExitStack()
        leading, following = (
            self._resources.enter_context(
                contextlib.closing(
                    local_slices.LocalSlices(
                        # A program that JAX's cache has is not kept.
                        schema.WorldSection(
                            hosts=2,
                            slices=2,
                            jax_cache_dir=str(directory / f"jax_cache-{number}"),
                        ),
                        log_directory=str(directory / f"logs-{number}"),
                        limits=watch.Limits(
                            compile_ahead_secs=budget_secs, grace_secs=600
                        ),
                        numbers=[number],
                    )
                )
            )
            for number in range(2)
        )
        first, second = (
            leader_claim.LeaderClaims(directory, machine=number, lost_secs=LOST_SECS)
            for number in range(2)
        )
        others = slice_machines.SliceMachines(leading, first, configured="same")
        first.look()
        assert others.take_lead()
        self._resources.callback(first.give_back)
        self._follows = threading.Thread(
            target=self._follow, args=(following, second, compile_ahead)
        )
        self._follows.start()
        others.await_machines([0, 1])
        self.cluster = processes.ProcessCluster(
            leading, others, injected=injected, emit=self.emit
        )
        self._resources.callback(self._follows.join)
        self._resources.callback(others.close)
        self._resources.callback(self.cluster.close)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._resources.close()

    def emit(self, name, **fields):
        events.check(name, fields)
        self.events.append((name, fields))

    def named(self, name):
        return [fields for each, fields in self.events if each == name]

    def run(self, slices, *, number=1, compile_ahead=None, **policy):
        """Runs a world until its end, or until other slices are to train."""
        policy = decision.Policy(settle_secs=0, **policy)
        work = decision.Train(slices=slices, spares=(), rows=8, accumulated=1)

        def has_changed():
            now = decision.decide(self.cluster.slices(frozenset(slices)), policy, WORK)
            is_same = isinstance(now, decision.Train) and now.slices == slices
            return None if is_same else now

        return self.cluster.run_world(
            self._train,
            cluster.Assignment(number=number, work=work, compile_ahead=compile_ahead),
            emit=self.emit,
            has_changed=has_changed,
        )

    def _follow(self, own, claims, compile_ahead):
        claims._owner = None
        claims.look()
        following = follower.Follower(
            *(claims.leader(), claims, 1, own),
            train=self._train,
            compile_ahead=compile_ahead,
            configured="same",
            lost_secs=LOST_SECS,
        )
        with NoSignal() as no_signal:
            self.over = following.run(no_signal)


@pytest.mark.slow
@pytest.mark.parametrize("min_slices", [1, 2])
def test_sigterm_to_the_leader_stops_the_run_only_if_the_others_are_too_few(
    tmp_path, min_slices
):
    train = functools.partial(
        tiny_hosts.counts,
        **{"steps": MANY, "directory": tmp_path},
        action=str(os.getpid()),
        at_step=3,
    )
    with TwoMachines(tmp_path, train) as two:
        if min_slices == 1:
            with pytest.raises(handover.HandedOverError):
                two.run((0, 1))
            assert two.named("slice_preempted") == [{"slice": 0}]
            assert not two.named("stop_requested")
        else:
            assert two.run((0, 1), min_slices=min_slices)
            assert two.named("stop_requested")
        assert not two.named("slice_lost")
    # It looks for the next leader.
    assert two.over is None
    first, second = tiny_hosts.notes(tmp_path, "left")
    assert first == second
    assert first["is_left"] == (min_slices == 1)


@pytest.mark.slow
def test_a_machine_has_the_program_of_each_number_that_its_host_may_get(tmp_path):
    gate = tmp_path / "gate"
    train = functools.partial(tiny_hosts.compiles, gate=str(gate))
    with TwoMachines(
        tmp_path, train, compile_ahead=tiny_hosts.compiles, budget_secs=600.0
    ) as two:

        def emit(name, **fields):
            two.events.append((name, fields))
            if name == "compiled_ahead":
                gate.touch()

        two.cluster._emit = emit
        fewer = decision.Train(slices=(0,), spares=(), rows=8, accumulated=1)
        smaller = cluster.CompileAhead(compiles=tiny_hosts.compiles, work=fewer)
        assert two.run((0, 1), compile_ahead=smaller)
        assert not two.named("executable_loaded")
        # Host 0 is on the machine that had host 1.
        two.events.clear()
        assert two.run((1,), number=2, max_slices=1)
        assert two.named("executable_loaded")
        assert not two.named("compiled")


@pytest.mark.slow
def test_a_slice_of_another_machine_is_killed_and_comes_back(tmp_path):
    train = functools.partial(tiny_hosts.counts, steps=MANY, directory=tmp_path)
    listed = [
        faults.Fault(kind=faults.Kind.KILL_SLICE, target=1, at_step=3, in_world=1),
        faults.Fault(kind=faults.Kind.RETURN_SLICE, target=1, at_step=3, in_world=2),
    ]
    with TwoMachines(tmp_path, train, injected=listed) as two:
        with pytest.raises(host_failure.WorldLostError):
            two.run((0, 1))
        assert [each["slice"] for each in two.named("slice_lost")] == [1]
        assert two.cluster.slices(frozenset({0, 1})).present_secs.keys() == {0}
        assert not two.run((0,), number=2)
        assert two.named("slice_returned") == [{"slice": 1}]
        assert two.named("world_leaving") == [{"slices": [0, 1]}]
