"""`elastic-ckpt status RUN`: one screen about a run, local or in a bucket.

It shows how far the run is, its hosts, the newest step of each tier, and the step that
would be restored if a slice or host were lost. It only reads, so it does not disturb
the run. The memory of hosts is looked at where it is on this machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from elastic_ckpt.cli import locations
from elastic_ckpt.core import bucket_clients, errors, storage_cause
from elastic_ckpt.training import run_directory

if TYPE_CHECKING:
    from elastic_ckpt.inspect.restorable import NewestStep
    from elastic_ckpt.inspect.status import Backup, Status

_WATCH_SECS = 5.0
# The end of a log that is read first.
_LOG_BYTES = 2**20
# Of a value of the last event.
_MAX_VALUE = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    parser.add_argument("run", help="the directory of a run")
    parser.add_argument(
        "--watch",
        action="store_true",
        help=f"show it again every {_WATCH_SECS:g} seconds, until Ctrl-C",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Shows the status once, or until Ctrl-C."""
    if not arguments.watch:
        _show(arguments)
        return 0
    try:
        while True:
            try:
                _show(arguments)
            except errors.DataError as error:
                # A file that is just being written; it is read again.
                print(f"not readable now: {error}", flush=True)
            time.sleep(_WATCH_SECS)
    except KeyboardInterrupt:
        return 0


def _show(arguments: argparse.Namespace) -> None:
    content = collect(arguments.run)
    if arguments.json:
        indent = None if arguments.watch else 2
        print(json.dumps(dataclasses.asdict(content), indent=indent), flush=True)
        return
    # The first screen is there before the next one replaces it.
    clear = "\033[H\033[J" if arguments.watch and sys.stdout.isatty() else ""
    print(f"{clear}{describe(content, now=time.time())}", flush=True)


def collect(directory: str) -> Status:
    """The status of the run in `directory`.

    Raises:
      RunError: if there is no run, or its storage is out of reach.
    """
    from elastic_ckpt.inspect import restorable, status
    from elastic_ckpt.monitoring import jsonl

    run_directory.run_of(directory)
    named = argparse.Namespace(
        paths=[directory], peer=[], run=None, secret_file=None, tls_authority=None
    )
    try:
        events = _events(directory)
        with locations.opened(named) as (_, tiers):
            offers = restorable.reachable(tiers)
            newest = [
                _with_plain_steps(each, directory) for each in restorable.newest(offers)
            ]
            uncommitted = sorted({each.step for each in tiers.leftovers()})
        return status.status(
            events,
            jsonl.read(
                os.path.join(directory, run_directory.METRICS), last_bytes=_LOG_BYTES
            ),
            is_alive=run_directory.is_alive(directory),
            tiers=newest,
            losses=[
                # No loss of a host takes a step out of storage.
                dataclasses.replace(each, step=newest[-1].step)
                if each.step is None
                else each
                for each in restorable.after_losses(
                    offers, slices=status.world_slices(events)
                )
            ],
            uncommitted=uncommitted,
            from_zero=_is_of_maxtext(directory),
            is_own_loop=run_directory.read_loop(directory) is not None,
        )
    except bucket_clients.failures() as error:
        raise errors.RunError(
            f"{directory} cannot be read ({error}); check the network and who may read"
            " there"
        ) from error


def _is_of_maxtext(directory: str) -> bool:
    if run_directory.read_loop(directory) is not None:
        return False
    return bool(run_directory.read_config(directory).deploy.maxtext)


def _with_plain_steps(newest: NewestStep, directory: str) -> NewestStep:
    # Steps of Orbax's own checkpointer, which MaxText uses without tiers.
    from elastic_ckpt.checkpoint import summary

    if newest.tier != "persistent" or newest.step is not None:
        return newest
    plain = summary.steps(run_directory.saved_steps_of(directory))
    return dataclasses.replace(newest, step=max(plain, default=None))


