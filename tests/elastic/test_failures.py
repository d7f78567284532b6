"""Failures of hosts: the verdict on each, and what the user reads of it."""

import dataclasses
import random
import signal

import jax
import pytest

from benchmarks import verdict_records, verdicts
from elastic_ckpt.core import errors
from elastic_ckpt.elastic import decision, failures, runtime
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
        pytest.param(each, marks=[pytest.mark.night, pytest.mark.slow][each in SOON])
        for each in verdicts.IN_PROCESSES
    ],
)
def test_a_fault_in_real_processes_has_its_verdict(kind):
    judged = verdicts.in_processes(kind, random.Random(kind))
    assert judged.is_right, judged


@pytest.mark.night
def test_a_healthy_run_has_no_verdict_though_its_slices_change():
    assert verdicts.healthy(random.Random(0)) == []


def test_every_row_of_the_table_is_injected():
    names = {kind.name for kind in failures.KINDS}
    injected = {*verdict_records.RECORDS, *verdicts.IN_PROCESSES}
    assert {meant.partition(":")[0] for meant in injected} == names


def raised(host, error):
    try:
        raise error
    except Exception as caught:
        return failures.of_exception(host, caught)


def of_devices(host, says):
    return raised(host, jax.errors.JaxRuntimeError(says))


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
    failed = [raised(host, error) for host in range(num_hosts)]
    assert not failures.WorldLostError(failed, num_hosts=num_hosts).hosts
    judged = failures.judge(failed, num_hosts=num_hosts)
    assert (judged.kind.what, judged.action) == ("program", failures.STOP)
    # Its traceback is a note.
    (note,) = failures.ProgramFailedError("a", failures=failed).__notes__
    assert note.startswith("\nTraceback (most")
    assert note.endswith(f"{type(error).__name__}: {error}")
    assert failed[0].place.startswith(__file__)


def test_the_author_of_a_program_reads_what_failed_and_what_helps():
    says = "RESOURCE_EXHAUSTED: Out of memory allocating 8589934592 bytes."
    failed = [
        dataclasses.replace(
            of_devices(host, says), place="a.py:3", log_file=f"host-{host}.log"
        )
        for host in range(2)
    ]
    assert failures.judge(failed, num_hosts=2).words == (
        "host 0 failed: the program needs more memory than its devices have at a.py:3:"
        " JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 8.00 GiB; lower"
        " `per_device_batch_size` or `max_target_length`; in a program of your own, use"
        " more microbatches or `jax.checkpoint`, or shard over more devices; its log is"
        " host-0.log"
    )
    ours = raised(0, errors.DataError("a.txt is cut short; restore it"))
    judged = failures.judge([ours], num_hosts=1, is_lost=False)
    assert judged.words == "a.txt is cut short; restore it"


@pytest.mark.parametrize(
    ("says", "alone"),
    [
        ("INTERNAL: uncorrectable ECC error", "device_bad"),
        ("INTERNAL: ICI link 3 is down", "device_bad"),
        # Ordinary messages of XLA name no part of a machine.
        ("INTERNAL: dot operand_precision={DEFAULT,DEFAULT} failed", "device_failed"),
        ("INTERNAL: HBM buffer assignment failed", "device_failed"),
        ("INTERNAL: a step was ABORTEDLY slow", "device_failed"),
    ],
)
def test_what_the_devices_of_all_hosts_report_at_one_step_is_the_program(says, alone):
    judged = failures.judge([of_devices(host, says) for host in range(4)], num_hosts=4)
    assert (judged.kind.name, judged.action) == ("fails_on_devices", "stop")
    first = failures.judge([of_devices(2, says)], num_hosts=4)
    assert (first.kind.name, first.action) == (alone, "leave out")
    assert first.hosts == {2}
    again = failures.judge([of_devices(1, says)], num_hosts=4, before=first.how)
    assert (again.kind.name, again.action) == ("fails_again", "stop")


def test_the_cause_is_not_what_others_do_to_a_host():
    aborted = failures.silent_death(0, -signal.SIGABRT)
    killed = failures.silent_death(2, -signal.SIGKILL)
    judged = failures.judge([aborted, killed], num_hosts=3)
    assert (judged.kind.name, judged.which) == ("host_killed", "2")
    # Only one device lacks memory, if there is another one.
    failed = [of_devices(0, "RESOURCE_EXHAUSTED: Out of memory")]
    kinds = [failures.judge(failed, num_hosts=n).kind.name for n in (1, 2)]
    assert kinds == ["device_memory_exhausted", "device_memory_taken"]


def verdicts_of(records, **policy):
    """The verdicts on worlds that are lost in turn, and the error of the run."""
    cluster = verdict_records.ScriptedCluster(random.Random(0), records)
    recorded, error = RecordedEvents(), None
    try:
        runtime.run(
            print, cluster=cluster, policy=decision.Policy(**policy), emit=recorded
        )
    except errors.RunError as raised_error:
        error = raised_error
    return recorded.named("verdict"), error


def test_the_verdict_of_a_world_that_is_the_last_is_to_stop():
    (said,), error = verdicts_of(verdict_records.RECORDS["host_killed"], max_retries=0)
    assert (said["kind"], said["action"]) == ("host_killed", "stop")
    assert isinstance(error, failures.WorldLostError)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("host_crashed", "the program fails at the same step in each world: killed by"),
        ("device_memory_taken", "the program needs more memory than its devices have"),
        ("device_failed", "the program fails at the same step in each world"),
        # But for a network.
        ("host_cut_off", ""),
        ("network_failed: connections", ""),
        ("network_failed: fabric", ""),
    ],
)
def test_what_fails_alike_at_one_step_of_two_worlds_is_the_program(kind, says):
    # The same draw, and so the same text, in both worlds.
    def same(world):
        world = dataclasses.replace(world, draw=random.Random(1))
        return verdict_records.RECORDS[kind][0](world)

    (first, second), error = verdicts_of([same, same])
    assert first["kind"] == kind.partition(":")[0]
    if not says:
        assert (second["kind"], error) == (first["kind"], None)
        return
    assert isinstance(error, failures.ProgramFailedError)
    assert says in str(error)
    assert (second["what"], second["action"]) == ("program", "stop")
    assert any("the previous world" in fact for fact in second["evidence"])
    # The last line names the cause, unless the log of a host that said nothing has it.
    assert ("\n" in str(error)) == (kind == "host_crashed")
