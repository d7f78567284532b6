"""The layout of a step directory, which is the same in the local and persistent tiers.

    state/params/w/zarr.json         an array, `params/w` of the checkpointable `state`
    state/params/w/c/0/1             one of its chunks, which is a box of the array
    data/shards-00000-00063.json.gz  a file of the component `data`
    manifest-<host id>               lists what a host holds; written last

Arrays are in zarr v3: uncompressed, little-endian, with a CRC-32C after the values of
each chunk. So a chunk's values start at byte 0 of its file with the same layout as in
memory, any zarr reader detects damage, and the directories of all hosts together form
one array. In an Orbax checkpoint the same chunks are in OCDBT, under Orbax's names
(`persistent`).

Boxes are cut into chunks of bounded size: hosts read, verify, transfer and repair one
chunk at a time, and a host that needs a part of a box reads little more than that part.

Spec: https://zarr-specs.readthedocs.io/en/latest/v3/core/index.html
"""

from __future__ import annotations

import functools
import itertools
import math
import urllib.parse
from collections.abc import Iterator, Sequence

from elastic_ckpt.core import boxes, digest, errors, storage
from elastic_ckpt.steps.manifest import Leaf

# The directory of the steps, inside the run directory.
STEPS = "checkpoints"
# What a run saves in each step: see `training.run_saver`.
STATE, DATA, CALLBACKS = "state", "data", "callbacks"
# The checksum follows the values in a chunk's file.
CHECKSUM_BYTES = 4
# Larger shards are cut to bound a reader's extra memory.
CHUNK_BYTES = 64 * 2**20
# File systems accept names of up to 255 bytes.
_NAME_BYTES = 200


def leaf_directory(path: str) -> str:
    """Returns the directory of the leaf `path`, relative to the step directory."""
    return "/".join(_safe(part) for part in path.split("/"))


def part_file(leaf: Leaf, box: boxes.Box) -> str:
    """A part's file on a RAM disk, relative to the step directory."""
    if leaf.is_file:
        return leaf.path
    return f"{leaf_directory(leaf.path)}/{chunk_key(box, leaf.chunk)}"


def chunk_key(box: boxes.Box, chunk: Sequence[int]) -> str:
    """The path of a chunk in its array's directory, such as `c/0/1`."""
    sizes = zip(box.start, chunk, strict=True)
    return "c" + "".join(f"/{start // size}" for start, size in sizes)


def chunk_shape(
    shard: Sequence[int], *, item_bytes: int, chunk_bytes: int = CHUNK_BYTES
) -> tuple[int, ...]:
    """The chunk shape of an array whose shards have the shape `shard`.

    The chunk shape divides the shard shape. The first dims are cut first, so that
    chunks are contiguous in a shard's memory wherever the dim sizes allow it.

    Args:
      shard: the shard's shape, at least 1 in each dim.
      item_bytes: the size of one element.
      chunk_bytes: the maximum size of a chunk, unless an element is larger or a dim is
        prime.
    """
    chunk = list(shard)
    for dim, size in enumerate(shard):
        most = chunk_bytes // max(1, item_bytes * math.prod(chunk[dim + 1 :]))
        if most >= size:
            break
        chunk[dim] = _largest_divisor(size, max(1, most))
    return tuple(chunk)


def cut(box: boxes.Box, chunk: Sequence[int]) -> Iterator[boxes.Box]:
    """The chunks of a shard's `box`, in C order.

    Raises:
      CheckpointError: if the box is not aligned with the chunk grid.
    """
    sides = [*zip(box.start, box.stop, chunk, strict=True)]
    if any(start % size or stop % size for start, stop, size in sides):
        raise errors.CheckpointError(
            f"the shard {box} cannot be cut into chunks of shape"
            f" {tuple(chunk)}, because all shards of an array must have the same shape;"
            " choose a sharding that divides the array evenly"
        )
    for start in itertools.product(*(range(*side) for side in sides)):
        yield boxes.Box(
            start=start, stop=tuple(a + n for a, n in zip(start, chunk, strict=True))
        )


def array_metadata(leaf: Leaf) -> dict[str, storage.Json]:
    """The `metadata` of an array for TensorStore's `zarr3` driver."""
    return {
        "shape": list(leaf.shape),
        "data_type": leaf.dtype,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(leaf.chunk)},
        },
        "chunk_key_encoding": {"name": "default"},
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "crc32c"},
        ],
    }


def _largest_divisor(number: int, most: int) -> int:
    # Search only up to the square root, because dims may have 1e8 elements.
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return max(n for n in (*low, *(number // n for n in low)) if n <= most)


@functools.lru_cache(maxsize=2**16)
def _safe(part: str) -> str:
    # A unique file name for `part` that cannot leave its directory.
    quoted = urllib.parse.quote(part, safe=" ,()[]{}@+=$!'") or "%"
    if quoted.startswith("."):
        quoted = f"%2E{quoted[1:]}"
    if len(quoted) > _NAME_BYTES:
        quoted = f"{quoted[:_NAME_BYTES]}%{digest.name_hash(part):016x}"
    return quoted


def slice_directory(base: str, number: int) -> str:
    """The RAM disk directory of one of multiple slices on a machine."""
    return f"{base}/slice-{number}"
