"""The failure of a host, and which failure of several is the cause."""

from __future__ import annotations

import dataclasses
import signal
import time

from elastic_ckpt.core import errors

# JAX aborts a process whose coordination service, on host 0, is gone.
_CONSEQUENCES = (signal.SIGABRT,)


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


def silent_death(host: int, exit_code: int) -> HostFailure:
    """The failure of a host that ended without a report."""
    killed = exit_code < 0
    message = (
        f"killed by {signal.Signals(-exit_code).name}"
        if killed
        else f"ended with exit code {exit_code}"
    )
    return HostFailure(
        host=host,
        message=message,
        is_signal=killed,
        is_silent=True,
        is_consequence=killed and -exit_code in _CONSEQUENCES,
        at_secs=time.monotonic(),
    )


def first_failure(failures: list[HostFailure]) -> HostFailure:
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
    """

    def __init__(
        self,
        message: str,
        *,
        hosts: frozenset[int],
        hung: frozenset[int] = frozenset(),
        at_secs: float,
    ) -> None:
        super().__init__(message)
        self.hosts = hosts
        self.hung = hung
        self.at_secs = at_secs


def lost_hosts(failures: list[HostFailure]) -> frozenset[int] | None:
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


def _has_failed_before(aborted: HostFailure, failures: list[HostFailure]) -> bool:
    return any(
        failure.host == 0
        and not failure.is_silent
        and not failure.is_of_devices
        and failure.at_secs < aborted.at_secs
        for failure in failures
    )
