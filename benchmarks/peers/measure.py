"""Runs sides in turns in one process and counts their tokens, by clock and processor.

A side is a name and a callable that makes a fresh iterator of int32 arrays: a peer's
(`sides_of`) or one's own loader. In each round each side starts anew, gives
`warm_up_tokens` and then at least `num_tokens`, which are timed, and is closed. Every
array is copied once, as on its way to a device.

A loader that decodes in advance starts with full buffers. The 16-way interleave decodes
a row group of each file, 8 million tokens, at once: so `num_tokens` is 16 million, two
times that, or the timed stretch would hold no decoding at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np

from benchmarks import report
from benchmarks.peers.documents import Documents
from benchmarks.peers.hf_datasets import HF_DATASETS, HF_DATASETS_ARROW
from benchmarks.peers.loaders import (
    GRAIN_ELASTIC,
    GRAIN_INTERLEAVE,
    LANCEDB,
    LITDATA,
    MOSAICML_STREAMING,
)
from benchmarks.peers.peer import ROW_LENGTH, Setting, Tokens

PEERS = (
    GRAIN_INTERLEAVE,
    GRAIN_ELASTIC,
    MOSAICML_STREAMING,
    LITDATA,
    LANCEDB,
    HF_DATASETS,
    HF_DATASETS_ARROW,
)


# By name: a fresh iterator over at least `warm_up_tokens + num_tokens` tokens, arrays
# of shape (2048,) or (rows, 2048). It is a generator, and closed at the end.
Sides = dict[str, Callable[[], Iterator[Tokens]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Millions of tokens of a side, one sample a round."""

    per_sec: tuple[float, ...]  # by the clock
    per_cpu_sec: tuple[float, ...]  # by the processors, of all threads of this process


def in_turns(
    sides: Sides,
    *,
    num_tokens: int = 16_000_000,
    warm_up_tokens: int = 1_000_000,
    num_rounds: int = 5,
) -> dict[str, Rates]:
    """The rates of each side.

    Raises:
      ValueError: a side yields something else than int32 rows, or ends too early.
    """
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(num_rounds):
        for name, make in sides.items():
            gc.collect()  # what the side before has left is not this one's time
            rows = cast(Any, make())
            with contextlib.closing(rows):
                _take(name, rows, warm_up_tokens)
                began = (time.perf_counter(), time.process_time())
                taken = _take(name, rows, num_tokens)
                ended = (time.perf_counter(), time.process_time())
            secs, cpu_secs = (b - a for a, b in zip(began, ended, strict=True))
            samples[name].append((taken / secs / 1e6, taken / cpu_secs / 1e6))
    rates = {}
    for name, pairs in samples.items():
        per_sec, per_cpu_sec = zip(*pairs, strict=True)
        rates[name] = Rates(per_sec=per_sec, per_cpu_sec=per_cpu_sec)
    return rates


def compared(
    rates: Mapping[str, Rates],
    *,
    name: str,
    ratio: Callable[[str], str],
    bounds: Mapping[str, str],
) -> dict[str, report.Figure]:
    """The figures of the side "ours" beside the others, each by clock and by processor.

    Args:
      rates: of all sides.
      name: of the figures of our rates, without `_per_sec` and `_per_cpu_sec`.
      ratio: the name of the figure of a ratio to another side; `cpu_` comes before that
        of the processor.
      bounds: of figures by the clock.
    """
    own = rates["ours"]
    by_clock, by_cpu = f"{name}_per_sec", f"{name}_per_cpu_sec"
    bound = bounds.get(by_clock, "no bound")
    figures = {
        by_clock: report.figure("Mtok/s", bound, own.per_sec),
        by_cpu: report.figure("Mtok/cpu-s", "no bound", own.per_cpu_sec),
    }
    for peer, theirs in rates.items():
        if peer == "ours":
            continue
        named = ratio(peer)
        rate = statistics.median(theirs.per_sec)
        figures[named] = report.ratio(
            own.per_sec,
            theirs.per_sec,
            f"{bounds.get(named, 'ahead')}; {peer}: {rate:.2f} Mtok/s",
        )
        rate = statistics.median(theirs.per_cpu_sec)
        figures[f"cpu_{named}"] = report.ratio(
            own.per_cpu_sec,
            theirs.per_cpu_sec,
            f"ahead; {peer}: {rate:.2f} Mtok/cpu-s",
        )
    return figures


def sides_of(setting: Setting, source: Documents, directory: pathlib.Path) -> Sides:
    """The installed peers that do `setting`; each keeps its format in `directory`.

    The files of a peer there are used again: one directory holds one corpus. Those that
    are left out are printed, with the reason.
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
        if not own.exists():
            unfinished = directory / f"{peer.name}.unfinished"
            peer.prepare(source, unfinished)
            if unfinished.exists():  # not for those that read the corpus itself
                unfinished.rename(own)
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
