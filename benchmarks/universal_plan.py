"""Plans in suite `universal`: how long they take and how much they read.

* A model with experts, saved by 8 ranks, is described in memory.
* 1e6 matrices of 100 layers, which become stacks, are opened from PyTorch distributed
  checkpoint files, the format that takes longest.
* 128 hosts read a ZeRO-1 checkpoint of 32 data-parallel ranks, with masters and moments
  as flat partitions in torch.save files. The files have one CRC-32 per entry: the
  figure counts the bytes in the plans and the bytes that hosts read in addition to
  compare the checksums of all entries that they use.
"""

from __future__ import annotations

import itertools
import math
import pathlib
import tempfile
import time
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks import dcp_writer, report, sized, turns
from elastic_ckpt.core import boxes
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal import factors, opening
from elastic_ckpt.universal.factors import row_major
from elastic_ckpt.universal.formats.checkpoint import (
    Checkpoint,
    Checksum,
    Fragment,
    StoredTensor,
)
from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.reading.engine import Reader, Span
from elastic_ckpt.universal.rules import matching
from elastic_ckpt.universal.rules.layout import Layout

_DTYPE = np.dtype(np.float32)
_HOSTS = 128
# The distributed checkpoint, whose values are not read.
_DCP_TENSORS = sized(10**6, 10**4)
_DCP_LAYERS, _DCP_FILES, _DCP_SHAPE = 100, 8, (8, 8)
# The torch.save files.
_LAYERS, _EMBED, _MLP, _VOCAB = 16, 2048, 5632, 32000
_KINDS = ("master", "first_moment", "second_moment")
_MATRICES = {
    **dict.fromkeys(("query", "key", "value", "out"), (_EMBED, _EMBED)),
    **dict.fromkeys(("gate", "up"), (_MLP, _EMBED)),
    "down": (_EMBED, _MLP),
}

_Shapes = Mapping[str, tuple[int, ...]]


def measure() -> dict[str, report.Figure]:
    """Runs the suite's part on plans."""
    experts_secs = turns.in_new_process(_experts)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "dcp"
        turns.in_new_process(_write_dcp, path)
        dcp_secs = turns.in_new_process(_open_dcp, path)
    return {
        "plan_experts_secs": report.figure(
            "secs", "at most 10; 60 layers of 256 experts, tp=8", [experts_secs]
        ),
        "open_match_and_plan_dcp_secs": report.figure(
            "secs", f"at most 25; {_DCP_TENSORS} tensors", [dcp_secs]
        ),
        "read_over_needed_percent_torch": report.figure(
            "percent",
            f"about 100; {_HOSTS} hosts, ZeRO-1 of 32 ranks",
            [_over_needed(*_zero())],
        ),
    }


def _targets(shapes: _Shapes) -> dict[str, TargetTensor]:
    return {
        name: TargetTensor(name=name, dtype=_DTYPE, shape=shape)
        for name, shape in shapes.items()
    }


def _planned(
    tensors: Sequence[StoredTensor],
    layout: Layout,
    targets: Mapping[str, TargetTensor],
    part: Box,
    axes: Mapping[str, int] | None = None,
) -> list[Span]:
    # The spans read by a host that needs this part of each target.
    matched = matching.moves(layout, tensors, axes or {}, targets)
    checkpoint = Checkpoint(format="described", tensors=tensors)
    units = [(target, [part]) for target in matched.targets.values()]
    return Reader(checkpoint, matched, matched.targets).planned(units)[1]


