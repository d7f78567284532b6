"""Runs sides in turns in one process and counts their tokens, by clock and processor.

A `Side` is a name and a callable that makes a fresh iterator of int32 arrays: a peer's
(`sides_of`) or one's own loader. In each round each side starts anew, gives
`warm_up_tokens` and then at least `num_tokens`, which are timed, and is closed. Every
array is copied once, as on its way to a device.

A loader that decodes in advance starts with full buffers. The 16-way interleave decodes
a row group of each file, 8 million tokens, at once: so `num_tokens` is 16 million, two
times that, or the timed stretch would hold no decoding at all.

    source = Documents(directory=pathlib.Path("/dev/shm/corpus"))
    source.write()
    sides = sides_of("packed", source=source, directory=pathlib.Path("/dev/shm/peers"))
    ours = Side(name="ours", make=lambda: iter(engine(source.files)))
    rates = in_turns([ours, *sides])
    rates["ours"].per_sec  # (26.1, ...), in Mtok/s, one a round
    rates["litdata"].per_cpu_sec
    print(absent("packed"))  # who is not among them, and why

From a shell: `python -m benchmarks.peers.measure --directory /dev/shm/peers`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.peers.documents import Documents
from benchmarks.peers.grain_elastic import GRAIN_ELASTIC
from benchmarks.peers.grain_interleave import GRAIN_INTERLEAVE
from benchmarks.peers.hf_datasets import HF_DATASETS, HF_DATASETS_ARROW
from benchmarks.peers.lancedb_streaming import LANCEDB
from benchmarks.peers.litdata_streaming import LITDATA
from benchmarks.peers.mosaicml_streaming import MOSAICML_STREAMING
from benchmarks.peers.peer import ROW_LENGTH, SETTINGS, Peer, Setting, Tokens

PEERS = (
    GRAIN_INTERLEAVE,
    GRAIN_ELASTIC,
    MOSAICML_STREAMING,
    LITDATA,
    LANCEDB,
    HF_DATASETS,
    HF_DATASETS_ARROW,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """One of those compared.

    Attributes:
      name: in the result.
      make: a fresh iterator over at least `warm_up_tokens + num_tokens` tokens: int32
        arrays of shape (2048,) or (rows, 2048). Its `close` is called where it has one.
    """

    name: str
    make: Callable[[], Iterator[Tokens]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Millions of tokens of a side, one sample a round.

    Attributes:
      per_sec: by the clock.
      per_cpu_sec: by the processor time of all threads of this process.
    """

    per_sec: tuple[float, ...]
    per_cpu_sec: tuple[float, ...]


def in_turns(
    sides: Sequence[Side],
    *,
    num_tokens: int = 16_000_000,
    warm_up_tokens: int = 1_000_000,
    num_rounds: int = 5,
) -> dict[str, Rates]:
    """The rates of each side.

    Raises:
      ValueError: a side yields something else than int32 rows, or ends too early.
    """
    samples: dict[str, list[tuple[float, float]]] = {side.name: [] for side in sides}
    for _ in range(num_rounds):
        for side in sides:
            gc.collect()  # what the side before has left is not this one's time
            rows = side.make()
            try:
                _take(side.name, rows, warm_up_tokens)
                began = (time.perf_counter(), time.process_time())
                taken = _take(side.name, rows, num_tokens)
                ended = (time.perf_counter(), time.process_time())
            finally:
                _close(rows)
            secs, cpu_secs = (b - a for a, b in zip(began, ended, strict=True))
            samples[side.name].append((taken / secs / 1e6, taken / cpu_secs / 1e6))
    rates = {}
    for name, pairs in samples.items():
        per_sec, per_cpu_sec = zip(*pairs, strict=True)
        rates[name] = Rates(per_sec=per_sec, per_cpu_sec=per_cpu_sec)
    return rates


