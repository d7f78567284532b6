"""A step in the step log, and its line in the file; see STEP_LOG.md."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from elastic_ckpt.core import digest, storage
from elastic_ckpt.training import batch_digests, id_runs

PROOF = "proof"
SUMMARY = "summary"
# BLAKE2b-128; versions 1 to 4 have BLAKE2b-64.
_DIGEST_BYTES = 16
_READABLE_DIGEST_BYTES = (8, 16)
# The most rows of a batch: a damaged file must not exhaust the memory of a reader.
_MAX_ROWS = 2**24


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step of a run.

    Attributes:
      step: its number, from 0.
      loss: over the global batch, before the update; NaN if it was not logged.
      digest: of ids and tokens in row order, `core.digest.batch_digest`; 32 hex digits,
        16 in versions 1 to 4.
      num_rows: of the global batch.
      attempt: the number of the attempt that logged it.
      runs: example ids in row order, see `id_runs`; empty if they are not listed.
      digests: of the batch and of blocks of its rows; None if the ids are listed, and
        in a summary.
    """

    step: int
    loss: float
    digest: str
    num_rows: int
    attempt: int
    runs: id_runs.Items = ()
    digests: batch_digests.BatchDigests | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """Example ids in row order; empty if they are not listed."""
        return id_runs.decode(self.runs)


def line(
    step: int,
    loss: float | None,
    ids: np.ndarray,
    row_digests: np.ndarray,
    *,
    detail: str,
) -> dict[str, storage.Json]:
    """The line of a step, at most 2,000 bytes.

    Args:
      step: its number.
      loss: over its batch; None if it is not known.
      ids: example ids in row order, uint64 `[rows]`.
      row_digests: of the tokens of the rows, uint32 `[rows]`.
      detail: `PROOF` lists the ids, or has digests of blocks of rows if the ids take
        too much space; `SUMMARY` has neither.
    """
    fields: dict[str, Any] = {
        "step": step,
        "loss": loss,
        "digest": digest.batch_digest(ids, row_digests, num_bytes=_DIGEST_BYTES),
        "rows": len(ids),
    }
    if loss is None:
        del fields["loss"]
    if detail == PROOF:
        runs = id_runs.encode(ids)
        if runs is not None:
            fields["ids"] = runs
        else:
            fields |= batch_digests.digests(ids, row_digests).line
    return fields


def parse(line: dict[str, Any], *, attempt: int) -> StepRecord:
    """The record of a line of any version.

    Raises:
      KeyError, TypeError, ValueError: if it is not the line of a step.
    """
    runs = line.get("ids", [])
    num_ids = id_runs.count(runs)
    num_rows = line.get("rows", num_ids)
    if "ids" in line and num_rows != num_ids:
        raise ValueError(f"{num_ids} ids of {num_rows} rows")
    if not 0 < num_rows <= _MAX_ROWS:
        raise ValueError(f"a batch of {num_rows} rows")
    if len(bytes.fromhex(line["digest"])) not in _READABLE_DIGEST_BYTES:
        raise ValueError(f"digest {line['digest']}")
    digests = batch_digests.parse(line, num_rows) if "blocks" in line else None
    return StepRecord(
        step=line["step"],
        loss=line.get("loss", math.nan),
        digest=line["digest"],
        num_rows=num_rows,
        attempt=attempt,
        runs=runs,
        digests=digests,
    )
