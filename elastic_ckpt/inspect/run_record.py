"""The record of a run: what it has written, as a report shows it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from elastic_ckpt.core import metrics
from elastic_ckpt.inspect.status import Event, Files

# The most lines of a table.
MOST_ROWS = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of the training loop.

    Attributes:
      number: from 1.
      start_step: its first step.
      hosts: of its world.
      losses: of each step that it logged, in order; NaN if it was not known yet.
    """

    number: int
    start_step: int
    hosts: int
    losses: Sequence[float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """A mixture as one saved step has consumed it.

    Attributes:
      step: the saved step.
      taken: documents by dataset.
      weights: by dataset.
    """

    step: int
    taken: Mapping[str, int]
    weights: Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """Everything that a report shows.

    Attributes:
      run: its name.
      directory: of the run.
      events: of `events.jsonl`.
      files: of metrics.
      attempts: of the step log, in order.
      mixtures: of the steps in storage, ascending; empty without a mixture.
      audit: the fields of the audit's outcome, and `passed`; a text if there is none.
      made_secs: when the report is made, since the epoch.
    """

    run: str
    directory: str
    events: Sequence[Event]
    files: Files
    attempts: Sequence[Attempt]
    mixtures: Sequence[Mixture]
    audit: Mapping[str, Any] | str
    made_secs: float

    @property
    def began_secs(self) -> float:
        """The time of the first event; 0 without one."""
        return self.events[0]["time"] if self.events else 0.0

    def named(self, name: str) -> list[Event]:
        """The events of this name."""
        return [event for event in self.events if event["event"] == name]

    def lines(self, metric: metrics.Metric) -> list[Mapping[str, Any]]:
        """The lines of a metric of the run as a whole, by time."""
        lines = [
            line
            for each in self.files.values()
            for line in each
            if line["metric"] == metric.name and "step" in line
        ]
        return sorted(lines, key=lambda line: line["time"])

    def losses(self, attempt: Attempt) -> dict[int, float]:
        """The losses that are known, by the number of the step, from 0.

        MaxText reports the loss of a step after it has saved the step, and so too late
        for the step log; it is among the metrics then.
        """
        by_step = {
            attempt.start_step + place: loss
            for place, loss in enumerate(attempt.losses)
        }
        for step, loss in by_step.items():
            if math.isnan(loss):
                by_step[step] = self._reported.get(step, loss)
        return {step: loss for step, loss in by_step.items() if math.isfinite(loss)}

    @functools.cached_property
    def _reported(self) -> dict[int, float]:
        # Of a step that was trained again the later line counts.
        return {
            line["step"] - 1: line["last"] for line in self.lines(metrics.TRAIN_LOSS)
        }

    def goodput_secs(self) -> dict[str, float]:
        """The seconds of all starts by cause."""
        return {
            cause: sum(
                line["sum"]
                for lines in self.files.values()
                for line in lines
                if line["metric"] == metric.name
            )
            for cause, metric in metrics.GOODPUT_SECS.items()
        }

    def attempts_with_counted(self) -> list[tuple[Attempt, int]]:
        """The attempts, with how many of their steps no later one trained again."""
        counted: list[tuple[Attempt, int]] = []
        end = math.inf
        for attempt in reversed(self.attempts):
            num = min(len(attempt.losses), max(0, end - attempt.start_step))
            counted.append((attempt, int(num)))
            end = min(end, attempt.start_step)
        return counted[::-1]