def compared(
    rates: Mapping[str, Rates],
    *,
    ours: str,
    name: str | None,
    ratio: Callable[[str], str],
    bounds: Mapping[str, str],
) -> dict[str, report.Figure]:
    """The figures of one side beside the others, each by clock and by processor.

    Args:
      rates: of all sides.
      ours: the side that is compared.
      name: of the figures of its rates, without `_per_sec` and `_per_cpu_sec`; None
        leaves them out.
      ratio: the name of the figure of a ratio to another side; `cpu_` comes before that
        of the processor.
      bounds: of figures by the clock.
    """
    own = rates[ours]
    figures = {}
    if name is not None:
        by_clock, by_cpu = f"{name}_per_sec", f"{name}_per_cpu_sec"
        bound = bounds.get(by_clock, "no bound")
        figures[by_clock] = report.figure("Mtok/s", bound, own.per_sec)
        figures[by_cpu] = report.figure("Mtok/cpu-s", "no bound", own.per_cpu_sec)
    for peer, theirs in rates.items():
        if peer == ours:
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


def sides_of(
    setting: Setting,
    *,
    source: Documents,
    directory: pathlib.Path,
    peers: Sequence[Peer] = PEERS,
) -> list[Side]:
    """The installed peers that do `setting`; each keeps its format in `directory`.

    The files of a peer there are used again: one directory holds one corpus.
    """
    sides = []
    for peer in peers:
        if setting in peer.lacks or peer.not_installed:
            continue
        own = directory / peer.name
        if not own.exists():
            unfinished = directory / f"{peer.name}.unfinished"
            peer.prepare(source, unfinished)
            if unfinished.exists():  # not for those that read the corpus itself
                unfinished.rename(own)
        sides.append(Side(name=peer.name, make=_maker(peer, setting, source, own)))
    return sides


def absent(setting: Setting, *, peers: Sequence[Peer] = PEERS) -> list[str]:
    """A line for each peer that `sides_of` leaves out, and why."""
    lines = []
    for peer in peers:
        if setting in peer.lacks:
            lines.append(f"{peer.name}: cannot: {peer.lacks[setting]}")
        elif peer.not_installed:
            lines.append(peer.not_installed)
    return lines


def _maker(
    peer: Peer, setting: Setting, source: Documents, own: pathlib.Path
) -> Callable[[], Iterator[Tokens]]:
    return lambda: peer.rows(setting, source, own)


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


def _close(rows: Any) -> None:
    # A generator has `close`, and so have Grain's iterators; a plain iterator has not.
    close = getattr(rows, "close", None)
    if close is not None:
        close()


def main() -> None:
    """Writes the corpus where it is missing, and prints a table of each setting."""
    names = [peer.name for peer in PEERS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.measure")
    parser.add_argument("--directory", type=pathlib.Path, required=True)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS)
    parser.add_argument("--peers", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16_000_000)
    arguments = parser.parse_args()
    peers = [peer for peer in PEERS if peer.name in arguments.peers]
    source = Documents(directory=arguments.directory / "corpus")
    if not source.directory.exists():
        source.write()
    for setting in arguments.settings:
        print(f"\n{setting:<28} {'median':>9} {'least':>9} {'most':>9}  Mtok/s")
        rates = in_turns(
            sides_of(
                setting, source=source, directory=arguments.directory, peers=peers
            ),
            num_tokens=arguments.tokens,
            num_rounds=arguments.rounds,
        )
        for name, rate in rates.items():
            values = rate.per_sec
            numbers = (statistics.median(values), min(values), max(values))
            print(f"{name:<28} " + " ".join(f"{number:9.2f}" for number in numbers))
        print("\n".join(absent(setting, peers=peers)))
    versions = {"python": platform.python_version()}
    for peer in peers:
        versions |= {name: str(version) for name, version in peer.versions.items()}
    print(", ".join(f"{name} {version}" for name, version in versions.items()))


if __name__ == "__main__":
    main()
