"""Decides what a run does when its slices change: continue, wait, or stop.

Everything here is a pure function of the policy and the live slices. The runtime finds
the live slices, calls `decide`, and acts.

Two batch policies, both exact:

* `keep_global`: a batch has the same rows on any number of slices. On fewer slices,
  each device computes its rows in equal microbatches and sums the gradients (gradient
  accumulation), so that no device holds more rows at a time than fit in its memory.
* `keep_per_device`: each device has the same number of rows, so a batch grows and
  shrinks with the number of slices, as in MaxText.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection
from typing import Literal, get_args

from elastic_ckpt.core import errors

# Returns why a number of slices cannot compute a number of rows; None if they can.
Objection = Callable[[int, int], str | None]


# What stays the same when the number of slices changes.
Batch = Literal["keep_global", "keep_per_device"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """What a run does when slices are lost and rejoin.

    Attributes:
      min_slices: the minimum number of slices to train on.
      max_slices: the maximum number of slices to train on; additional slices are
        spares. None uses all.
      batch: what stays the same when the number of slices changes: the rows of the
        global batch (`"keep_global"`) or the rows of each device (`"keep_per_device"`).
      wait_secs: the time to wait for `min_slices` before the run ends with an error.
      settle_secs: the time that a new slice must be alive before the run expands onto
        it.
      max_retries: the number of worlds in a row that may be lost without a new step
        before the run ends with an error.
      quarantine_failures: the number of failures within `quarantine_secs` after which a
        slice is not used again; 0 disables the quarantine.
      quarantine_secs: the time window in which failures count.
      leave_out_slow: whether to exclude slices with slow hosts if enough others remain.
    """

    min_slices: int = 1
    max_slices: int | None = None
    batch: Batch = "keep_global"
    wait_secs: float = 600.0
    settle_secs: float = 10.0
    max_retries: int = 10
    quarantine_failures: int = 0
    quarantine_secs: float = 3600.0
    leave_out_slow: bool = False

    def __post_init__(self) -> None:
        if self.batch not in get_args(Batch):
            raise errors.ConfigError(
                f"Policy(batch={self.batch!r}): choose one of {get_args(Batch)}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The rows of a batch, from which each world gets its `rows` and `microbatches`.

    Attributes:
      devices_per_slice: the number of devices in a slice.
      num_slices: the number of slices for which `rows` was chosen.
      rows: the number of rows in a global batch on `num_slices` slices; `Policy.batch`
        determines the rows on any other number of slices. 0 lets the training function
        choose.
      max_rows_per_device: the maximum number of rows that a device computes at a time;
        a device splits more rows into microbatches.
      objection: a function of a number of slices and a number of rows. It returns why
        the data cannot be split that way, or None if it can. The run does not form a
        world that has an objection.
    """

    devices_per_slice: int
    num_slices: int = 1
    rows: int = 0
    max_rows_per_device: int = 1
    objection: Objection = lambda *_: None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """A failure of a slice: it was lost, or failed its check when it rejoined.

    Attributes:
      at_secs: the time of the failure, on the monotonic clock.
    """

    slice: int
    at_secs: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slices:
    """The slices that a run may use.

    Attributes:
      current: the slices of the current or last world, except the lost ones; empty
        before the first world.
      alive_secs: how long each live slice has been alive, in seconds, keyed by slice
        number.
      failures: all failures in this run, in any order.
      slow: the slices that have slow hosts.
    """

    current: frozenset[int] = frozenset()
    alive_secs: dict[int, float]
    failures: tuple[Failure, ...] = ()
    slow: frozenset[int] = frozenset()

    def quarantined(self, policy: Policy) -> frozenset[int]:
        """The slices that failed too often within the policy's time window.

        A slice stays quarantined: failures are never forgotten.
        """
        most = policy.quarantine_failures
        by_slice: dict[int, list[float]] = collections.defaultdict(list)
        for failure in self.failures if most else ():
            by_slice[failure.slice].append(failure.at_secs)
        return frozenset(
            number
            for number, at_secs in by_slice.items()
            if any(
                last - first <= policy.quarantine_secs
                for first, last in zip(
                    sorted(at_secs), sorted(at_secs)[most - 1 :], strict=False
                )
            )
        )

    def usable(self, policy: Policy) -> list[int]:
        """The slices to train on, best first: the current world's slices, then others.

        A slice that has just rejoined is usable only once it has settled, unless no
        training would be disturbed: before the first world, or with fewer than
        `min_slices` slices.
        """
        healthy = self.alive_secs.keys() - self.quarantined(policy)
        settled = {
            number
            for number in healthy
            if number in self.current or self.alive_secs[number] >= policy.settle_secs
        }
        is_training = self.current and len(settled) >= policy.min_slices
        usable = settled if is_training else healthy
        return sorted(usable, key=lambda number: (number not in self.current, number))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Train on these slices.

    Attributes:
      slices: the slices, in mesh order.
      spares: the usable slices that the world does not need.
      rows: the number of rows in a global batch.
      accumulated: the number of microbatches in which a device computes its rows.
    """

    slices: tuple[int, ...]
    spares: tuple[int, ...]
    rows: int
    accumulated: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wait:
    """Wait for more slices.

    Attributes:
      why: what is missing.
      within_secs: the maximum time to wait; 0 means save and stop.
    """

    why: str
    within_secs: float


Decision = Train | Wait


def decide(
    slices: Slices,
    policy: Policy,
    work: Work,
    *,
    waited_secs: float = 0.0,
) -> Decision:
    """Chooses the largest number of usable slices that can divide the batch, or waits.

    A spare replaces a lost slice, so that the mesh shape and the compiled program stay
    the same. Slices of the current world are preferred.
    """
    if slices.slow and policy.leave_out_slow:
        others = dataclasses.replace(
            slices,
            alive_secs={
                number: secs
                for number, secs in slices.alive_secs.items()
                if number not in slices.slow
            },
            slow=frozenset(),
        )
        decided = decide(others, policy, work, waited_secs=waited_secs)
        if isinstance(decided, Train):
            return decided
    usable = slices.usable(policy)
    most = min(len(usable), policy.max_slices or len(usable))
    objections = []
    for number in range(most, policy.min_slices - 1, -1):
        decided = _train(usable, number, policy, work)
        if isinstance(decided, Train):
            return decided
        objections.append(decided)
    missing = (
        f"{_count(usable)} are usable, but min_slices={policy.min_slices}"
        if most < policy.min_slices
        else f"no subset of {_count(usable)} can divide a batch:"
        f" {'; '.join(objections)}"
    )
    excluded = slices.quarantined(policy) & slices.alive_secs.keys()
    if excluded:
        missing += f"; {_count(excluded)} are quarantined after repeated failures"
    return Wait(why=missing, within_secs=max(0.0, policy.wait_secs - waited_secs))


def _train(usable: list[int], number: int, policy: Policy, work: Work) -> Train | str:
    # Returns an objection if the first `number` usable slices cannot compute a batch.
    devices = number * work.devices_per_slice
    if policy.batch == "keep_per_device":
        rows, indivisible = divmod(work.rows * number, work.num_slices)
        if indivisible:
            return (
                f"{work.rows} rows on {work.num_slices} slices would not be a whole"
                f" number of rows on {number}"
            )
    else:
        rows = work.rows
    rows_per_device, indivisible = divmod(rows, devices)
    if indivisible:
        return (
            f"{rows} rows cannot be split over the {devices} devices of a"
            f" {number}-slice world"
        )
    if why := work.objection(number, rows):
        return why
    # The fewest equal microbatches that fit in a device's memory.
    most = max(work.max_rows_per_device, 1)
    accumulated = next(
        count
        for count in range(1, max(rows_per_device, 1) + 1)
        if rows_per_device % count == 0 and rows_per_device // count <= most
    )
    return Train(
        slices=tuple(sorted(usable[:number])),
        spares=tuple(sorted(usable[number:])),
        rows=rows,
        accumulated=accumulated,
    )


def _count(slices: Collection[int]) -> str:
    return f"slices {sorted(slices)}" if slices else "no slices"
