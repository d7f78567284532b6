"""Failures of hosts, and the verdict on them: what failed, and what the run does.

A host that fails leaves a `HostFailure`. When a world has ended with failures, `judge`
finds the one that caused the others, describes it by a few words (how the host ended,
the classes of its exception, its phase, whether all hosts failed alike, whether the
world before had failed in the same way) and takes the first row of `KINDS` that has
only such words and whose pattern is in what the host said. A row is one of three
actions: restart the world, leave the slice out, or stop.

Two rules stand above the table:

* An exception is the program's if several hosts raise the same one, or if it comes
  again at the same step in the next world, even if it speaks of a device.
* A host that lost its connections to another tells nothing about the cause: such errors
  count only if nothing else was recorded.

Sources of the patterns: the names of CUDA's driver API (`CUresult`), NVIDIA's catalogue
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
# The signals by which a program ends itself.
_CRASHES = ("SIGSEGV", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS", "SIGABRT", "SIGBUS")
# The directories whose functions called the training function, and those of libraries.
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib")})
_MOST_TRACEBACK, _MOST_SAID = 8000, 200
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_PATH = re.compile(r"(?:\w+:/)?/[\w.+=@~-]+(?:/[\w.+=@~-]+)*")
_BYTES = re.compile(r"(\d{6,}) ?bytes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostFailure:
    """The reason why a host stopped.

    Attributes:
      host: the host's number.
      message: the message for the user.
      is_ours: whether it is an ElasticCkptError, whose message has a remedy.
      is_of_devices: whether JAX raised it, for devices that failed or are gone.
      is_signal: whether the process died by a signal.
      is_silent: whether it ended without reporting a failure.
      is_consequence: whether it died as hosts do when host 0 is gone.
      is_hang: whether it was ended because it hangs.
      at_secs: the time, on the machine's monotonic clock.
      since_secs: since when it had not made progress; None if that is the same time.
      error: the names of the exception's class and of its bases; empty without one.
      traceback: of the exception, its end.
      place: the user's line that raised it, `file:line`; empty if there is none.
      phase: that the host was in.
      log: the end of its log, of a host that reported nothing.
      log_file: the path of its log; empty if it has none of its own.
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
        """What happened, and the end of the log."""
        log = [f"  | {line}" for line in self.log.splitlines()]
        if log:
            log.insert(0, f"the end of its log, {self.log_file}:")
        return [f"host {self.host} failed: {self.message}", *log]


