"""Verdicts: what failed when a run was interrupted, and what is to be done about it.

`judge` goes through one table, `KINDS`, in order; the first kind with a sign that the
evidence shows is the verdict. The evidence is what a run records: how its hosts ended,
what they and JAX said, the phases that they were in, and events. A page of the guides
lists the kinds.

Two rules stand above the table:

* An exception is the program's if several hosts raise the same one, or if it comes
  again at the same step in the next world, even if it speaks of a device. A device does
  not fail on all hosts at one step; a mistake in the program does. What all hosts may
  see at once is left: a network or a service that fails, a file that is damaged.
* A host that lost its connections to another tells nothing about the cause: such errors
  count only if nothing else was recorded.

Sources of the signs: the names of CUDA's driver API (`CUresult`), NVIDIA's catalogue of
Xid errors, `ncclResult_t`, gRPC's status codes as XLA prints them, errno(3), and the
error codes of Amazon S3 and Google Cloud Storage.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from elastic_ckpt.elastic import host_failure, watch
from elastic_ckpt.elastic.host_failure import HostFailure


class What(enum.StrEnum):
    """What can fail."""

    HOST = "host"
    SLICE = "slice"
    MACHINE = "machine"
    DEVICE = "device"
    STORAGE = "storage"
    NETWORK = "network"
    DATA = "data"
    PROGRAM = "program"


class Action(enum.StrEnum):
    """What is to be done with the run."""

    GO_ON = "go on"
    LEAVE_OUT = "leave out"
    RESTART = "restart"
    STOP = "stop"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sign:
    """What the evidence has to show, all of it; what is left empty is not looked at.

    Attributes:
      event: the name of an event.
      fields: a pattern for each of some of its fields.
      error: classes of exceptions, one of which the leading host has raised.
      says: a pattern in the message of its failure, or in its log if it sent none.
      signals: by one of which its process died.
      exited: whether its process ended by itself, without a report.
      hangs: whether it was ended because it hung.
      aborted: whether JAX ended it, for it had lost the coordination service.
      phases: one of which it was in.
      hosts: how many hosts failed in this way: `one` is some, and not all.
      of_devices: whether JAX raised an exception for its devices.
      gone: what is gone, with its memory.
      again: whether the world before failed in the same way at the same step.
      after: a pattern in the tiers and causes that `degraded` has reported before.
    """

    event: str = ""
    fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    error: tuple[str, ...] = ()
    says: str = ""
    signals: tuple[signal.Signals, ...] = ()
    exited: bool | None = None
    hangs: bool | None = None
    aborted: bool | None = None
    phases: tuple[str, ...] = ()
    hosts: Literal["", "one", "all"] = ""
    of_devices: bool | None = None
    gone: Literal["", "slice", "machine"] = ""
    again: bool | None = None
    after: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of interruption.

    Attributes:
      name: in events.
      what: that has failed.
      action: for a world that was lost; a run that has ended stops.
      meaning: what happened, after "host 1" or the like.
      remedy: what a person can do.
      signs: one of them is enough.
    """

    name: str
    what: What
    action: Action
    meaning: str
    remedy: str
    signs: tuple[Sign, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The verdict on one interruption.

    Attributes:
      kind: the name of its kind.
      what: that has failed.
      which: its numbers, path, tier or line of the program; empty if that is not known.
      phase: that it was in; empty if that is not known.
      step: the steps that the world had done.
      since_secs: since when, in seconds since the epoch.
      evidence: facts, each as it was recorded.
      action: what is to be done.
      hosts: that have failed.
      meaning: what happened.
      traceback: of the program; empty if it has raised nothing.
    """

    kind: str
    what: What
    which: str
    phase: str
    step: int
    since_secs: float
    evidence: tuple[str, ...]
    action: Action
    hosts: frozenset[int]
    meaning: str
    traceback: str

    @property
    def line(self) -> str:
        """The verdict in one line, without its evidence."""
        since = time.strftime("%H:%M:%S", time.gmtime(self.since_secs))
        phase = f"phase {self.phase}, " if self.phase else ""
        return (
            f"{self.what}{self.which and ' '}{self.which} {self.meaning} ({phase}after"
            f" step {self.step}, since {since} UTC): {self.action}"
        )

    def fields(self) -> dict[str, Any]:
        """The fields of the event `verdict`."""
        return {
            "kind": self.kind,
            "what": str(self.what),
            "which": self.which,
            "phase": self.phase,
            "step": self.step,
            "since": self.since_secs,
            "evidence": [*self.evidence],
            "action": str(self.action),
            "why": self.line,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failed:
    """How a world failed, as far as the next one compares it.

    Attributes:
      step: the steps that it had done.
      how: what its leading host said, without the numbers in it.
    """

    step: int
    how: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """What a run has recorded of an interruption.

    Attributes:
      failures: of the hosts of a world; empty for an event.
      event: the name of an event; empty for failures.
      fields: of the event.
      num_hosts: of the world.
      slices: of the world, in the order of its hosts.
      gone: the slices that are gone with their memory.
      machines: the machines that are gone.
      is_lost: whether a world was lost, and another one may go on; otherwise the run
        has ended.
      step: the steps that the world had done.
      at_secs: the time of an event, on the machine's monotonic clock.
      epoch_secs: the time at which that clock was 0, in seconds since the epoch.
      degraded: the tiers and causes of earlier `degraded` events, `tier cause`.
      before: how the world before failed; None if it did not.
    """

    failures: Sequence[HostFailure] = ()
    event: str = ""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    num_hosts: int = 1
    slices: Sequence[int] = ()
    gone: frozenset[int] = frozenset()
    machines: frozenset[int] = frozenset()
    is_lost: bool = False
    step: int = 0
    at_secs: float = 0.0
    epoch_secs: float = 0.0
    degraded: frozenset[str] = frozenset()
    before: Failed | None = None


def judge(evidence: Evidence) -> Verdict | None:
    """The verdict on an interruption; None if the evidence shows none."""
    case = _Case(evidence)
    kind = next((each for each in KINDS if any(map(case.shows, each.signs))), None)
    return None if kind is None else case.verdict(kind)


def failed(evidence: Evidence) -> Failed | None:
    """How a world failed, to compare the next one with it."""
    case = _Case(evidence)
    return Failed(step=evidence.step, how=case.how) if case.lead else None


def hosts_of_bad_devices(
    failures: Sequence[HostFailure], num_hosts: int
) -> frozenset[int]:
    """The hosts whose devices failed, if others only lost their connections to them.

    Args:
      failures: all of them reported by JAX, for devices.
      num_hosts: of the world.
    """
    seen = Evidence(failures=failures, num_hosts=num_hosts, is_lost=True)
    verdict = judge(seen)
    if verdict is None or verdict.action is not Action.LEAVE_OUT:
        return frozenset()
    return verdict.hosts if len(verdict.hosts) < num_hosts else frozenset()


# Errors of hosts that have only lost others.
_CONNECTION = re.compile(
    r"Gloo|Connection (closed|reset|refused)|Broken pipe|\bUNAVAILABLE\b"
    r"|\bDEADLINE_EXCEEDED\b|[Cc]oordination ?[Ss]ervice|ncclRemoteError"
    r"|[Bb]arrier timed out|\bABORTED\b"
)
# The signals by which a program ends itself.
_FATAL = (
    signal.SIGSEGV,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGTRAP,
    signal.SIGSYS,
    signal.SIGABRT,
)
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
_KILLED = re.compile(r"killed by (SIG\w+)")
_PATH = re.compile(r"(?:\w+:/)?/[\w.+=@~-]+(?:/[\w.+=@~-]+)*")
_MOST_SAID = 200
# The phases of events that do not name theirs.
_PHASES = {
    "degraded": "save",
    "divergence_found": "step",
    "executable_refused": "compile",
    "component_not_loaded": "restore",
    "replicas_differ": "save",
    "restore_distrusted": "step",
    "restored_from": "restore",
    "step_passed_over": "restore",
}


class _Case:
    """One piece of evidence, and what follows from it alone."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        failures = list(evidence.failures)
        causes = [each for each in failures if not _is_connection(each)] or failures
        lost = host_failure.lost_hosts(causes)
        leading = [each for each in causes if lost and each.host in lost] or causes
        self.lead = host_failure.first_failure(leading) if leading else None
        self.how = "" if self.lead is None else _how(self.lead)
        # The hosts that failed in the same way as the leading one.
        self._alike = [each for each in leading if _how(each) == self.how]
        self._are_all = bool(self._alike) and self._is_everywhere(causes)

    def _is_everywhere(self, causes: Sequence[HostFailure]) -> bool:
        lead = self.lead
        assert lead is not None
        if lead.is_hang and not lead.is_silent:
            return True
        if len(self._alike) == self._evidence.num_hosts:
            if len(self._alike) > 1:
                return True
            # One host alone shows nothing of its devices, but for one controller, whose
            # slices are all there.
            return not lead.is_silent and not (
                lead.is_of_devices and self._evidence.is_lost
            )
        # Others may have been ended before they could report theirs.
        is_raised = not lead.is_silent and not lead.is_hang
        return is_raised and 1 < len(self._alike) == len(causes)

    def shows(self, sign: Sign) -> bool:
        """Whether the evidence has all of a sign."""
        seen = self._evidence
        if sign.event or seen.event:
            return sign.event == seen.event and all(
                re.search(pattern, str(seen.fields[name]))
                for name, pattern in sign.fields.items()
            )
        lead = self.lead
        if lead is None:
            return False
        killed = _KILLED.match(lead.message)
        died_by = killed[1] if killed and lead.is_silent and not lead.is_hang else ""
        is_again = seen.before is not None and seen.before == failed(seen)
        has_exited = lead.is_silent and not lead.is_signal
        gone = "machine" if seen.machines else "slice" if seen.gone else ""
        return (
            (not sign.error or not set(sign.error).isdisjoint(lead.error))
            and (not sign.says or re.search(sign.says, _said(lead)) is not None)
            and (not sign.signals or died_by in [s.name for s in sign.signals])
            and sign.exited in (None, has_exited)
            and sign.hangs in (None, lead.is_hang)
            and sign.aborted in (None, _is_aborted(lead))
            and (not sign.phases or lead.phase in sign.phases)
            and (not sign.hosts or (sign.hosts == "all") == self._are_all)
            and sign.of_devices in (None, lead.is_of_devices and not lead.is_hang)
            and (not sign.gone or sign.gone == gone)
            and sign.again in (None, is_again)
            and (
                not sign.after
                or any(re.search(sign.after, each) for each in seen.degraded)
            )
        )

    def verdict(self, kind: Kind) -> Verdict:
        """The verdict that it is of this kind."""
        seen, lead = self._evidence, self.lead
        action = kind.action
        if not seen.event and not seen.is_lost:
            action = Action.STOP
        hosts = frozenset(each.host for each in self._alike)
        phase = str(seen.fields.get("phase", _PHASES.get(seen.event, "")))
        since_secs = seen.at_secs
        if lead is not None:
            phase = lead.phase
            since_secs = lead.at_secs if lead.since_secs is None else lead.since_secs
        return Verdict(
            kind=kind.name,
            what=kind.what,
            which=self._which(kind, hosts),
            phase=phase,
            step=seen.step,
            since_secs=seen.epoch_secs + since_secs,
            evidence=self._facts(),
            action=action,
            hosts=hosts,
            meaning=kind.meaning,
            traceback="" if lead is None else lead.traceback,
        )

    def _which(self, kind: Kind, hosts: frozenset[int]) -> str:
        seen, lead, fields = self._evidence, self.lead, self._evidence.fields
        if kind.what is What.MACHINE and seen.machines:
            return _listed(seen.machines)
        if kind.what is What.SLICE and seen.gone:
            return _listed(seen.gone)
        if kind.what is What.PROGRAM:
            return lead.place if lead is not None else str(fields.get("component", ""))
        if kind.what in (What.DATA, What.STORAGE):
            if "tier" in fields:
                return str(fields["tier"])
            text = str(fields.get("why", "")) if lead is None else lead.message
            if path := _PATH.search(text):
                return path[0]
        if fields.get("devices"):
            return _listed(fields["devices"])
        if "host" in fields and kind.what is What.HOST:
            return str(fields["host"])
        if "machine" in fields:
            return str(fields["machine"])
        if "slice" in fields:
            name = "" if kind.what is What.SLICE else "of slice "
            return f"{name}{fields['slice']}"
        if kind.what is What.SLICE and seen.slices:
            if lead is not None and "RunError" in lead.error:
                # Of the supervisor, on no host.
                return ""
            per_slice = seen.num_hosts // len(seen.slices) or 1
            return _listed({seen.slices[host // per_slice] for host in hosts})
        if not hosts or self._are_all:
            return ""
        name = "" if kind.what is What.HOST else "of host "
        return f"{name}{_listed(hosts)}"

    def _facts(self) -> tuple[str, ...]:
        seen = self._evidence
        if seen.event:
            told = [f"{name}: {value}" for name, value in seen.fields.items()]
            return (f"{seen.event}: {_cut(', '.join(told))}",)
        facts = []
        for each in sorted(seen.failures, key=lambda each: each.at_secs):
            what = each.message.partition("\n")[0]
            name = each.error[0] if each.error and each.is_ours else ""
            at = f" at {each.place}" if each.place else ""
            phase = f" in phase {each.phase!r}" if each.phase else ""
            fact = f"host {each.host}{phase}: {name}{name and ': '}{_cut(what)}{at}"
            facts.append(fact)
        if seen.gone:
            facts.append(f"gone with their memory: slices {_listed(seen.gone)}")
        if seen.machines:
            facts.append(f"without an answer: machines {_listed(seen.machines)}")
        if seen.before is not None and seen.before == failed(seen):
            facts.append(f"the world before failed alike after step {seen.step}")
        return tuple(facts)


def _said(failure: HostFailure) -> str:
    return f"{failure.message}\n{failure.log}" if failure.is_silent else failure.message


def _how(failure: HostFailure) -> str:
    name = failure.error[0] if failure.error else ""
    message = failure.message.partition("\n")[0]
    return f"{name}: {_NUMBERS.sub('#', message)} {failure.place}"


def _is_aborted(failure: HostFailure) -> bool:
    # JAX says so in the log, which that of another machine is not at hand.
    if not failure.is_consequence:
        return False
    return not failure.log or _CONNECTION.search(failure.log) is not None


def _is_connection(failure: HostFailure) -> bool:
    if failure.is_hang or not (failure.is_of_devices or failure.is_consequence):
        return False
    if failure.is_consequence:
        return _is_aborted(failure)
    return _CONNECTION.search(failure.message) is not None


def _listed(numbers: Any) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_SAID else f"{text[:_MOST_SAID]}..."


_OS_ERRORS = ("OSError", "ClientError", "HttpError", "GoogleAPIError", "BotoCoreError")
_HTTP = r"(?:[Ss]tatus|HTTP|[Cc]ode|[Ee]rror)[^0-9;]{0,20}"
_NO_MEMORY = "RESOURCE_EXHAUSTED|CUDA_ERROR_OUT_OF_MEMORY"
_THROTTLED = rf"SlowDown|Too Many Requests|rateLimitExceeded|{_HTTP}429"


def _of_one_device(says: str) -> Sign:
    # Not of the devices of all hosts at one step, and not at the same step again.
    return Sign(of_devices=True, hosts="one", again=False, says=says)


def _degraded(tier: str, cause: str, why: str = "") -> Sign:
    fields = {"tier": f"^{tier}$", "cause": f"^{cause}$"}
    return Sign(event="degraded", fields=fields | ({"why": why} if why else {}))


def _kind(
    name: str,
    what: What,
    action: Action,
    meaning: str,
    remedy: str,
    *signs: Sign,
) -> Kind:
    return Kind(
        name=name,
        what=what,
        action=action,
        meaning=meaning,
        remedy=remedy,
        signs=signs,
    )


_STORED = "persistent"
# In order: the first that the evidence shows counts.
KINDS: tuple[Kind, ...] = (
    # Gone.
    _kind(
        "machine_lost",
        What.MACHINE,
        Action.LEAVE_OUT,
        "is lost: its supervisor does not answer",
        "look whether it was preempted or is off; it is taken in again when it is back",
        Sign(gone="machine"),
        Sign(event="slice_lost", fields={"why": "its machine is lost"}),
    ),
    _kind(
        "leader_lost",
        What.MACHINE,
        Action.LEAVE_OUT,
        "led the run, and is lost: it has ended, or its claim has lapsed",
        "look whether it was preempted or is off; it follows when it is back",
        Sign(event="leader_lost"),
    ),
    _kind(
        "slice_lost",
        What.SLICE,
        Action.LEAVE_OUT,
        "is lost, with its memory",
        "nothing: it is taken in again when it is back",
        Sign(gone="slice"),
        Sign(event="slice_lost", fields={"why": "it does not answer"}),
    ),
    _kind(
        "slice_preempted",
        What.SLICE,
        Action.LEAVE_OUT,
        "is asked to end (SIGTERM), as machines are that are preempted",
        "nothing: the others continue, and it is taken in again when it is back",
        Sign(event="slice_preempted"),
    ),
    # What ends a run, whatever its hosts do.
    _kind(
        "replaced",
        What.PROGRAM,
        Action.STOP,
        "was replaced: another start continues the run",
        "let the newer start run; stop this one's launcher",
        Sign(error=("ReplacedError",)),
    ),
    _kind(
        "grace_exceeded",
        What.PROGRAM,
        Action.STOP,
        "was asked to end, and ended without a save",
        "raise `termination_grace_period_seconds`, or save more often",
        Sign(error=("StoppedError",)),
    ),
    _kind(
        "too_few_slices",
        What.SLICE,
        Action.STOP,
        "count is too small for the run",
        "bring slices back and start the run again, or lower `min_slices`",
        Sign(error=("RunError",), says="bring slices back and start the run again"),
    ),
    _kind(
        "diverged",
        What.PROGRAM,
        Action.STOP,
        "was ended by a callback, such as after a divergence",
        "[a loss that diverges](broken-run.md#a-loss-that-diverges)",
        Sign(error=("DivergedError",)),
    ),
    _kind(
        "wrong_configuration",
        What.PROGRAM,
        Action.STOP,
        "has a configuration that cannot be",
        "correct the key that the message names",
        Sign(error=("ConfigError",)),
    ),
    _kind(
        "other_model",
        What.PROGRAM,
        Action.STOP,
        "has another state than its checkpoint",
        "load it through a layout, or name another run",
        Sign(error=("OtherModelError",)),
    ),
    _kind(
        "wrong_clock",
        What.MACHINE,
        Action.GO_ON,
        "has a clock that is wrong, so that its requests are refused",
        "synchronise its clock (NTP); renew the certificate if that has expired",
        Sign(
            error=(*_OS_ERRORS, "ElasticCkptError"),
            says="RequestTimeTooSkewed|certificate (has expired|is not yet valid)",
        ),
        Sign(
            event="degraded",
            fields={
                "why": "RequestTimeTooSkewed|certificate (has expired|is not yet valid)"
            },
        ),
    ),
    # Data.
    _kind(
        "data_missing",
        What.DATA,
        Action.STOP,
        "is not there",
        "restore the file, or correct the path",
        Sign(
            error=("DataError",),
            says="matches no file|No such file|contains no text files|cannot be opened",
        ),
    ),
    _kind(
        "data_damaged",
        What.DATA,
        Action.STOP,
        "is damaged",
        "[corrupt records](broken-run.md#corrupt-records)",
        Sign(
            error=("DataError",),
            says="cut short|damaged|cannot be read|not JSON|checksum|corrupt"
            "|ends (here|before)|ends at byte",
        ),
    ),
    _kind(
        "data_changed",
        What.DATA,
        Action.STOP,
        "is other data than the run has begun with",
        "restore what it was, or begin a new run",
        Sign(
            error=("DataError",),
            says="chang|was removed|digest differs|saved by another",
        ),
    ),
    _kind(
        "data_unusable",
        What.DATA,
        Action.STOP,
        "cannot be used as the pipeline says",
        "correct the pipeline, or the data, as the message says",
        Sign(error=("DataError",)),
    ),
    # Steps.
    _kind(
        "step_of_another_run",
        What.STORAGE,
        Action.STOP,
        "contains the steps of another run",
        "[a run that was moved or renamed](broken-run.md"
        "#a-run-that-was-moved-or-renamed)",
        Sign(error=("CheckpointError",), says="steps of another run"),
    ),
    _kind(
        "step_not_stored",
        What.STORAGE,
        Action.STOP,
        "did not take a step that was due",
        "remove the cause that the message names, and start the run again",
        Sign(error=("NotStoredError",)),
    ),
    _kind(
        "step_unreadable",
        What.STORAGE,
        Action.STOP,
        "has no step that can be read",
        "[lost machines and missing parts](broken-run.md"
        "#lost-machines-and-missing-parts)",
        Sign(error=("CheckpointError",)),
    ),
    # Hangs.
    _kind(
        "host_unreachable",
        What.NETWORK,
        Action.LEAVE_OUT,
        "does not connect the host to the others",
        "check routes, firewalls and names between the machines",
        Sign(hangs=True, hosts="one", phases=(watch.REACH,)),
        Sign(hangs=True, hosts="one", phases=(watch.JOIN,), says="hangs in phase"),
        Sign(event="slice_refused", fields={"why": "do not join the others"}),
    ),
    _kind(
        "host_stopped",
        What.HOST,
        Action.LEAVE_OUT,
        "stands still: its process sends no sign",
        "look for SIGSTOP, swapping, a frozen machine",
        Sign(hangs=True, says="no heartbeat"),
    ),
    _kind(
        "restore_hangs",
        What.STORAGE,
        Action.RESTART,
        "does not deliver what is restored",
        "look at the storage; the stacks of all hosts are in their logs",
        Sign(hangs=True, phases=(watch.RESTORE,)),
    ),
    _kind(
        "compile_hangs",
        What.PROGRAM,
        Action.RESTART,
        "does not finish to compile",
        "raise `elastic_hang_timeout_seconds`; the stacks are in the logs",
        Sign(hangs=True, phases=(watch.COMPILE,)),
    ),
    _kind(
        "host_hangs",
        What.HOST,
        Action.LEAVE_OUT,
        "hangs, and the others wait for it",
        "its stacks are in its log",
        Sign(hangs=True, hosts="one"),
    ),
    _kind(
        "collective_hangs",
        What.NETWORK,
        Action.RESTART,
        "stands still: all hosts wait in the same phase",
        "the stacks of all hosts are in their logs; look at the fabric",
        Sign(hangs=True),
    ),
    # What JAX says of devices.
    _kind(
        "device_memory_exhausted",
        What.PROGRAM,
        Action.STOP,
        "needs more memory than its devices have",
        "lower the batch, or raise `microbatches`, or shard more",
        Sign(
            of_devices=True,
            hosts="all",
            says=_NO_MEMORY,
        ),
        Sign(of_devices=True, again=True, says=_NO_MEMORY),
    ),
    _kind(
        "device_memory_taken",
        What.DEVICE,
        Action.LEAVE_OUT,
        "has less memory than the others: another process may use it",
        "end other processes on the device",
        Sign(of_devices=True, says=_NO_MEMORY),
    ),
    _kind(
        "program_refused_by_xla",
        What.PROGRAM,
        Action.STOP,
        "is refused by XLA",
        "correct the program: its traceback is in the error",
        Sign(
            of_devices=True,
            says="^[^:]*: ?(INVALID_ARGUMENT|UNIMPLEMENTED|FAILED_PRECONDITION"
            "|NOT_FOUND|OUT_OF_RANGE)",
        ),
    ),
    _kind(
        "device_memory_bad",
        What.DEVICE,
        Action.LEAVE_OUT,
        "has memory with errors that cannot be corrected (ECC)",
        "drain the machine and reset the device; replace it if that recurs",
        _of_one_device(
            r"\bECC\b|Xid[^\n]*: (48|63|64|94|95)\b|row remap"
            r"|HBM[^\n]{0,40}([Uu]ncorrect|[Pp]arity)|[Uu]ncorrect[^\n]{0,40}HBM",
        ),
    ),
    _kind(
        "device_link_down",
        What.DEVICE,
        Action.LEAVE_OUT,
        "has lost a link to other devices (NVLink, ICI)",
        "drain the machine; look at `nvidia-smi nvlink`, or the health of the slice",
        _of_one_device(r"NVLINK|NVLink|NVSwitch|Xid[^\n]*: 74\b|\bICI\b"),
    ),
    _kind(
        "device_lost",
        What.DEVICE,
        Action.LEAVE_OUT,
        "is gone: its driver does not reach it",
        "drain the machine and restart it; replace the device if that recurs",
        _of_one_device(
            r"fallen off the bus|GPU is lost|Xid[^\n]*: (79|119|120)\b"
            "|CUDA_ERROR_(NO_DEVICE|DEVICE_UNAVAILABLE|SYSTEM_NOT_READY|INVALID_DEVICE)"
            "|TPU[^\\n]*(unhealthy|not healthy|not found)",
        ),
        Sign(hosts="one", error=("RuntimeError",), says="nable to initialize backend"),
    ),
    _kind(
        "slice_restarted",
        What.SLICE,
        Action.RESTART,
        "was restarted, without its arrays",
        "nothing: the run restores what it had",
        Sign(of_devices=True, says="DATA_LOSS|slice.{0,40}(down|restart|unhealthy)"),
    ),
    _kind(
        "fabric_failed",
        What.NETWORK,
        Action.RESTART,
        "failed below a collective (NCCL)",
        "look at `NCCL_DEBUG=WARN`, the counters of the ports, and the switches",
        Sign(
            of_devices=True,
            says=r"NCCL|nccl(System|Unhandled|Internal)Error|NET/IB|ibv_|RoCE|\bEFA\b",
        ),
    ),
    _kind(
        "name_not_resolved",
        What.NETWORK,
        Action.RESTART,
        "does not resolve a name (DNS)",
        "look at the resolver of the machine, and at the service's name",
        Sign(
            error=("JaxRuntimeError", "OSError"),
            says="Name or service not known|name resolution|[Nn]ame resolver"
            "|Could not resolve|DNS resolution",
        ),
    ),
    _kind(
        "coordination_timed_out",
        What.NETWORK,
        Action.RESTART,
        "did not carry an answer of all hosts in time",
        "look for a host that is slow, and at the network of host 0",
        Sign(of_devices=True, says=r"\bDEADLINE_EXCEEDED\b|[Bb]arrier timed out"),
    ),
    _kind(
        "coordination_lost",
        What.NETWORK,
        Action.RESTART,
        "does not lead to the coordination service, on host 0",
        "look at the machine of host 0, and at its network",
        Sign(of_devices=True, says=r"\bUNAVAILABLE\b|[Cc]oordination ?[Ss]ervice"),
    ),
    _kind(
        "connections_lost",
        What.NETWORK,
        Action.RESTART,
        "lost connections between hosts that live",
        "look at the network between the machines",
        Sign(
            of_devices=True,
            says=r"Gloo|Connection (closed|reset|refused)|Broken pipe|\bABORTED\b",
        ),
    ),
    _kind(
        "program_fails_on_devices",
        What.PROGRAM,
        Action.STOP,
        "fails on the devices of all hosts at one step",
        "correct the program: kernels of your own, shapes, indices",
        Sign(of_devices=True, hosts="all"),
    ),
    # The same again: a program, whatever it looks like.
    _kind(
        "program_fails_again",
        What.PROGRAM,
        Action.STOP,
        "fails at the same step in each world",
        "correct the program: its traceback, or its log, is in the error",
        Sign(again=True, of_devices=True),
        Sign(again=True, signals=_FATAL, aborted=False),
    ),
    _kind(
        "device_failed",
        What.DEVICE,
        Action.LEAVE_OUT,
        "failed",
        "look for Xid errors in the kernel's log, or at the health of the slice",
        Sign(of_devices=True),
    ),
    # Processes that died without a word.
    _kind(
        "host_out_of_memory",
        What.HOST,
        Action.RESTART,
        "had its process killed by the kernel, for want of memory",
        "give the host more memory, or keep fewer steps in RAM",
        Sign(signals=(signal.SIGKILL,), says="oom_kill|[Oo]ut of memory|OOMKilled"),
        Sign(exited=True, says="exit code 137"),
    ),
    _kind(
        "host_killed",
        What.HOST,
        Action.RESTART,
        "had its process killed (SIGKILL)",
        "find out who did: the kernel's log, the launcher, an operator",
        Sign(signals=(signal.SIGKILL,)),
    ),
    _kind(
        "host_ended",
        What.HOST,
        Action.RESTART,
        "had its process ended by a signal of others",
        "find out who did: the launcher, an operator, a limit of processor time",
        Sign(
            signals=(
                signal.SIGTERM,
                signal.SIGINT,
                signal.SIGHUP,
                signal.SIGQUIT,
                signal.SIGXCPU,
                signal.SIGXFSZ,
            )
        ),
    ),
    _kind(
        "program_crashes",
        What.PROGRAM,
        Action.STOP,
        "crashes on all hosts",
        "run it with `python -X faulthandler`; look for native extensions",
        Sign(signals=(*_FATAL, signal.SIGBUS), hosts="all", aborted=False),
    ),
    _kind(
        "ram_disk_full",
        What.STORAGE,
        Action.RESTART,
        "has no room on the RAM disk",
        "raise the size of /dev/shm, or keep fewer steps in RAM",
        Sign(signals=(signal.SIGBUS,), after="^local full$"),
        Sign(error=_OS_ERRORS, says="No space left.*/dev/shm|/dev/shm.*No space left"),
        _degraded("local", "full"),
    ),
    _kind(
        "host_memory_bad",
        What.MACHINE,
        Action.RESTART,
        "has memory that cannot be reached (SIGBUS): faulty, or a full RAM disk",
        "look for machine checks in the kernel's log, and at the size of /dev/shm",
        Sign(signals=(signal.SIGBUS,)),
    ),
    _kind(
        "host_cut_off",
        What.NETWORK,
        Action.LEAVE_OUT,
        "does not connect the host to the others any more",
        "check the links of its machine; JAX ends a host without the coordination"
        " service",
        Sign(aborted=True),
    ),
    _kind(
        "host_crashed",
        What.HOST,
        Action.RESTART,
        "crashed",
        "the end of its log has the reason; a crash at the same step is the program's",
        Sign(signals=_FATAL),
    ),
    _kind(
        "program_not_importable",
        What.PROGRAM,
        Action.STOP,
        "cannot be imported",
        "install what it imports, on all machines",
        Sign(error=("ImportError", "SyntaxError")),
        Sign(exited=True, hosts="all", phases=("start",)),
    ),
    _kind(
        "program_exits",
        What.PROGRAM,
        Action.STOP,
        "ended on all hosts before the run did",
        "remove calls of `os._exit` and of `exit` in native code",
        Sign(exited=True, hosts="all"),
    ),
    _kind(
        "host_exited",
        What.HOST,
        Action.RESTART,
        "ended before the run did",
        "the end of its log may have the reason",
        Sign(exited=True),
    ),
    _kind(
        "device_wrong",
        What.DEVICE,
        Action.LEAVE_OUT,
        "computes wrong values",
        "drain its machine, and have the device tested",
        Sign(event="slice_refused", fields={"why": "and sound devices compute"}),
        Sign(error=("DeviceWrongError",)),
        Sign(event="replicas_differ", fields={"is_certain": "True"}),
    ),
    _kind(
        "device_too_slow",
        What.DEVICE,
        Action.LEAVE_OUT,
        "does not finish its check",
        "nothing: it is checked again, at longer and longer intervals",
        Sign(event="slice_refused", fields={"why": "did not finish the check"}),
    ),
    _kind(
        "device_check_failed",
        What.DEVICE,
        Action.LEAVE_OUT,
        "cannot be used: its check failed",
        "the log that the event names has the reason",
        Sign(event="slice_refused", fields={"why": "failed in the check"}),
    ),
    # Tiers, while the run goes on.
    _kind(
        "storage_full",
        What.STORAGE,
        Action.GO_ON,
        "is full",
        "make room, or keep fewer steps; what waits is stored by itself",
        _degraded(_STORED, "full"),
        Sign(error=_OS_ERRORS, says="No space left|[Qq]uota exceeded"),
    ),
    _kind(
        "storage_read_only",
        What.STORAGE,
        Action.GO_ON,
        "cannot be written: it is mounted read-only",
        "look for errors of the disk, and mount it for writing",
        _degraded(".*", "read_only"),
        Sign(error=_OS_ERRORS, says="Read-only file system"),
    ),
    _kind(
        "storage_throttled",
        What.STORAGE,
        Action.GO_ON,
        "refuses requests, as too many",
        "save less often, or ask for a higher quota",
        _degraded(_STORED, ".*", _THROTTLED),
        Sign(error=_OS_ERRORS, says=_THROTTLED),
    ),
    _kind(
        "storage_refused",
        What.STORAGE,
        Action.GO_ON,
        "refuses this account",
        "check who may write there, and that credentials are valid",
        _degraded(_STORED, "refused"),
        Sign(error=_OS_ERRORS[1:], says=rf"Forbidden|AccessDenied|{_HTTP}40[13]"),
    ),
    _kind(
        "storage_stale",
        What.STORAGE,
        Action.GO_ON,
        "has a stale handle: its server was changed or restarted",
        "mount it again",
        _degraded(".*", ".*", "Stale file handle"),
        Sign(error=_OS_ERRORS, says="Stale file handle"),
    ),
    _kind(
        "storage_io_error",
        What.STORAGE,
        Action.GO_ON,
        "has input/output errors",
        "look at the disk: the kernel's log, SMART",
        _degraded(".*", ".*", "Input/output error"),
        Sign(error=_OS_ERRORS, says="Input/output error"),
    ),
    _kind(
        "storage_slow",
        What.STORAGE,
        Action.GO_ON,
        "does not answer in time",
        "save less often, or use faster storage",
        _degraded(_STORED, "slow"),
    ),
    _kind(
        "storage_unreachable",
        What.STORAGE,
        Action.GO_ON,
        "cannot be reached",
        "bring it back: what waits is stored by itself",
        _degraded(_STORED, "unreachable"),
        Sign(error=_OS_ERRORS[1:], says=rf"{_HTTP}5[0-9][0-9]|Service Unavailable"),
    ),
    _kind(
        "storage_missing",
        What.STORAGE,
        Action.GO_ON,
        "is not there",
        "bring the directory or bucket back",
        _degraded("(persistent|local)", "missing"),
    ),
    _kind(
        "peer_unreachable",
        What.NETWORK,
        Action.GO_ON,
        "does not lead to a peer that takes copies",
        "look at the machine that the event names",
        _degraded("peer", "(unreachable|slow|missing)"),
    ),
    _kind(
        "peer_refused",
        What.NETWORK,
        Action.GO_ON,
        "leads to a peer that refuses this run",
        "give all machines the run's secret",
        _degraded("peer", "refused"),
    ),
    _kind(
        "copies_differ",
        What.STORAGE,
        Action.GO_ON,
        "holds a step whose copies differ",
        "look for faulty memory: `elastic-ckpt verify` reads all",
        _degraded(".*", "damaged"),
        Sign(event="step_passed_over", fields={"why": "digest|damaged|different"}),
    ),
    _kind(
        "copies_damaged",
        What.STORAGE,
        Action.GO_ON,
        "had bad copies, which others replaced",
        "damage that recurs is faulty memory or a faulty disk",
        Sign(event="restored_from", fields={"bad_copies": "[1-9]"}),
    ),
    _kind(
        "state_corrupt",
        What.DEVICE,
        Action.GO_ON,
        "held a corrupt state when it was saved",
        "look for devices that compute wrong values: `replica_validation`",
        Sign(event="restore_distrusted"),
    ),
    _kind(
        "executable_damaged",
        What.STORAGE,
        Action.GO_ON,
        "has a compiled program that cannot be used",
        "nothing: it is compiled anew",
        Sign(event="executable_refused"),
    ),
    _kind(
        "component_failed",
        What.PROGRAM,
        Action.GO_ON,
        "has a component that cannot be saved or loaded",
        "correct the component whose error this is",
        _degraded(".*", "component"),
        Sign(event="component_not_loaded"),
    ),
    _kind(
        "tier_failed",
        What.STORAGE,
        Action.GO_ON,
        "did not take a step",
        "the event has the reason",
        _degraded(".*", "(other|refused|slow|unreachable|full)"),
    ),
    # Training.
    _kind(
        "loss_not_finite",
        What.PROGRAM,
        Action.GO_ON,
        "has a loss or gradient that is not finite",
        "[a loss that diverges](broken-run.md#a-loss-that-diverges)",
        Sign(
            event="divergence_found",
            fields={"why": r"\b(nan|-?inf)\b", "action": "^(?!abort)"},
        ),
    ),
    _kind(
        "loss_diverges",
        What.PROGRAM,
        Action.GO_ON,
        "has a loss or gradient that diverges",
        "[a loss that diverges](broken-run.md#a-loss-that-diverges)",
        Sign(event="divergence_found", fields={"action": "^(?!abort)"}),
    ),
    _kind(
        "data_slow",
        What.DATA,
        Action.GO_ON,
        "comes too slowly at one host",
        "[a slow run](slow-run.md); `leave_out_slow` leaves its slice out",
        Sign(event="slow_host", fields={"phase": "^data$"}),
    ),
    _kind(
        "host_slow",
        What.HOST,
        Action.GO_ON,
        "is slow, and the others wait for it",
        "[a slow run](slow-run.md); `leave_out_slow` leaves its slice out",
        Sign(event="slow_host"),
    ),
    # Exceptions of the program.
    _kind(
        "host_memory_exhausted",
        What.PROGRAM,
        Action.STOP,
        "needs more memory than the host has",
        "give the host more memory, or read less ahead",
        Sign(error=("MemoryError",)),
        Sign(error=_OS_ERRORS, says="Cannot allocate memory"),
    ),
    _kind(
        "too_many_files",
        What.PROGRAM,
        Action.STOP,
        "has too many files open, or too many processes",
        "raise `ulimit -n` and `ulimit -u`, or close what is not used",
        Sign(
            error=("OSError", "RuntimeError"),
            says="Too many open files|can't start new thread"
            "|Resource temporarily unavailable",
        ),
    ),
    _kind(
        "service_unreachable",
        What.NETWORK,
        Action.STOP,
        "does not lead to a service that the program uses",
        "look at the service that the traceback names",
        Sign(error=("ConnectionError", "TimeoutError", "gaierror")),
    ),
    _kind(
        "cannot_go_on",
        What.PROGRAM,
        Action.STOP,
        "cannot go on",
        "do what the error says",
        Sign(error=("ElasticCkptError",)),
    ),
    _kind(
        "program_failed",
        What.PROGRAM,
        Action.STOP,
        "raised an exception on all hosts",
        "correct the program: its traceback is in the error",
        Sign(error=("BaseException",), hosts="all"),
    ),
    _kind(
        "program_failed_on_one_host",
        What.PROGRAM,
        Action.STOP,
        "raised an exception, and not on all hosts",
        "correct the program, or what only that host has: its traceback is in the"
        " error",
        Sign(error=("BaseException",)),
    ),
)
# The events that can be signs.
EVENTS = frozenset(sign.event for kind in KINDS for sign in kind.signs) - {""}
