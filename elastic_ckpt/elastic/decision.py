"""Decides what a run does when its slices change: continue on which, wait, or stop.

Everything here is a pure function of what is alive and of the policy. The runtime finds
out what is alive, calls `decide`, and acts.

Two batch policies, both exact:

* `keep_global`: a batch has the same rows on any number of slices. Fewer slices compute
  it in several equal parts and sum their gradients (gradient accumulation), so that the
  rows that a device holds at a time stay within what fits into its memory.
* `keep_per_device`: a device has the same rows, so that a batch grows and shrinks with
  the slices, as in MaxText.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection
from typing import Literal, get_args

from elastic_ckpt.core import errors

# Why a number of slices cannot compute a batch; None if it can.
Objection = Callable[[int, int], str | None]


# The size that stays the same when the number of slices changes.
Batch = Literal["keep_global", "keep_per_device"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """What a run does when slices are lost and come back.

    Attributes:
      min_slices: the fewest slices to train on.
      max_slices: the most; slices beyond it are spares. None takes all.
      batch: what stays the same when the number of slices changes: the rows of the
        global batch (`"keep_global"`), or those of a device (`"keep_per_device"`).
      wait_secs: how long to wait for `min_slices` before the run ends with an error.
      settle_secs: how long a new slice has to be there before the run grows onto it.
      max_retries: how many worlds in succession may be lost without a new step before
        the run ends with an error.
      quarantine_failures: a slice with this many failures within `quarantine_secs` is
        not used again; 0 uses every slice.
      quarantine_secs: the time within which failures count.
      leave_out_slow: whether slices with slow hosts are left out, if there are enough
        slices without them.
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
      devices_per_slice: the number of devices of a slice.
      num_slices: the number of slices for which `rows` was chosen.
      rows: rows of a global batch on `num_slices`; `Policy.batch` says what becomes of
        them on another number. By default the run chooses its rows itself.
      max_rows_per_device: the most rows that fit into a device at a time; with more, it
        computes its rows in several microbatches.
      objection: a function of a number of slices and of rows that returns why the data
        cannot be divided so, or None if it can; such a world is not formed.
    """

    devices_per_slice: int
    num_slices: int = 1
    rows: int = 0
    max_rows_per_device: int = 1
    objection: Objection = lambda *_: None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """A failure of a slice: it was lost, or its check failed when it came back.

    Attributes:
      slice: its number.
      at_secs: the time, on the monotonic clock.
    """

    slice: int
    at_secs: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slices:
    """The slices that a run may use.

    Attributes:
      current: of the world that runs, or ran last, without those that were lost; empty
        at the start.
      present_secs: by slice that is alive, how long it has been.
      failures: of all slices in this run, in any order.
      slow: the slices that have slow hosts.
    """

    current: frozenset[int] = frozenset()
    present_secs: dict[int, float]
    failures: tuple[Failure, ...] = ()
    slow: frozenset[int] = frozenset()

    def quarantined(self, policy: Policy) -> frozenset[int]:
        """Those that fail repeatedly: too often within the window of the policy.

        A slice stays quarantined, because its failures stay.
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
        """The slices to train on, best first: those of the current world, then others.

        A slice that has just come back counts only once it has settled, unless there is
        no training that it could disturb: at the start, and below `min_slices`.
        """
        healthy = self.present_secs.keys() - self.quarantined(policy)
        settled = {
            number
            for number in healthy
            if number in self.current or self.present_secs[number] >= policy.settle_secs
        }
        is_training = self.current and len(settled) >= policy.min_slices
        usable = settled if is_training else healthy
        return sorted(usable, key=lambda number: (number not in self.current, number))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Train on these slices.

    Attributes:
      slices: in the order of the mesh.
      spares: usable slices that are left over.
      rows: of a global batch.
      accumulated: equal parts in which a device computes its rows of a batch.
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
      within_secs: how long, at most; if it is 0, save and end.
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
    """Decides for as many slices as there are and fit.

    A lost slice is replaced by a spare, so that the mesh has the same shape and the
    same program. Slices of the current world are preferred to others.

    Args:
      slices: that are there.
      policy: of the run.
      work: of the run.
      waited_secs: how long the run has waited already.
    """
    if slices.slow and policy.leave_out_slow:
        others = dataclasses.replace(
            slices,
            present_secs={
                number: secs
                for number, secs in slices.present_secs.items()
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
        f"{_count(usable)} usable, and min_slices={policy.min_slices}"
        if most < policy.min_slices
        else f"no number of the {_count(usable)} fits: {'; '.join(objections)}"
    )
    excluded = slices.quarantined(policy) & slices.present_secs.keys()
    if excluded:
        missing += f"; {_count(excluded)} quarantined after repeated failures"
    return Wait(why=missing, within_secs=max(0.0, policy.wait_secs - waited_secs))


def _train(usable: list[int], number: int, policy: Policy, work: Work) -> Train | str:
    # On the best of the usable slices; or why so many cannot compute a batch.
    devices = number * work.devices_per_slice
    if policy.batch == "keep_per_device":
        rows, indivisible = divmod(work.rows * number, work.num_slices)
        if indivisible:
            return (
                f"{work.rows} rows on {work.num_slices} slices are no whole number on"
                f" {number}"
            )
    else:
        rows = work.rows
    rows_per_device, indivisible = divmod(rows, devices)
    if indivisible:
        return f"{rows} rows do not divide over the {devices} devices of {number}"
    if why := work.objection(number, rows):
        return why
    # The fewest equal parts that fit into a device.
    most = max(work.max_rows_per_device, 1)
    accumulated = next(
        parts
        for parts in range(1, max(rows_per_device, 1) + 1)
        if rows_per_device % parts == 0 and rows_per_device // parts <= most
    )
    return Train(
        slices=tuple(sorted(usable[:number])),
        spares=tuple(sorted(usable[number:])),
        rows=rows,
        accumulated=accumulated,
    )


def _count(slices: Collection[int]) -> str:
    return f"slices {sorted(slices)}" if slices else "no slice"
