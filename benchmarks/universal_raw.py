"""Loads of raw files through a layout, beside plain reads of the same bytes.

The state is large matrices and small vectors in safetensors files of 1 GiB, in the page
cache. Sides take turns, and a ratio is that of two turns of a round.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import pathlib
import tempfile
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from benchmarks import report, universal_files, universal_turns
from elastic_ckpt import universal
from elastic_ckpt.core import boxes, host_memory
from elastic_ckpt.universal import opening
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.plan import load_plan
from elastic_ckpt.universal.reading import restored_tree
from elastic_ckpt.universal.rules import matching
from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.stored import StoredTensor

_ROWS, _COLUMNS = 4096, 2048
_HOSTS = 8

# The relations of the matrices in the files to those in the tree.
_RULES = ("unchanged", "transposed", "stacked")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The size of the state, and how often it is loaded.

    Attributes:
      file_matrices: of 32 MiB, in each file.
      files: that are loaded.
      peaks: the numbers of files whose peak of memory is measured.
      rounds: that are counted; one before them is not.
    """

    file_matrices: int = 32
    files: int = 4
    peaks: tuple[int, ...] = (1, 8)
    rounds: int = 5


SMALL = Size(file_matrices=1, files=2, peaks=(1,), rounds=1)


def measure(size: Size = Size()) -> dict[str, report.Figure]:
    """Runs the suite's part on raw files."""
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory)
        files = [path / f"{n:05d}" for n in range(max(size.files, *size.peaks))]
        for number, file in enumerate(files):
            first = number * size.file_matrices
            numbers = range(first, first + size.file_matrices)
            shapes = {
                name: shape for each in numbers for name, shape in _shapes(each).items()
            }
            universal_files.write(file, shapes, seed=first)
        for count in {size.files, *size.peaks}:
            (path / f"{count}_files").mkdir()
            for file in files[:count]:
                (path / f"{count}_files" / f"{file.name}.safetensors").symlink_to(file)
        checkpoint = path / f"{size.files}_files"
        return {
            **_ratios(checkpoint, size.rounds),
            **_peaks(path, size.peaks),
            **_planned(checkpoint),
        }


def _ratios(path: pathlib.Path, rounds: int) -> dict[str, report.Figure]:
    sides: dict[str, Callable[[], Any]] = {
        "plain": lambda: _plain(path, transposed=False),
        "unchanged": lambda: _load(path, "unchanged"),
        "plain_transposed": lambda: _plain(path, transposed=True),
        "transposed": lambda: _load(path, "transposed"),
        "stacked": lambda: _load(path, "stacked"),
    }
    num_bytes = sum(file.stat().st_size for file in path.iterdir())
    secs = universal_turns.timed(sides, rounds, num_bytes=num_bytes)
    gib = num_bytes / 2**30
    transposed = "at most 1.3; reading and device_put(a.T)"
    return {
        "relayout_load_ratio_raw": report.ratio(
            secs["unchanged"],
            secs["plain"],
            "at most 1.3; reading and device_put of the same bytes",
        ),
        "relayout_load_ratio_raw_transposed": report.ratio(
            secs["transposed"], secs["plain_transposed"], transposed
        ),
        "relayout_load_ratio_raw_stacked": report.ratio(
            secs["stacked"], secs["plain_transposed"], transposed
        ),
        "relayout_load_gib_per_sec": report.figure(
            "GiB/s", "unchanged", [gib / each for each in secs["unchanged"]]
        ),
    }


def _peaks(path: pathlib.Path, counts: tuple[int, ...]) -> dict[str, report.Figure]:
    figures = {}
    for count in counts:
        checkpoint = path / f"{count}_files"
        samples = []
        for layout in ("unchanged", "transposed", "stacked"):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                samples.append(pool.apply(_over_bound, (checkpoint, layout)))
        gib = sum(file.stat().st_size for file in checkpoint.iterdir()) / 2**30
        figures[f"peak_over_bound_percent_{round(gib)}_gib"] = report.figure(
            "percent", "at most 10; memory beyond the arrays, over 256 MiB", samples
        )
    return figures


