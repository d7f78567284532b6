"""Failures of hosts and the verdict on them: what failed, and what the run does.

A host that fails leaves a `HostFailure`. When a world has ended with failures, `judge`
finds the failure that caused the others and describes it in a few words: how the host
stopped, the classes of its exception, its phase, whether all hosts failed alike, and
whether the previous world failed in the same way. The verdict is the first row of
`KINDS` whose words all apply and whose pattern matches the host's message. Each row has
one of three actions: restart the world, leave the slice out, or stop.

Two rules take precedence over the table:

* An exception is the program's fault if more than one host raises it, or if it recurs
  at the same step in the next world, even if the exception mentions a device.
* A host that lost its connection to another host does not show the cause: such errors
  count only if nothing else was recorded.

Sources of the patterns: the names of CUDA's driver API (`CUresult`), NVIDIA's catalog
of Xid errors, `ncclResult_t`, and gRPC's status codes as XLA prints them.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sysconfig
import time
import traceback
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from elastic_ckpt.core import errors
from elastic_ckpt.elastic import watch

RESTART, LEAVE_OUT, STOP = "restart", "leave out", "stop"
# Signals that a program causes itself.
_CRASHES = ("SIGSEGV", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS", "SIGABRT", "SIGBUS")
# Frames in these directories are not the user's code.
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib")})
_MOST_TRACEBACK, _MOST_SAID = 8000, 200
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_PATH = re.compile(r"(?:\w+:/)?/[\w.+=@~-]+(?:/[\w.+=@~-]+)*")
_BYTES = re.compile(r"(\d{6,}) ?bytes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostFailure:
    """Why a host stopped.

    Attributes:
      message: the message for the user.
      is_ours: whether the error is an ElasticCkptError, whose message has a remedy.
      is_of_devices: whether JAX raised the error because devices failed or disappeared.
      is_signal: whether a signal killed the process.
      is_silent: whether the host exited without reporting a failure.
      is_consequence: whether the host died in the way that hosts do when host 0 is
        gone.
      is_hang: whether the host was killed because it hung.
      at_secs: the time of the failure, on the machine's monotonic clock.
      since_secs: the time of the host's last progress; None if that is `at_secs`.
      error: the names of the exception's class and its bases; empty if there is none.
      traceback: the end of the exception's traceback.
      place: the line of user code that raised the exception, as `file:line`; empty if
        there is none.
      phase: the phase that the host was in.
      log: the end of the host's log.
      log_file: the path of the host's log; empty if the host has no log of its own.
    """

    host: int
    message: str
    is_ours: bool = False
    is_of_devices: bool = False
    is_signal: bool = False
    is_silent: bool = False
    is_consequence: bool = False
    is_hang: bool = False
    at_secs: float
    since_secs: float | None = None
    error: Sequence[str] = ()
    traceback: str = ""
    place: str = ""
    phase: str = ""
    log: str = ""
    log_file: str = ""

    def lines(self) -> list[str]:
        """A description of the failure, followed by the end of the log."""
        log = [f"  | {line}" for line in self.log.splitlines()]
        if log:
            log.insert(0, f"the end of its log, {self.log_file}:")
        return [f"host {self.host} failed: {self.message}", *log]


def of_exception(host: int, error: BaseException) -> HostFailure:
    """The failure of a host whose program raised an exception."""
    is_ours = isinstance(error, errors.ElasticCkptError)
    names = [kind.__name__ for kind in type(error).__mro__]
    said = str(error) if is_ours else f"{type(error).__name__}: {error}"
    users = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OURS, "<", *_LIBRARIES))
    ]
    # Drops the notes: JAX adds one about traceback filtering.
    told = traceback.TracebackException.from_exception(error)
    told.__notes__ = None
    return HostFailure(
        host=host,
        message=said.removesuffix(": "),
        is_ours=is_ours,
        # On CPU, a lost connection is a ValueError.
        is_of_devices="JaxRuntimeError" in names
        or ("ValueError" in names and "Gloo" in said),
        at_secs=time.monotonic(),
        error=names,
        traceback="".join(told.format())[-_MOST_TRACEBACK:].rstrip(),
        place=f"{users[-1].filename}:{users[-1].lineno}" if users else "",
    )


def silent_death(host: int, exit_code: int, *, oom_kills: int = 0) -> HostFailure:
    """The failure of a host that exited without a report.

    A negative exit code is a signal. `oom_kills` counts the processes that the kernel
    of the host's machine has killed to free memory since the world began.
    """
    killed = exit_code < 0
    message = (
        f"killed by {signal.Signals(-exit_code).name}"
        if killed
        else f"stopped with exit code {exit_code}"
    )
    if exit_code == -signal.SIGKILL and oom_kills:
        message += f"; the kernel was out of memory (oom_kill +{oom_kills})"
    return HostFailure(
        host=host,
        message=message,
        is_signal=killed,
        is_silent=True,
        # JAX aborts a process whose coordination service, on host 0, is gone.
        is_consequence=exit_code == -signal.SIGABRT,
        at_secs=time.monotonic(),
    )


def of_hang(host: int, hang: watch.Hang, *, now_secs: float) -> HostFailure:
    """The failure of a host that caused a hang, or of any host if none is the cause."""
    return HostFailure(
        host=host,
        message=f"{hang.why}; the stacks of all hosts are in their logs",
        is_signal=bool(hang.hosts),
        is_silent=bool(hang.hosts),
        is_of_devices=not hang.hosts,
        is_hang=True,
        at_secs=now_secs,
        since_secs=now_secs - hang.secs,
    )


def oom_kills() -> int:
    """The number of processes that this machine's kernel has killed to free memory.

    Source: `oom_kill` in /proc/vmstat (proc_vmstat(5)); 0 if there is no such field.
    """
    try:
        with open("/proc/vmstat") as file:
            counts = dict(line.split() for line in file)
    except OSError:
        return 0
    return int(counts.get("oom_kill", 0))


class WorldLostError(errors.RunError):
    """A world ended because hosts failed; the next may continue (see `judge`).

    Attributes:
      failures: the failures of all hosts that failed; at least one.
      hosts: the hosts whose slices are lost; empty if the program or network failed.
      is_of_program: whether the program failed and would fail again.
      gone: the slices that were lost with their memory.
      machines: the lost machines, if the run has more than one.
    """

    def __init__(
        self,
        failures: Sequence[HostFailure],
        *,
        num_hosts: int = 1,
        gone: Collection[int] = (),
        machines: Collection[int] = (),
    ) -> None:
        judged = judge(failures, num_hosts=num_hosts)
        super().__init__("\n".join(judged.lead.lines()))
        self.failures = tuple(failures)
        self.num_hosts = num_hosts
        self.hosts = judged.hosts
        self.is_of_program = judged.action == STOP
        self.gone = frozenset(gone)
        self.machines = frozenset(machines)


class ProgramFailedError(errors.RunError):
    """A world's program failed and would fail again in the next world.

    The traceback of the user's program, if there is one, is a note on the error.

    Attributes:
      failures: the failures of all hosts that failed; at least one.
    """

    def __init__(self, message: str, *, failures: Sequence[HostFailure]) -> None:
        super().__init__(message)
        self.failures = tuple(failures)
        first = first_failure(failures)
        if first.traceback and not first.is_ours:
            self.add_note(f"\n{first.traceback}")


def first_failure(failures: Sequence[HostFailure]) -> HostFailure:
    """The failure that caused the others.

    Most elastic_ckpt errors are not caused by another host's death. Death by a signal
    is not caused by an exception or failed devices, unless JAX aborted the host. Ties
    go to the earliest failure.
    """
    return min(
        failures,
        key=lambda f: (
            not f.is_ours or "NotStoredError" in f.error,
            not f.is_signal or f.is_consequence,
            f.is_of_devices,
            f.is_consequence,
            f.at_secs,
        ),
    )


def lost_hosts(failures: Sequence[HostFailure]) -> frozenset[int]:
    """The hosts that ended a world by dying or computing wrong values.

    JAX aborts a host that has lost the coordination service. Such a host is not a cause
    if another host died in a different way, or if the program failed earlier on host 0,
    which stops the service. If host 0 was also aborted, the other hosts lost it.
    """
    silent = [failure for failure in failures if failure.is_silent]
    causes = [each for each in failures if "DeviceWrongError" in each.error]
    causes = causes or [each for each in silent if not each.is_consequence]
    has_failed_before = any(
        each.host == 0
        and not each.is_silent
        and not each.is_of_devices
        and each.at_secs < silent[0].at_secs
        for each in failures
        if silent
    )
    if not causes and silent and not has_failed_before:
        causes = [each for each in silent if each.host == 0] or silent[:1]
    return frozenset(failure.host for failure in causes)


class Kind(NamedTuple):
    """A row of the table of verdicts.

    Attributes:
      name: the name of the kind, used in events.
      what: the part that failed: `host`, `slice`, `machine`, `device`, `network`,
        `storage`, `data` or `program`.
      action: what the run does after losing a world; a run that has ended stops.
      meaning: a predicate that says what happened, after a subject such as "host 1".
      words: the words that must all describe the failure; of words joined by `|`, at
        least one must.
      says: a pattern to find in the host's message, or in its log if it did not send a
        message.
      advice: the user's remedy.
    """

    name: str
    what: str
    action: str
    meaning: str
    words: str
    says: str = ""
    advice: str = ""


_NO_MEMORY = "RESOURCE_EXHAUSTED|CUDA_ERROR_OUT_OF_MEMORY|Ran out of memory"
_BAD_DEVICE = (
    r"\bECC\b|Xid[^\n]*: (48|63|64|74|79|94|95|119|120)\b|row remap|NVLINK|NVLink"
    r"|HBM[^\n]{0,40}([Uu]ncorrect|[Pp]arity)|[Uu]ncorrect[^\n]{0,40}HBM|NVSwitch"
    r"|\bICI\b|fallen off the bus|GPU is lost|TPU[^\n]*(healthy|not found)"
    "|CUDA_ERROR_(NO_DEVICE|DEVICE_UNAVAILABLE|SYSTEM_NOT_READY|INVALID_DEVICE)"
)
_CONNECTION = (
    r"[Gg]loo|Connection (closed|reset|refused)|Broken pipe|\bUNAVAILABLE\b"
    r"|\bDEADLINE_EXCEEDED\b|[Cc]oordination ?[Ss]ervice|ncclRemoteError"
    r"|[Bb]arrier timed out|\bABORTED\b|JAX distributed service"
)
_NETWORK = (
    rf"{_CONNECTION}|NCCL|nccl(System|Unhandled|Internal)Error|NET/IB|ibv_|RoCE|\bEFA\b"
    "|[Nn]ame resol|DNS resol|Name or service not known|Could not resolve"
)
_REFUSED = (
    "^[^:]*: ?(INVALID_ARGUMENT|UNIMPLEMENTED|FAILED_PRECONDITION|NOT_FOUND"
    "|OUT_OF_RANGE)"
)
_SMALLER = (
    "lower `per_device_batch_size` or `max_target_length`; in a program of your own,"
    " use more microbatches or `jax.checkpoint`, or shard over more devices"
)
_DRAIN = "drain its machine; check the kernel log, `nvidia-smi` and the slice's health"

# fmt: off
# The first row that matches is the verdict.
KINDS = (
    # Lost.
    Kind("machine_lost", "machine", LEAVE_OUT, "does not answer", "machine-gone",
         advice="check whether it was preempted or is off"),
    Kind("slice_lost", "slice", LEAVE_OUT, "is lost, with its memory",
         "slice-gone"),
    Kind("device_wrong", "device", LEAVE_OUT, "computes wrong values",
         "DeviceWrongError", advice="drain its machine, and have the device tested"),
    # Our own errors, whose messages have the remedy.
    Kind("replaced", "program", STOP, "was replaced by another launch",
         "ReplacedError"),
    Kind("grace_exceeded", "program", STOP, "was killed before it had saved",
         "StoppedError"),
    Kind("diverged", "program", STOP, "was stopped by a callback", "DivergedError"),
    Kind("wrong_configuration", "program", STOP, "has an invalid configuration",
         "ConfigError"),
    Kind("other_model", "program", STOP, "does not match its checkpoint",
         "OtherModelError"),
    Kind("data_unusable", "data", STOP, "cannot be used", "DataError"),
    Kind("step_not_stored", "storage", STOP, "did not store a step that was due",
         "NotStoredError"),
    Kind("step_unreadable", "storage", STOP, "has no readable step",
         "CheckpointError"),
    Kind("cannot_continue", "program", STOP, "cannot continue", "ElasticCkptError"),
    # Hangs.
    Kind("host_unreachable", "network", LEAVE_OUT, "does not connect the host",
         f"hang one in:{watch.REACH}",
         advice="check routes, firewalls and name resolution"),
    Kind("host_unreachable", "network", LEAVE_OUT, "does not connect the host",
         f"hang one in:{watch.JOIN}", "hangs in phase",
         advice="check routes, firewalls and name resolution"),
    Kind("host_stopped", "host", LEAVE_OUT, "is frozen: it sends no heartbeat",
         "hang", "no heartbeat", "check for SIGSTOP, swapping or a frozen machine"),
    Kind("restore_hangs", "storage", RESTART, "does not deliver the state to restore",
         f"hang in:{watch.RESTORE}", advice="check the storage"),
    Kind("host_hangs", "host", LEAVE_OUT, "hangs, and the others wait for it",
         "hang one", advice="its stacks are in its log"),
    Kind("world_hangs", "network", RESTART, "hangs: all hosts wait in the same phase",
         "hang", advice="raise `elastic_hang_timeout_seconds` if the phase takes long"),
    # Device errors from JAX.
    Kind("device_memory_exhausted", "program", STOP,
         "needs more memory than its devices have",
         "devices all|again|alone", _NO_MEMORY, _SMALLER),
    Kind("device_memory_taken", "device", LEAVE_OUT, "has less memory than the others",
         "devices", _NO_MEMORY, "stop other processes on the device"),
    Kind("program_refused_by_xla", "program", STOP, "was rejected by XLA",
         "devices", _REFUSED),
    Kind("device_bad", "device", LEAVE_OUT, "has a hardware error",
         "devices one once", _BAD_DEVICE, _DRAIN),
    Kind("device_bad", "device", LEAVE_OUT, "cannot be used by JAX",
         "RuntimeError one", "nable to initialize backend", _DRAIN),
    Kind("slice_restarted", "slice", RESTART, "was restarted and lost its arrays",
         "devices", "DATA_LOSS|slice.{0,40}(down|restart|unhealthy)"),
    Kind("network_failed", "network", RESTART, "lost connections between live hosts",
         "devices", _NETWORK,
         "check links, switches and name servers; set `NCCL_DEBUG=WARN`"),
    Kind("fails_on_devices", "program", STOP, "fails on the devices of all hosts",
         "devices all", advice="check your own kernels, shapes and indices"),
    Kind("fails_again", "program", STOP, "fails at the same step in each world",
         "devices|crash again"),
    Kind("device_failed", "device", LEAVE_OUT, "failed", "devices", advice=_DRAIN),
    # Processes that died silently.
    Kind("host_out_of_memory", "host", RESTART,
         "was killed by the kernel because memory ran out",
         "SIGKILL", "oom_kill|[Oo]ut of memory|OOMKilled",
         "give it more memory, or keep fewer steps in RAM"),
    Kind("host_out_of_memory", "host", RESTART, "was killed because memory ran out",
         "exit", "exit code 137", "give it more memory, or keep fewer steps in RAM"),
    Kind("host_cut_off", "network", LEAVE_OUT, "no longer connects the host",
         "aborted", advice="check the links of its machine"),
    Kind("program_crashes", "program", STOP, "crashes on all hosts", "crash all",
         advice="check native extensions with `python -X faulthandler`"),
    Kind("host_crashed", "host", RESTART, "crashed", "crash",
         advice="see the end of its log; after SIGBUS, check if /dev/shm is full"),
    Kind("host_killed", "host", RESTART, "was killed from outside", "signal",
         advice="check the launcher, operators, limits and the kernel log"),
    Kind("not_importable", "program", STOP, "cannot be imported",
         "ImportError|SyntaxError", advice="install its imports on all machines"),
    Kind("not_importable", "program", STOP, "cannot be imported", "exit all in:start",
         advice="see what each host printed to standard error"),
    Kind("program_exits", "program", STOP, "exited on all hosts before the run ended",
         "exit all", advice="remove calls to `os._exit`, or to `exit` in native code"),
    Kind("host_exited", "host", RESTART, "exited before the run ended", "exit",
         advice="see the end of its log"),
    # Exceptions of the program.
    Kind("shapes_differ", "program", STOP, "combines arrays of mismatched shapes",
         "TypeError|ValueError", "[Ss]hape"),
    Kind("not_finite", "program", STOP, "computed a non-finite number",
         "FloatingPointError", advice="check the operation that the traceback names"),
    Kind("program_failed", "program", STOP, "raised an exception", ""),
)
# fmt: on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on one interruption.

    Attributes:
      which: the indices, path or line that identify the failed part; empty if unknown.
      lead: the failure that caused the others.
      how: the manner and step of the world's failure, for comparing worlds.
      step: the number of steps that the world had completed.
      action: what the run does.
      hosts: the lost hosts: those that died or whose devices failed.
      evidence: the recorded facts that support the verdict.
    """

    kind: Kind
    which: str
    lead: HostFailure
    how: str
    step: int
    action: str
    hosts: frozenset[int]
    evidence: tuple[str, ...]

    @property
    def words(self) -> str:
        """What happened, the host's message, and advice for the program's author."""
        lead, kind = self.lead, self.kind
        if lead.is_ours:
            return lead.message
        said = lead.message.partition("\n")[0].rstrip(".")
        said = _BYTES.sub(lambda found: f"{int(found[1]) / 2**30:,.2f} GiB", said)
        log = lead.lines()[1:] if lead.is_silent else []
        last = "" if log or not lead.log_file else f"; its log is {lead.log_file}"
        words = (
            f"host {lead.host} failed: the {kind.what} {kind.meaning}"
            f"{lead.place and ' at '}{lead.place}: {said}"
            f"{kind.advice and '; '}{kind.advice}{last}"
        )
        return "\n".join([words, *log])

    def fields(self) -> dict[str, Any]:
        """The fields of the `verdict` event, except `world`."""
        lead, kind = self.lead, self.kind
        since_secs = lead.at_secs if lead.since_secs is None else lead.since_secs
        since = time.time() - time.monotonic() + since_secs
        clock = time.strftime("%H:%M:%S", time.gmtime(since))
        phase = f"phase {lead.phase}, " if lead.phase else ""
        return {
            "kind": kind.name,
            "what": kind.what,
            "which": self.which,
            "phase": lead.phase,
            "step": self.step,
            "since": since,
            "evidence": [*self.evidence],
            "action": self.action,
            "why": f"{kind.what}{self.which and ' '}{self.which} {kind.meaning}"
            f" ({phase}after step {self.step}, since {clock} UTC): {self.action}"
            f"{kind.advice and '; '}{kind.advice}",
        }


