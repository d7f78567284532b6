"""Suite `storage`: what a run writes to and reads from its storage.

Object stores are emulators in another process, with which neither side shares a Python
interpreter. The step log:

* `log_bytes_per_step`: bytes of the log of `elastic-ckpt train` over its steps, at a
  batch of 4,096 shuffled rows.
* `log_write_ratio`: the write of the log before a checkpoint at step 100,000 over that
  at step 100, in a bucket of GCS; `_s3` and `_disk` are the others. A checkpoint is
  saved every 100 steps, of 4,096 rows each.

Data and steps in buckets (`storage_buckets`):

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
        corpus = str(root / "texts.array_record")
        with contextlib.closing(
            array_record_module.ArrayRecordWriter(corpus, "group_size:1")
        ) as writer:
            for number in range(100_000):
                writer.write(b"text %d" % number)
        settings = {
            "run_name": "log",
            "base_output_directory": directory,
            "grain_train_files": corpus,
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


def _log_writes(size: Size) -> dict[str, report.Figure]:
    figures: dict[str, report.Figure] = {}
    with tempfile.TemporaryDirectory() as disk, storage_buckets.stores() as environment:
        bucket = environment["BUCKET"]
        directories = {"": f"gs://{bucket}", "_s3": f"s3://{bucket}", "_disk": disk}
        with mock.patch.dict(os.environ, environment):
            for ending, directory in directories.items():
                early, late = _checkpoints(directory, size)
                figures[f"log_write_ratio{ending}"] = report.ratio(
                    late, early, "at most 1.5"
                )
    return figures


def _checkpoints(directory: str, size: Size) -> tuple[list[float], list[float]]:
    # The seconds of the writes at step 100, and of those at the late step.
    generator = np.random.default_rng(0)
    reports = [_report(generator, size.rows) for _ in range(_PERIOD)]
    early, late = [], []
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
                    samples.append(log.checkpoint())
    return early[1:], late[1:]


class _Log:
    # The log of a run of which only the log exists.
    def __init__(self, run: str, reports: list[train_step.StepReport]) -> None:
        world = topology.Topology(hosts=1, slices=1, devices=1)
        start = step_log.Start(step=0, world=world, data={})
        self._log = step_log.StepLog(run, start)
        self._reports = reports
        self._step = 0

    def checkpoint(self) -> float:
        """Logs the steps until the next checkpoint; the seconds of its write."""
        for each in self._reports:
            self._log.append(self._step, each)
            self._step += 1
        began = time.perf_counter()
        self._log.sync()
        return time.perf_counter() - began

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
