"""`elastic-ckpt audit RUN`: checks that a run trained on the right examples.

It compares the run's examples with the examples that one host reads from the run's own
pipeline. `--step` shows which documents a step used, and `--find` shows which steps
used a document.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any

from elastic_ckpt.cli import option_numbers
from elastic_ckpt.core import errors
from elastic_ckpt.data import provenance as documents
from elastic_ckpt.training import audit, provenance

_LIMITS = (
    "An audit compares the run with its own pipeline, reread by one host. It does not\n"
    "check what that pipeline drops (filters, truncation, incomplete batches)."
)
_OUTCOMES = {
    "used": "used",
    "left_out": "skipped when the run rolled back to an older step",
    "too_short": "skipped because it has fewer than two tokens",
    "filtered": "dropped by the pipeline",
    "corrupt": "skipped because it is corrupt",
    "read_ahead": "read ahead, not in a step yet",
    "not_yet_used": "not used yet",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the verb's arguments."""
    parser.add_argument("run", help="a run directory")
    parser.add_argument(
        "--data",
        metavar="MODULE:NAME",
        help="for your own training loop: the data that it passes to ec.batches, or a"
        " function that returns this data; MODULE must be importable",
    )
    question = parser.add_mutually_exclusive_group()
    question.add_argument(
        "--find",
        metavar="FILE:RECORD",
        help="show which steps used a document: the end of its file path and its record"
        " index, from 0",
    )
    question.add_argument(
        "--step",
        type=option_numbers.count,
        metavar="N",
        help="show which documents a step used; as in saves, the first step is 1"
        " (under MaxText 0)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Audits the run or answers a question about its documents; 1 if it fails."""
    recorded = audit.RunAudit(arguments.run, data=arguments.data)
    if arguments.find is not None or arguments.step is not None:
        _answer(recorded, arguments)
        return 0
    outcome = recorded.outcome()
    content = dataclasses.asdict(outcome) | {"passed": outcome.passed}
    print(json.dumps(content, indent=2) if arguments.json else describe(outcome))
    return 0 if outcome.passed else 1


def describe(outcome: audit.Audit) -> str:
    """The outcome in words."""
    hosts = " -> ".join(map(str, outcome.hosts))
    problem = outcome.first_difference or outcome.missing_checkpoint
    lines = {
        f"{outcome.num_steps} steps took {outcome.num_examples:,} rows; hosts:"
        f" {hosts}": True,
        f"lost: {outcome.num_lost} rows; repeated: {outcome.num_repeated}": True,
        f"batches of the one-host run: {outcome.num_identical_steps} of"
        f" {outcome.num_steps}": True,
        "steps retrained after an interruption:"
        f" {outcome.num_redone_steps}": outcome.num_redone_steps,
        "rows skipped where the run rolled back:"
        f" {outcome.num_left_out:,}": outcome.num_left_out,
        "PASSED: every step used the examples and values of the one-host run's batch,"
        f" and none was lost or repeated\n{_LIMITS}": outcome.passed,
        f"FAILED: {problem}": not outcome.passed,
    }
    return "\n".join(line for line, is_shown in lines.items() if is_shown)


def _answer(recorded: audit.RunAudit, arguments: argparse.Namespace) -> None:
    answers: list[dict[str, Any]] = []

    def answer(content: dict[str, Any], lines: Iterator[str]) -> None:
        answers.append(content)
        if not arguments.json:
            print("\n".join(lines), flush=True)

    run = provenance.Provenance.of_run(recorded)
    if arguments.find is not None:
        for found in run.find(*_document_of(arguments.find)):
            answer(dataclasses.asdict(found), _lines_of_found(found))
    else:
        for batch in run.step(arguments.step):
            answer(dataclasses.asdict(batch), _lines_of_batch(batch))
    if arguments.json:
        print(json.dumps(answers, indent=2))


def _document_of(asked: str) -> tuple[str, int]:
    file, _, record = asked.rpartition(":")
    if not file or not record.isdecimal():
        raise errors.ConfigError(
            f"--find {asked} does not have the form FILE:RECORD; specify the end of the"
            " file path and the record index, from 0, such as a.parquet:17"
        )
    return file, int(record)


def _lines_of_found(found: provenance.Found) -> Iterator[str]:
    tokens = found.document_tokens
    size = "" if tokens is None else f", {tokens:,} tokens"
    yield (
        f"{_document(found)}, epoch {found.epoch}, logical shard {found.shard}{size}:"
        f" {_OUTCOMES[found.outcome]}"
    )
    for use in found.uses:
        yield (
            f"  step {use.step}, row {use.row}"
            f"{_tokens(use.first_token, use.num_tokens)}, attempt {use.attempt}"
            f"{'' if use.is_current else ' (discarded)'}"
        )


def _lines_of_batch(batch: provenance.UsedBatch) -> Iterator[str]:
    yield (
        f"step {batch.step}, attempt {', '.join(map(str, batch.attempts))}:"
        f" {len(batch.rows):,} rows from position {batch.position:,}"
        f"{'' if batch.is_current else ' (discarded)'}"
    )
    for number, row in enumerate(batch.rows):
        if not row:
            yield f"  row {number}: padding"
        for piece in row:
            tokens = _tokens(piece.first_token, piece.num_tokens)
            of_all = f" of {piece.document_tokens:,}" if tokens else ""
            yield (
                f"  row {number}: {_document(piece)}, epoch {piece.epoch}{tokens}"
                f"{of_all}"
            )


def _document(of: provenance.Found | documents.Piece) -> str:
    file = os.path.basename(of.file)
    # A dataset from a list of files is named after them.
    is_named = of.dataset not in ("", file)
    return f"{file}:{of.record}" + f" ({of.dataset})" * is_named


def _tokens(first: int, number: int | None) -> str:
    return "" if number is None else f", tokens {first:,} to {first + number:,}"
