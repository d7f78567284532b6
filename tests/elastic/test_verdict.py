"""Verdicts: what a run says of each fault."""

import dataclasses
import random
import signal

import pytest

from benchmarks import verdict_records, verdicts
from elastic_ckpt.core import errors, events
from elastic_ckpt.elastic import (
    decision,
    host_failure,
    process_cluster,
    runtime,
    verdict,
)
from tests.recorded_events import RecordedEvents

# Those that run before a change lands; the other ones run before a release.
SOON = ("host_crashed", "host_hangs", "program_failed", "step_unreadable")


@pytest.mark.parametrize("meant", verdict_records.RECORDS)
def test_a_fault_has_its_verdict_whatever_host_and_step_it_hits(meant):
    judged = verdicts.in_records(meant, random.Random(meant))
    assert judged.is_right, judged


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, marks=pytest.mark.slow if kind in SOON else pytest.mark.night
        )
        for kind in verdicts.IN_PROCESSES
    ],
)
def test_a_fault_in_real_processes_has_its_verdict(kind):
    judged = verdicts.in_processes(kind, random.Random(kind))
    assert judged.is_right, judged


@pytest.mark.night
def test_a_healthy_run_has_no_verdict_though_its_slices_change():
    assert verdicts.healthy(random.Random(0)) == []


def test_what_a_run_does_after_each_verdict(golden):
    kinds = [f"{kind.name}: {kind.what}, {kind.action}\n" for kind in verdict.KINDS]
    golden("verdicts.txt", "".join(kinds))


def raised(host, error):
    try:
        raise error
    except Exception as caught:
        return host_failure.of_exception(host, caught)


@pytest.mark.parametrize("num_hosts", [1, 3])
@pytest.mark.parametrize(
    "error",
    [
        ValueError("Xid 79: the GPU has fallen off the bus"),
        RuntimeError("NCCL ncclRemoteError: the host was killed by SIGKILL"),
        AssertionError("no heartbeat for 30 s"),
        KeyError("UNAVAILABLE"),
    ],
)
def test_an_exception_of_the_program_is_never_the_machines(num_hosts, error):
    failures = [raised(host, error) for host in range(num_hosts)]
    ended = process_cluster.error_of(failures, num_hosts, described="")
    assert not isinstance(ended, host_failure.WorldLostError)
    judged = verdict.judge(verdict.Evidence(failures=failures, num_hosts=num_hosts))
    assert (judged.what, judged.action) == (verdict.What.PROGRAM, verdict.Action.STOP)


def test_the_verdict_of_a_world_that_is_the_last_is_to_stop():
    draw = random.Random(0)
    cluster = verdict_records.ScriptedCluster(
        draw, verdict_records.RECORDS["host_killed"]
    )
    recorded = RecordedEvents()
    with pytest.raises(host_failure.WorldLostError):
        runtime.run(
            print,
            cluster=cluster,
            policy=decision.Policy(max_retries=0),
            emit=recorded,
        )
    (said,) = recorded.named("verdict")
    assert (said["kind"], said["action"]) == ("host_killed", "stop")


def test_a_run_without_slices_says_so():
    cluster = verdict_records.ScriptedCluster(
        random.Random(0), verdict_records.RECORDS["slice_lost"], gone=True
    )
    policy = decision.Policy(min_slices=cluster.hosts, wait_secs=0)
    recorded = RecordedEvents()
    with pytest.raises(errors.RunError, match="bring slices back"):
        runtime.run(print, cluster=cluster, policy=policy, emit=recorded)
    kinds = [said["kind"] for said in recorded.named("verdict")]
    assert kinds == ["slice_lost", "too_few_slices"]
    # No slice of the world is to blame.
    assert recorded.named("verdict")[-1]["which"] == ""


def test_what_only_lost_its_connection_is_not_blamed():
    aborted = host_failure.silent_death(0, -signal.SIGABRT)
    killed = host_failure.silent_death(2, -signal.SIGKILL)
    seen = verdict.Evidence(failures=[aborted, killed], num_hosts=3, is_lost=True)
    judged = verdict.judge(seen)
    assert (judged.kind, judged.which) == ("host_killed", "2")


def of_devices(host, says):
    return host_failure.HostFailure(
        host=host,
        at_secs=0.0,
        message=says,
        error=("JaxRuntimeError",),
        is_of_devices=True,
    )


@pytest.mark.parametrize(
    "says", ["INTERNAL: uncorrectable ECC error", "INTERNAL: ICI link 3 is down"]
)
def test_what_the_devices_of_all_hosts_report_at_one_step_is_the_program(says):
    for hosts, kind in ((range(4), "program_fails_on_devices"), ([2], None)):
        failures = [of_devices(host, says) for host in hosts]
        seen = verdict.Evidence(failures=failures, num_hosts=4, is_lost=True)
        judged = verdict.judge(seen)
        if kind is None:
            assert (judged.what, judged.action) == ("device", "leave out")
            again = dataclasses.replace(seen, before=verdict.failed(seen))
            judged = verdict.judge(again)
            kind = "program_fails_again"
        assert (judged.kind, judged.action) == (kind, "stop")


