"""The time from a checkpoint of 1e6 tensors and a layout to the plan of a host.

The tensors are matrices of 100 layers, which become stacks. The host needs a part of
each, or all.
"""

from __future__ import annotations

import json
import multiprocessing
import time

import numpy as np

from benchmarks import report
from elastic_ckpt.core import boxes
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.plan import load_plan
from elastic_ckpt.universal.rules import matching
from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.stored import Fragment, StoredTensor

_LAYERS, _ROWS, _COLUMNS, _FILES = 100, 64, 48, 100
_DTYPE = np.dtype(np.float32)


def measure(num_tensors: int = 10**6) -> dict[str, report.Figure]:
    """Runs the suite's part on plans."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        match_secs, plan_secs = pool.apply(_measured, (num_tensors,))
    return {
        "match_and_plan_secs": report.figure(
            "secs",
            f"at most 120; {num_tensors} tensors",
            [match_secs + each for each in plan_secs],
        ),
        "match_secs": report.figure("secs", "no bound", [match_secs]),
        "plan_secs": report.figure("secs", "one host of all, and of 8", plan_secs),
    }


def _measured(num_tensors: int) -> tuple[float, list[float]]:
    tensors = [_tensor(number) for number in range(num_tensors)]
    shape = (_COLUMNS, _LAYERS, _ROWS)
    targets = {
        name: TargetTensor(name=name, dtype=_DTYPE, shape=shape)
        for name in (f"experts/{n}/w" for n in range(num_tensors // _LAYERS))
    }
    began = time.perf_counter()
    matched = matching.moves(_layout(), tensors, {}, targets)
    match_secs = time.perf_counter() - began
    plan_secs = []
    for hosts in (1, 8):
        part = boxes.Box(start=(0, 0, 0), stop=(_COLUMNS // hosts, _LAYERS, _ROWS))
        needed = {target: [part] for target in targets.values()}
        began = time.perf_counter()
        plan = load_plan.plan(tensors, matched.moves, matched.fills, needed)
        plan_secs.append(time.perf_counter() - began)
        volume = num_tensors * _ROWS * _COLUMNS // hosts
        assert plan.total().needed_bytes == volume * _DTYPE.itemsize
    return match_secs, plan_secs


def _layout() -> Layout:
    name = "layers.{layer}.experts.{expert}.weight"
    rules = [
        {"from": {name: "out embed"}, "to": {"experts/{expert}/w": "embed layer out"}}
    ]
    return Layout.parse(json.dumps({"version": 1, "rules": rules}), file="layout.yml")


def _tensor(number: int) -> StoredTensor:
    expert, layer = divmod(number, _LAYERS)
    row_bytes = _COLUMNS * _DTYPE.itemsize
    return StoredTensor(
        name=f"layers.{layer}.experts.{expert}.weight",
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
