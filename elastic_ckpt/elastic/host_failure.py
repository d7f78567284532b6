"""The failure of a host, and which failure of several is the cause."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Sequence

from elastic_ckpt.core import errors
from elastic_ckpt.elastic.watch import Hang

# JAX aborts a process whose coordination service, on host 0, is gone.
_CONSEQUENCES = (signal.SIGABRT,)
# The directories whose functions called the training function, and those of libraries.
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib")})
_MOST_LINES = 60


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostFailure:
    """The reason why a host stopped.

    Attributes:
      host: the host's number.
      message: the message for the user.
      is_ours: whether it is an ElasticCkptError, whose message has a remedy.
      may_follow: whether the death of another host may have caused it, although it is
        ours.
      is_replaced: whether it is a ReplacedError: another start continues the run.
      is_of_devices: whether JAX raised it, for devices that failed or are gone.
      is_signal: whether the process died by a signal.
      is_silent: whether it ended without reporting a failure.
      is_consequence: whether it died as hosts do when host 0 is gone.
      is_hang: whether it was ended because it hangs.
      at_secs: the time, on the machine's monotonic clock.
      since_secs: since when it had not made progress; None if that is the same time.
      error: the names of the exception's class and of its bases; empty without one.
      traceback: of the exception, from the first function that is not of this library.
      place: the user's line that raised it, `file:line`; empty if there is none.
      phase: that the host was in.
      log: the end of its log, of a host that reported nothing.
    """

    host: int
    message: str
    is_ours: bool = False
    may_follow: bool = False
    is_replaced: bool = False
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


def of_exception(host: int, error: BaseException) -> HostFailure:
    """The failure of a host whose program has raised an exception."""
    is_ours = isinstance(error, errors.ElasticCkptError)
    told = traceback.TracebackException.from_exception(error)
    # JAX adds a note about its traceback.
    told.__notes__ = None
    frames = list(told.stack)
    while frames and frames[0].filename.startswith(_OURS):
        del frames[0]
    if frames:
        told.stack = traceback.StackSummary.from_list(frames)
    users = [
        frame
        for frame in frames
        if not frame.filename.startswith((_OURS, "<", *_LIBRARIES))
    ]
    lines = "".join(told.format()).rstrip().splitlines()
    if len(lines) > _MOST_LINES:
        lines = [*lines[:1], "  ...", *lines[2 - _MOST_LINES :]]
    return HostFailure(
        host=host,
        message=str(error) if is_ours else [*told.format_exception_only()][-1].strip(),
        is_ours=is_ours,
        may_follow=isinstance(error, errors.NotStoredError),
        is_replaced=isinstance(error, errors.ReplacedError),
        is_of_devices=is_of_devices(error),
        at_secs=time.monotonic(),
        error=[kind.__name__ for kind in type(error).__mro__],
        traceback="\n".join(lines),
        place=f"{users[-1].filename}:{users[-1].lineno}" if users else "",
    )


def is_of_devices(error: BaseException) -> bool:
    """Whether JAX raised it, for devices that failed or are gone."""
    # JAX was imported by whatever could raise it. On CPU, a lost connection is a
    # ValueError.
    jax = sys.modules.get("jax")
    return jax is not None and (
        isinstance(error, jax.errors.JaxRuntimeError)
        or (isinstance(error, ValueError) and "Gloo" in str(error))
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
        is_consequence=killed and -exit_code in _CONSEQUENCES,
        at_secs=time.monotonic(),
    )


def of_hang(host: int, hang: Hang, phase: str, *, now_secs: float) -> HostFailure:
    """The failure of a host that is ended because its world hangs.

    Args:
      host: one of the culprits, or any host if there are none.
      hang: of the world.
      phase: that the host is in.
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
        phase=phase,
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


def first_failure(failures: Sequence[HostFailure]) -> HostFailure:
    """The failure that caused the others.

    Most of our errors are never a consequence of another host's death, and death by a
    signal is never a consequence of an exception, unless JAX has aborted the host; nor
    is that of failed devices. Among equals the earliest is first.
    """
    return min(
        failures,
        key=lambda f: (
            not f.is_ours or f.may_follow,
            not f.is_signal or f.is_consequence,
            f.is_of_devices,
            f.is_consequence,
            f.at_secs,
        ),
    )


class WorldLostError(errors.RunError):
    """A world ended because hosts or devices were lost; another world may go on.

    Attributes:
      hosts: the hosts that died; empty if devices failed and all processes lived.
      hung: those of them that were ended because they hung.
      at_secs: the time of the first failure, on the machine's monotonic clock.
      failures: of all hosts that failed.
      num_hosts: of the world.
      gone: the slices that are gone with their memory; a cluster adds them.
      machines: the machines of these slices, if the run has several; likewise.
    """

    def __init__(
        self,
        message: str,
        *,
        hosts: frozenset[int],
        hung: frozenset[int] = frozenset(),
        at_secs: float,
        failures: Sequence[HostFailure] = (),
        num_hosts: int = 1,
        gone: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__(message)
        self.hosts = hosts
        self.hung = hung
        self.at_secs = at_secs
        self.failures = tuple(failures)
        self.num_hosts = num_hosts
        self.gone = gone
        self.machines: frozenset[int] = frozenset()


class ProgramFailedError(errors.RunError):
    """The program of a world failed, and another world would fail, too.

    Its message begins with the traceback of the user's program, if it has one.

    Attributes:
      why: the failure in one line.
      failures: of all hosts that failed.
      num_hosts: of the world.
    """

    def __init__(
        self,
        message: str,
        *,
        why: str,
        failures: Sequence[HostFailure],
        num_hosts: int = 1,
    ) -> None:
        super().__init__(message)
        self.why = why
        self.failures = tuple(failures)
        self.num_hosts = num_hosts


def lost_hosts(failures: Sequence[HostFailure]) -> frozenset[int] | None:
    """The hosts whose death ended a world; None if the program itself failed.

    A host that JAX aborts has lost the coordination service. It is not a cause if
    another host died otherwise, or if the program failed before on host 0, which ends
    the service. If host 0 is aborted, too, the others have lost it.
    """
    silent = [failure for failure in failures if failure.is_silent]
    causes = [failure for failure in silent if not failure.is_consequence]
    if not causes and silent and not _has_failed_before(silent[0], failures):
        causes = [each for each in silent if each.host == 0] or silent[:1]
    if causes:
        return frozenset(failure.host for failure in causes)
    if failures and all(failure.is_of_devices for failure in failures):
        return frozenset()
    return None


def _has_failed_before(aborted: HostFailure, failures: Sequence[HostFailure]) -> bool:
    return any(
        failure.host == 0
        and not failure.is_silent
        and not failure.is_of_devices
        and failure.at_secs < aborted.at_secs
        for failure in failures
    )
