"""Evaluation: the mean loss over finite data, the same on any number of hosts."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Protocol

import jax

from elastic_ckpt.core import events
from elastic_ckpt.data import elastic_data
from elastic_ckpt.training import train_step

# The name of the mean loss among the metrics that rank a step.
METRIC = "eval_loss"


class Restartable(Protocol):
    """Finite global batches that can start again."""

    def __next__(self) -> elastic_data.Batch:
        """The next batch; StopIteration at the end, on all hosts at once."""

    def reset(self) -> None:
        """Moves to the beginning."""

    def close(self) -> None:
        """Stops reading ahead."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The periodic evaluation of a run.

    Attributes:
      evaluate: the `evaluate` function of the program.
      batches: finite global batches; padding in the last one is not counted.
      interval: training steps between two evaluations.
      max_batches: the most batches of an evaluation; 0 takes all.
      emit: called after each evaluation.
    """

    evaluate: Callable[
        [train_step.TrainState, elastic_data.Batch], tuple[jax.Array, jax.Array]
    ]
    batches: Restartable
    interval: int
    max_batches: int
    emit: events.Emit

    def is_due(self, step: int) -> bool:
        """Whether to evaluate now that `step` steps are done."""
        return step % self.interval == 0

    def run(self, step: int, state: train_step.TrainState) -> float:
        """The mean loss in nats per target, over the data from its beginning."""
        began = time.monotonic()
        self.batches.reset()
        loss, targets, num_batches = 0.0, 0, 0
        while not self.max_batches or num_batches < self.max_batches:
            try:
                batch = next(self.batches)
            except StopIteration:
                break
            summed, count = self.evaluate(state, batch)
            loss, targets = loss + float(summed), targets + int(count)
            num_batches += 1
        mean = loss / max(targets, 1)
        secs = time.monotonic() - began
        self.emit("evaluated", step=step, loss=mean, batches=num_batches, secs=secs)
        return mean
