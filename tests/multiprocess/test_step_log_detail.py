"""Runs whose batches are too large for their ids to be listed, and their audits."""

import json

import pytest

from elastic_ckpt.training import step_log
from tests import runs

# Ids of one or two digits: a batch of them takes more than 1,600 bytes.
ROWS = 1024


@pytest.mark.night
@pytest.mark.parametrize("in_order", [False, True])
def test_a_run_of_large_batches_passes_its_audit_over_resizes_and_details(
    tmp_path, corpus, in_order
):
    config = runs.write_config(
        tmp_path,
        corpus,
        global_batch_size=ROWS,
        checkpoint_period=2,
        grain_use_elastic_iterator=not in_order,
    )
    # One host has the order of the one-host run, which a summary proves.
    for settings in (
        ("hosts=2", "steps=4"),
        ("hosts=1", "steps=6", "step_log=summary"),
        ("hosts=4", "steps=8"),
    ):
        ended = runs.cli("train", config, *settings)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    run = tmp_path / "tiny"
    records = runs.steps(run)
    assert [bool(each.digests) for each in records] == [True] * 4 + [False] * 2 + (
        [True] * 2
    )
    assert not any(each.ids for each in records)
    outcome = json.loads(runs.verb("audit", run, "--json"))
    assert outcome["passed"]
    assert outcome["num_examples"] == 8 * ROWS
    assert outcome["num_row_identical_steps"] == (8 if in_order else 2)
    forge(run / step_log.DIRECTORY / "attempt-00003.jsonl")
    output = runs.verb("audit", run, code=1)
    assert "FAILED: step 7" in output
    if in_order:
        assert "step 7, rows 64 to 95: other examples were used" in output
        assert "lost: at most 32 examples; repeated: at most 32" in output


def forge(path):
    # The digests of other examples in the third block of the last step.
    *lines, last = path.read_text().splitlines()
    record = json.loads(last)
    blocks = record["blocks"]
    record |= {
        "digest": record["digest"][::-1],
        "examples": record["examples"][::-1],
        "blocks": blocks[:32] + blocks[32:48][::-1] + blocks[48:],
    }
    path.write_text("\n".join([*lines, json.dumps(record)]) + "\n")
