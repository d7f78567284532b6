"""`audit RUN --find FILE:RECORD` and `--step N`: the documents behind a run's steps."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent import futures
from typing import TYPE_CHECKING, Any

from elastic_ckpt.core import errors
from elastic_ckpt.data import datasets
from elastic_ckpt.training import run_directory

if TYPE_CHECKING:
    from etils import epath

    from elastic_ckpt.cli import audit
    from elastic_ckpt.data import provenance as documents
    from elastic_ckpt.training import provenance

# Data states that are read at once.
_READERS = 16

_OUTCOMES = {
    "used": "used",
    "left_out": "left out with other rows when the run went back to an older step",
    "too_short": "makes no example: it has fewer than two tokens",
    "filtered": "left out by the pipeline",
    "corrupt": "corrupt, and skipped",
    "read_ahead": "read ahead, in no step yet",
    "not_yet_used": "not used yet",
}


def answer(run: audit.Run, arguments: argparse.Namespace) -> int:
    """Prints the answer to `--find` or `--step`."""
    from elastic_ckpt.training import provenance

    readings: list[provenance.Reading] = []

    def announce(reading: provenance.Reading) -> None:
        readings.append(reading)
        print(describe_reading(reading), file=sys.stderr, flush=True)

    found = provenance.Provenance(
        run.attempts,
        run.data_of,
        saved=_saved(run.directory),
        is_in_order=run.is_in_order,
        first_step=run.first_step,
        announce=announce,
    )
    if arguments.find is not None:
        _print_uses(found, arguments.find, readings, is_json=arguments.json)
    else:
        _print_step(found, arguments.step, readings, is_json=arguments.json)
    return 0


def describe_reading(reading: provenance.Reading) -> str:
    """What is read, in words."""
    if not reading.shards:
        return f"computing which records {reading.num_rows:,} rows have; reading none"
    shards = ", ".join(map(str, reading.shards[:8]))
    more = ", ..." if len(reading.shards) > 8 else ""
    amount = (
        f" of files with {reading.epoch_records:,} records and"
        f" {reading.epoch_bytes / 1e6:,.1f} MB"
    )
    if reading.num_records is not None and reading.num_bytes is not None:
        amount = (
            f", about {reading.num_records:,} records with"
            f" {reading.num_bytes / 1e6:,.1f} MB{amount}"
        )
    start = "the beginning of the data"
    if reading.from_step is not None:
        start = f"the data state of checkpoint {reading.from_step}"
    plural = "s" * (len(reading.shards) > 1)
    return (
        f"reading logical shard{plural} {shards}{more} from {start}:"
        f" at most {reading.num_rows:,} rows{amount}"
    )


def _print_uses(
    run: provenance.Provenance,
    asked: str,
    readings: list[provenance.Reading],
    *,
    is_json: bool,
) -> None:
    file, colon, record = asked.rpartition(":")
    if not colon or not file or not record.isdecimal():
        raise errors.ConfigError(
            f"--find {asked}: write FILE:RECORD, the end of a path and the number of"
            " the record in the file, from 0, such as a.parquet:17"
        )
    found = []
    for each in run.find(file, int(record)):
        found.append(dataclasses.asdict(each))
        if not is_json:
            print("\n".join(_lines_of_found(each)), flush=True)
    if is_json:
        _print_json(found=found, readings=readings)


def _lines_of_found(found: provenance.Found) -> Iterator[str]:
    size = (
        "" if found.document_tokens is None else f", {found.document_tokens:,} tokens"
    )
    shard = "" if found.shard is None else f", logical shard {found.shard}"
    yield (
        f"{_document(found)}, epoch {found.epoch}{shard}{size}:"
        f" {_OUTCOMES[found.outcome]}"
    )
    for use in found.uses:
        row = "a row" if use.row is None else f"row {use.row}"
        tokens = _tokens(use.first_token, use.num_tokens)
        yield (
            f"  step {use.step}, {row}{tokens}, attempt {use.attempt}"
            + (" (discarded)" * (not use.is_current))
        )


def _print_step(
    run: provenance.Provenance,
    step: int,
    readings: list[provenance.Reading],
    *,
    is_json: bool,
) -> None:
    batches = []
    for batch, rows in run.step(step):
        if is_json:
            of_batch = [dataclasses.asdict(row) for row in rows]
            batches.append({**dataclasses.asdict(batch), "rows": of_batch})
            continue
        attempts = ", ".join(map(str, batch.attempts))
        print(
            f"step {batch.step}, attempt {attempts}: {batch.num_rows:,} rows from"
            f" position {batch.position:,}" + " (discarded)" * (not batch.is_current)
        )
        for row in rows:
            print("\n".join(_lines_of_row(row)), flush=True)
    if is_json:
        _print_json(batches=batches, readings=readings)


def _lines_of_row(row: provenance.UsedRow) -> Iterator[str]:
    place = "a row" if row.row is None else f"row {row.row}"
    if not row.documents:
        yield f"  {place}: padding"
    for piece in row.documents:
        tokens = _tokens(piece.first_token, piece.num_tokens)
        of_all = "" if not tokens else f" of {piece.document_tokens:,}"
        yield f"  {place}: {_document(piece)}, epoch {piece.epoch}{tokens}{of_all}"


def _document(of: provenance.Found | documents.Piece) -> str:
    file = os.path.basename(of.file)
    # A dataset of a list is named after its files, and the only one has no name.
    is_named = of.dataset not in ("", file, datasets.ONLY)
    return f"{file}:{of.record}" + f" ({of.dataset})" * is_named


def _tokens(first: int, number: int | None) -> str:
    return "" if number is None else f", tokens {first:,} to {first + number:,}"


def _print_json(readings: list[provenance.Reading], **content: Any) -> None:
    as_json = content | {"readings": [dataclasses.asdict(each) for each in readings]}
    print(json.dumps(as_json, indent=2))


def _saved(directory: str) -> list[provenance.SavedData]:
    # The data states in storage that can be read.
    from elastic_ckpt.checkpoint import summary

    steps = summary.steps(run_directory.saved_steps_of(directory))
    with futures.ThreadPoolExecutor(_READERS) as pool:
        return [
            saved
            for of_step in pool.map(saved_at, steps.keys(), steps.values())
            for saved in of_step
        ]


def saved_at(step: int, path: epath.Path) -> list[provenance.SavedData]:
    """The data states of a step that can be read, nearly always one."""
    from elastic_ckpt.data import cursors, state
    from elastic_ckpt.training import provenance

    found = []
    for part in path.iterdir():
        if not (part / state.FILE_NAME).exists():
            continue
        try:
            saved = state.read(part)
        except errors.DataError:
            # An older state serves, too.
            continue

        def read(
            shards: Iterable[int], part: epath.Path = part, saved: Any = saved
        ) -> cursors.Cursors:
            return cursors.read(part, shards, saved.position)

        found.append(provenance.SavedData(step=step, state=saved, cursors=read))
    return found
