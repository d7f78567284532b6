"""Compares what a run trained on with what one host would have trained on."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

import grain
import numpy as np

from elastic_ckpt.core import digest
from elastic_ckpt.data import example_id, positional
from elastic_ckpt.training import step_log


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """The outcome of an audit.

    Attributes:
      num_steps: steps in the run's lineage.
      num_examples: rows that these steps took, repeats of later epochs counted.
      num_epochs: passes over the data, the last one perhaps in part.
      num_lost: examples that the one-host run used up to here, and the run did not.
      num_repeated: examples that the run used more often than the one-host run.
      num_row_identical_steps: steps whose rows also stand in the one-host order.
      num_redone_steps: steps that were trained again after a crash (and count once).
      hosts: hosts of each attempt.
      first_difference: the first step that differs, in words; empty if none does.
    """

    num_steps: int
    num_examples: int
    num_epochs: float
    num_lost: int
    num_repeated: int
    num_row_identical_steps: int
    num_redone_steps: int
    hosts: tuple[int, ...]
    first_difference: str

    @property
    def passed(self) -> bool:
        """Whether each example was used exactly once, in the one-host run's batches."""
        return not (self.first_difference or self.num_lost or self.num_repeated)


def audit(
    attempts: list[step_log.Attempt],
    data: positional.PositionalData,
    *,
    num_saved_steps: int = 0,
) -> Audit:
    """Compares the lineage of `attempts` with a one-host run over `data`.

    Batch for batch, the same examples with the same tokens have to be there; their
    places in the batch may differ, and are counted. The one-host run is read anew from
    the files.

    Args:
      attempts: the step log.
      data: what the run was configured to train on.
      num_saved_steps: the run's newest checkpoint; a log that ends before it has lost
        steps that were trained.
    """
    lineage = step_log.lineage(attempts)
    steps = [lineage[step] for step in sorted(lineage)]
    used: collections.Counter[int] = collections.Counter()
    expected: collections.Counter[int] = collections.Counter()
    num_row_identical = 0
    difference = ""
    oracle = _one_host_rows(data.examples())
    for number, record in enumerate(steps):
        rows = [next(oracle) for _ in record.ids]
        expected.update(row for row, _ in rows)
        used.update(record.ids)
        num_row_identical += list(record.ids) == [row for row, _ in rows]
        if not difference and record.step != number:
            difference = f"step {number} is missing from the step log"
        difference = difference or _difference(record, rows)
    if not difference and num_saved_steps > len(steps):
        difference = (
            f"step {len(steps)} is missing from the step log, whose end was lost:"
            f" checkpoint {num_saved_steps} was saved after it"
        )
    num_logged = sum(len(attempt.records) for attempt in attempts)
    num_examples = sum(used.values())
    return Audit(
        num_steps=len(steps),
        num_examples=num_examples,
        num_epochs=num_examples / data.num_records(),
        num_lost=(expected - used).total(),
        num_repeated=(used - expected).total(),
        num_row_identical_steps=num_row_identical,
        num_redone_steps=num_logged - len(steps),
        hosts=tuple(attempt.hosts for attempt in attempts),
        first_difference=difference,
    )


def _one_host_rows(examples: grain.MapDataset) -> Iterator[tuple[int, int]]:
    # (example id, row digest) of every example of the one-host run, in order.
    number = 0
    while True:
        example = examples[number]
        assert example is not None
        tokens = np.concatenate([example["inputs"], example["targets"]])[None]
        yield (
            example_id.join(example["example_id"][None])[0],
            int(digest.row_digests(tokens)[0]),
        )
        number += 1


def _difference(record: step_log.StepRecord, rows: list[tuple[int, int]]) -> str:
    used = collections.Counter(record.ids)
    expected = collections.Counter(row for row, _ in rows)
    if used != expected:
        row, wrong = next(
            (row, id_)
            for row, id_ in enumerate(record.ids)
            if used[id_] > expected[id_]
        )
        return (
            f"step {record.step}, row {row}: example {wrong} was used; the one-host run"
            f" has {sorted((expected - used).elements())} in this batch instead of"
            f" {sorted((used - expected).elements())}"
        )
    tokens = dict(rows)
    if digest.batch_digest(record.ids, (tokens[id_] for id_ in record.ids)) != (
        record.digest
    ):
        return (
            f"step {record.step}: the examples are those of the one-host run, but their"
            f" tokens are not (digest {record.digest})"
        )
    return ""
