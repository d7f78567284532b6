"""Capture: a copy of what this process holds of a state, in files of the RAM disk.

The trainer is blocked only for this copy: digests and copies for peers are made from
it, beside the training. It is in memory once: the files that it lies in become those of
the step (`ram.chunk_files`). A state that goes to storage alone is copied into memory.

Replicas on devices of one process are copied once; other processes copy theirs, because
replicas count as holders.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import inspect
import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.sharding import Sharding

from elastic_ckpt.core import boxes, errors, host_memory
from elastic_ckpt.steps import layout
from elastic_ckpt.steps.manifest import Leaf
from elastic_ckpt.tiers.captured import Captured, CapturedLeaf
from elastic_ckpt.tiers.ram.chunk_files import LEAST_BYTES, ChunkFile, ChunkFiles

Whole = np.ndarray | np.generic | int | float | bool

# The dtypes of JAX that TensorStore's zarr v3 arrays store bit by bit.
STORABLE = frozenset(
    {
        "bfloat16",
        "bool",
        "complex128",
        "complex64",
        "float16",
        "float32",
        "float4_e2m1fn",
        "float64",
        "float8_e3m4",
        "float8_e4m3b11fnuz",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "int16",
        "int2",
        "int32",
        "int4",
        "int64",
        "int8",
        "uint16",
        "uint32",
        "uint64",
        "uint8",
    }
)
_ALIGNMENT_BYTES = 64
# How JAX runs a program, where its C++ alone does not.
_CALLS = frozenset(
    {("pxla.py", "ExecuteReplicated.__call__"), ("stages.py", "Compiled.__call__")}
)
# The directory of JAX as code objects name it.
_JAX = os.path.dirname(
    os.path.dirname(inspect.unwrap(jax.device_put).__code__.co_filename)
)
# Small chunks are copied into memory; of more than so many bytes, the larger ones are
# not.
_MOST_SMALL_BYTES = 2**27
_LEAST_OF_MANY_BYTES = 2**16
# As much is in host memory that was fetched from devices and is not copied yet.
_WAVE_BYTES = 2**28


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Shards(CapturedLeaf):
    """The shards that a host holds of an array that other code has assembled.

    Attributes:
      kept: whether no other code changes the values, so that they need no copy.
      is_own: whether this host uploads a box if no RAM disk has the step; by default
        it uploads all of them.
      group_of: the name of the hosts that hold a box; empty for this one alone, as all
        are by default.
    """

    kept: bool
    is_own: Callable[[boxes.Box], bool] | None = None
    group_of: Callable[[boxes.Box], str] | None = None


Value = jax.Array | Whole | Shards


class Memory:
    """Memory that captures of one host take their copies in, one after the other.

    Args:
      files: of the RAM disk that steps are saved to; None if they go to storage alone.
    """

    def __init__(self, files: ChunkFiles | None = None) -> None:
        self._files = files
        self._pool = host_memory.Pool()
        self._last: dict[str, weakref.ref[jax.Array]] = {}

    def is_still(self, path: str, array: jax.Array) -> bool:
        """Whether a view of an array in host memory stands for a copy.

        It does if the same array was captured before: the program keeps it, and what is
        donated to a program while a view of it is held is copied by XLA. The memory
        must be XLA's own, which other code cannot change.
        """
        if array.nbytes < LEAST_BYTES:
            # The copy takes no longer than the decision.
            return False
        last = self._last.get(path)
        if last is not None and last() is array:
            return is_result_of_program(array)
        self._last[path] = weakref.ref(array)
        return False

    def take_files(self, sizes: Sequence[int]) -> list[ChunkFile | None]:
        """A file on the RAM disk for each large chunk, while there is room."""
        taken: list[ChunkFile | None] = [None] * len(sizes)
        if self._files is None:
            return taken
        least = LEAST_BYTES
        if sum(size for size in sizes if size < least) > _MOST_SMALL_BYTES:
            least = _LEAST_OF_MANY_BYTES
        with contextlib.suppress(OSError):
            for number, size in enumerate(sizes):
                if size >= least:
                    taken[number] = self._files.take(size)
        return taken

    def take(self, num_bytes: int) -> np.ndarray:
        """One piece of memory: the last one of this size, whose pages are warm."""
        return self._pool.take(num_bytes)

    def give_back(self, files: Sequence[ChunkFile | None], piece: np.ndarray) -> None:
        """Releases what was taken; files that became part of a step stay."""
        self._pool.give_back(piece)
        for file in files:
            if file is not None and self._files is not None:
                self._files.discard(file)


def capture(leaves: Mapping[str, Value], memory: Memory) -> Captured:
    """Copies what this process holds of a state; arrays may be donated afterwards.

    Large chunks are copied into files of the RAM disk, if there is one. Values of
    devices pass through host memory in waves. For arrays in the host's memory, views
    may be enough.

    Args:
      leaves: by path: arrays of JAX under any sharding, typed random keys (their data
        is captured), values that are whole in every process (arrays of NumPy and
        numbers), and `Shards`.
      memory: for the copies, which gets it back when they are released.

    Raises:
      CheckpointError: if a leaf is of another type, or of a dtype that no tier stores;
        it names the leaf.
    """
    with _no_collection():
        here = [_held(path, leaves[path], memory) for path in sorted(leaves)]
        parts = [(each, part) for each in here for part in each.parts()]
        copied = [part.num_bytes for each, part in parts if not each.kept]
        files = memory.take_files(copied)
        file_of = iter(files)
        # Values that are fetched are a copy already; without a file they stay there.
        at: list[tuple[ChunkFile | None, int | None]] = []
        num_bytes = 0
        for each, part in parts:
            file = None if each.kept else next(file_of)
            in_piece = file is None and not (each.kept or each.is_far)
            at.append((file, num_bytes if in_piece else None))
            num_bytes += _aligned(part.num_bytes) if in_piece else 0
        piece = memory.take(num_bytes)
        values = _fetched(parts)
        places = iter(at)
        captured = []
        for each in here:
            boxes_of, files_of = [], {}
            for part in each.parts():
                here_values = next(values)
                file, offset = next(places)
                if file is not None or offset is not None:
                    copy = np.ndarray(
                        here_values.shape,
                        here_values.dtype,
                        piece if file is None else file.memory,
                        offset or 0,
                    )
                    np.copyto(copy, here_values)
                    here_values = copy
                if file is not None:
                    files_of[part.box] = file
                boxes_of.append((part.box, here_values))
            captured.append(
                CapturedLeaf(
                    leaf=each.leaf,
                    shard_shape=each.shard_shape,
                    boxes=tuple(boxes_of),
                    files=files_of,
                )
            )
    release = functools.partial(memory.give_back, files, piece)
    return Captured(captured, on_release=release)


def numbers(value: Any) -> Any:
    """Returns `value`, or the numbers of a typed random key."""
    if isinstance(value, jax.Array) and _is_key(value.dtype):
        return jax.random.key_data(value)
    return value


def leaf_of(path: str, value: jax.Array | Whole) -> Leaf:
    """Returns the leaf of `value`, independent of its elements.

    Raises:
      CheckpointError: as `capture`.
    """
    if isinstance(value, jax.Array):
        return Leaf(path=path, shape=value.shape, dtype=_dtype(path, value.dtype))
    if not isinstance(value, np.ndarray | np.generic | int | float):
        raise errors.CheckpointError(
            f"leaf {path!r} is a {type(value).__name__}, and a state has arrays and"
            " numbers; take it out of the state, or save it as a separate"
            " checkpointable"
        )
    array = np.asarray(value)
    return Leaf(path=path, shape=array.shape, dtype=_dtype(path, array.dtype))


def is_result_of_program(array: jax.Array) -> bool:
    """Whether a program of XLA made an array, and so its memory is XLA's alone.

    `jax.device_put` and DLPack take over memory of NumPy as it is. JAX notes in each
    array where it was made; False where it has not.
    """
    traceback = getattr(array, "traceback", None)
    if traceback is None or not traceback.frames:
        return False
    innermost = traceback.frames[0]
    if not innermost.file_name.startswith(_JAX + os.sep):
        # Only programs are called by C++ straight from a caller's code.
        return True
    return (os.path.basename(innermost.file_name), innermost.function_name) in _CALLS


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    # Thousands of new objects would start garbage collections over all objects of a
    # training process, which cost more than the copies.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Part(NamedTuple):
    # A chunk of a shard: its box, the shard, and where it lies in there.
    box: boxes.Box
    shard: jax.Array | np.ndarray
    within: tuple[slice, ...] | None
    num_bytes: int


class _Held(NamedTuple):
    # What is here of a leaf: local shards without replicas; `kept`: whether they need
    # no copy; `is_far`: whether they have to be fetched.
    leaf: Leaf
    shard_shape: tuple[int, ...]
    shards: Sequence[tuple[boxes.Box, jax.Array | np.ndarray]]
    kept: bool
    is_far: bool

    def parts(self) -> Iterator[_Part]:
        if not self.shards:
            return
        cut, num_bytes = _cut(self.leaf.dtype, self.shard_shape)
        for box, shard in self.shards:
            if cut is None:
                yield _Part(box, shard, None, num_bytes)
                continue
            for start, within in cut:
                begin = tuple(a + n for a, n in zip(box.start, start, strict=True))
                sizes = [each.stop - each.start for each in within]
                stop = tuple(a + n for a, n in zip(begin, sizes, strict=True))
                part = boxes.Box(start=begin, stop=stop)
                yield _Part(part, shard, within, num_bytes)


_Cuts = tuple[tuple[tuple[int, ...], tuple[slice, ...]], ...]


@functools.lru_cache(maxsize=2**14)
def _cut(dtype: str, shard_shape: tuple[int, ...]) -> tuple[_Cuts | None, int]:
    # The chunks of a shard, by their start in it; None if it is one. And their bytes.
    item_bytes = np.dtype(dtype).itemsize
    chunk = layout.chunk_shape(shard_shape, item_bytes=item_bytes)
    num_bytes = math.prod(chunk) * item_bytes
    if chunk == shard_shape:
        return None, num_bytes
    cuts = []
    for box in layout.cut(boxes.whole(shard_shape), chunk):
        within = tuple(map(slice, box.start, box.stop))
        cuts.append((box.start, within))
    return tuple(cuts), num_bytes


def _fetched(parts: Sequence[tuple[_Held, _Part]]) -> Iterator[np.ndarray]:
    # The values of all parts, in order. A device sends the next ones while those before
    # are copied: as many as are in host memory at a time.
    ahead: collections.deque[_Coming] = collections.deque()
    last: tuple[Any, Any] = (None, None)
    num_bytes = 0
    for each, part in parts:
        coming = _Coming(part.shard, part.within, 0)
        if each.is_far and part.within is not None and _is_long(part.shard):
            coming = _Coming(_slice(part), None, part.num_bytes)
        elif each.is_far:
            if last[0] is not part.shard:
                # JAX keeps what it fetched with an array: here, with the clone.
                last = (part.shard, cast(Any, part.shard).clone())
            coming = _Coming(last[1], part.within, part.num_bytes)
        if isinstance(coming.source, jax.Array):
            coming.source.copy_to_host_async()
        ahead.append(coming)
        num_bytes += coming.num_bytes
        del coming
        while num_bytes > _WAVE_BYTES:
            num_bytes -= ahead[0].num_bytes
            yield ahead.popleft().values()
    last = (None, None)
    while ahead:
        yield ahead.popleft().values()


class _Coming(NamedTuple):
    # What a part is read from, where it lies in there, and the bytes that come.
    source: jax.Array | np.ndarray
    within: tuple[slice, ...] | None
    num_bytes: int

    def values(self) -> np.ndarray:
        values = np.asarray(self.source)
        return values if self.within is None else values[self.within]


def _is_long(shard: jax.Array | np.ndarray) -> bool:
    return shard.nbytes > _WAVE_BYTES


def _slice(part: _Part) -> jax.Array:
    # A part of a shard, in memory of its own on the device.
    assert part.within is not None
    start = [each.start for each in part.within]
    sizes = tuple(each.stop - each.start for each in part.within)
    return _sliced(part.shard, start, sizes)


@functools.partial(jax.jit, static_argnums=2)
def _sliced(
    shard: jax.Array, start: Sequence[int], sizes: tuple[int, ...]
) -> jax.Array:
    return jax.lax.dynamic_slice(shard, start, sizes)


def _held(path: str, value: Value, memory: Memory) -> _Held:
    if isinstance(value, Shards):
        return _Held(value.leaf, value.shard_shape, value.boxes, value.kept, False)
    value = numbers(value)
    leaf = leaf_of(path, value)
    if not isinstance(value, jax.Array):
        # In this machine's byte order, which is that of the files.
        array = np.asarray(value, np.dtype(leaf.dtype))
        whole = [(boxes.whole(array.shape), array)] if array.size else []
        return _Held(leaf, array.shape, whole, False, False)
    placement = _placement(value.sharding, value.shape)
    shards = value.addressable_shards
    if placement.is_far:
        far = [(box, shards[number].data) for number, box in placement.boxes]
        return _Held(leaf, placement.shard_shape, far, False, True)
    # Views; keeping JAX's objects instead would cost rounds of garbage collection.
    in_place = [(box, np.asarray(shards[n].data)) for n, box in placement.boxes]
    kept = memory.is_still(path, value)
    return _Held(leaf, placement.shard_shape, in_place, kept, False)


class _Placement(NamedTuple):
    # The first shard with each local box; whether they have to be fetched.
    shard_shape: tuple[int, ...]
    boxes: tuple[tuple[int, boxes.Box], ...]
    is_far: bool


@functools.lru_cache(maxsize=2**14)
def _placement(sharding: Sharding, shape: tuple[int, ...]) -> _Placement:
    indices = sharding.addressable_devices_indices_map(shape)
    first: dict[boxes.Box, int] = {}
    for number, index in enumerate(indices.values()):
        assert index is not None
        first.setdefault(boxes.of_index(index, shape), number)
    return _Placement(
        shard_shape=sharding.shard_shape(shape),
        boxes=tuple((number, box) for box, number in first.items() if box.volume),
        is_far=any(device.platform != "cpu" for device in indices),
    )


@functools.lru_cache
def _is_key(dtype: np.dtype) -> bool:
    return jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


# A dtype's name takes NumPy as long as a copy of 64 KiB.
@functools.lru_cache(maxsize=2**16)
def _dtype(path: str, dtype: np.dtype) -> str:
    if dtype.name not in STORABLE:
        raise errors.CheckpointError(
            f"leaf {path!r} has the dtype {dtype.name}, which no tier can store; cast"
            " it to a wider one before it is saved"
        )
    return dtype.name
