"""`elastic-ckpt status RUN`: one screen about a run, local or in a bucket.

It shows how far the run is, its hosts, the newest step of each tier, and the step that
would be restored if a slice or host were lost. It only reads, so it does not disturb
the run. The memory of hosts is looked at where it is on this machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time

from etils import epy

from elastic_ckpt.core import storage_cause

with epy.lazy_imports():
    from elastic_ckpt.inspect import replica_findings, status

# Of a value of the last event.
_MAX_VALUE = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    parser.add_argument("run", help="the directory of a run")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Shows the status."""
    content = status.collect(arguments.run)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(content), indent=2))
    else:
        print(describe(content, now=time.time()))
    return 0


def describe(content: status.Status, *, now: float) -> str:
    """The status as one screen.

    Args:
      content: of the run.
      now: the time, in seconds since the epoch.
    """
    progress = content.progress
    age = f"({_age(now - progress.time)} ago)" if progress.time else ""
    lines = [
        (
            "step",
            _of(progress.step, "{:,}", "none yet")
            + _of(progress.steps, " of {:,}")
            + f" {age}" * bool(age),
            _of(progress.loss, "loss {:.4f}"),
            _of(progress.learning_rate, "learning rate {:.3g}"),
        ),
        (
            "rate",
            _of(progress.steps_per_sec, "{:.3g} steps/s", "unknown"),
            _of(progress.tokens_per_sec, "{:,.0f} tokens/s"),
            _of(progress.data_wait_percent, "{:.1f} % waiting for data"),
            _of(progress.goodput_percent, "goodput {:.1f} %"),
        ),
        ("hosts", *_hosts(content.world)),
        *(_tier(each, now) for each in content.tiers),
        ("backup", *_backup(content.backup)),
        *_losses(content),
    ]
    if content.replicas is not None:
        lines.append(("replicas", replica_findings.line(content.replicas)))
    if content.verdict is not None:
        ago = _age(now - content.verdict["time"])
        kind = content.verdict["kind"]
        lines.append(("verdict", f"{ago} ago: {content.verdict['why']} ({kind})"))
    lines.append(("last event", _event(content.last_event, now)))
    return "\n".join(
        [
            f"{content.run or 'run'}: {content.phase}",
            *(f"{name:<10} {', '.join(filter(None, parts))}" for name, *parts in lines),
        ]
    )


def _hosts(world: status.World | None) -> list[str]:
    if world is None:
        return ["none"]
    numbers = ", ".join(map(str, world.slice_numbers))
    on = f" (world on slices {numbers})" if numbers else ""
    return [
        f"{world.hosts} alive",
        f"in {world.slices} slices{on}",
        f"{world.devices} devices",
    ]


def _tier(tier: status.NewestStep, now: float) -> tuple[str, ...]:
    name = {"local": "in RAM", "persistent": "in storage"}[tier.tier]
    if tier.step is None:
        return name, "no complete step that can be seen from here"
    age = f"{_age(now - tier.time_ms / 1000)} old" if tier.time_ms else ""
    return name, f"step {tier.step:,}", age


def _losses(content: status.Status) -> list[tuple[str, str]]:
    # Domains whose loss costs the same are on one line.
    done = content.progress.step or 0
    alike: dict[tuple[str, int | None], list[str]] = {}
    for each in content.losses:
        alike.setdefault((each.domain, each.step), []).append(each.name)
    lines = []
    for (domain, step), names in alike.items():
        cost = "the run would begin anew"
        if step is not None:
            again = max(0, done - step - content.from_zero)
            cost = f"restores step {step:,}, {again:,} steps to train again"
        what = f"{domain} {names[0]}:"
        if names[1:]:
            what = f"{domain}s {', '.join(names)}: each"
        lines.append(("if lost", f"{what} {cost}"))
    return lines


def _backup(backup: status.Backup) -> list[str]:
    numbers = ", ".join(map(str, backup.being_written))
    failed = backup.failed or ""
    cause = f"{backup.cause}: " if backup.cause not in (None, "other") else ""
    advice = storage_cause.of_message(failed).advice
    advice = f" ({advice})" if advice and advice not in failed else ""
    return [
        _of(backup.steps_behind, "{:,} steps behind RAM", "no step in RAM to back up"),
        f"being written, or cut short: step {numbers}" if numbers else "",
        f"{backup.due_steps:,} steps due and not there" if backup.due_steps else "",
        f"FAILED: {cause}{failed}{advice}" if failed else "",
    ]


def _event(event: status.Event | None, now: float) -> str:
    if event is None:
        return "none"
    # The backup above has the whole reason, and `--json` has all.
    values = {key: str(event[key]) for key in event if key not in ("time", "event")}
    listed = [
        f"{key}={value[:_MAX_VALUE]}{'...' * (len(value) > _MAX_VALUE)}"
        for key, value in values.items()
    ]
    ago = f"{_age(now - event['time'])} ago:"
    return " ".join([ago, event["event"], *listed])


def _of(value: float | None, text: str, otherwise: str = "") -> str:
    return otherwise if value is None else text.format(value)


def _age(secs: float) -> str:
    secs = max(0.0, secs)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if secs >= 2 * length:
            return f"{secs / length:.0f} {unit}"
    return f"{secs:.0f} s"
