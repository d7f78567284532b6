"""The status of a run, computed from the run's files.

As in a restore, only the manifests determine which step would be restored now or after
the loss of a host or slice: a step can be restored if the remaining holders together
have all of its parts.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from elastic_ckpt.core import errors, metrics
from elastic_ckpt.core import events as core_events
from elastic_ckpt.inspect import run_files, tier_locations
from elastic_ckpt.inspect.tier_locations import Locations
from elastic_ckpt.steps.manifest import Holder, Host
from elastic_ckpt.tiers.find import FoundStep

# The period over which waits for data are averaged.
_RECENT_SECS = 60.0
# How much of a log's end is read first.
_LOG_BYTES = 2**20

Event = Mapping[str, Any]
# The metrics by file name, as from `run_files.read_metrics`.
Files = Mapping[str, Sequence[Mapping[str, Any]]]

# Events that report how many steps are completed.
_DONE = ("save_started", "run_stopped", "run_finished")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewestStep:
    """The newest complete step in a tier.

    Attributes:
      tier: the tier, `local` (the memory of all hosts) or `persistent`.
      step: the step number; None if the tier has no complete step.
      time_ms: when the step was committed, in ms since the epoch; None if unknown.
    """

    tier: str
    step: int | None
    time_ms: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class AfterLoss:
    """The step that would be restored if one failure domain were lost with its memory.

    Attributes:
      domain: the kind of domain, `host` or `slice`.
      name: the slice, or the index of one of the hosts that share the memory.
      step: the step number; None if the run would start over.
    """

    domain: str
    name: str
    step: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Status:
    """The status of a run; None means unknown.

    Attributes:
      run: the run name; empty before the first launch.
      phase: the run's current activity, or how the run ended.
      hosts: the number of live hosts in the current world; None before the first world
        and after the run has ended.
      slices: the number of live slices in the current world; None when `hosts` is.
      devices: the number of devices of these hosts; None when `hosts` is.
      slice_numbers: the slices of the current world; empty if the run is not elastic.
      step: the number of completed steps.
      steps: the total number of steps of the run.
      time: the time of the latest metric, in seconds since the epoch.
      loss: the loss of the newest step; None if only an older loss is known.
      learning_rate: the learning rate of the newest step; None if only an older one is
        known.
      steps_per_sec: the newest step's rate since the latest launch.
      tokens_per_sec: the newest step's rate since the latest launch.
      goodput_percent: the goodput since the latest launch.
      data_wait_percent: the share of recent step time that is spent waiting for data,
        on the host that waits longest.
      tiers: the newest step of each tier.
      losses: the step that would be restored after losing each slice or host.
      steps_behind: the number of steps by which the newest step in storage is behind
        the newest one in RAM; None if there is no step in RAM.
      being_written: the steps that are not committed yet or were interrupted.
      backup_failed: the reason why the latest backup failed; None if a backup has
        succeeded since.
      backup_cause: the cause of that failure, as in events; None if there is no
        failure.
      due_steps: the number of steps that were due to be saved to storage but are not
        there, as counted by the run.
      first_step: the number of the first step: 0 under MaxText, where step 9 is the
        tenth.
      replicas: lines about the newest comparison of copies of the state and the newest
        difference found; empty if nothing has been compared.
      verdict: the latest `verdict` event; None if nothing has failed.
      last_event: the latest event; None before the first event.
    """

    run: str
    phase: str
    hosts: int | None
    slices: int | None
    devices: int | None
    slice_numbers: tuple[int, ...]
    step: int | None
    steps: int | None
    time: float | None
    loss: float | None
    learning_rate: float | None
    steps_per_sec: float | None
    tokens_per_sec: float | None
    goodput_percent: float | None
    data_wait_percent: float | None
    tiers: tuple[NewestStep, ...]
    losses: tuple[AfterLoss, ...]
    steps_behind: int | None
    being_written: tuple[int, ...]
    backup_failed: str | None
    backup_cause: str | None
    due_steps: int | None
    first_step: int
    replicas: tuple[str, ...]
    verdict: Event | None
    last_event: Event | None


def collect(directory: str) -> Status:
    """The status of the run in `directory`.

    Raises:
      RunError: if `directory` is not a run directory.
      DataError: if the run's files cannot be read.
    """
    record = run_files.read(directory)
    events = run_files.read_events(directory, last_bytes=_LOG_BYTES)
    if all(event["event"] != "run_started" for event in events):
        events = run_files.read_events(directory)
    with tier_locations.opened([directory]) as (_, tiers):
        there = reachable(tiers)
        local, stored = newest_steps(there)
        uncommitted = {each.step for each in tiers.leftovers()}
        if stored.step is None:
            # Steps from Orbax's own checkpointer, which MaxText uses without tiers.
            stored = dataclasses.replace(stored, step=max(tiers.stored, default=None))
    return status(
        events,
        run_files.read_metrics(
            os.path.join(directory, run_files.METRICS), last_bytes=_LOG_BYTES
        ),
        is_alive=run_files.is_alive(directory),
        tiers=[local, stored],
        losses=[
            # Steps in storage survive the loss of any host.
            dataclasses.replace(
                each, step=stored.step if each.step is None else each.step
            )
            for each in after_losses(there, slices=world_slices(events))
        ],
        uncommitted=sorted(uncommitted),
        first_step=record.first_step,
        program=record.program,
    )


def status(
    events: Sequence[Event],
    files: Files,
    *,
    is_alive: bool | None,
    tiers: Sequence[NewestStep],
    losses: Sequence[AfterLoss],
    uncommitted: Sequence[int],
    first_step: int = 1,
    program: str = "train",
) -> Status:
    """The status of a run, from its latest events and metrics and from its tiers.

    `is_alive` is whether the run's process is alive, or None if unknown. For
    `first_step` and `program`, see `run_files.RunRecord`.
    """
    started = _last(events, "run_started") or {}
    since_secs: float = started.get("time", 0.0)
    since = events[events.index(started) :] if started else ()
    lines = sorted(itertools.chain(*files.values()), key=lambda line: line["time"])
    newest = {line["metric"]: line for line in lines}
    now = phase(events, is_alive=is_alive, program=program)
    world: dict[str, int] = {}
    if started and now not in core_events.ENDS and is_alive is not False:
        # If a host or slice has been lost since then, its world has ended.
        is_lost = _last(since, "host_lost", "slice_lost", "world_left") is not None
        world = {
            name: 0 if is_lost else started[name]
            for name in ("hosts", "slices", "devices")
        }

    def last(
        metric: metrics.Metric, *, since_secs: float = 0.0, step: int | None = None
    ) -> float | None:
        line = newest.get(metric.name, {"time": -1.0})
        counts = line["time"] >= since_secs and step in (None, line.get("step"))
        return line.get("last") if counts else None

    # Metrics are written later than events, and a killed process loses its last
    # metrics.
    step = max(
        int(last(metrics.TRAIN_STEPS) or 0),
        *(each["step"] for each in since if each["event"] in _DONE),
        *(e.step + 1 - first_step for e in tiers if e.step is not None),
        0,
    )
    of_tiers = {each.tier: each.step or 0 for each in tiers if each.step is not None}
    # A successful backup has no `why`.
    stored = [e for e in events if e.get("tier", "persistent") == "persistent"]
    tried = _last(stored, "backed_up", "degraded") or {}
    due = last(metrics.CHECKPOINT_BACKLOG)
    return Status(
        run=started.get("run", ""),
        phase=now,
        hosts=world.get("hosts"),
        slices=world.get("slices"),
        devices=world.get("devices"),
        slice_numbers=world_slices(events) if world else (),
        step=step or None,
        steps=started.get("steps"),
        time=max((line["time"] for line in newest.values()), default=None),
        loss=last(metrics.TRAIN_LOSS, step=step),
        learning_rate=last(metrics.TRAIN_LEARNING_RATE, step=step),
        steps_per_sec=last(metrics.TRAIN_STEP_RATE, since_secs=since_secs),
        tokens_per_sec=last(metrics.TRAIN_TOKEN_RATE, since_secs=since_secs),
        goodput_percent=last(metrics.GOODPUT, since_secs=since_secs),
        data_wait_percent=_data_wait_percent(files, since_secs),
        tiers=tuple(tiers),
        losses=tuple(losses),
        steps_behind=max(0, of_tiers["local"] - of_tiers.get("persistent", 0))
        if "local" in of_tiers
        else None,
        being_written=tuple(uncommitted),
        backup_failed=tried.get("why"),
        backup_cause=tried.get("cause"),
        due_steps=None if due is None else int(due),
        first_step=first_step,
        replicas=tuple(_replicas(events)),
        verdict=_last(events, "verdict"),
        last_event=events[-1] if events else None,
    )


def phase(events: Sequence[Event], *, is_alive: bool | None, program: str) -> str:
    """A run's current activity, or how the run ended; for arguments, see `status`."""
    begun = (core_events.NAMES[e["event"]].begins for e in reversed(events))
    now = next(filter(None, begun), "not started")
    if now == "restoring" and program != "train":
        # Other programs restore their state before they report that they begin.
        now = "training"
    if is_alive is False and now not in core_events.ENDS and events:
        return "not running: its process exited without a last event"
    return now


