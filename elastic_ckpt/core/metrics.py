"""The metrics of a run: named numbers that are recorded through `jax.monitoring`.

To record a metric, call `metrics.DATA_WAIT.record(secs)` or use `with
metrics.DATA_LOAD.timed():`. `jax.monitoring` passes each value to all registered
listeners, from `elastic_ckpt.monitoring` and from the user's program. There are three
kinds:

* duration: seconds, for duration listeners
* gauge: a level whose last value matters, for scalar listeners
* counter: an amount whose sum matters, for scalar listeners

Recording takes about a microsecond without listeners and never raises.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import time
from collections.abc import Iterator
from typing import Literal, TypeAlias

from absl import logging
from jax import monitoring

Kind: TypeAlias = Literal["duration", "gauge", "counter"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric:
    """A quantity that a run measures repeatedly.

    Attributes:
      name: the name in `jax.monitoring`.
      kind: the kind, which determines how values are combined.
      unit: the unit of the values, which is also the suffix of the name.
      meaning: the meaning of a value.
    """

    name: str
    kind: Kind
    unit: str
    meaning: str

    def record(self, value: float) -> None:
        """Passes `value` to the listeners; logs each distinct listener error once."""
        try:
            if self.kind == "duration":
                monitoring.record_event_duration_secs(self.name, value)
            else:
                monitoring.record_scalar(self.name, value)
        # Errors in listeners, which may be anyone's code, must not stop the training.
        except Exception as error:
            _warn_once(self.name, f"{type(error).__name__}: {error}")

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Records how many seconds the block takes, unless it raises."""
        assert self.kind == "duration", self
        began_secs = time.monotonic()
        yield
        self.record(time.monotonic() - began_secs)


@functools.lru_cache(maxsize=256)
def _warn_once(name: str, reason: str) -> None:
    logging.warning(
        "a jax.monitoring listener failed on %s (%s); the run continues without it",
        name,
        reason,
    )


# All metrics by name. Users see the names, so a golden file freezes them.
METRICS: dict[str, Metric] = {}


def _metric(name: str, kind: Kind, meaning: str) -> Metric:
    metric = Metric(
        name=f"/elastic_ckpt/{name}",
        kind=kind,
        unit=re.split("[/_]", name)[-1],
        meaning=meaning,
    )
    METRICS[metric.name] = metric
    return metric


