"""What 128 hosts read of files of torch.save, whose entries have one CRC-32 each.

Every host needs a 128th of each target, along its outer dim. The checkpoints are a
ZeRO-1 of 32 data-parallel ranks, with masters and moments as flat partitions, and one
of Megatron, of 4 tensor-parallel ranks and 4 pipeline stages. They are described in
memory: what is counted are the bytes of the plans, and those that hosts read beside
them to compare the checksums of all entries that they use.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from concurrent import futures
from typing import Any

import numpy as np

from benchmarks import report
from elastic_ckpt.core import boxes
from elastic_ckpt.universal import flat_ranges
from elastic_ckpt.universal.formats.opened import OpenedCheckpoint
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.plan import load_plan
from elastic_ckpt.universal.reading.read_checks import ReadChecks
from elastic_ckpt.universal.rules import matching
from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.stored import Checksum, Fragment, StoredTensor
from elastic_ckpt.universal.strides import row_major

_HOSTS, _LAYERS, _EMBED, _MLP, _VOCAB = 128, 16, 2048, 5632, 32000
_DTYPE = np.dtype(np.float32)
_KINDS = ("master", "first_moment", "second_moment")


def measure() -> dict[str, report.Figure]:
    """Runs the suite's part on files of torch.save."""
    over = [_percent(*made) for made in (_zero(), _megatron())]
    return {
        "read_over_needed_percent_torch": report.figure(
            "percent",
            f"at most 5; {_HOSTS} hosts, ZeRO-1 of 32 ranks and Megatron of tp 4, pp 4",
            over,
        )
    }


def _matrices() -> dict[str, tuple[int, int]]:
    square = dict.fromkeys(("query", "key", "value", "out"), (_EMBED, _EMBED))
    wide = {"gate": (_MLP, _EMBED), "up": (_MLP, _EMBED), "down": (_EMBED, _MLP)}
    return {**square, **wide}