def of_exception(host: int, error: BaseException) -> HostFailure:
    """The failure of a host whose program has raised an exception."""
    is_ours = isinstance(error, errors.ElasticCkptError)
    names = [kind.__name__ for kind in type(error).__mro__]
    said = str(error) if is_ours else f"{type(error).__name__}: {error}"
    users = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((_OURS, "<", *_LIBRARIES))
    ]
    # Without the notes, of which JAX adds one about its traceback.
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
    """The failure of a host that ended without a report.

    Args:
      host: its number.
      exit_code: negative for a signal.
      oom_kills: how many processes of its machine the kernel has killed since the world
        began, because memory was short.
    """
    killed = exit_code < 0
    message = (
        f"killed by {signal.Signals(-exit_code).name}"
        if killed
        else f"ended with exit code {exit_code}"
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
    """The failure of a host that is ended because its world hangs.

    Args:
      host: one of the culprits, or any host if there are none.
      hang: of the world.
      now_secs: the time, on the machine's monotonic clock.
    """
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
    """How many processes of this machine the kernel has killed for want of memory.

    Source: `oom_kill` in /proc/vmstat (proc_vmstat(5)); 0 where it has none.
    """
    try:
        with open("/proc/vmstat") as file:
            counts = dict(line.split() for line in file)
    except OSError:
        return 0
    return int(counts.get("oom_kill", 0))


class WorldLostError(errors.RunError):
    """A world ended because hosts failed; another world may go on (see `judge`).

    Attributes:
      failures: of all hosts that failed, one at least.
      num_hosts: of the world.
      hosts: whose slices are lost; empty if the program or the network failed.
      is_of_program: whether the program failed, and would again.
      gone: the slices that are gone with their memory.
      machines: the machines of these slices, if the run has several.
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
    """The program of a world failed, and another world would fail, too.

    The traceback of the user's program is a note of the error, if it has one.

    Attributes:
      failures: of all hosts that failed, one at least.
    """

    def __init__(self, message: str, *, failures: Sequence[HostFailure]) -> None:
        super().__init__(message)
        self.failures = tuple(failures)
        first = first_failure(failures)
        if first.traceback and not first.is_ours:
            self.add_note(f"\n{first.traceback}")


def first_failure(failures: Sequence[HostFailure]) -> HostFailure:
    """The failure that caused the others.

    Most of our errors are never a consequence of another host's death, and death by a
    signal is never a consequence of an exception, unless JAX has aborted the host; nor
    is that of failed devices. Among equals the earliest is first.
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
    """The hosts that died, or compute wrong values, and ended a world by that.

    A host that JAX aborts has lost the coordination service. It is not a cause if
    another host died otherwise, or if the program failed before on host 0, which ends
    the service. If host 0 is aborted, too, the others have lost it.
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
      name: in events.
      what: that has failed: `host`, `slice`, `machine`, `device`, `network`, `storage`,
        `data` or `program`.
      action: for a world that was lost; a run that has ended stops.
      meaning: what happened, after "host 1" or the like.
      words: all of which describe the failure; of those joined by `|` one does.
      says: a pattern in what the host said, or in its log if it said nothing.
      advice: what a person can do.
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
_DRAIN = "drain its machine; look at the kernel's log, `nvidia-smi`, the slice's health"

# fmt: off
# In order: the first row that fits is the verdict.
KINDS = (
    # Gone.
    Kind("machine_lost", "machine", LEAVE_OUT, "does not answer", "machine-gone",
         advice="look whether it was preempted or is off"),
    Kind("slice_lost", "slice", LEAVE_OUT, "is lost, with its memory",
         "slice-gone"),
    Kind("device_wrong", "device", LEAVE_OUT, "computes wrong values",
         "DeviceWrongError", advice="drain its machine, and have the device tested"),
    # Errors of ours, whose messages have the remedy.
    Kind("replaced", "program", STOP, "is continued by another start", "ReplacedError"),
    Kind("grace_exceeded", "program", STOP, "did not save before it was ended",
         "StoppedError"),
    Kind("diverged", "program", STOP, "was ended by a callback", "DivergedError"),
    Kind("wrong_configuration", "program", STOP, "cannot be configured so",
         "ConfigError"),
    Kind("other_model", "program", STOP, "has another state than its checkpoint",
         "OtherModelError"),
    Kind("data_unusable", "data", STOP, "cannot be used", "DataError"),
    Kind("step_not_stored", "storage", STOP, "did not take a step that was due",
         "NotStoredError"),
    Kind("step_unreadable", "storage", STOP, "has no step that can be read",
         "CheckpointError"),
    Kind("cannot_go_on", "program", STOP, "cannot go on", "ElasticCkptError"),
    # Hangs.
    Kind("host_unreachable", "network", LEAVE_OUT, "does not connect the host",
         f"hang one in:{watch.REACH}", advice="check routes, firewalls and names"),
    Kind("host_unreachable", "network", LEAVE_OUT, "does not connect the host",
         f"hang one in:{watch.JOIN}", "hangs in phase",
         advice="check routes, firewalls and names"),
    Kind("host_stopped", "host", LEAVE_OUT, "stands still: it sends no heartbeat",
         "hang", "no heartbeat", "look for SIGSTOP, swapping, a frozen machine"),
    Kind("restore_hangs", "storage", RESTART, "does not deliver what is restored",
         f"hang in:{watch.RESTORE}", advice="look at the storage"),
    Kind("host_hangs", "host", LEAVE_OUT, "hangs, and the others wait for it",
         "hang one", advice="its stacks are in its log"),
    Kind("world_hangs", "network", RESTART, "stands still: all hosts wait in one phase",
         "hang", advice="raise `elastic_hang_timeout_seconds` if the phase takes long"),
    # What JAX says of devices.
    Kind("device_memory_exhausted", "program", STOP,
         "needs more memory than its devices have",
         "devices all|again|alone", _NO_MEMORY, _SMALLER),
    Kind("device_memory_taken", "device", LEAVE_OUT, "has less memory than the others",
         "devices", _NO_MEMORY, "end other processes on the device"),
    Kind("program_refused_by_xla", "program", STOP, "is refused by XLA",
         "devices", _REFUSED),
    Kind("device_bad", "device", LEAVE_OUT, "has an error of its hardware",
         "devices one once", _BAD_DEVICE, _DRAIN),
    Kind("device_bad", "device", LEAVE_OUT, "cannot be used by JAX",
         "RuntimeError one", "nable to initialize backend", _DRAIN),
    Kind("slice_restarted", "slice", RESTART, "was restarted, without its arrays",
         "devices", "DATA_LOSS|slice.{0,40}(down|restart|unhealthy)"),
    Kind("network_failed", "network", RESTART, "lost connections between live hosts",
         "devices", _NETWORK,
         "look at links, switches, name servers, `NCCL_DEBUG=WARN`"),
    Kind("fails_on_devices", "program", STOP, "fails on the devices of all hosts",
         "devices all", advice="look at kernels of your own, shapes, indices"),
    Kind("fails_again", "program", STOP, "fails at the same step in each world",
         "devices|crash again"),
    Kind("device_failed", "device", LEAVE_OUT, "failed", "devices", advice=_DRAIN),
    # Processes that died without a word.
    Kind("host_out_of_memory", "host", RESTART,
         "was killed by the kernel, for want of memory",
         "SIGKILL", "oom_kill|[Oo]ut of memory|OOMKilled",
         "give it more memory, or keep fewer steps in RAM"),
    Kind("host_out_of_memory", "host", RESTART, "was killed, for want of memory",
         "exit", "exit code 137", "give it more memory, or keep fewer steps in RAM"),
    Kind("host_cut_off", "network", LEAVE_OUT, "does not connect the host any more",
         "aborted", advice="check the links of its machine"),
    Kind("program_crashes", "program", STOP, "crashes on all hosts", "crash all",
         advice="look at native extensions, with `python -X faulthandler`"),
    Kind("host_crashed", "host", RESTART, "crashed", "crash",
         advice="see the end of its log; at SIGBUS, whether /dev/shm is full"),
    Kind("host_killed", "host", RESTART, "was killed from outside", "signal",
         advice="look at the launcher, operators, limits, the kernel's log"),
    Kind("not_importable", "program", STOP, "cannot be imported",
         "ImportError|SyntaxError", advice="install what it imports on all machines"),
    Kind("not_importable", "program", STOP, "cannot be imported", "exit all in:start",
         advice="see what each host printed to standard error"),
    Kind("program_exits", "program", STOP, "ended on all hosts before the run did",
         "exit all", advice="remove calls of `os._exit`, or of `exit` in native code"),
    Kind("host_exited", "host", RESTART, "ended before the run did", "exit",
         advice="see the end of its log"),
    # Exceptions of the program.
    Kind("shapes_differ", "program", STOP, "combines arrays that do not fit",
         "TypeError|ValueError", "[Ss]hape"),
    Kind("not_finite", "program", STOP, "computes what is not a finite number",
         "FloatingPointError", advice="look at the operation that the traceback names"),
    Kind("program_failed", "program", STOP, "raised an exception", ""),
)
# fmt: on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on one interruption.

    Attributes:
      kind: the row of the table.
      which: the numbers of what failed, its path or line; empty if that is not known.
      lead: the failure that caused the others.
      how: in which way it failed, and after which step, to compare worlds.
      step: the steps that the world had done.
      action: what the run does.
      hosts: that are lost: they died, or their devices alone failed.
      evidence: facts, each as it was recorded.
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
        """What happened, what the host said and what helps, for the author."""
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
        """The fields of the event `verdict`, but the world."""
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
    """The verdict on the failures with which a world, or a run, has ended.

    Args:
      failures: of its hosts, one at least.
      num_hosts: of the world.
      slices: of the world, in the order of its hosts.
      gone: the slices that are gone with their memory.
      machines: the machines that are gone.
      step: the steps that the world had done.
      before: how the world before failed, a `Verdict.how`; empty if it did not.
      is_lost: whether a world was lost, and another one may go on; otherwise the run
        has ended.
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
        # One host alone shows nothing of its devices, but for one controller, whose
        # slices are all there.
        is_all = not lead.is_silent and not (lead.is_of_devices and is_lost)
    elif not lead.is_silent:
        # Others may have been ended before they could report theirs.
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
        f"gone with their memory: slices {_listed(gone)}": gone,
        f"without an answer: machines {_listed(machines)}": machines,
        f"the world before failed alike after step {step}": how == before,
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
    # Without the numbers in it, which differ between hosts and worlds.
    message = failure.message.partition("\n")[0]
    return f"{[*failure.error[:1]]} {_NUMBERS.sub('#', message)} {failure.place}"


def _is_aborted(failure: HostFailure) -> bool:
    # JAX says so in the log, which that of another machine is not at hand.
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