DATA_WAIT = _metric("data/wait_secs", "duration", "the loop waited for a batch")
DATA_READ_AHEAD = _metric(
    "data/read_ahead_batches",
    "gauge",
    "batches ready on this host when the loop asked for one",
)
DATA_ROWS = _metric(
    "data/rows", "counter", "rows of a delivered batch that this host loaded"
)
DATA_BYTES = _metric(
    "data/bytes", "counter", "bytes of a delivered batch that this host loaded"
)
DATA_SAVE_BLOCK = _metric(
    "data/save_block_secs",
    "duration",
    "the loop was blocked while the data state was captured",
)
DATA_SAVE = _metric(
    "data/save_secs",
    "duration",
    "from capturing the data state until this host has written its part",
)
DATA_LOAD = _metric(
    "data/load_secs", "duration", "the data state was read and the iterator moved to it"
)
CHECKPOINT_SAVE_BLOCK = _metric(
    "checkpoint/save_block_secs",
    "duration",
    "the loop was blocked by a save, including the wait for the previous one",
)
CHECKPOINT_SAVE = _metric(
    "checkpoint/save_secs",
    "duration",
    "from the start of a save until its step is complete",
)
CHECKPOINT_LOAD = _metric(
    "checkpoint/load_secs", "duration", "a step was restored, weights and data state"
)
CHECKPOINT_READ = {
    near: _metric(
        f"checkpoint/read_{near}_bytes",
        "counter",
        f"bytes that all hosts read and verified for a restore, {source}",
    )
    for near, source in {
        "local": "each from its own RAM",
        "close": "from peers in their failure domain",
        "distant": "from peers in a different failure domain",
        "persistent": "from persistent storage",
    }.items()
}
CHECKPOINT_BAD_COPIES = _metric(
    "checkpoint/bad_copies", "counter", "damaged copies that a restore read"
)
CHECKPOINT_REPAIRED = _metric(
    "checkpoint/repaired_copies", "counter", "damaged copies that were repaired"
)
CHECKPOINT_COPY = _metric(
    "checkpoint/copy_bytes",
    "counter",
    "bytes of a step that all hosts copied from their peers",
)
CHECKPOINT_COPY_SECS = _metric(
    "checkpoint/copy_secs", "duration", "until all copies of a step existed"
)
CHECKPOINT_BACKUP = _metric(
    "checkpoint/backup_bytes",
    "counter",
    "bytes that all hosts wrote to persistent storage for a step",
)
CHECKPOINT_BACKUP_SECS = _metric(
    "checkpoint/backup_secs",
    "duration",
    "until a step was committed in persistent storage",
)
CHECKPOINT_BACKLOG = _metric(
    "checkpoint/backlog_steps",
    "gauge",
    "steps due in persistent storage that are not there yet",
)
CHECKPOINT_FAILURES = _metric(
    "checkpoint/tier_failures", "counter", "times a tier failed to accept a step"
)
VALIDATION = _metric(
    "validation/check_secs", "duration", "copies of the state were compared"
)
VALIDATION_FINDINGS = _metric(
    "validation/findings",
    "counter",
    "parts of the state whose copies differ; recorded by the first host",
)
TRAIN_STEPS = _metric("train/steps", "gauge", "completed steps, by the step log")
TRAIN_PLANNED = _metric(
    "train/planned_steps", "gauge", "steps after which the run is finished"
)
TRAIN_CLAIM = _metric("train/claim", "gauge", "the claimed world that trains")
TRAIN_LOSS = _metric("train/loss", "gauge", "loss of the step, over its global batch")
TRAIN_STEP = _metric(
    "train/step_secs", "duration", "from one logged step to the next, including waits"
)
TRAIN_STEP_RATE = _metric("train/steps_per_sec", "gauge", "one over the step's seconds")
TRAIN_TOKENS = _metric(
    "train/tokens", "counter", "targets that a step was trained on, without padding"
)
TRAIN_TOKEN_RATE = _metric("train/tokens_per_sec", "gauge", "token rate of the step")
TRAIN_LEARNING_RATE = _metric(
    "train/learning_rate", "gauge", "learning rate of the step's update"
)
TRAIN_GRADIENT_NORM = _metric(
    "train/gradient_norm", "gauge", "gradient norm of the step, before clipping"
)
GOODPUT = _metric(
    "goodput/percent", "gauge", "share of this launch's time that trained new steps"
)
GOODPUT_SECS = {
    cause: _metric(f"goodput/{cause}_secs", "duration", meaning)
    for cause, meaning in {
        "productive": "trained new steps",
        "again": "retrained lost steps",
        "save": "the loop was blocked by a save",
        "evaluate": "evaluated",
        "validate": "compared copies of the state",
        "end": "a world ended: a failure was found, or hosts saved and left",
        "wait": "waited for slices",
        "decide": "the slices of a world were chosen",
        "start": "the processes of a world started and joined",
        "prepare": "the job was assembled, and the newest step found",
        "restore": "state and data were restored",
        "compile": "the first batch was read, and the step compiled or loaded",
        "first_step": "the first step of a world, logged",
    }.items()
}
SLICES = _metric("run/slices", "gauge", "slices of the world")
MISSING_SLICES = _metric(
    "run/missing_slices",
    "gauge",
    "slices lost, refused or quarantined that have not rejoined",
)
SAVED_STEPS = _metric(
    "run/saved_steps", "gauge", "completed steps at the newest complete save"
)
STORED_STEPS = _metric(
    "run/stored_steps",
    "gauge",
    "completed steps at the newest save in persistent storage",
)
LOST_STEPS = _metric("run/lost_steps", "counter", "steps lost to a change of slices")
LOST_HOSTS = _metric("run/lost_hosts", "counter", "hosts whose loss ended a world")
LOST_SLICES = _metric("run/lost_slices", "counter", "slices that were lost")
FINDINGS = _metric("run/findings", "counter", "findings of callbacks: divergences")
ROLLBACKS = _metric(
    "run/rollbacks", "counter", "times a finding made the run roll back"
)
FAILURES = _metric("run/failures", "counter", "failures that ended the run")
