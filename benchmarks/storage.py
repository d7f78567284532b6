"""Suite `storage`: the step log; buckets, compared with plain ranged reads and Orbax.

* `log_bytes_per_step`: log size per step of `elastic-ckpt train` with a batch of 4,096
  shuffled rows.
* `log_bytes_moved_ratio`: the bytes that the metrics of a run in a bucket transfer,
  relative to the bytes of the resulting log.
* `bucket_read_ratio`: the speed of reading TFRecords from a GCS bucket relative to
  ranged reads of the same bytes, 16 at a time, of 2 MiB each; `_s3` for S3; `_late`
  with answers that take 20 ms longer, because the first byte of real stores takes tens
  of milliseconds.
* `upload_ratio_orbax`: the time until a state is saved to a GCS bucket relative to
  stock Orbax, which only writes to `gs://`.

Data is read as a loop does by default: TFRecords in shards, verified, in batches. The
object stores are emulators in another process, so that neither side shares a Python
interpreter with them. As in a run, files are looked up and indexed once beforehand.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, cast
from unittest import mock

import fsspec
import gcsfs
import grain
import jax
import jax.numpy as jnp
import numpy as np
from array_record.python import array_record_module
from orbax.checkpoint import v1 as ocp

from benchmarks import report, sized, turns
from elastic_ckpt import data, frontend
from elastic_ckpt.core import metrics, storage
from elastic_ckpt.data.sources import remote_file
from elastic_ckpt.monitoring import summaries
from elastic_ckpt.tiers import choices
from elastic_ckpt.training import step_log
from tests import tfrecord_files

_RECORD_BYTES = 64 * 1024
# The record length and the checksums.
_FRAME_BYTES = 16
_SHARDS = 4
# The number of records in a batch.
_ROWS = 32
# The number of simultaneous plain reads, and the bytes of each.
_READERS = 16
_RANGE_BYTES = remote_file.RANGE_BYTES
# The first bytes from real stores take tens of milliseconds.
_LATE_SECS = 0.02
_LARGE_LEAVES = 8
_SMALL_LEAVES = 64
_SERVING = """
import json, sys
from tests import buckets
with buckets.serving(float(sys.argv[1])) as environment:
    print(json.dumps(environment | {"BUCKET": buckets.BUCKET}), flush=True)
    sys.stdin.read()
"""
_FILES = sized(8, 2)
_FILE_BYTES = sized(64 << 20, 4 << 20)
_STATE_ITEMS = sized(16 << 20, 1 << 18)
_ROUNDS = sized(7, 1)
_BATCHES = sized(360, 20)
# The steps of the run whose log is measured.
_STEPS = sized(20, 2)
_LOGGED = {
    "run_name": "log",
    "max_target_length": 16,
    "global_batch_size": sized(4096, 512),
    "base_emb_dim": 16,
    "base_num_query_heads": 2,
    "head_dim": 8,
    "base_mlp_dim": 16,
    "base_num_decoder_layers": 1,
    "enable_checkpointing": False,
    "steps": _STEPS,
}


def measure() -> dict[str, report.Figure]:
    """Measures in processes that start with the addresses of the stores."""
    ratios, saves, moved = {}, {}, 0.0
    for ending, kind, late_secs in (
        ("", "gs", 0.0),
        ("_s3", "s3", 0.0),
        ("_late", "gs", _LATE_SECS),
    ):
        with stores(late_secs) as environment, mock.patch.dict(os.environ, environment):
            url = f"{kind}://{environment['BUCKET']}"
            secs = turns.in_new_process(_reads, f"{url}/data")
            ratios[f"bucket_read_ratio{ending}"] = report.ratio(
                secs["plain"],
                secs["ours"],
                "at least 0.8; relative to the speed of plain ranged reads",
            )
            if not ending:
                moved = turns.in_new_process(_moved_by_metrics, f"{url}/metrics")
                saves = turns.in_new_process(_saves, f"{url}/steps")
    return ratios | {
        "log_bytes_moved_ratio": report.figure("ratio", "at most 2", [moved]),
        "log_bytes_per_step": report.figure("bytes", "at most 160", [_log_bytes()]),
        "upload_ratio_orbax": report.ratio(
            saves["ours"],
            saves["orbax"],
            "at most 1.1; time until a step is in gs://, relative to Orbax",
        ),
    }


def _log_bytes() -> float:
    with tempfile.TemporaryDirectory() as directory:
        corpus = f"{directory}/texts.array_record"
        writer = array_record_module.ArrayRecordWriter(corpus, "group_size:1")
        for number in range(100_000):
            writer.write(b"text %d" % number)
        writer.close()
        settings = {"base_output_directory": directory, "grain_train_files": corpus}
        config = pathlib.Path(directory, "config.yml")
        # JSON is YAML.
        config.write_text(json.dumps(_LOGGED | settings))
        subprocess.run(
            [sys.executable, "-m", "elastic_ckpt.cli.main", "train", str(config)],
            stdout=subprocess.DEVNULL,
            check=True,
        )
        files = pathlib.Path(directory, "log", step_log.DIRECTORY).iterdir()
        return sum(file.stat().st_size for file in files) / _STEPS


def _moved_by_metrics(directory: str) -> float:
    # The bytes in requests to the store over the remaining bytes, for an hour of
    # batches.
    moved = 0
    request = gcsfs.GCSFileSystem._request

    async def counted(
        client: Any, method: str, path: str, *args: Any, data: Any = None, **more: Any
    ) -> Any:
        nonlocal moved
        status, headers, info, content = await request(
            client, method, path, *args, data=data, **more
        )
        moved += len(content) + (0 if data is None else len(bytes(data)))
        return status, headers, info, content

    sink = summaries.json_lines(f"{directory}/host-00000.jsonl")
    with mock.patch.object(gcsfs.GCSFileSystem, "_request", counted), sink as write:
        for _ in range(_BATCHES):
            write(
                [
                    {
                        "time": float(number),
                        "metric": metrics.TRAIN_STEP.name,
                        "count": 10,
                        "sum": 12.3,
                        "min": 1.0,
                        "max": 2.0,
                        "last": 1.2,
                    }
                    for number in range(20)
                ]
            )
    files = fsspec.url_to_fs(directory)[0].find(directory, detail=True).values()
    return moved / sum(file["size"] for file in files)


@contextlib.contextmanager
def stores(late_secs: float = 0.0) -> Iterator[dict[str, str]]:
    """Runs both stores in another process; `gs://` answers after `late_secs`.

    Yields:
      The environment variables for clients, including the name of the `BUCKET`.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _SERVING, str(late_secs)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as serving:
        assert serving.stdin is not None
        assert serving.stdout is not None
        try:
            yield json.loads(serving.stdout.readline())
        finally:
            serving.stdin.close()


