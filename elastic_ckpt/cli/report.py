"""`elastic-ckpt report RUN`: one HTML page about a run, with plots, in one file.

The page needs nothing else and can be sent around. It includes an audit, which reads
the run's data again; `--no-audit` leaves that out.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from elastic_ckpt.application import run_directory
from elastic_ckpt.core import errors, storage

if TYPE_CHECKING:
    from elastic_ckpt.inspect.report import Mixture, Record

_FILE = "report.html"
# The most steps in storage whose mixture is read.
_MOST_STEPS = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    parser.add_argument("run", help="the directory of a run")
    parser.add_argument("--output", help=f"the file to write; by default RUN/{_FILE}")
    parser.add_argument(
        "--no-audit",
        action="store_true",
        help="leave out the audit, which reads the data again",
    )


def run(arguments: argparse.Namespace) -> int:
    """Writes the page, and prints its path."""
    from elastic_ckpt.inspect import plot, report

    # Before the audit, which may take long.
    plot.library()
    record = collect(arguments.run, has_audit=not arguments.no_audit)
    path = arguments.output or os.path.join(arguments.run, _FILE)
    storage.write_atomic(path, report.report(record).encode())
    print(f"wrote {path}")
    return 0


def collect(directory: str, *, has_audit: bool) -> Record:
    """All that the report of the run in `directory` shows.

    Raises:
      RunError: if there is no run.
      DataError: if it has trained nothing yet.
    """
    from elastic_ckpt.inspect import report, status
    from elastic_ckpt.monitoring import jsonl
    from elastic_ckpt.training import step_log

    name = run_directory.run_of(directory)
    root = storage.absolute(directory)
    try:
        events = run_directory.read_events(directory)
    except FileNotFoundError:
        events = []
    return report.Record(
        run=name,
        directory=directory,
        phase=status.phase(
            events,
            is_alive=run_directory.is_alive(directory),
            is_own_loop=run_directory.read_loop(directory) is not None,
        ),
        events=events,
        files=jsonl.read(root / run_directory.METRICS),
        attempts=[
            report.Attempt(
                number=attempt.attempt,
                start_step=attempt.start_step,
                hosts=attempt.hosts,
                losses=[each.loss for each in attempt.records],
            )
            for attempt in step_log.read(directory)
        ],
        mixtures=_mixtures(directory),
        audit=_audit(directory) if has_audit else "No audit was asked for.",
        made_secs=time.time(),
    )


def _mixtures(directory: str) -> list[Mixture]:
    from elastic_ckpt.checkpoint import summary
    from elastic_ckpt.cli import inspect
    from elastic_ckpt.inspect import report

    steps = summary.steps(run_directory.saved_steps_of(directory))
    mixtures = []
    for step in _some(list(steps)):
        data = inspect.data_of(str(steps[step]))
        datasets = data.get("pipeline", {}).get("datasets", {})
        if len(datasets) > 1:
            weights = {name: each["weight"] for name, each in datasets.items()}
            mixtures.append(
                report.Mixture(step=step, taken=data["taken"], weights=weights)
            )
    return mixtures


def _some(steps: Sequence[int]) -> list[int]:
    # Evenly, with the last.
    every = -(-len(steps) // _MOST_STEPS) or 1
    return list(steps[::-1][::every])[::-1]


def _audit(directory: str) -> dict[str, Any] | str:
    from elastic_ckpt.cli import audit

    print("auditing; --no-audit leaves it out", file=sys.stderr, flush=True)
    try:
        outcome = audit.outcome_of(directory)
    except errors.ElasticCkptError as error:
        return f"The run cannot be audited: {error}"
    return dataclasses.asdict(outcome) | {"passed": outcome.passed}
