"""Suite `universal`: conversions of raw files, beside a durable copy of the same bytes.

A round copies all files and syncs them, and then converts them in each way; what a side
has written is removed before the next. All are in the page cache.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks import report, turns
from elastic_ckpt.universal.writing import conversion, convert

_ROWS, _COLUMNS = 4096, 2048
_RULE = {
    "from": {"layers.{layer}.weight": "out embed"},
    "to": {"layers/{layer}/w": "out embed"},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """The size of the checkpoint, and how often it is converted."""

    file_matrices: int = 32  # of 32 MiB, in each file
    files: int = 4
    rounds: int = 3


SMALL = Size(file_matrices=1, files=2, rounds=1)


def measure(size: Size = Size()) -> dict[str, report.Figure]:
    """Runs the suite's part on conversions."""
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory)
        source, target = path / "source", path / "target"
        source.mkdir()
        target.mkdir()
        for number in range(size.files):
            first = number * size.file_matrices
            matrices = range(first, first + size.file_matrices)
            write(
                source / f"{number:05d}.safetensors",
                {f"layers.{each}.weight": (_ROWS, _COLUMNS) for each in matrices},
                seed=number,
            )
        rules = path / "rules.yml"
        rules.write_text(json.dumps({"version": 1, "rules": [_RULE]}))

        def copy() -> None:
            for file in sorted(source.iterdir()):
                copied = target / file.name
                shutil.copyfile(file, copied)
                with copied.open("rb") as opened:
                    os.fsync(opened.fileno())

        def converted(name: str, to: Any) -> None:
            convert.convert(
                conversion.Job(
                    source=str(source),
                    target=str(target / name),
                    rules=str(rules),
                    to=to,
                )
            )

        def remove() -> None:
            shutil.rmtree(target)
            target.mkdir()
            os.sync()

        sides = {
            "copy": copy,
            "convert_ratio_cp": lambda: converted("0", "orbax"),
            "convert_ratio_cp_safetensors": lambda: converted("model", "safetensors"),
        }
        secs = turns.timed(sides, size.rounds, after=remove)
    copies = secs.pop("copy")
    return {
        side: report.ratio(copies, taken, "a durable copy of the same bytes, at least")
        for side, taken in secs.items()
    }


def write(
    path: pathlib.Path, shapes: Mapping[str, tuple[int, ...]], *, seed: int
) -> None:
    """Writes random float32 tensors, in their order, into one file."""
    header = {}
    stop = 0
    for name, shape in shapes.items():
        start, stop = stop, stop + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            file.write(generator.random(shape, np.float32).data)
