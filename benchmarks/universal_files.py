"""The safetensors files that suite `universal` loads and converts."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping

import numpy as np


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
