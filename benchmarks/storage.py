"""Suite `storage`: what a run writes to and reads from its storage.

Object stores are emulators on this machine (`tests.buckets`). The step log:

* `log_bytes_per_step`: bytes of the log of `elastic-ckpt train` over its steps, at a
  batch of 4,096 shuffled rows.
* `log_write_ratio`: the write of the log before a checkpoint at step 100,000 over that
  at step 100, in a bucket of GCS; `_s3` and `_disk` are the others. A checkpoint is
  saved every 100 steps, of 4,096 rows each.
* `log_write_ms`: the write at step 100,000 in a bucket of GCS; `_s3`, `_disk`.
* `log_append_ms`: what a step adds to the log without it, on a disk.

Data and steps in buckets, with the emulators in another process (`storage_buckets`):

* `bucket_read_ratio`: the speed of reading TFRecords from a bucket of GCS over that of
  ranged reads of the same bytes, 16 at a time, of 2 MiB each; `_s3`, and `_late` with
  answers that take 20 ms longer.
* `upload_ratio_orbax`: the time until a state is saved to a bucket of GCS over that of
  plain Orbax.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
from array_record.python import array_record_module

from benchmarks import report, storage_buckets
from elastic_ckpt.core import topology
from elastic_ckpt.training import step_log, train_step

_PERIOD = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The size of the runs.

    Attributes:
      rows: of a batch.
      train_steps: of the run whose log is measured.
      late_step: of the late checkpoint.
      rounds: of checkpoints that are timed.
      buckets: the size of what is read from buckets and saved to them.
    """

    rows: int = 4096
    train_steps: int = 20
    late_step: int = 100_000
    rounds: int = 31
    buckets: storage_buckets.Size = dataclasses.field(
        default_factory=storage_buckets.Size
    )


SMALL = Size(
    rows=512,
    train_steps=2,
    late_step=300,
    rounds=2,
    buckets=storage_buckets.Size(data_files=2, file_mib=4, state_mib=1, rounds=1),
)


def measure(size: Size = Size()) -> dict[str, report.Figure]:
    """Runs the suite."""
    return _log_bytes(size) | _log_writes(size) | storage_buckets.measure(size.buckets)


def _log_bytes(size: Size) -> dict[str, report.Figure]:
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(directory)
        settings = {
            "run_name": "log",
            "base_output_directory": directory,
            "grain_train_files": _corpus(root / "texts.array_record"),
            "max_target_length": 16,
            "global_batch_size": size.rows,
            "base_emb_dim": 16,
            "base_num_query_heads": 2,
            "head_dim": 8,
            "base_mlp_dim": 16,
            "base_num_decoder_layers": 1,
            "enable_checkpointing": False,
            "steps": size.train_steps,
        }
        # JSON is YAML.
        (root / "config.yml").write_text(json.dumps(settings))
        command = [sys.executable, "-m", "elastic_ckpt.cli.main", "train"]
        subprocess.run(
            [*command, str(root / "config.yml")], check=True, stdout=subprocess.DEVNULL
        )
        files = (root / "log" / step_log.DIRECTORY).iterdir()
        num_bytes = sum(file.stat().st_size for file in files)
    per_step = num_bytes / size.train_steps
    return {"log_bytes_per_step": report.figure("bytes", "at most 2,000", [per_step])}


def _corpus(path: pathlib.Path) -> str:
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for number in range(100_000):
        writer.write(b"text %d" % number)
    writer.close()
    return str(path)


def _log_writes(size: Size) -> dict[str, report.Figure]:
    figures: dict[str, report.Figure] = {}
    with tempfile.TemporaryDirectory() as disk, _buckets() as buckets:
        directories = {"": buckets["gs"], "_s3": buckets["s3"], "_disk": disk}
        for ending, directory in directories.items():
            early, late, appended = _checkpoints(directory, size)
            figures[f"log_write_ratio{ending}"] = report.ratio(
                late, early, "at most 1.5"
            )
            figures[f"log_write_ms{ending}"] = report.figure("ms", "no bound", late)
            figures["log_append_ms"] = report.figure("ms", "no bound", appended)
    return figures


def _checkpoints(
    directory: str, size: Size
) -> tuple[list[float], list[float], list[float]]:
    # Milliseconds of the writes at step 100, of those at the late step, and of a step
    # between them.
    generator = np.random.default_rng(0)
    reports = [_report(generator, size.rows) for _ in range(_PERIOD)]
    early, late, appended = [], [], []
    with contextlib.closing(_Log(f"{directory}/late", reports)) as long:
        for _ in range(size.late_step // _PERIOD - 1):
            long.checkpoint()
        # One more round, which is not counted: clients connect in it.
        for number in range(size.rounds + 1):
            new = _Log(f"{directory}/early-{number}", reports)
            with contextlib.closing(new) as short:
                # They take turns to be first, as a flush may leave work to the next.
                sides = [(short, early), (long, late)][:: 1 if number % 2 else -1]
                for log, samples in sides:
                    append_ms, sync_ms = log.checkpoint()
                    if number:
                        samples.append(sync_ms)
                        appended.append(append_ms)
    return early, late, appended


class _Log:
    # The log of a run of which only the log exists.
    def __init__(self, run: str, reports: list[train_step.StepReport]) -> None:
        world = topology.Topology(hosts=1, slices=1, devices=1)
        start = step_log.Start(step=0, world=world, data={})
        self._log = step_log.StepLog(run, start)
        self._reports = reports
        self._step = 0

    def checkpoint(self) -> tuple[float, float]:
        # Milliseconds of each step until the next checkpoint, and of its write.
        began = time.perf_counter()
        for each in self._reports:
            self._log.append(self._step, each)
            self._step += 1
        appended = time.perf_counter()
        self._log.sync()
        ended = time.perf_counter()
        return 1e3 * (appended - began) / len(self._reports), 1e3 * (ended - appended)

    def close(self) -> None:
        self._log.close()


def _report(generator: np.random.Generator, rows: int) -> train_step.StepReport:
    # Outputs of a step, on the host.
    fields: Any = {
        "example_id": generator.integers(0, 2**32, (rows, 2), np.uint32),
        "row_digests": generator.integers(0, 2**32, rows, np.uint32),
        "tokens": np.int32(rows),
    }
    scalars = ("loss", "learning_rate", "gradient_norm")
    return train_step.StepReport(**fields | dict.fromkeys(scalars, np.float32(0.1)))


@contextlib.contextmanager
def _buckets() -> Iterator[dict[str, str]]:
    # The URL of a bucket of each kind, by protocol.
    from tests import buckets

    with buckets.serving() as environment, mock.patch.dict(os.environ, environment):
        yield {kind: f"{kind}://{buckets.BUCKET}" for kind in ("gs", "s3")}