def judge(
    failures: Sequence[HostFailure],
    *,
    num_hosts: int,
    slices: Sequence[int] = (),
    gone: Collection[int] = (),
    machines: Collection[int] = (),
    step: int = 0,
    before: str = "",
    is_lost: bool = True,
) -> Verdict:
    """The verdict on the failures that ended a world or a run.

    Args:
      failures: the hosts' failures; at least one.
      num_hosts: the number of hosts in the world.
      slices: the slices of the world, in host order.
      gone: the slices that were lost with their memory.
      machines: the machines that were lost.
      step: the number of steps that the world had completed.
      before: the previous world's `Verdict.how`; empty if that world did not fail.
      is_lost: whether a world was lost and the next may continue; if False, the run has
        ended.
    """
    causes = [each for each in failures if not _is_connection(each)] or list(failures)
    died = lost_hosts(causes)
    causes = [each for each in causes if each.host in died] or causes
    lead = first_failure(causes)
    alike = [each for each in causes if _how(each) == _how(lead)]
    hosts = frozenset(each.host for each in alike)
    how = f"{_how(lead)} after step {step}"
    is_all = len(hosts) == num_hosts
    if num_hosts == 1:
        # With a single host, nobody knows whose fault a device error is, except under a
        # single controller whose slices are all alive.
        is_all = not lead.is_silent and not (lead.is_of_devices and is_lost)
    elif not lead.is_silent:
        # Other hosts may have been killed before they could report their failures.
        is_all |= lead.is_hang or 1 < len(alike) == len(causes)
    is_dead = lead.is_silent and not lead.is_hang
    is_aborted = is_dead and _is_aborted(lead)
    is_killed = is_dead and lead.is_signal and not is_aborted
    died_by = lead.message.removeprefix("killed by ").partition(";")[0]
    words = {
        f"in:{lead.phase}": True,
        "machine-gone": machines,
        "slice-gone": gone and not machines,
        "hang": lead.is_hang,
        "devices": lead.is_of_devices and not lead.is_hang,
        "exit": is_dead and not lead.is_signal,
        "aborted": is_aborted,
        "signal": is_killed,
        "crash": is_killed and died_by in _CRASHES,
        died_by: is_killed,
        "all": is_all,
        "one": not is_all,
        "alone": num_hosts == 1,
        "again": how == before,
        "once": how != before,
    } | dict.fromkeys(lead.error, True)
    said = f"{lead.message}\n{lead.log}" if lead.is_silent else lead.message
    kind = next(
        kind
        for kind in KINDS
        if all(any(map(words.get, word.split("|"))) for word in kind.words.split())
        and re.search(kind.says, said)
    )
    facts = {
        f"lost with their memory: slices {_listed(gone)}": gone,
        f"no answer from machines {_listed(machines)}": machines,
        f"the previous world failed in the same way after step {step}": how == before,
    }
    per_slice = num_hosts // len(slices) if slices else 0
    which = {
        "machine": _listed(machines),
        "slice": _listed(gone or {slices[h // per_slice] for h in hosts if per_slice}),
        "program": lead.place,
        "data": "".join(_PATH.findall(lead.message)[:1]),
        "storage": "".join(_PATH.findall(lead.message)[:1]),
        "host": _listed(hosts),
    }
    is_left_out = kind.action == LEAVE_OUT and len(hosts) < num_hosts
    return Verdict(
        kind=kind,
        which=which.get(kind.what, "" if is_all else f"of host {_listed(hosts)}"),
        lead=lead,
        how=how,
        step=step,
        action=kind.action if is_lost else STOP,
        hosts=died or (hosts if is_left_out else frozenset()),
        evidence=(
            *map(_fact, sorted(failures, key=lambda each: each.at_secs)),
            *(fact for fact, is_so in facts.items() if is_so),
        ),
    )


def _how(failure: HostFailure) -> str:
    # Drops numbers, which differ between hosts and worlds.
    message = failure.message.partition("\n")[0]
    return f"{[*failure.error[:1]]} {_NUMBERS.sub('#', message)} {failure.place}"


def _is_aborted(failure: HostFailure) -> bool:
    # JAX logs an abort; the log of another machine is not available.
    is_told = not failure.log or re.search(_CONNECTION, failure.log)
    return failure.is_consequence and bool(is_told)


def _is_connection(failure: HostFailure) -> bool:
    if failure.is_hang or failure.is_consequence:
        return _is_aborted(failure)
    return failure.is_of_devices and bool(re.search(_CONNECTION, failure.message))


def _fact(failure: HostFailure) -> str:
    name = f"{failure.error[0]}: " if failure.is_ours else ""
    phase = f" in phase {failure.phase!r}" if failure.phase else ""
    said = failure.message.partition("\n")[0][:_MOST_SAID]
    at = f" at {failure.place}" if failure.place else ""
    return f"host {failure.host}{phase}: {name}{said}{at}"


def _listed(numbers: Collection[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
