"""The time from a checkpoint of 1e6 tensors and a layout to the plan of a host.

The tensors are matrices of 100 layers, which become stacks. The host needs a part of
each, or all. They are described in memory, or opened from files of PyTorch's
distributed checkpoints, the format that takes longest.
"""

from __future__ import annotations

import json
import multiprocessing
import pathlib
import tempfile
import time
from collections.abc import Sequence

import numpy as np

from benchmarks import dcp_writer, process_memory, report
from elastic_ckpt.core import boxes
from elastic_ckpt.universal import opening
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.plan import load_plan
from elastic_ckpt.universal.rules import matching
from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.stored import Fragment, StoredTensor

_LAYERS, _ROWS, _COLUMNS, _FILES = 100, 64, 48, 100
# In distributed checkpoints, whose values are not read.
_SMALL_ROWS, _SMALL_COLUMNS, _SMALL_FILES = 8, 8, 8
_DTYPE = np.dtype(np.float32)


def measure(num_tensors: int = 10**6) -> dict[str, report.Figure]:
    """Runs the suite's part on plans."""
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(1) as pool:
        match_secs, plan_secs = pool.apply(_measured, (num_tensors,))
    with spawn.Pool(1) as pool:
        experts_secs = pool.apply(_experts)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "dcp"
        with spawn.Pool(1) as pool:
            pool.apply(_write, (path, num_tensors))
        with spawn.Pool(1) as pool:
            secs, processor_secs, peak_gib = pool.apply(_opened, (path,))
    bound = f"at most 120; {num_tensors} tensors"
    return {
        "match_and_plan_secs": report.figure(
            "secs", bound, [match_secs + each for each in plan_secs]
        ),
        "plan_experts_secs": report.figure(
            "secs", "at most 10; 60 layers of 256 experts, tp=8", [experts_secs]
        ),
        "match_secs": report.figure("secs", "no bound", [match_secs]),
        "plan_secs": report.figure("secs", "one host of all, and of 8", plan_secs),
        "open_match_and_plan_dcp_secs": report.figure("secs", bound, [secs]),
        "open_match_and_plan_dcp_processor_secs": report.figure(
            "secs", "no bound", [processor_secs]
        ),
        "open_match_and_plan_dcp_peak_gib": report.figure(
            "GiB", "resident memory of the process", [peak_gib]
        ),
    }


def _experts() -> float:
    """Seconds to match and plan a model of experts, saved by 8 ranks of tp."""
    layers, experts, ranks, embed, width = 60, 256, 8, 64, 32
    part = width // ranks
    shapes = {"gate": (part, embed), "up": (part, embed), "down": (embed, part)}
    dims = {"gate": "ff@tp embed", "up": "ff@tp embed", "down": "embed ff@tp"}
    tensors = [
        StoredTensor(
            name=f"layers.{layer}.experts.{expert}.{name}.weight",
            dtype=_DTYPE,
            shape=shape,
            ranks=(("tp", rank),),
            fragments=(
                Fragment(
                    box=boxes.whole(shape),
                    file=f"rank-{rank}.bin",
                    offset=_DTYPE.itemsize * part * embed * number,
                    strides=(_DTYPE.itemsize * shape[1], _DTYPE.itemsize),
                ),
            ),
        )
        for rank in range(ranks)
        for layer in range(layers)
        for expert in range(experts)
        for number, (name, shape) in enumerate(shapes.items())
    ]
    rules = [
        {
            "from": {f"layers.{{layer}}.experts.{{expert}}.{name}.weight": dims[name]},
            "to": {f"layers/moe/{name}": "layer expert embed ff"},
        }
        for name in shapes
    ]
    layout = Layout.from_dict({"rules": rules})
    shape = (layers, experts, embed, width)
    targets = {
        name: TargetTensor(name=name, dtype=_DTYPE, shape=shape)
        for name in (f"layers/moe/{each}" for each in shapes)
    }
    host = boxes.Box(start=(0, 0, 0, 0), stop=(layers, experts // ranks, embed, width))
    began = time.perf_counter()
    matched = matching.moves(layout, tensors, {"tp": ranks}, targets)
    needed = {target: [host] for target in targets.values()}
    load_plan.plan(tensors, matched.moves, matched.fills, needed)
    return time.perf_counter() - began


def _measured(num_tensors: int) -> tuple[float, list[float]]:
    tensors = [_tensor(number) for number in range(num_tensors)]
    return _match_and_plan(tensors, (_ROWS, _COLUMNS), hosts=(1, 8))


def _write(path: pathlib.Path, num_tensors: int) -> None:
    dcp_writer.write(
        path,
        [_name(number) for number in range(num_tensors)],
        shape=(_SMALL_ROWS, _SMALL_COLUMNS),
        files=_SMALL_FILES,
    )


def _opened(path: pathlib.Path) -> tuple[float, float, float]:
    # Seconds, those of the processor, and GiB.
    began, processor_began = time.perf_counter(), time.process_time()
    tensors = opening.open_checkpoint(path).tensors
    _match_and_plan(tensors, (_SMALL_ROWS, _SMALL_COLUMNS), hosts=(8,))
    return (
        time.perf_counter() - began,
        time.process_time() - processor_began,
        process_memory.resident_bytes("VmHWM") / 2**30,
    )


def _match_and_plan(
    tensors: Sequence[StoredTensor], matrix: tuple[int, int], hosts: Sequence[int]
) -> tuple[float, list[float]]:
    # The seconds of both, the latter for each number of hosts.
    rows, columns = matrix
    shape = (columns, _LAYERS, rows)
    targets = {
        name: TargetTensor(name=name, dtype=_DTYPE, shape=shape)
        for name in (f"experts/{n}/w" for n in range(len(tensors) // _LAYERS))
    }
    began = time.perf_counter()
    matched = matching.moves(_layout(), tensors, {}, targets)
    match_secs = time.perf_counter() - began
    plan_secs = []
    for count in hosts:
        part = boxes.Box(start=(0, 0, 0), stop=(columns // count, _LAYERS, rows))
        needed = {target: [part] for target in targets.values()}
        began = time.perf_counter()
        plan = load_plan.plan(tensors, matched.moves, matched.fills, needed)
        plan_secs.append(time.perf_counter() - began)
        volume = len(tensors) * rows * columns // count
        assert plan.total().needed_bytes == volume * _DTYPE.itemsize
    return match_secs, plan_secs


def _layout() -> Layout:
    name = "layers.{layer}.experts.{expert}.weight"
    rules = [
        {"from": {name: "out embed"}, "to": {"experts/{expert}/w": "embed layer out"}}
    ]
    return Layout.parse(json.dumps({"version": 1, "rules": rules}), file="layout.yml")


def _name(number: int) -> str:
    expert, layer = divmod(number, _LAYERS)
    return f"layers.{layer}.experts.{expert}.weight"


def _tensor(number: int) -> StoredTensor:
    row_bytes = _COLUMNS * _DTYPE.itemsize
    return StoredTensor(
        name=_name(number),
        dtype=_DTYPE,
        shape=(_ROWS, _COLUMNS),
        fragments=(
            Fragment(
                box=boxes.whole((_ROWS, _COLUMNS)),
                file=f"model-{number % _FILES:05d}.safetensors",
                offset=number // _FILES * _ROWS * row_bytes,
                strides=(row_bytes, _DTYPE.itemsize),
            ),
        ),
    )
