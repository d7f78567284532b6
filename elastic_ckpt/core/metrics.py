"""What a run measures of itself, as named numbers that `jax.monitoring` carries.

A metric is recorded where it is measured, `metrics.DATA_WAIT.record(secs)` or `with
metrics.DATA_LOAD.timed():`, and reaches whoever has registered a listener with
`jax.monitoring`: ours of `elastic_ckpt.monitoring`, or a program's own. There are three
kinds:

* duration: seconds, to the listeners of durations
* gauge: a level, of which the last value counts, to the listeners of scalars
* counter: an amount, of which the sum counts, to the listeners of scalars too

Recording takes about a microsecond with nobody listening, and never raises.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Literal, TypeAlias

from absl import logging
from jax import monitoring

Kind: TypeAlias = Literal["duration", "gauge", "counter"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric:
    """One number that a run measures, again and again.

    Attributes:
      name: under which `jax.monitoring` carries it.
      kind: what may be made of its values.
      unit: of its values; the name ends with it.
      meaning: what a value says.
    """

    name: str
    kind: Kind
    unit: str
    meaning: str

    def record(self, value: float) -> None:
        """Hands `value` to the listeners; of an error of theirs the log tells once."""
        try:
            if self.kind == "duration":
                monitoring.record_event_duration_secs(self.name, value)
            else:
                monitoring.record_scalar(self.name, value)
        # Anybody's listener is called here, and none may end the training.
        except Exception as error:
            _tell_once(self.name, f"{type(error).__name__}: {error}")

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Records the seconds that the block took, unless it raised."""
        assert self.kind == "duration", self
        began_secs = time.monotonic()
        yield
        self.record(time.monotonic() - began_secs)


@functools.lru_cache(maxsize=256)
def _tell_once(name: str, reason: str) -> None:
    logging.warning(
        "a listener of jax.monitoring failed on %s (%s); the run goes on without it",
        name,
        reason,
    )


DATA_WAIT = Metric(
    name="/elastic_ckpt/data/wait_secs",
    kind="duration",
    unit="secs",
    meaning="the loop waited for a batch",
)
DATA_READ_AHEAD = Metric(
    name="/elastic_ckpt/data/read_ahead_batches",
    kind="gauge",
    unit="batches",
    meaning="batches that were ready on this host when one was asked for",
)
DATA_ROWS = Metric(
    name="/elastic_ckpt/data/rows",
    kind="counter",
    unit="rows",
    meaning="rows of a delivered batch that this host loaded",
)
DATA_BYTES = Metric(
    name="/elastic_ckpt/data/bytes",
    kind="counter",
    unit="bytes",
    meaning="bytes of a delivered batch that this host loaded",
)
DATA_SAVE_BLOCK = Metric(
    name="/elastic_ckpt/data/save_block_secs",
    kind="duration",
    unit="secs",
    meaning="the loop was held up while the data state was taken",
)
DATA_SAVE = Metric(
    name="/elastic_ckpt/data/save_secs",
    kind="duration",
    unit="secs",
    meaning="from taking the data state until this host had written its part",
)
DATA_LOAD = Metric(
    name="/elastic_ckpt/data/load_secs",
    kind="duration",
    unit="secs",
    meaning="the data state was read, and the iterator brought there",
)
CHECKPOINT_SAVE_BLOCK = Metric(
    name="/elastic_ckpt/checkpoint/save_block_secs",
    kind="duration",
    unit="secs",
    meaning="the loop was held up by a save, waiting for the one before included",
)
CHECKPOINT_SAVE = Metric(
    name="/elastic_ckpt/checkpoint/save_secs",
    kind="duration",
    unit="secs",
    meaning="from the start of a save until its step was found complete",
)
CHECKPOINT_LOAD = Metric(
    name="/elastic_ckpt/checkpoint/load_secs",
    kind="duration",
    unit="secs",
    meaning="a step was restored, weights and data state",
)

CHECKPOINT_READ = {
    near: Metric(
        name=f"/elastic_ckpt/checkpoint/read_{near}_bytes",
        kind="counter",
        unit="bytes",
        meaning=f"all hosts read and verified for a restore, {where}",
    )
    for near, where in {
        "local": "each from its own RAM",
        "close": "from peers in their failure domain",
        "distant": "from peers in another failure domain",
        "persistent": "from persistent storage",
    }.items()
}
CHECKPOINT_BAD_COPIES = Metric(
    name="/elastic_ckpt/checkpoint/bad_copies",
    kind="counter",
    unit="copies",
    meaning="copies that a restore met which were not what was saved",
)
CHECKPOINT_REPAIRED = Metric(
    name="/elastic_ckpt/checkpoint/repaired_copies",
    kind="counter",
    unit="copies",
    meaning="of these those that were put right",
)
CHECKPOINT_COPY = Metric(
    name="/elastic_ckpt/checkpoint/copy_bytes",
    kind="counter",
    unit="bytes",
    meaning="all hosts took as copies of a step from their peers",
)
CHECKPOINT_COPY_SECS = Metric(
    name="/elastic_ckpt/checkpoint/copy_secs",
    kind="duration",
    unit="secs",
    meaning="until all copies of a step were there",
)
CHECKPOINT_BACKUP = Metric(
    name="/elastic_ckpt/checkpoint/backup_bytes",
    kind="counter",
    unit="bytes",
    meaning="all hosts wrote to persistent storage for a step",
)
CHECKPOINT_BACKUP_SECS = Metric(
    name="/elastic_ckpt/checkpoint/backup_secs",
    kind="duration",
    unit="secs",
    meaning="until a step was committed in persistent storage",
)

# Every metric by its name. Users see the names, so a golden file freezes them.
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        DATA_WAIT,
        DATA_READ_AHEAD,
        DATA_ROWS,
        DATA_BYTES,
        DATA_SAVE_BLOCK,
        DATA_SAVE,
        DATA_LOAD,
        CHECKPOINT_SAVE_BLOCK,
        CHECKPOINT_SAVE,
        CHECKPOINT_LOAD,
        *CHECKPOINT_READ.values(),
        CHECKPOINT_BAD_COPIES,
        CHECKPOINT_REPAIRED,
        CHECKPOINT_COPY,
        CHECKPOINT_COPY_SECS,
        CHECKPOINT_BACKUP,
        CHECKPOINT_BACKUP_SECS,
    )
}