def describe(content: Status, *, now: float) -> str:
    """The status as one screen.

    Args:
      content: from `collect`.
      now: the time, in seconds since the epoch.
    """
    progress = content.progress
    lines = [
        f"{content.run or 'run'}: {content.phase}",
        "step       "
        + _joined(
            _of(progress.step, "{:,}", "none yet")
            + _of(progress.steps, " of {:,}")
            + (f" ({_age(now - progress.time)} ago)" if progress.time else ""),
            _of(progress.loss, "loss {:.4f}"),
            _of(progress.learning_rate, "learning rate {:.3g}"),
        ),
        "rate       "
        + _joined(
            _of(progress.steps_per_sec, "{:.3g} steps/s", "unknown"),
            _of(progress.tokens_per_sec, "{:,.0f} tokens/s"),
            _of(progress.data_wait_percent, "{:.1f} % waiting for data"),
            _of(progress.goodput_percent, "goodput {:.1f} %"),
        ),
        f"hosts      {_hosts(content)}",
        *_tiers(content, now),
        f"backup     {_backup(content)}",
        *_losses(content),
        *_replicas(content),
        *_verdict(content, now),
        f"last event {_event(content.last_event, now)}",
    ]
    return "\n".join(lines)


def _hosts(content: Status) -> str:
    world = content.world
    if world is None:
        return "none"
    numbers = ", ".join(map(str, world.slice_numbers))
    return (
        f"{world.hosts} alive, in {world.slices} slices"
        + (f" (world on slices {numbers})" if numbers else "")
        + f", {world.devices} devices"
    )


def _tiers(content: Status, now: float) -> list[str]:
    names = {"local": "in RAM", "persistent": "in storage"}
    return [
        f"{names[each.tier]:<10} "
        + (
            "no complete step that can be seen from here"
            if each.step is None
            else f"step {each.step:,}"
            + (f", {_age(now - each.time_ms / 1000)} old" if each.time_ms else "")
        )
        for each in content.tiers
    ]


def _losses(content: Status) -> list[str]:
    # Domains whose loss costs the same are on one line.
    done = content.progress.step or 0
    alike: dict[tuple[str, int | None], list[str]] = {}
    for each in content.losses:
        alike.setdefault((each.domain, each.step), []).append(each.name)
    lines = []
    for (domain, step), names in alike.items():
        named = f"{domain}s {', '.join(names)}: each" if names[1:] else names[0]
        cost = (
            "the run would begin anew"
            if step is None
            else f"restores step {step:,},"
            f" {max(0, done - step - content.from_zero):,} steps to train again"
        )
        what = named if names[1:] else f"{domain} {named}:"
        lines.append(f"if lost    {what} {cost}")
    return lines


def _replicas(content: Status) -> list[str]:
    from elastic_ckpt.inspect import replica_findings

    compared = content.replicas
    return [f"replicas   {replica_findings.line(compared)}"] if compared else []


def _verdict(content: Status, now: float) -> list[str]:
    judged = content.verdict
    if judged is None:
        return []
    return [f"verdict    {_age(now - judged['time'])} ago: {judged['why']}"]


def _backup(content: Status) -> str:
    backup = content.backup
    behind = "no step in RAM to back up"
    if backup.steps_behind is not None:
        behind = f"{backup.steps_behind:,} steps behind RAM"
    numbers = ", ".join(map(str, backup.being_written))
    return _joined(
        behind,
        f"being written, or cut short: step {numbers}" if numbers else "",
        f"{backup.due_steps:,} steps due and not there" if backup.due_steps else "",
        f"FAILED: {_failure(backup)}" if backup.failed else "",
    )


def _failure(backup: Backup) -> str:
    advice = storage_cause.of_message(backup.failed or "").advice
    cause = f"{backup.cause}: " if backup.cause not in (None, "other") else ""
    if not advice or advice in (backup.failed or ""):
        return f"{cause}{backup.failed}"
    return f"{cause}{backup.failed} ({advice})"


def _event(event: Any, now: float) -> str:
    if event is None:
        return "none"
    fields = {key: event[key] for key in event if key not in ("time", "event")}
    listed = " ".join(f"{key}={_cut(str(value))}" for key, value in fields.items())
    return f"{_age(now - event['time'])} ago: {event['event']} {listed}".rstrip()


def _cut(text: str) -> str:
    # The backup above has the whole reason, and `--json` has all.
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}..."


def _events(directory: str) -> list[dict[str, Any]]:
    try:
        events = run_directory.read_events(directory, last_bytes=_LOG_BYTES)
        if all(event["event"] != "run_started" for event in events):
            events = run_directory.read_events(directory)
    except FileNotFoundError:
        return []
    return events


def _of(value: float | None, text: str, otherwise: str = "") -> str:
    return otherwise if value is None else text.format(value)


def _joined(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def _age(secs: float) -> str:
    secs = max(0.0, secs)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if secs >= 2 * length:
            return f"{secs / length:.0f} {unit}"
    return f"{secs:.0f} s"