def _experts() -> float:
    layers, experts, ranks, embed, width = 60, 256, 8, 64, 32
    rows = width // ranks
    shapes = {"gate": (rows, embed), "up": (rows, embed), "down": (embed, rows)}
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
                    offset=_DTYPE.itemsize * rows * embed * number,
                    strides=row_major(shape, _DTYPE.itemsize),
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
    targets = _targets({f"layers/moe/{each}": shape for each in shapes})
    host = Box(start=(0, 0, 0, 0), stop=(layers, experts // ranks, embed, width))
    began = time.perf_counter()
    _planned(tensors, layout, targets, host, {"tp": ranks})
    return time.perf_counter() - began


def _write_dcp(path: pathlib.Path) -> None:
    names = [
        f"layers.{layer}.experts.{expert}.weight"
        for expert in range(_DCP_TENSORS // _DCP_LAYERS)
        for layer in range(_DCP_LAYERS)
    ]
    dcp_writer.write(path, names, shape=_DCP_SHAPE, files=_DCP_FILES)


def _open_dcp(path: pathlib.Path) -> float:
    began = time.perf_counter()
    tensors = opening.open_checkpoint(path).tensors
    rows, columns = _DCP_SHAPE
    experts = range(len(tensors) // _DCP_LAYERS)
    layout = Layout.from_dict(
        {
            "rules": [
                {
                    "from": {"layers.{layer}.experts.{expert}.weight": "out embed"},
                    "to": {"experts/{expert}/w": "embed layer out"},
                }
            ]
        }
    )
    shape = (columns, _DCP_LAYERS, rows)
    part = Box(start=(0, 0, 0), stop=(columns // 8, _DCP_LAYERS, rows))
    targets = _targets({f"experts/{number}/w": shape for number in experts})
    spans = _planned(tensors, layout, targets, part)
    secs = time.perf_counter() - began
    volume = len(tensors) * rows * columns // 8
    assert _needed_bytes(spans) == volume * _DTYPE.itemsize
    return secs


def _zero() -> tuple[Checkpoint, Layout, dict[str, TargetTensor]]:
    ranks = 32
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (_VOCAB, _EMBED)}
    for layer in range(_LAYERS):
        for name, shape in _MATRICES.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
        shapes[f"layers.{layer}.norm.weight"] = (_EMBED,)
    part = -(-sum(map(math.prod, shapes.values())) // ranks)
    part_bytes = part * _DTYPE.itemsize
    begins = itertools.accumulate(map(math.prod, shapes.values()), initial=0)
    tensors = [
        StoredTensor(
            name=name,
            dtype=_DTYPE,
            shape=shape,
            kind=kind,
            fragments=_of_ranks(shape, begin, part, number * part_bytes),
        )
        for (name, shape), begin in zip(shapes.items(), begins, strict=False)
        for number, kind in enumerate(_KINDS)
    ]
    entries = [
        Checksum(number * part_bytes, (number + 1) * part_bytes, 0)
        for number in range(len(_KINDS))
    ]
    checkpoint = Checkpoint(
        format="DeepSpeed ZeRO-1", tensors=tensors, checksums=lambda _: entries
    )
    states = {kind: {"from": "{}", "to": f"{kind}/{{}}"} for kind in _KINDS}
    rules = [{"from": {"{name:path}": "..."}, "to": {"{name}": "..."}}]
    targets = _targets(
        {f"{kind}/{name}": shape for kind in _KINDS for name, shape in shapes.items()}
    )
    return checkpoint, Layout.from_dict({"states": states, "rules": rules}), targets


def _of_ranks(
    shape: tuple[int, ...], begin: int, part: int, at: int
) -> tuple[Fragment, ...]:
    # A tensor in a flat buffer that is cut into equal parts for ranks.
    strides = row_major(shape, _DTYPE.itemsize)
    end = begin + math.prod(shape)
    fragments = []
    for rank in range(begin // part, (end - 1) // part + 1):
        start, stop = max(begin, rank * part), min(end, (rank + 1) * part)
        for box in factors.boxes_of_range(shape, start - begin, stop - begin):
            offset = sum(n * each for n, each in zip(box.start, strides, strict=True))
            fragments.append(
                Fragment(
                    box=box,
                    file=f"rank-{rank}_optim_states.pt",
                    offset=at + (begin - rank * part) * _DTYPE.itemsize + offset,
                    strides=strides,
                )
            )
    return tuple(fragments)


def _over_needed(
    checkpoint: Checkpoint, layout: Layout, targets: Mapping[str, TargetTensor]
) -> float:
    # Every host needs a 128th of each target, along its outer dim.
    matched = matching.moves(layout, checkpoint.tensors, checkpoint.axes, targets)

    def reader(host: int) -> tuple[Reader, list[Span]]:
        units = []
        for target in matched.targets.values():
            part = target.shape[0] // _HOSTS
            start, stop = [0] * len(target.shape), list(target.shape)
            start[0], stop[0] = host * part, (host + 1) * part
            units.append((target, [Box(start=tuple(start), stop=tuple(stop))]))
        made = Reader(checkpoint, matched, matched.targets, host=(host, _HOSTS))
        return made, made.planned(units)[1]

    needed = read = 0
    for host in range(_HOSTS):
        made, spans = reader(host)
        needed += _needed_bytes(spans)
        read += sum(span.stop - span.start for span in spans)
        # A host may have already read a part of an entry that it compares.
        read += sum(entry.stop - entry.start for _, entry in made.checks.entries())
    return 100 * (read / needed - 1)


def _needed_bytes(spans: Sequence[Span]) -> int:
    # The bytes of all copied elements.
    return sum(
        copy.form.volume * copy.form.kind[0].itemsize
        for span in spans
        for copy in span.copies
    )