def _last(events: Sequence[Event], *names: str) -> Event | None:
    return next((e for e in reversed(events) if e["event"] in names), None)


def world_slices(events: Sequence[Event]) -> tuple[int, ...]:
    """The slices of the latest world; empty if the run is not elastic."""
    chosen = _last(events, "world_started")
    return tuple(chosen["slices"]) if chosen else ()


def _data_wait_percent(files: Files, since_secs: float) -> float | None:
    steps = [
        line
        for lines in files.values()
        for line in lines
        if line["metric"] == metrics.TRAIN_STEP.name and line["time"] >= since_secs
    ]
    if not steps:
        return None
    since = max(since_secs, max(line["time"] for line in steps) - _RECENT_SECS)
    step_secs = sum(line["sum"] for line in steps if line["time"] >= since)
    waits = [
        sum(
            line["sum"]
            for line in lines
            if line["metric"] == metrics.DATA_WAIT.name and line["time"] >= since
        )
        for lines in files.values()
    ]
    return min(100.0, 100 * max(waits) / max(step_secs, 1e-9))


def _replicas(events: Sequence[Event]) -> Iterator[str]:
    compared = _last(events, "validated")
    if compared is None:
        return
    step, found = compared["step"], _last(events, "replicas_differ")
    differ = "DIFFER" if found is not None and found["step"] == step else "equal"
    yield f"{differ} at step {step:,} ({compared['level']})"
    if found is not None:
        parts = [
            f"{e['leaf'] or 'the tree'} at hosts {', '.join(map(str, e['hosts']))}"
            + ("" if e["is_certain"] else " (which of them is unknown)")
            for e in events
            if (e["event"], e.get("step")) == ("replicas_differ", found["step"])
        ]
        preserved = _last(events, "step_preserved")
        kept = f"; step {preserved['step']:,} is preserved" if preserved else ""
        yield f"differed at step {found['step']:,}: {errors.first_of(parts)}{kept}"


