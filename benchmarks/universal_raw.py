"""Loads of raw files through a layout, beside plain reads of the same bytes.

The state is large matrices and small vectors in safetensors files of 1 GiB, in the page
cache. Sides take turns, and a ratio is that of two turns of a round.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import tempfile
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
from elastic_ckpt.universal.rules import matching
from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.stored import StoredTensor

_ROWS, _COLUMNS = 4096, 2048
_HOSTS = 8
_SPAN_BYTES = load_plan.LOCAL.span_bytes

# The relations of the matrices in the files to those in the tree.
RELATIONS = ("unchanged", "transposed", "stacked")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The size of the state, and how often it is loaded.

    Attributes:
      file_matrices: of 32 MiB, in each file.
      files: that are loaded.
      rounds: that are counted; one before them is not.
    """

    file_matrices: int = 32
    files: int = 4
    rounds: int = 5


SMALL = Size(file_matrices=1, files=2, rounds=1)


def measure(size: Size = Size()) -> dict[str, report.Figure]:
    """Runs the suite's part on raw files."""
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory)
        write(path, matrices=size.file_matrices, files=size.files)
        return {
            **_ratios(path, size.rounds),
            **_planned(path),
        }


def _ratios(path: pathlib.Path, rounds: int) -> dict[str, report.Figure]:
    sides: dict[str, Callable[[], Any]] = {
        "plain": lambda: _plain(path, transposed=False),
        "unchanged": lambda: load(path, "unchanged"),
        "plain_transposed": lambda: _plain(path, transposed=True),
        "transposed": lambda: load(path, "transposed"),
        "stacked": lambda: load(path, "stacked"),
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


def _planned(path: pathlib.Path) -> dict[str, report.Figure]:
    checkpoint = opening.open_checkpoint(path)
    over: dict[bool, list[float]] = {True: [], False: []}
    requests: list[tuple[int, int]] = []
    for name, is_outer in itertools.product(RELATIONS, (True, False)):
        targets = _targets(path, name)
        matched = matching.moves(_layout(name), checkpoint.tensors, {}, targets)
        for host in range(_HOSTS):
            needed = {
                target: [_of_host(target.shape, name, host, is_outer=is_outer)]
                for target in targets.values()
            }
            total = load_plan.plan(
                checkpoint.tensors, matched.moves, matched.fills, needed
            ).total()
            over[is_outer].append(100 * (total.read_bytes / total.needed_bytes - 1))
            most = len(checkpoint.tensors) + -(-total.read_bytes // _SPAN_BYTES)
            requests.append((total.requests, most))
    number, most = max(requests, key=lambda each: each[0] / each[1])
    hosts = f"the worst of {_HOSTS} hosts"
    return {
        "read_over_needed_percent": report.figure(
            "percent", f"at most 5; {hosts}, sharded on outer dims", [max(over[True])]
        ),
        "read_over_needed_percent_inner": report.figure(
            "percent", f"no bound; {hosts}, sharded on inner dims", [max(over[False])]
        ),
        "requests_per_host": report.figure(
            "requests",
            f"at most {most}, one for each tensor and {_SPAN_BYTES >> 20} MiB; {hosts}",
            [number],
        ),
    }


def _of_host(
    shape: tuple[int, ...], name: str, host: int, *, is_outer: bool
) -> boxes.Box:
    # The part of a host along one of the two dims that a matrix has in the file.
    dim = 0 if (name == "unchanged") == is_outer else len(shape) - 1
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


def load(path: pathlib.Path, name: str, *, separator: str = ".") -> Any:
    """Loads the state with its matrices `unchanged`, `transposed` or `stacked`.

    Args:
      path: of a checkpoint of any format.
      name: the relation of its matrices to those of the state.
      separator: of the parts of the names of tensors.
    """
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
    layout = _layout(name, separator)
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


def _layout(name: str, separator: str = ".") -> Layout:
    stack = "" if name == "stacked" else "/{layer}"
    layer = "layer " if name == "stacked" else ""
    dims = {"unchanged": "out embed", "transposed": "embed out"}
    rules = [
        {
            "from": {f"layers{separator}{{layer}}{separator}w": "out embed"},
            "to": {f"layers{stack}/w": dims.get(name, "embed layer out")},
        },
        {
            "from": {f"layers{separator}{{layer}}{separator}norm": "embed"},
            "to": {f"layers{stack}/norm": f"{layer}embed"},
        },
    ]
    return Layout.parse(json.dumps({"version": 1, "rules": rules}), file="layout.yml")


def write(path: pathlib.Path, *, matrices: int, files: int) -> None:
    """Writes files of the state, each with so many matrices of 32 MiB."""
    for number in range(files):
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in range(number * matrices, (number + 1) * matrices):
            shapes[f"layers.{layer}.norm"] = (_COLUMNS,)
            shapes[f"layers.{layer}.w"] = (_ROWS, _COLUMNS)
        file = path / f"{number:05d}.safetensors"
        universal_files.write(file, shapes, seed=number)
