"""The manifests of a large world: each host has 100 boxes, one of each leaf."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from elastic_ckpt.core import boxes
from elastic_ckpt.steps import manifest

LEAVES = 100
# Each host has as many of a leaf.
ROWS = 16
_BOX_BYTES = 2**20


def _contents(num_hosts: int) -> manifest.Contents:
    shape = (num_hosts * ROWS, 512)
    leaves = [
        manifest.Leaf(path=f"params/layer_{number:03d}/w", shape=shape, dtype="float32")
        for number in range(LEAVES)
    ]
    return manifest.Contents(leaves=tuple(leaves), components={"data": num_hosts})


def manifests(num_hosts: int, *, step: int) -> Iterator[manifest.Manifest]:
    """The manifests that hosts write when they save, by number."""
    contents = _contents(num_hosts)
    slice_hosts = max(10, num_hosts // 100)
    generator = np.random.default_rng(step)
    for number in range(num_hosts):
        yield manifest.Manifest(
            run="scale",
            step=step,
            save="0",
            host=manifest.Host(
                id=f"{number:016x}.0",
                number=number,
                domains={"slice": str(number // slice_hosts)},
            ),
            contents=contents,
            fragments=_fragments(number, generator),
            component_files=(
                manifest.ComponentFile(
                    component="data",
                    parts=(number, number + 1),
                    path=f"data/shards-{number:05d}-{number:05d}.json",
                    digest=generator.bytes(16),
                    stored_bytes=150,
                ),
            ),
        )


def _fragments(number: int, generator: np.random.Generator) -> manifest.Fragments:
    start = np.tile([number * ROWS, 0], (LEAVES, 1))
    return manifest.Fragments(
        leaf=np.arange(LEAVES, dtype=np.int32),
        boxes=boxes.Boxes(start=start, stop=start + np.array([ROWS, 512])),
        digest=generator.integers(0, 2**64, (LEAVES, 2), np.uint64),
        file=np.zeros(LEAVES, np.int32),
        offset=np.arange(LEAVES) * _BOX_BYTES,
        stored_bytes=np.full(LEAVES, _BOX_BYTES),
        files=("arrays.bin",),
    )
