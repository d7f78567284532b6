"""`elastic-ckpt status RUN`: one screen about a run, local or in a bucket.

It shows the run's progress, its hosts, the newest step of each tier, and the step that
would be restored if a slice or host were lost. It only reads, so it does not disturb
the run. It sees only this machine's RAM.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator

from elastic_ckpt.core import storage_cause
from elastic_ckpt.inspect import status

# Maximum number of characters shown of a value in the last event.
_MAX_VALUE = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    parser.add_argument("run", help="a run directory")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Shows the status."""
    content = status.collect(arguments.run)
    print(
        json.dumps(dataclasses.asdict(content), indent=2)
        if arguments.json
        else describe(content, now=time.time())
    )
    return 0


def describe(content: status.Status, *, now: float) -> str:
    """The status as one screen; `now` is in seconds since the epoch."""
    lines = [f"{content.run or 'run'}: {content.phase}"]
    for name, *parts in _lines(content, now):
        lines.append(f"{name:<10} {', '.join(filter(None, parts))}")
    return "\n".join(lines)


def _lines(content: status.Status, now: float) -> Iterator[tuple[str, ...]]:
    steps = _of(content.step, "{:,}", "none yet") + _of(content.steps, " of {:,}")
    yield (
        "step",
        steps + (f" ({_age(now - content.time)} ago)" if content.time else ""),
        _of(content.loss, "loss {:.4f}"),
        _of(content.learning_rate, "learning rate {:.3g}"),
    )
    yield (
        "rate",
        _of(content.steps_per_sec, "{:.3g} steps/s", "unknown"),
        _of(content.tokens_per_sec, "{:,.0f} tokens/s"),
        _of(content.data_wait_percent, "{:.1f}% waiting for data"),
        _of(content.goodput_percent, "goodput {:.1f}%"),
    )
    numbers = ", ".join(map(str, content.slice_numbers))
    yield (
        "hosts",
        _of(content.hosts, "{} alive", "none"),
        _of(content.slices, "in {} slices")
        + (f" (world on slices {numbers})" if numbers else ""),
        _of(content.devices, "{} devices"),
    )
    for tier in content.tiers:
        yield (
            "in RAM" if tier.tier == "local" else "in storage",
            _of(tier.step, "step {:,}", "no complete step visible from here"),
            f"{_age(now - tier.time_ms / 1000)} old" if tier.time_ms else "",
        )
    behind, being_written = content.steps_behind, content.being_written
    yield (
        "backup",
        _of(behind, "{:,} steps behind RAM", "no step in RAM to back up"),
        "being written, or interrupted: step " * bool(being_written)
        + ", ".join(map(str, being_written)),
        _of(content.due_steps or None, "{:,} steps due but missing"),
        _failure(content.backup_failed, content.backup_cause),
    )
    yield from _losses(content)
    for line in content.replicas:
        yield "replicas", line
    if content.verdict is not None:
        ago, kind = _age(now - content.verdict["time"]), content.verdict["kind"]
        yield "verdict", f"{ago} ago: {content.verdict['why']} ({kind})"
    yield "last event", _event(content.last_event, now)


def _losses(content: status.Status) -> Iterator[tuple[str, str]]:
    # Domains whose loss costs the same are on one line.
    alike: dict[tuple[str, int | None], list[str]] = {}
    for each in content.losses:
        alike.setdefault((each.domain, each.step), []).append(each.name)
    for (domain, step), names in alike.items():
        cost = "the run would start over"
        if step is not None:
            again = max(0, (content.step or 0) - step - 1 + content.first_step)
            cost = f"restores step {step:,}, {again:,} steps to retrain"
        several = f"{domain}s {', '.join(names)}: each"
        yield "if lost", f"{several if names[1:] else f'{domain} {names[0]}:'} {cost}"


def _failure(why: str | None, cause: str | None) -> str:
    if why is None:
        return ""
    advice = storage_cause.advice(why)
    told = why if advice in why else f"{why} ({advice})"
    return f"FAILED: {told}" if cause == "other" else f"FAILED: {cause}: {told}"


def _event(event: status.Event | None, now: float) -> str:
    if event is None:
        return "none"
    # `backup` shows the whole reason, and `--json` shows everything.
    listed = [
        f"{key}={str(value)[:_MAX_VALUE]}"
        for key, value in event.items()
        if key not in ("time", "event")
    ]
    return " ".join([f"{_age(now - event['time'])} ago:", event["event"], *listed])


def _of(value: float | None, text: str, otherwise: str = "") -> str:
    return otherwise if value is None else text.format(value)


def _age(secs: float) -> str:
    secs = max(0.0, secs)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if secs >= 2 * length:
            return f"{secs / length:.0f} {unit}"
    return f"{secs:.0f} s"
