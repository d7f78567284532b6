"""Suite `universal`: conversions of raw files, beside a durable copy of the same bytes.

A round copies all files and syncs them, and then converts them in each way; each side
is removed before the next. All are in the page cache.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable

from benchmarks import report, universal_files
from elastic_ckpt.universal.writing import conversion, convert

_ROWS, _COLUMNS = 4096, 2048
_DIMS = {"": "out embed", "_transposed": "embed out"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The size of the checkpoint, and how often it is converted.

    Attributes:
      file_matrices: of 32 MiB, in each file.
      files: that are converted.
      rounds: that are counted; one before them is not.
    """

    file_matrices: int = 32
    files: int = 4
    rounds: int = 3


SMALL = Size(file_matrices=1, files=2, rounds=1)


def measure(size: Size = Size()) -> dict[str, report.Figure]:
    """Runs the suite's part on conversions."""
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory)
        (path / "source").mkdir()
        for number in range(size.files):
            first = number * size.file_matrices
            matrices = range(first, first + size.file_matrices)
            universal_files.write(
                path / "source" / f"{number:05d}.safetensors",
                {f"layers.{each}.weight": (_ROWS, _COLUMNS) for each in matrices},
                seed=number,
            )
        for name, dims in _DIMS.items():
            (path / f"rules{name}.yml").write_text(_rules(dims))
        secs: dict[str, list[float]] = collections.defaultdict(list)
        for number in range(size.rounds + 1):
            for side, taken in _round(path).items():
                if number:
                    secs[side].append(taken)
    copies = secs.pop("copy")
    return {
        side: report.ratio(copies, taken, "a durable copy of the same bytes, at least")
        for side, taken in secs.items()
    }


def _round(path: pathlib.Path) -> dict[str, float]:
    taken = {"copy": _timed(path, lambda: _copy(path))}
    for name in _DIMS:
        for to, target in (("orbax", "0"), ("safetensors", "model")):
            job = conversion.Job(
                source=str(path / "source"),
                target=str(path / "target" / target),
                rules=str(path / f"rules{name}.yml"),
                to=to,
            )
            shown = "" if to == "orbax" else f"_{to}"
            taken[f"convert_ratio_cp{shown}{name}"] = _timed(
                path, lambda job=job: convert.convert(job)
            )
    return taken


def _timed(path: pathlib.Path, act: Callable[[], object]) -> float:
    (path / "target").mkdir()
    began_secs = time.monotonic()
    act()
    secs = time.monotonic() - began_secs
    shutil.rmtree(path / "target")
    os.sync()
    return secs


def _copy(path: pathlib.Path) -> None:
    for file in sorted((path / "source").iterdir()):
        copied = path / "target" / file.name
        shutil.copyfile(file, copied)
        with copied.open("rb") as opened:
            os.fsync(opened.fileno())


def _rules(dims: str) -> str:
    name = "layers.{layer}.weight"
    rule = {"from": {name: "out embed"}, "to": {"layers/{layer}/w": dims}}
    return json.dumps({"version": 1, "rules": [rule]})