def _zero() -> tuple[OpenedCheckpoint, Layout, dict[str, TargetTensor]]:
    ranks = 32
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (_VOCAB, _EMBED)}
    for layer in range(_LAYERS):
        for name, shape in _matrices().items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
        shapes[f"layers.{layer}.norm.weight"] = (_EMBED,)
    total = sum(map(math.prod, shapes.values()))
    part = -(-total // ranks)
    part_bytes = part * _DTYPE.itemsize
    tensors, begin = [], 0
    for name, shape in shapes.items():
        end = begin + math.prod(shape)
        for number, kind in enumerate(_KINDS):
            fragments = []
            for rank in range(begin // part, (end - 1) // part + 1):
                start, stop = max(begin, rank * part), min(end, (rank + 1) * part)
                strides = row_major(shape, _DTYPE.itemsize)
                at = number * part_bytes + (begin - rank * part) * _DTYPE.itemsize
                for box in flat_ranges.boxes_of_range(
                    shape, start - begin, stop - begin
                ):
                    offset = at + sum(
                        n * stride for n, stride in zip(box.start, strides, strict=True)
                    )
                    fragments.append(
                        Fragment(
                            box=box,
                            file=f"rank-{rank}_optim_states.pt",
                            offset=offset,
                            strides=strides,
                        )
                    )
            tensors.append(
                StoredTensor(
                    name=name,
                    dtype=_DTYPE,
                    shape=shape,
                    kind=kind,
                    fragments=tuple(fragments),
                )
            )
        begin = end
    entries = [
        Checksum(number * part_bytes, (number + 1) * part_bytes, 0)
        for number in range(len(_KINDS))
    ]
    checkpoint = OpenedCheckpoint(
        format="DeepSpeed ZeRO-1", tensors=tensors, checksums=lambda _: entries
    )
    states = {kind: {"from": "{}", "to": f"{kind}/{{}}"} for kind in _KINDS}
    rules = [{"from": {"{name:path}": "..."}, "to": {"{name}": "..."}}]
    targets = {
        name: TargetTensor(name=name, dtype=_DTYPE, shape=shape)
        for kind in _KINDS
        for name, shape in ((f"{kind}/{n}", s) for n, s in shapes.items())
    }
    return checkpoint, Layout.from_dict({"states": states, "rules": rules}), targets


def _megatron() -> tuple[OpenedCheckpoint, Layout, dict[str, TargetTensor]]:
    tp, pp = 4, 4
    tensors: list[StoredTensor] = []
    entries: dict[str, list[Checksum]] = {}
    for stage in range(pp):
        for rank in range(tp):
            file, at = f"mp_rank_{rank:02}_{stage:03}/model_optim_rng.pt", 0
            for local in range(_LAYERS // pp):
                for name, shape in _matrices().items():
                    is_rows = name not in ("out", "down")
                    held = [shape[0] // tp, shape[1]]
                    if not is_rows:
                        held = [shape[0], shape[1] // tp]
                    size = math.prod(held) * _DTYPE.itemsize
                    place = tuple(held)
                    tensors.append(
                        StoredTensor(
                            name=f"layers.{local}.{name}.weight",
                            dtype=_DTYPE,
                            shape=place,
                            ranks=(("pp", stage), ("tp", rank)),
                            fragments=(
                                Fragment(
                                    box=boxes.whole(place),
                                    file=file,
                                    offset=at,
                                    strides=row_major(place, _DTYPE.itemsize),
                                ),
                            ),
                        )
                    )
                    entries.setdefault(file, []).append(Checksum(at, at + size, 0))
                    at += size
    checkpoint = OpenedCheckpoint(
        format="Megatron mp_rank",
        tensors=tensors,
        axes={"tp": tp, "pp": pp},
        checksums=entries.__getitem__,
    )
    rules = [
        {
            "from": {
                f"layers.{{local}}.{name}.weight": "out@tp in"
                if name not in ("out", "down")
                else "out in@tp"
            },
            "to": {f"layers.{{(pp local)}}.{name}": "out in"},
        }
        for name in _matrices()
    ]
    targets = {
        name: TargetTensor(name=name, dtype=_DTYPE, shape=shape)
        for layer in range(_LAYERS)
        for name, shape in ((f"layers.{layer}.{n}", s) for n, s in _matrices().items())
    }
    return checkpoint, Layout.from_dict({"rules": rules}), targets


def _percent(
    checkpoint: OpenedCheckpoint, layout: Layout, targets: Mapping[str, TargetTensor]
) -> float:
    matched = matching.moves(layout, checkpoint.tensors, checkpoint.axes, targets)
    plans = []
    for host in range(_HOSTS):
        needed = {}
        for target in targets.values():
            part = target.shape[0] // _HOSTS
            start, stop = [0] * len(target.shape), list(target.shape)
            start[0], stop[0] = host * part, (host + 1) * part
            box = boxes.Box(start=tuple(start), stop=tuple(stop))
            needed[target] = [box]
        plans.append(
            load_plan.plan(checkpoint.tensors, matched.moves, matched.fills, needed)
        )
    world = _World(_HOSTS)
    with futures.ThreadPoolExecutor(_HOSTS) as pool:
        checks = list(
            pool.map(
                lambda host: ReadChecks(
                    checkpoint, plans[host], plans[host].files, world.host(host)
                ),
                range(_HOSTS),
            )
        )
    totals = [plan.total() for plan in plans]
    needed_bytes = sum(total.needed_bytes for total in totals)
    read = sum(total.read_bytes for total in totals)
    read += sum(each.extra_bytes for each in checks)
    return 100 * (read / needed_bytes - 1)


class _World:
    """Hosts that are threads: what each gathers is what all have."""

    def __init__(self, num_hosts: int) -> None:
        self._barrier = threading.Barrier(num_hosts)
        self.values: list[Any] = [None] * num_hosts

    def host(self, number: int) -> _Host:
        """The allgather of a host."""
        return _Host(self, number)

    def gathered(self, host: int, value: Any) -> list[Any]:
        """The values of all hosts."""
        self.values[host] = value
        self._barrier.wait()
        values = list(self.values)
        self._barrier.wait()
        return values


class _Host:
    """See `allgather.Allgather`."""

    def __init__(self, world: _World, number: int) -> None:
        self._world = world
        self.host, self.num_hosts = number, len(world.values)

    def gather(self, kind: str, value: Any, *, timeout_secs: float) -> list[Any]:
        """See `allgather.Allgather`."""
        del kind, timeout_secs
        return self._world.gathered(self.host, value)

    def run(
        self, kind: str, part: Any, *, order: Any = "together", timeout_secs: float
    ) -> list[Any]:
        """See `allgather.Allgather`."""
        del order
        return self.gather(kind, part(), timeout_secs=timeout_secs)
