"""Buckets: reading training data beside plain ranged reads, and saving beside Orbax.

Data is read as a loop does it by default: TFRecords in shards, verified, in batches.
The object stores are emulators in another process, so that neither side shares a Python
interpreter with them. They answer at once, but the first byte of real stores takes tens
of milliseconds: data is read with late answers, too. The sides take turns, and each
reads or writes the same bytes.
Files are looked up and indexed once before, as by a run.
Orbax itself writes to `gs://` alone. Prints all samples as JSON.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import fsspec
import grain
import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from benchmarks import report
from elastic_ckpt import data, frontend
from elastic_ckpt.core import storage
from elastic_ckpt.data.sources import remote_file, tfrecord
from elastic_ckpt.tiers import choices

_RECORD_BYTES = 64 * 1024
# The length of a record and the checksums.
_FRAME_BYTES = 16
_SHARDS = 4
# The records of a batch.
_ROWS = 32
# The number of plain reads at a time, and the bytes of each.
_READERS = 16
_RANGE_BYTES = remote_file.BLOCK_BYTES
# Within the first bytes of real stores, which take tens of milliseconds.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The size of the measurement.

    Attributes:
      data_files: of training data.
      file_mib: of each.
      state_mib: of the state that is saved.
      rounds: that are counted.
    """

    data_files: int = 8
    file_mib: int = 64
    state_mib: int = 64
    rounds: int = 7


def measure(size: Size) -> dict[str, report.Figure]:
    """Measures in a process that begins with the addresses of the stores."""
    samples = _measured(size)
    late = _measured(size, late_secs=_LATE_SECS)
    samples |= {f"{side}_late": late[f"{side}_gs"] for side in ("plain", "ours")}
    figures = {}
    for kind, ending in (("gs", ""), ("s3", "_s3"), ("late", "_late")):
        figures[f"bucket_read_ratio{ending}"] = report.ratio(
            samples[f"plain_{kind}"],
            samples[f"ours_{kind}"],
            "at least 0.8; speed over that of plain ranged reads",
        )
        mib = size.data_files * size.file_mib
        figures[f"bucket_read_mib_per_sec{ending}"] = report.figure(
            "MiB/s", "no bound", [mib / each for each in samples[f"ours_{kind}"]]
        )
    return figures | {
        "upload_ratio_orbax": report.ratio(
            samples["save_ours"],
            samples["save_orbax"],
            "at most 1.1; until a step is in gs://, over Orbax's",
        ),
        "upload_secs": report.figure("secs", "no bound", samples["save_ours"]),
    }


def _measured(size: Size, *, late_secs: float = 0.0) -> dict[str, list[float]]:
    # Late stores are read from alone.
    command = [sys.executable, "-m", __name__, json.dumps(dataclasses.asdict(size))]
    with stores(late_secs) as environment:
        done = subprocess.run(
            [*command, *["--late"] * bool(late_secs)],
            stdout=subprocess.PIPE,
            env={**os.environ, **environment},
            check=True,
        )
    return json.loads(done.stdout)


@contextlib.contextmanager
def stores(late_secs: float = 0.0) -> Iterator[dict[str, str]]:
    """Runs both stores in another process; `gs://` answers after `late_secs`.

    Yields:
      The environment of their clients, and the name of their `BUCKET`.
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


def _reads(url: str, size: Size) -> dict[str, list[float]]:
    paths = _write_data(url, size)
    num_batches = size.data_files * size.file_mib * 2**20 // _RECORD_BYTES // _ROWS
    ranges = _ranges(paths)
    with concurrent.futures.ThreadPoolExecutor(_READERS) as readers:
        sides: dict[str, Callable[[], int]] = {
            "plain": lambda: sum(readers.map(_read_range, ranges)),
            "ours": lambda: _read_records(paths, num_batches),
        }
        # Threads are started, and files indexed, in a round that is not counted.
        num_bytes = {side: read() for side, read in sides.items()}
        assert len(set(num_bytes.values())) == 1, num_bytes
        return _timed(sides, size.rounds)


def _timed(
    sides: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, list[float]]:
    # The seconds of each; they take turns to be first.
    secs: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in list(sides)[:: 1 if number % 2 else -1]:
            began = time.perf_counter()
            sides[side]()
            secs[side].append(time.perf_counter() - began)
    return secs


def _write_data(url: str, size: Size) -> tuple[str, ...]:
    generator = np.random.default_rng(0)
    num_records = size.file_mib * 2**20 // _RECORD_BYTES
    paths = []
    for number in range(size.data_files):
        path = f"{url}/part-{number}.tfrecord"
        records = (generator.bytes(_RECORD_BYTES) for _ in range(num_records))
        with tempfile.TemporaryDirectory() as directory:
            local = pathlib.Path(directory, "part")
            tfrecord.write(local, records)
            storage.write_atomic(path, local.read_bytes())
        paths.append(path)
    return tuple(paths)


def _ranges(paths: tuple[str, ...]) -> list[tuple[Any, str, int, int]]:
    ranges = []
    for path in paths:
        system, name = fsspec.url_to_fs(path)
        num_bytes = system.info(name)["size"]
        ranges += [
            (system, name, start, min(start + _RANGE_BYTES, num_bytes))
            for start in range(0, num_bytes, _RANGE_BYTES)
        ]
    return ranges


def _read_range(part: tuple[Any, str, int, int]) -> int:
    system, name, start, stop = part
    return len(system.cat_file(name, start=start, end=stop))


def _read_records(paths: tuple[str, ...], num_batches: int) -> int:
    # The bytes of all records with their frames, as a loop on one host takes them.
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


def _saves(url: str, size: Size) -> dict[str, list[float]]:
    keep = cast(Any, ocp.training.preservation_policies.LatestN(1))
    ours = frontend.Checkpointer(
        [choices.Persistent(f"{url}/ours", every=1, keep=keep)]
    )
    orbax = ocp.training.Checkpointer(f"{url}/orbax", preservation_policy=keep)
    steps = itertools.count(1)
    items = size.state_mib * 2**18 // _LARGE_LEAVES

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
    # Clients connect, and programs are compiled, in a round that is not counted.
    for act in sides.values():
        act()
    secs = _timed(sides, size.rounds)
    ours.close()
    orbax.close()
    return secs


def main() -> None:
    """Measures, and prints the samples of each side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("size", type=json.loads)
    parser.add_argument("--late", action="store_true")
    arguments = parser.parse_args()
    size = Size(**arguments.size)
    samples: dict[str, list[float]] = {}
    for kind in ("gs",) if arguments.late else ("gs", "s3"):
        secs = _reads(f"{kind}://{os.environ['BUCKET']}/data", size)
        samples |= {f"{side}_{kind}": values for side, values in secs.items()}
    if not arguments.late:
        secs = _saves(f"gs://{os.environ['BUCKET']}/steps", size)
        samples |= {f"save_{side}": values for side, values in secs.items()}
    print(json.dumps(samples))


if __name__ == "__main__":
    main()