def _reads(url: str) -> turns.Secs:
    paths = _write_data(url)
    num_batches = _FILES * _FILE_BYTES // _RECORD_BYTES // _ROWS
    ranges = list(_ranges(paths))
    with concurrent.futures.ThreadPoolExecutor(_READERS) as readers:
        sides: dict[str, Callable[[], int]] = {
            "plain": lambda: sum(readers.map(_read_range, ranges)),
            "ours": lambda: _read_records(paths, num_batches),
        }
        num_bytes = {side: read() for side, read in sides.items()}
        assert len(set(num_bytes.values())) == 1, num_bytes
        return turns.timed(sides, _ROUNDS)


def _write_data(url: str) -> tuple[str, ...]:
    generator = np.random.default_rng(0)
    num_records = _FILE_BYTES // _RECORD_BYTES
    paths = []
    for number in range(_FILES):
        path = f"{url}/part-{number}.tfrecord"
        records = (generator.bytes(_RECORD_BYTES) for _ in range(num_records))
        with tempfile.TemporaryDirectory() as directory:
            local = pathlib.Path(directory, "part")
            tfrecord_files.write(local, records)
            storage.write_atomic(path, local.read_bytes())
        paths.append(path)
    return tuple(paths)


def _ranges(paths: tuple[str, ...]) -> Iterator[tuple[Any, str, int, int]]:
    for path in paths:
        system, name = fsspec.url_to_fs(path)
        num_bytes = system.info(name)["size"]
        for start in range(0, num_bytes, _RANGE_BYTES):
            yield system, name, start, min(start + _RANGE_BYTES, num_bytes)


def _read_range(part: tuple[Any, str, int, int]) -> int:
    system, name, start, stop = part
    return len(system.cat_file(name, start=start, end=stop))


def _read_records(paths: tuple[str, ...], num_batches: int) -> int:
    # The bytes of all records with their frames, as a loop on one host reads them.
    remote_file.forget()
    batches = data.LocalBatches(
        data.sharded(functools.partial(_shard, paths), pipeline="rows"),
        global_batch_size=_ROWS,
    )
    num_bytes = 0
    for batch in itertools.islice(batches, num_batches):
        rows = batch["bytes"]
        num_bytes += rows.nbytes + len(rows) * _FRAME_BYTES
    return num_bytes


def _shard(paths: tuple[str, ...], shard: int) -> grain.IterDataset:
    source = data.TFRecord(files=paths, record_format="bytes")
    return data.Records(source, shard=shard, num_shards=_SHARDS).map(_row)


def _row(record: dict[str, Any]) -> dict[str, np.ndarray]:
    return {"bytes": np.frombuffer(record["text"], np.uint8)}


def _saves(url: str) -> turns.Secs:
    keep = cast(Any, ocp.training.preservation_policies.LatestN(1))
    ours = frontend.Checkpointer(
        [choices.Persistent(f"{url}/ours", every=1, keep=keep)]
    )
    orbax = ocp.training.Checkpointer(f"{url}/orbax", preservation_policy=keep)
    steps = itertools.count(1)
    items = _STATE_ITEMS // _LARGE_LEAVES

    @jax.jit
    def make(number: float) -> dict[str, jax.Array]:
        large = jnp.sin(jnp.arange(items, dtype=jnp.float32) * number)
        state = {f"large_{n}": large + n for n in range(_LARGE_LEAVES)}
        small = {f"small_{n:02d}": large[:256] * n for n in range(_SMALL_LEAVES)}
        return state | small

    def save(checkpointer: Any) -> None:
        step = next(steps)
        state = jax.block_until_ready(make(step + 0.5))
        assert checkpointer.save_async(step, state, force=True).result()

    sides = {"ours": lambda: save(ours), "orbax": lambda: save(orbax)}
    secs = turns.timed(sides, _ROUNDS)
    ours.close()
    orbax.close()
    return secs
