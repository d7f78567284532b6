"""The most memory that a load of another layout takes beyond its arrays.

Each load is a process, whose anonymous memory is read every 2 ms. A peak is that of
the worst of the loads of one kind of files.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import pathlib
import tempfile
import threading
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from benchmarks import report, universal_raw
from elastic_ckpt.universal.reading import restored_tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of the states.

    Attributes:
      file_matrices: of 32 MiB, in each file.
      files: the numbers of files of the states.
    """

    file_matrices: int = 32
    files: tuple[int, ...] = (1, 8)


SMALL = Size(file_matrices=2, files=(1,))


def measure(size: Size = Size()) -> dict[str, report.Figure]:
    """Runs the suite's part on memory."""
    figures = {}
    for files in size.files:
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory)
            raw, saved = path / "safetensors", path / "orbax"
            raw.mkdir()
            universal_raw.write(raw, matrices=size.file_matrices, files=files)
            gib = round(files * size.file_matrices / 32)
            _in_process(_save, raw, saved)
            loads = {
                "": [(raw, name, ".") for name in universal_raw.RELATIONS],
                "_orbax": [(saved, "stacked", "/")],
            }
            for kind, arguments in loads.items():
                percent = max(_in_process(_over_bound, *each) for each in arguments)
                figures[f"peak_over_bound_percent{kind}_{gib}_gib"] = report.figure(
                    "percent",
                    "at most 10; memory beyond the arrays, over 256 MiB",
                    [percent],
                )
    return figures


def _in_process(function: Any, *arguments: Any) -> Any:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def _save(raw: pathlib.Path, saved: pathlib.Path) -> None:
    ocp.save(str(saved), universal_raw.load(raw, "unchanged"))


def _over_bound(path: pathlib.Path, name: str, separator: str) -> float:
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
    state = universal_raw.load(path, name, separator=separator)
    ended.set()
    watcher.join()
    arrays = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    beyond = max(0, peak - before - arrays)
    return 100 * (beyond / restored_tree.BUDGET_BYTES - 1)


def _anonymous_bytes() -> int:
    status = pathlib.Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024