def reachable(locations: Locations) -> list[FoundStep]:
    """The steps from which a restore chooses, newest first.

    The list ends with the first step that is complete in storage, because that step
    survives any loss of hosts. Abandoned steps are skipped.
    """
    there: list[FoundStep] = []
    for step in reversed(locations.known):
        looked = locations.look(step)
        of_line = [e for e in looked.saves if not locations.line.abandons(e.step_id)]
        there += of_line
        if newest_steps(of_line)[1].step is not None:
            break
    return there


def newest_steps(there: Sequence[FoundStep]) -> tuple[NewestStep, ...]:
    """The newest complete step of each tier: RAM and storage."""
    return tuple(
        _newest_of(tier, there, lambda holder, tier=tier: holder.tier == tier)
        for tier in ("local", "persistent")
    )


def after_losses(
    there: Sequence[FoundStep], *, slices: Iterable[int] = ()
) -> tuple[AfterLoss, ...]:
    """The newest step that remains after the loss of each slice and each host.

    `there` is from `reachable`; `slices` are the slices of the current world, even if
    they do not have copies.
    """
    hosts = [holder.host for each in there for holder in each.table.holders]
    of_slices = {*map(str, slices), *(_key(host, "slice") for host in hosts)} - {""}
    # The names to show, by domain and key.
    shown = {("slice", each): each for each in of_slices}
    shown |= {("host", _key(host, "host")): str(host.number) for host in hosts}
    losses = []
    for (domain, key), name in shown.items():

        def is_left(holder: Holder, key: str = key, domain: str = domain) -> bool:
            return holder.tier != "local" or _key(holder.host, domain) != key

        left = _newest_of("", there, is_left)
        losses.append(AfterLoss(domain=domain, name=name, step=left.step))
    return tuple(
        sorted(losses, key=lambda e: (e.domain == "host", len(e.name), e.name))
    )


def _newest_of(
    tier: str, there: Iterable[FoundStep], counts: Callable[[Holder], bool]
) -> NewestStep:
    # The first step that is complete at the remaining holders.
    for table in (each.table.held_by(counts) for each in there):
        if table.complete:
            time_ms = table.contents.time_ms or None
            return NewestStep(tier=tier, step=table.step_id.step, time_ms=time_ms)
    return NewestStep(tier=tier, step=None, time_ms=None)


def _key(host: Host, domain: str) -> str:
    # A host without a machine name is assumed to be alone on its machine.
    return host.domains.get(domain, host.id if domain == "host" else "")
