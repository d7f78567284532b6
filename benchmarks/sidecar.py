"""Suite `sidecar`: how long a loop waits for its data, read in or out of process.

A step takes no time on the host's processors, like a step on an accelerator. The loop
waits for each step before it asks for the next batch, like a loop that prints losses.
Creating a batch's rows takes 0.7 of a step (`slow`) or almost nothing (`trivial`).

* `step_slowdown_percent`: by how much data slows a step down, including every cost to
  the loop, with `RemoteIterator`; the other figures use `ec.data.Batches`. Python
  creates the slow rows. If a thread does (`..._thread`), it blocks the interpreter,
  which the loop needs now and then. A worker process does not (`..._worker_process`;
  with `RemoteIterator`, the worker process replaces Pathways' sidecar).
* `next_ratio_in_process`: `next()` of `ec.data.Batches` for trivial rows in a loop that
  does nothing else and thus waits for read-ahead, relative to the plain in-process way:
  Grain's batches of the same rows and `jax.make_array_from_process_local_data`.
  `next_ratio_colocated` likewise. `..._between_steps`: the cost of `next()` to a loop
  with steps of 5 ms that reads its data in the meantime.
* `save_block_ms`: how long `save` blocks a loop of slow rows, with batches in flight.
* `ratio_maxtext_wrapper`: a step with slow rows from MaxText's `RemoteIteratorWrapper`,
  relative to a step with `RemoteIterator`; `..._trivial` is the same for `next()` with
  trivial rows. The wrapper deadlocks if the workers run in the controller's process, as
  they do here: it is removed from the list of iterators that its worker closes when the
  wrapper is created; nothing else is changed.

The suite runs in MaxText's environment; see `tests/maxtext/pyproject.toml`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import numpy as np
from elastic_ckpt_sidecar import RemoteIterator
from etils import epath
from jax.sharding import Mesh

from benchmarks import report, sized, turns
from elastic_ckpt.core import errors, topology
from elastic_ckpt.data import iterator, sharded_data

_ROWS = 64
_LENGTH = 1024
_NUM_SHARDS = 64
_STEP_SECS = 0.05
_SHORT_STEP_SECS = 0.005
_SHARE = 0.7
_NUM_ROUNDS = sized(7, 1)
_STEPS_A_ROUND = 20
# Batches that are ready when a round begins do not count.
_STEPS_UNCOUNTED = 4
_SETTLE_SECS = 0.4
_BATCHES_A_ROUND = 100
_NUM_RECORDS = 10**8
_IN_CALLER = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)

Batches = Iterator[dict[str, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Row:
    """Creates row `n`, which takes a given time."""

    secs: float

    def __call__(self, number: int) -> dict[str, np.ndarray]:
        """Features `inputs` and `targets`, int32 `[1024]`."""
        ends = time.perf_counter() + self.secs
        while time.perf_counter() < ends:
            # Short enough that Python does not let other threads run in the meantime.
            hashlib.sha256(bytes(1000))
        inputs = np.full(_LENGTH, number, np.int32)
        return {"inputs": inputs, "targets": inputs + 1}


SLOW = Row(_SHARE * _STEP_SECS / _ROWS)
TRIVIAL = Row(0.0)


def measure() -> dict[str, report.Figure]:
    """Runs the suite."""
    if importlib.util.find_spec("maxtext") is None:
        raise errors.ConfigError(
            "suite sidecar compares with MaxText; run it in MaxText's environment (see"
            " the top of tests/maxtext/pyproject.toml)"
        )
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    mesh = topology.mesh_of(topology.present(1))
    return _slowdowns(mesh) | _nexts(mesh) | _saves(mesh)


def _slowdowns(mesh: Mesh) -> dict[str, report.Figure]:
    sides = {
        "": _colocated(mesh, SLOW, num_workers=1),
        "_thread": in_process(mesh, SLOW, num_workers=0),
        "_worker_process": in_process(mesh, SLOW, num_workers=1),
        "_maxtext": _maxtext_wrapper(mesh, SLOW),
    }
    step = _accelerator_step()
    secs: turns.Secs = {name: [] for name in sides}
    for name in in_turns(sides):
        steps(sides[name], step, _STEPS_UNCOUNTED)
        secs[name].append(steps(sides[name], step, _STEPS_A_ROUND)[1])
    close(sides)
    figures = {
        f"step_slowdown_percent{name}": report.figure(
            "%",
            "a step without data",
            [100 * (each / _STEP_SECS - 1) for each in of_side[1:]],
        )
        for name, of_side in secs.items()
    }
    return figures | {
        "ratio_maxtext_wrapper": report.ratio(
            secs["_maxtext"][1:], secs[""][1:], "steps with slow rows; theirs over ours"
        )
    }


def steps(
    batches: Batches, step: Callable[[Any], jax.Array], num_steps: int
) -> tuple[float, float]:
    """The seconds that the loop waits for a batch and that a step with it takes."""
    waits = []
    began = time.perf_counter()
    for _ in range(num_steps):
        asked = time.perf_counter()
        batch = _ready(next(batches))
        waits.append(time.perf_counter() - asked)
        step(batch).block_until_ready()
        # A step releases its batch.
        del batch
    return statistics.fmean(waits), (time.perf_counter() - began) / num_steps


def _nexts(mesh: Mesh) -> dict[str, report.Figure]:
    sides = {
        "_in_process": in_process(mesh, TRIVIAL),
        "_colocated": _colocated(mesh, TRIVIAL),
        "_plain": _plain(mesh, TRIVIAL),
        "_maxtext": _maxtext_wrapper(mesh, TRIVIAL),
    }
    step = _accelerator_step(_SHORT_STEP_SECS)
    in_a_loop: turns.Secs = {name: [] for name in sides}
    back_to_back: turns.Secs = {name: [] for name in sides}
    for name in in_turns(sides):
        steps(sides[name], step, _STEPS_UNCOUNTED)
        in_a_loop[name].append(steps(sides[name], step, _BATCHES_A_ROUND)[0])
        began = time.perf_counter()
        for _ in range(_BATCHES_A_ROUND):
            _ready(next(sides[name]))
        back_to_back[name].append(time.perf_counter() - began)
    close(sides)
    figures = {}
    for how, measured in (("", back_to_back), ("_between_steps", in_a_loop)):
        secs = {name: samples[1:] for name, samples in measured.items()}
        bound = "at most 1.1; over" if not how else "over"
        for name in ("_in_process", "_colocated"):
            figures[f"next_ratio{name}{how}"] = report.ratio(
                secs[name], secs["_plain"], f"{bound} Grain's batches in process"
            )
        figures[f"ratio_maxtext_wrapper_trivial{how}"] = report.ratio(
            secs["_maxtext"], secs["_colocated"], "next(); theirs over ours, colocated"
        )
    return figures


def _saves(mesh: Mesh) -> dict[str, report.Figure]:
    batches = _colocated(mesh, SLOW, num_workers=1)
    step = _accelerator_step()
    millis = []
    for _ in range(30):
        step(next(batches)).block_until_ready()
        with tempfile.TemporaryDirectory() as directory:
            began = time.perf_counter()
            writing = asyncio.run(batches.save(_Created(directory)))
            millis.append(1000 * (time.perf_counter() - began))
            # In parallel with the loop, like Orbax.
            thread = threading.Thread(target=asyncio.run, args=(writing,))
            thread.start()
            next(batches)
            thread.join()
    batches.close()
    return {"save_block_ms": report.figure("ms", "below 2", millis[5:])}


class _Created:
    def __init__(self, path: str) -> None:
        self._path = epath.Path(path)

    async def await_creation(self) -> epath.Path:
        return self._path


def _shard(row: Row, shard: int) -> grain.IterDataset:
    records = grain.MapDataset.range(shard, _NUM_RECORDS, _NUM_SHARDS)
    return records.map(row).to_iter_dataset(_IN_CALLER)


def _data(row: Row, num_workers: int | None = None) -> sharded_data.ShardedData:
    return sharded_data.sharded(
        functools.partial(_shard, row),
        num_shards=_NUM_SHARDS,
        pipeline="benchmark",
        num_workers=num_workers,
    )


def _colocated(
    mesh: Mesh, row: Row, *, num_workers: int | None = None
) -> RemoteIterator:
    return RemoteIterator(_data(row, num_workers), mesh=mesh, global_batch_size=_ROWS)


def in_process(
    mesh: Mesh, row: Row, *, num_workers: int | None = None
) -> iterator.Batches:
    """The rows from `ec.data.sharded`."""
    return iterator.Batches(_data(row, num_workers), mesh=mesh, global_batch_size=_ROWS)


def _plain(mesh: Mesh, row: Row) -> Batches:
    # The same rows from Grain, copied to the mesh.
    sharding = topology.batch_sharding(mesh)
    records = grain.MapDataset.range(_NUM_RECORDS).map(row)
    for batch in records.to_iter_dataset(_IN_CALLER).batch(_ROWS):
        yield {
            name: jax.make_array_from_process_local_data(sharding, feature)
            for name, feature in batch.items()
        }


def _maxtext_wrapper(mesh: Mesh, row: Row) -> Any:
    from maxtext.input_pipeline import multihost_dataloading

    def dataset(dataloading_host_index: int, dataloading_host_count: int) -> Any:
        records = grain.MapDataset.range(_NUM_RECORDS)
        return records[dataloading_host_index::dataloading_host_count]

    def batched(dataset: Any) -> Any:
        return dataset.map(row).to_iter_dataset(_IN_CALLER).batch(_ROWS)

    wrapper = multihost_dataloading.RemoteIteratorWrapper(
        dataset, batched, mesh, (_ROWS, _LENGTH)
    )
    # Otherwise its worker, while being created, closes the wrapper that creates it.
    multihost_dataloading._GLOBAL_REMOTE_ITERATORS.discard(wrapper)
    return wrapper


def _accelerator_step(secs: float = _STEP_SECS) -> Callable[[Any], jax.Array]:
    def wait(_: np.ndarray) -> np.ndarray:
        time.sleep(secs)
        return np.zeros((), np.float32)

    @jax.jit
    def step(batch: dict[str, jax.Array]) -> jax.Array:
        loss = jax.ShapeDtypeStruct((), np.float32)
        return jax.pure_callback(wait, loss, batch["inputs"][0, 0])

    return step


def _ready(batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
    # Asking costs nothing; waiting lets other threads use the interpreter.
    features: list[Any] = list(batch.values())
    if not all(feature.is_ready() for feature in features):
        jax.block_until_ready(batch)
    return batch


def in_turns(sides: dict[str, Any]) -> Iterator[str]:
    """The side whose turn it is; each side's first turn is an uncounted warm-up."""
    for name in [*sides] * (_NUM_ROUNDS + 1):
        # Lets the previous side finish the reads that it has begun.
        time.sleep(_SETTLE_SECS)
        yield name


def close(sides: dict[str, Any]) -> None:
    """Closes the sides that can be closed."""
    for side in sides.values():
        with contextlib.suppress(AttributeError):
            side.close()
