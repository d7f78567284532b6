"""Runs sides in turns in one process; measures token rates by clock and processor time.

A side is a name and a callable that creates a fresh iterator of int32 arrays: a peer
(`sides_of`) or your own loader. In each round, each side is restarted, yields
`warm_up_tokens` and then at least `num_tokens`, which are timed, and is closed. Every
array is copied once, as on its way to a device.

A loader that decodes in advance starts with full buffers. The 16-way interleave decodes
a row group of each file, 8 million tokens, in one piece. `num_tokens` is therefore
twice that, 16 million; otherwise the timed part would include no decoding at all.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np

from benchmarks import report
from benchmarks.peers import hf_datasets, loaders
from benchmarks.peers.documents import Documents
from benchmarks.peers.peer import ROW_LENGTH, Setting, Tokens

PEERS = (*loaders.PEERS, *hf_datasets.PEERS)
# By name: creates a fresh iterator over at least `warm_up_tokens + num_tokens` tokens,
# arrays of shape (2048,) or (rows, 2048). It is a generator and is closed at the end.
Sides = dict[str, Callable[[], Iterator[Tokens]]]


# A side's rates in millions of tokens, one sample per round: `per_sec` by the clock and
# `per_cpu_sec` by the processor time of all threads of this process.
Rates = dict[str, list[float]]


def in_turns(
    sides: Sides, *, num_tokens: int, warm_up_tokens: int, num_rounds: int
) -> dict[str, Rates]:
    """The rates of each side.

    Raises:
      ValueError: if a side yields something other than int32 rows or ends too early.
    """
    rates: dict[str, Rates] = {n: {"per_sec": [], "per_cpu_sec": []} for n in sides}
    for _ in range(num_rounds):
        for name, make in sides.items():
            gc.collect()  # do not time the previous side's garbage
            rows = cast(Any, make())
            with contextlib.closing(rows):
                _take(name, rows, warm_up_tokens)
                began, cpu_began = time.perf_counter(), time.process_time()
                taken = _take(name, rows, num_tokens)
                secs = time.perf_counter() - began
                cpu_secs = time.process_time() - cpu_began
            rates[name]["per_sec"].append(taken / secs / 1e6)
            rates[name]["per_cpu_sec"].append(taken / cpu_secs / 1e6)
    return rates


def compared(
    rates: Mapping[str, Rates],
    *,
    name: str,
    ratio: Callable[[str], str],
    bounds: Mapping[str, str],
) -> dict[str, report.Figure]:
    """The figures of the side "ours" and the others, each by clock and by processor.

    `name` is the name of our rates, without `_per_sec` and `_per_cpu_sec`; `ratio`
    returns the name of the figure for a ratio to a side, which is prefixed with `cpu_`
    for processor time. Bounds are by figure.
    """
    figures = {}
    for clock, unit, before in (
        ("per_sec", "Mtok/s", ""),
        ("per_cpu_sec", "Mtok/cpu-s", "cpu_"),
    ):
        own = f"{name}_{clock}"
        ours = rates["ours"][clock]
        figures[own] = report.figure(unit, bounds.get(own, "no bound"), ours)
        for side in [side for side in rates if side != "ours"]:
            named, theirs = f"{before}{ratio(side)}", rates[side][clock]
            bound = bounds.get(named, "ahead")
            beside = f"{side}: {statistics.median(theirs):.2f} {unit}"
            figures[named] = report.ratio(ours, theirs, f"{bound}; {beside}")
    return figures


def sides_of(setting: Setting, source: Documents, directory: pathlib.Path) -> Sides:
    """The installed peers that support `setting`; each keeps its files in `directory`.

    A peer's existing files are reused: one directory contains one corpus. Skipped peers
    are printed, with the reason.
    """
    sides: Sides = {}
    for peer in PEERS:
        if setting in peer.lacks:
            print(f"{setting}: {peer.name}: cannot: {peer.lacks[setting]}")
            continue
        if peer.not_installed:
            print(f"{setting}: {peer.not_installed}")
            continue
        own = directory / peer.name
        if peer.prepare is not None and not own.exists():
            peer.prepare(source, own)
        sides[peer.name] = functools.partial(peer.rows, setting, source, own)
    return sides


def _take(name: str, rows: Iterator[Tokens], num_tokens: int) -> int:
    taken = 0
    for array in rows:
        if array.dtype != np.int32 or array.shape[-1] != ROW_LENGTH:
            raise ValueError(
                f"{name} yields {array.dtype} of shape {array.shape}, "
                f"not int32 rows of {ROW_LENGTH}"
            )
        array.copy()  # a view of a mapped file has not been read yet
        taken += array.size
        if taken >= num_tokens:
            return taken
    raise ValueError(
        f"{name} ended after {taken} of {num_tokens} tokens: write more documents"
    )