def _over_bound(path: pathlib.Path, layout: str) -> float:
    # The peak of a process's anonymous memory beyond the arrays, over the budget.
    jax.block_until_ready(jax.numpy.zeros(1))
    before = _anonymous_bytes()
    peak, ended = before, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.002):
            peak = max(peak, _anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    state = _load(path, layout)
    ended.set()
    watcher.join()
    arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    beyond = max(0, peak - before - arrays)
    return 100 * (beyond / restored_tree.BUDGET_BYTES - 1)


def _anonymous_bytes() -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def _planned(path: pathlib.Path) -> dict[str, report.Figure]:
    checkpoint = opening.open_checkpoint(path)
    over, requests = [], []
    for name in _RULES:
        targets = _targets(path, name)
        matched = matching.moves(_layout(name), checkpoint.tensors, {}, targets)
        for host in range(_HOSTS):
            needed = {
                target: [_of_host(target.shape, name, host)]
                for target in targets.values()
            }
            total = load_plan.plan(
                checkpoint.tensors, matched.moves, matched.fills, needed
            ).total()
            over.append(100 * (total.read_bytes / total.needed_bytes - 1))
            requests.append(float(total.requests))
    return {
        "read_over_needed_percent": report.figure(
            "percent", f"at most 5; {_HOSTS} hosts, sharded on outer dims", over
        ),
        "requests_per_host": report.figure("requests", "no bound", requests),
    }


def _of_host(shape: tuple[int, ...], name: str, host: int) -> boxes.Box:
    # The part of a host along the dim of a matrix that is the outer one in the file.
    dim = 0 if name == "unchanged" else len(shape) - 1
    part = shape[dim] // _HOSTS
    start, stop = [0] * len(shape), list(shape)
    start[dim], stop[dim] = host * part, (host + 1) * part
    return boxes.Box(start=tuple(start), stop=tuple(stop))


def _plain(path: pathlib.Path, *, transposed: bool) -> list[jax.Array]:
    # Reads each tensor into new memory, as many at a time as there are processors.
    def read(tensor: StoredTensor) -> np.ndarray:
        (fragment,) = tensor.fragments
        num_bytes = int(np.prod(tensor.shape)) * tensor.dtype.itemsize
        memory = host_memory.allocate(num_bytes)
        with open(fragment.file, "rb", buffering=0) as file:
            file.seek(fragment.offset)
            view, done = memory.data, 0
            while done < num_bytes:
                done += file.readinto(view[done:])
        return memory.view(tensor.dtype).reshape(tensor.shape)

    tensors = opening.open_checkpoint(path).tensors
    with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        arrays = [
            jax.device_put(values.T if transposed else values)
            for values in pool.map(read, tensors)
        ]
    return jax.block_until_ready(arrays)


def _load(path: pathlib.Path, name: str) -> Any:
    sharding = SingleDeviceSharding(jax.local_devices()[0])
    abstract: dict[str, Any] = {}
    for path_of_leaf, target in _targets(path, name).items():
        *outer, last = path_of_leaf.split("/")
        branch = abstract
        for key in outer:
            branch = branch.setdefault(key, {})
        branch[last] = jax.ShapeDtypeStruct(
            target.shape, target.dtype, sharding=sharding
        )
    layout = _layout(name)
    return jax.block_until_ready(universal.load(path, abstract, layout=layout))


def _targets(path: pathlib.Path, name: str) -> dict[str, TargetTensor]:
    matrices = len(opening.open_checkpoint(path).tensors) // 2
    if name == "stacked":
        shapes = {
            "layers/w": (_COLUMNS, matrices, _ROWS),
            "layers/norm": (matrices, _COLUMNS),
        }
    else:
        matrix = (_COLUMNS, _ROWS) if name == "transposed" else (_ROWS, _COLUMNS)
        shapes = {
            f"layers/{number}/{leaf}": shape
            for number in range(matrices)
            for leaf, shape in (("w", matrix), ("norm", (_COLUMNS,)))
        }
    return {
        leaf: TargetTensor(name=leaf, dtype=np.dtype(np.float32), shape=shape)
        for leaf, shape in shapes.items()
    }


def _layout(name: str) -> Layout:
    stack = "" if name == "stacked" else "/{layer}"
    layer = "layer " if name == "stacked" else ""
    dims = {"unchanged": "out embed", "transposed": "embed out"}
    rules = [
        {
            "from": {"layers.{layer}.dense.weight": "out embed"},
            "to": {f"layers{stack}/w": dims.get(name, "embed layer out")},
        },
        {
            "from": {"layers.{layer}.norm.weight": "embed"},
            "to": {f"layers{stack}/norm": f"{layer}embed"},
        },
    ]
    return Layout.parse(json.dumps({"version": 1, "rules": rules}), file="layout.yml")


def _shapes(number: int) -> dict[str, tuple[int, ...]]:
    return {
        f"layers.{number}.norm.weight": (_COLUMNS,),
        f"layers.{number}.dense.weight": (_ROWS, _COLUMNS),
    }
