"""Suite `storage`: what a run writes to and reads from its storage.

The step log:

* `log_bytes_per_step`: bytes of the log of `elastic-ckpt train` over its steps, at a
  batch of 4,096 shuffled rows.

Data and steps in buckets (`storage_buckets`), of emulators in another process, with
which neither side shares a Python interpreter:

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
import pathlib
import subprocess
import sys
import tempfile

from array_record.python import array_record_module

from benchmarks import report, storage_buckets
from elastic_ckpt.training import step_log


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The size of the runs."""

    rows: int = 4096  # of a batch
    train_steps: int = 20
    buckets: storage_buckets.Size = storage_buckets.FULL


SMALL = Size(
    rows=512,
    train_steps=2,
    buckets=storage_buckets.Size(data_files=2, file_mib=4, state_mib=1, rounds=1),
)


def measure(size: Size = Size()) -> dict[str, report.Figure]:
    """Runs the suite."""
    return _log_bytes(size) | storage_buckets.measure(size.buckets)


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
