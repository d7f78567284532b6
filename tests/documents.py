"""Makes the batches of a run of the documents that `audit --step` names.

If they have the digests that the run has logged, each document was named rightly.
"""

import json

import numpy as np
import pyarrow.parquet as pq

from elastic_ckpt.core import digest
from elastic_ckpt.data.lm import documents as lm_documents
from elastic_ckpt.training import step_log
from tests import runs

DOCUMENTS = lm_documents.Documents()


def assert_named(run, steps, *, length: int) -> int:
    """Fails unless the named documents make the batches of all attempts.

    Args:
      run: the directory of a run over the column `text` of Parquet files, packed, with
        no row of padding.
      steps: to ask for.
      length: tokens of a row.

    Returns:
      The number of batches.
    """
    logged = {
        (attempt.attempt, record.step): record
        for attempt in step_log.read(run)
        for record in attempt.records
    }
    num_batches = 0
    for step in steps:
        # The log has 0 for the first step.
        output = runs.verb("audit", run, "--step", step + 1, "--json")
        for batch in json.loads(output[: output.rindex("]") + 1]):
            made = [_row(row, length) for row in batch["rows"]]
            features = {name: np.stack([row[name] for row in made]) for name in made[0]}
            for attempt in batch["attempts"]:
                record = logged[attempt, step]
                ids = np.arange(record.row, record.stop)
                found = step_log.batch_digest(ids, digest.row_digests(features))
                assert record.digest == found
                num_batches += 1
    return num_batches


def _row(documents, length):
    names = ("inputs", "targets", "inputs_segmentation", "inputs_position")
    row = {name: np.zeros(length, np.int32) for name in names}
    begin = 0
    for number, piece in enumerate(documents, start=1):
        text = pq.read_table(piece["file"])["text"][piece["record"]].as_py()
        (tokens,) = DOCUMENTS.tokens([text])
        assert len(tokens) == piece["document_tokens"]
        first, size = piece["first_token"], piece["num_tokens"]
        end = begin + size
        row["inputs"][begin:end] = tokens[first : first + size]
        row["targets"][begin:end] = tokens[first + 1 : first + size + 1]
        row["inputs_segmentation"][begin:end] = number
        row["inputs_position"][begin:end] = np.arange(size)
        begin = end
    return row | {
        "targets_segmentation": row["inputs_segmentation"],
        "targets_position": row["inputs_position"],
    }