@pytest.mark.parametrize(
    "says",
    [
        "INTERNAL: dot operand_precision={DEFAULT,DEFAULT} failed",
        "INTERNAL: HBM buffer assignment failed",
        "INTERNAL: a step was ABORTEDLY slow",
    ],
)
def test_ordinary_messages_of_xla_name_no_part_of_a_machine(says):
    failures = [of_devices(host, says) for host in range(4)]
    seen = verdict.Evidence(failures=failures, num_hosts=4, is_lost=True)
    assert verdict.judge(seen).kind == "program_fails_on_devices"


def test_a_failing_device_is_left_out_and_not_what_lost_it():
    bad = verdict_records.RECORDS["device_lost"][0]
    world = verdict_records.World(
        draw=random.Random(0), emit=events.nobody, hosts=4, host=2, step=3
    )
    error = process_cluster.error_of(bad(world), 4, described="")
    assert error.hosts == {2}


@pytest.mark.parametrize(
    "kind", ["host_cut_off", "connections_lost", "coordination_lost", "fabric_failed"]
)
def test_a_network_that_fails_twice_at_one_step_is_not_the_program(kind):
    records = verdict_records.RECORDS[kind] * 2
    cluster = verdict_records.ScriptedCluster(random.Random(0), records)
    recorded = RecordedEvents()
    runtime.run(print, cluster=cluster, emit=recorded)
    assert [said["kind"] for said in recorded.named("verdict")] == [kind] * 2


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        # Its log has the reason.
        ("host_crashed", "program fails at the same step"),
        ("device_memory_taken", "Traceback (most recent call last):"),
        ("device_failed", "Traceback (most recent call last):"),
    ],
)
def test_what_fails_alike_at_one_step_of_two_worlds_is_the_program(kind, says):
    # The same draw, and so the same text, in both worlds.
    def same(world):
        world = dataclasses.replace(world, draw=random.Random(1))
        return verdict_records.RECORDS[kind][0](world)

    cluster = verdict_records.ScriptedCluster(random.Random(0), [same, same])
    recorded = RecordedEvents()
    with pytest.raises(host_failure.ProgramFailedError) as ended:
        runtime.run(print, cluster=cluster, emit=recorded)
    first, second = recorded.named("verdict")
    assert first["kind"] == kind
    assert (second["what"], second["action"]) == ("program", "stop")
    assert any("the world before" in fact for fact in second["evidence"])
    assert str(ended.value).startswith(says)
    assert ended.value.why == second["why"]


@pytest.mark.parametrize(
    ("event", "fields"),
    [
        ("degraded", {"tier": "peer", "cause": "too_few", "why": "items lack copies"}),
        ("restored_from", {"bad_copies": 0}),
        ("replicas_differ", {"is_certain": False}),
        ("step_passed_over", {"why": "step 40 lacks 2 of 64 data shards"}),
        ("slice_lost", {"why": "host 1 failed: killed by SIGKILL"}),
        ("divergence_found", {"why": "the loss is nan", "action": "abort"}),
    ],
)
def test_what_is_normal_or_has_another_verdict_has_none(event, fields):
    assert event in verdict.EVENTS
    assert verdict.judge(verdict.Evidence(event=event, fields=fields)) is None


@pytest.mark.parametrize(
    ("event", "fields", "kind"),
    [
        ("slice_refused", {"why": "its hosts [1] did not finish the check in 60 s"},
         "device_too_slow"),
        ("slice_refused", {"why": "its host 0 failed in the check; see a.log"},
         "device_check_failed"),
        ("slice_refused", {"why": "its hosts do not join the others"},
         "host_unreachable"),
        ("slice_lost", {"why": "its machine is lost"}, "machine_lost"),
        ("slice_lost", {"why": "it does not answer"}, "slice_lost"),
        ("replicas_differ", {"is_certain": True, "devices": [4]}, "device_wrong"),
        ("restore_distrusted", {}, "state_corrupt"),
        ("executable_refused", {"why": "it was altered"}, "executable_damaged"),
        ("component_not_loaded", {"component": "data"}, "component_failed"),
    ],
)  # fmt: skip
def test_an_event_that_interrupts_has_its_verdict(event, fields, kind):
    seen = verdict.Evidence(event=event, fields={"slice": 1, **fields})
    assert verdict.judge(seen).kind == kind


def test_what_goes_on_failing_has_one_verdict_in_each_world():
    records = verdict_records.RECORDS["storage_full"][0]
    (killed,) = verdict_records.RECORDS["host_killed"]

    def twice(world):
        return [*records(world), *records(world)]

    def twice_and_killed(world):
        return [*twice(world), *killed(world)]

    recorded = RecordedEvents()
    cluster = verdict_records.ScriptedCluster(
        random.Random(0), [twice_and_killed, twice]
    )
    runtime.run(print, cluster=cluster, emit=recorded)
    assert len(recorded.named("degraded")) > 2
    kinds = [each["kind"] for each in recorded.named("verdict")]
    assert kinds == ["storage_full", "host_killed", "storage_full"]


def test_every_fault_is_of_a_kind_of_the_table():
    names = [kind.name for kind in verdict.KINDS]
    assert len(names) == len(set(names)) >= 40
    recorded = {meant.partition(":")[0] for meant in verdict_records.RECORDS}
    assert recorded | verdicts.IN_PROCESSES.keys() == {*names}
    assert len(verdicts.IN_PROCESSES) >= 15
    assert events.NAMES.keys() >= verdict.EVENTS
