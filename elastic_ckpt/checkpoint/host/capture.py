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
import ctypes
import dataclasses
import functools
import gc
import inspect
import math
import operator
import os
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Sharding

from elastic_ckpt.core import background, boxes, errors, host_memory
from elastic_ckpt.steps import layout
from elastic_ckpt.steps.manifest import Leaf
from elastic_ckpt.tiers.captured import Captured, CapturedLeaf, Values
from elastic_ckpt.tiers.choices import CaptureIn
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
# Of these JAX has several elements in a byte, and files have one.
_PACKED = frozenset({"float4_e2m1fn", "int2", "int4", "uint2", "uint4"})
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
# What is left to the rest of the process, at least.
_SPARE_BYTES = 2**29
_TOLD = {
    "host": "a copy in the host's memory",
    "device": "a copy on the devices",
    "wait": "no copy: the save waits until they are in storage",
}
# As much is in host memory that devices send, as much of a shard that came as a whole,
# and as much that is being copied.
_WAVE_BYTES = 2**27
_MOST_PLACES = 2**17
_PINNED = "pinned_host"
_NO_FILES: Mapping[boxes.Box, ChunkFile] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Shards:
    """The shards that a host holds of an array that other code has assembled.

    Attributes:
      leaf: the whole array.
      shard_shape: that all shards of it have, here and elsewhere.
      boxes: each that is here, once, with its values.
      kept: whether no other code changes the values, so that they need no copy.
      holders: the numbers of what holds a box, such as devices, here and elsewhere,
        ascending; by default this host alone does.
      own: those of this host.
    """

    leaf: Leaf
    shard_shape: tuple[int, ...]
    boxes: tuple[tuple[boxes.Box, np.ndarray], ...]
    kept: bool
    holders: Callable[[boxes.Box], tuple[int, ...]] = lambda _: (0,)
    own: Collection[int] = (0,)


Value = jax.Array | Whole | Shards


class Memory:
    """Memory that captures of one host take their copies in, one after the other.

    Args:
      files: of the RAM disk that steps are saved to; None if they go to storage alone.
      where: the place of values that get no file; see `Persistent.capture`.
      num_threads: that copy at a time; by default half of the processors, at most 8.
    """

    def __init__(
        self,
        files: ChunkFiles | None = None,
        where: CaptureIn = "auto",
        *,
        num_threads: int | None = None,
    ) -> None:
        processors = len(os.sched_getaffinity(0))
        self.num_threads = num_threads or max(1, min(8, processors // 2))
        self._files = files
        self._where: CaptureIn = where
        self._told: CaptureIn = "host"
        self._pool = host_memory.Pool()
        self._last: dict[str, weakref.ref[jax.Array]] = {}
        # By path, where an array was when it was captured last: mostly it still is.
        self._places: dict[str, ArrayPlace] = {}

    def place(self, path: str, array: jax.Array) -> ArrayPlace:
        """The leaf of an array, and how this host's part of it is cut.

        Raises:
          CheckpointError: if no tier stores its dtype.
        """
        last = self._places.get(path)
        if (
            last is not None
            and last.sharding is array.sharding
            and last.shape == array.shape
            and last.dtype is array.dtype
        ):
            return last
        place = _place(path, array)
        if len(self._places) >= _MOST_PLACES:
            self._places.clear()
        self._places[path] = place
        return place

    def is_still(self, path: str, array: jax.Array) -> bool:
        """Whether a view of an array in host memory stands for a copy.

        It does if the same array was captured before: the program keeps it, and what is
        donated to a program while a view of it is held is copied by XLA. The memory
        must be XLA's own, which other code cannot change.
        """
        last = self._last.get(path)
        if last is not None and last() is array:
            return is_result_of_program(array)
        self._last[path] = weakref.ref(array)
        return False

    def take_files(self, sizes: Sequence[int]) -> list[ChunkFile | None]:
        """A file on the RAM disk for each large chunk, while there is room.

        A size of 0 needs none.
        """
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

    def where(self, num_bytes: int, rest: Sequence[_Part]) -> CaptureIn:
        """Where parts without a file, of so many bytes, are captured: not `auto`."""
        where = self._where
        if where == "auto":
            where, free = "host", host_memory.available_bytes()
            if not self._pool.has(num_bytes) and num_bytes + _SPARE_BYTES > free:
                where = "device" if _fit(rest) else "wait"
            if where != self._told:
                logging.warning(
                    "%d bytes of a save are captured with %s, since the host has %d"
                    " bytes of memory left",
                    num_bytes,
                    _TOLD[where],
                    free,
                )
                self._told = where
        return where

    def take(self, num_bytes: int) -> np.ndarray:
        """One piece of memory: the last one of this size, whose pages are warm."""
        return self._pool.take(num_bytes)

    def give_back(self, files: Sequence[ChunkFile | None], piece: np.ndarray) -> None:
        """Releases what was taken; files that became part of a step stay."""
        self._pool.give_back(piece)
        self.discard(files)

    def discard(self, files: Sequence[ChunkFile | None]) -> None:
        """Removes files that did not become part of a step."""
        for file in files:
            if file is not None and self._files is not None:
                self._files.discard(file)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    # Thousands of new objects would start garbage collections over all objects of a
    # training process, which cost more than the copies. As a decorator it ends when
    # most of them are gone.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_collection()
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
    with contextlib.ExitStack() as resources:
        here = [_held(path, leaves[path], memory) for path in sorted(leaves)]
        parts = [part for each in here for part in each.parts]
        sizes = [part.num_bytes if part.wants_file else 0 for part in parts]
        _end_computations(parts)
        files = memory.take_files(sizes)
        on_error = resources.enter_context(contextlib.ExitStack())
        on_error.callback(memory.discard, files)
        copies = resources.enter_context(_Copies(memory.num_threads))
        rest = [
            part
            for part, file in zip(parts, files, strict=True)
            if file is None and not part.kept
        ]
        where = memory.where(sum(part.num_bytes for part in rest), rest)
        if where != "host" and any(map(_is_lent, leaves.values())):
            where = "host"
        stays = where != "host"
        # Values that are fetched are a copy already.
        near = [_aligned(part.num_bytes) for part in rest if not part.is_far]
        piece, offset = memory.take(0 if stays else sum(near)), 0
        address = piece.ctypes.data
        coming = _fetched(
            (part, file is not None)
            for part, file in zip(parts, files, strict=True)
            if part.is_far and not (file is None and stays)
        )
        duplicates: dict[int, jax.Array | np.ndarray] = {}
        with_files = iter(files)
        captured = []
        for each in here:
            boxes_of: list[tuple[boxes.Box, Values]] = []
            files_of: dict[boxes.Box, ChunkFile] = {}
            for part in each.parts:
                file = next(with_files)
                values: Values
                if file is None and stays and not part.kept:
                    shard = part.shard
                    if part.is_direct:
                        shard = np.asarray(shard.addressable_data(0))
                        shard = _duplicate(shard) if where == "device" else shard
                    elif where == "device":
                        if id(shard) not in duplicates:
                            duplicates[id(shard)] = _duplicate(shard)
                        shard = duplicates[id(shard)]
                    values = _OnDevice(shard, part.within, part.num_bytes)
                elif file is not None:
                    values = next(coming) if part.is_far else part.values()
                    values = copies.begin(values, file.memory, 0)
                    files_of[part.box] = file
                elif part.is_far:
                    values = next(coming)
                elif part.kept:
                    values = part.values()
                else:
                    if part.is_direct:
                        values = _copied(part, piece, address, offset)
                    else:
                        values = copies.begin(part.values(), piece, offset)
                    offset += _aligned(part.num_bytes)
                boxes_of.append((part.box, values))
            captured.append(
                CapturedLeaf(
                    each.leaf,
                    each.shard_shape,
                    tuple(boxes_of),
                    files_of or _NO_FILES,
                    each.place,
                )
            )
        on_error.pop_all()
    return Captured(
        captured,
        on_release=functools.partial(memory.give_back, files, piece),
        is_lent=where == "wait" and bool(rest),
    )


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


def _is_lent(value: Value) -> bool:
    # Whoever lends shards does not wait for a save.
    return isinstance(value, Shards) and not value.kept


class _Copies:
    # Copies that are made in several threads, and done when the block ends. Of what
    # they copy, a wave is held at most.

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._pool: futures.Executor | None = None
        self._begun: collections.deque[tuple[futures.Future[None], int]]
        self._begun = collections.deque()
        self._num_bytes = 0

    def begin(self, values: np.ndarray, memory: np.ndarray, offset: int) -> np.ndarray:
        copy = np.ndarray(values.shape, values.dtype, memory, offset)
        if self._num_threads == 1 or copy.nbytes < LEAST_BYTES:
            np.copyto(copy, values)
            return copy
        if self._pool is None:
            self._pool = background.pool(self._num_threads, "capture")
        done = self._pool.submit(np.copyto, copy, values)
        self._begun.append((done, copy.nbytes))
        self._num_bytes += copy.nbytes
        while self._num_bytes > _WAVE_BYTES:
            self._end_first()
        return copy

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        while self._begun:
            self._end_first()
        if self._pool is not None:
            self._pool.shutdown()

    def _end_first(self) -> None:
        done, num_bytes = self._begun.popleft()
        self._num_bytes -= num_bytes
        done.result()


def _end_computations(parts: Iterable[_Part]) -> None:
    # Memory that is copied by its address has to have its values.
    jax.block_until_ready([part.shard for part in parts if part.is_direct])


def _copied(part: _Part, piece: np.ndarray, address: int, offset: int) -> np.ndarray:
    # As a copy of `np.asarray(array)`, in a fifth of the time, of which small arrays
    # take most.
    pointer = part.shard.unsafe_buffer_pointer()
    ctypes.memmove(address + offset, pointer, part.num_bytes)
    return np.ndarray(part.box.shape, part.shard.dtype, piece, offset)


def _duplicate(shard: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
    # In memory of its own, beside the shard.
    if isinstance(shard, np.ndarray):
        return shard.copy()
    return jnp.array(shard, copy=True)


def _fit(parts: Sequence[_Part]) -> bool:
    # Whether devices tell that they have room for a copy. Those of the host do not.
    of_devices: collections.Counter[jax.Device] = collections.Counter()
    for part in parts:
        if part.is_far:
            (device,) = part.shard.devices()
            of_devices[device] += part.num_bytes
    for device, num_bytes in of_devices.items():
        stats = device.memory_stats() or {}
        free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
        if free < num_bytes + _SPARE_BYTES:
            return False
    return bool(of_devices)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class _Part(NamedTuple):
    # A chunk of a shard: the shard, and where the chunk lies in it; whether it needs no
    # copy in memory, whether it has to be fetched, whether it goes into a file, and
    # whether its memory is copied as it is: then the shard is the whole array, of which
    # this process has just that one.
    box: boxes.Box
    shard: Any
    within: tuple[slice, ...] | None
    num_bytes: int
    kept: bool
    is_far: bool
    wants_file: bool
    is_direct: bool = False

    def values(self) -> np.ndarray:
        return self.shard if self.within is None else self.shard[self.within]


class _Held(NamedTuple):
    # What is here of a leaf: the chunks of local shards without replicas.
    leaf: Leaf
    shard_shape: tuple[int, ...]
    parts: Sequence[_Part]
    place: object


class _Cut(NamedTuple):
    # The chunks of a shard, each with its place there; no place if it is the whole.
    chunks: tuple[tuple[boxes.Box, tuple[slice, ...] | None], ...]
    num_bytes: int

    def parts(
        self,
        box: boxes.Box,
        shard: Any,
        *,
        kept: bool,
        is_far: bool = False,
        wants_file: bool = True,
    ) -> Iterator[_Part]:
        for chunk, within in self.chunks:
            here = box
            if within is not None:
                here = boxes.Box(
                    start=tuple(map(operator.add, box.start, chunk.start)),
                    stop=tuple(map(operator.add, box.start, chunk.stop)),
                )
            yield _Part(here, shard, within, self.num_bytes, kept, is_far, wants_file)


@functools.lru_cache(maxsize=2**14)
def _cut(dtype: str, shard_shape: tuple[int, ...]) -> _Cut:
    item_bytes = np.dtype(dtype).itemsize
    chunk = layout.chunk_shape(shard_shape, item_bytes=item_bytes)
    num_bytes = math.prod(chunk) * item_bytes
    if chunk == shard_shape:
        return _Cut(((boxes.whole(shard_shape), None),), num_bytes)
    cut = layout.cut(boxes.whole(shard_shape), chunk)
    chunks = ((box, (*map(slice, box.start, box.stop),)) for box in cut)
    return _Cut(tuple(chunks), num_bytes)


def _fetched(parts: Iterable[tuple[_Part, bool]]) -> Iterator[np.ndarray]:
    # The values of far parts, in order, each with whether it is copied at once. A
    # device sends the next ones while those before are copied: as many as are in host
    # memory at a time.
    ahead: collections.deque[_OnDevice] = collections.deque()
    # The last shard that was sent as a whole, where to, and its copy.
    last: tuple[Any, Any, Any] = (None, None, None)
    num_bytes = 0
    for part, is_copied in parts:
        pinned = _pinned(part.shard) if is_copied else None
        if part.within is not None and part.shard.nbytes > _WAVE_BYTES:
            sliced = _sent(_slice(part.shard, part.within), pinned)
            coming = _OnDevice(sliced, None, part.num_bytes)
        else:
            if last[0] is not part.shard or last[1] != pinned:
                # JAX keeps what it fetched with an array: here, with the clone.
                last = (part.shard, pinned, _sent(part.shard.clone(), pinned))
            coming = _OnDevice(last[2], part.within, part.num_bytes)
        ahead.append(coming)
        num_bytes += coming.nbytes
        del coming
        while num_bytes > _WAVE_BYTES:
            num_bytes -= ahead[0].nbytes
            yield ahead.popleft().values()
    last = (None, None, None)
    while ahead:
        yield ahead.popleft().values()


def _pinned(shard: jax.Array) -> Sharding | None:
    # Where a GPU sends a shard at the speed of its bus, 26 times that of a copy to
    # ordinary memory (H100). Locked memory is scarce, so values are there for as long
    # as they are being copied. TPUs send to ordinary memory as fast.
    (device,) = shard.devices()
    kinds = {memory.kind for memory in device.addressable_memories()}
    if device.platform == "tpu" or _PINNED not in kinds:
        return None
    if shard.dtype.name in _PACKED:
        return None
    return shard.sharding.with_memory_kind(_PINNED)


def _sent(array: jax.Array, pinned: Sharding | None) -> jax.Array:
    # The array whose values arrive in host memory while others are copied.
    if pinned is not None:
        # Others may have locked all that may be locked.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            return jax.device_put(array, pinned)
    array.copy_to_host_async()
    return array


class _OnDevice(NamedTuple):
    # A part of an array, and its bytes; see `captured.OnDevice`.
    source: Any
    within: tuple[slice, ...] | None
    nbytes: int

    def values(self) -> np.ndarray:
        values = np.asarray(self.source)
        return values if self.within is None else values[self.within]

    def fetch(self) -> np.ndarray:
        if isinstance(self.source, np.ndarray):
            return self.values()
        if self.within is not None:
            return np.asarray(_slice(self.source, self.within))
        return np.asarray(self.source.clone())


def _slice(shard: Any, within: tuple[slice, ...]) -> jax.Array:
    # A part of a shard, in memory of its own on the device.
    start = [each.start for each in within]
    return _sliced(shard, start, tuple(each.stop - each.start for each in within))


@functools.partial(jax.jit, static_argnums=2)
def _sliced(
    shard: jax.Array, start: Sequence[int], sizes: tuple[int, ...]
) -> jax.Array:
    return jax.lax.dynamic_slice(shard, start, sizes)


def _held(path: str, value: Value, memory: Memory) -> _Held:
    if isinstance(value, jax.Array):
        return _held_of_array(path, value, memory)
    if isinstance(value, Shards):
        cut = _cut(value.leaf.dtype, value.shard_shape) if value.boxes else None
        listed = [
            part
            for box, shard in value.boxes
            for part in cast(_Cut, cut).parts(box, shard, kept=value.kept)
        ]
        place = dataclasses.replace(value, boxes=())
        return _Held(value.leaf, value.shard_shape, listed, place)
    # In this machine's byte order, which is that of the files.
    leaf = leaf_of(path, value)
    array = np.asarray(value, np.dtype(leaf.dtype))
    whole = boxes.whole(array.shape)
    cuts = _cut(leaf.dtype, array.shape) if array.size else _Cut((), 0)
    return _Held(leaf, array.shape, [*cuts.parts(whole, array, kept=False)], None)


def _held_of_array(path: str, array: jax.Array, memory: Memory) -> _Held:
    place = memory.place(path, array)
    num_bytes, is_far = place.num_bytes, place.is_far
    if place.is_direct:
        ((_, box),) = place.boxes
        part = _Part(box, array, None, num_bytes, False, False, True, True)
        return _Held(place.leaf, place.shard_shape, (part,), place)
    # What is fetched is a copy in any case.
    kept = place.is_large and not is_far and memory.is_still(path, array)
    array = numbers(array)
    parts: list[_Part] = []
    for number, box in place.boxes:
        shard = array.addressable_data(number)
        if not is_far:
            # Keeping JAX's object instead would cost rounds of garbage collection.
            shard = np.asarray(shard)
        if place.cut is None:
            parts.append(_Part(box, shard, None, num_bytes, kept, is_far, not kept))
        else:
            parts += place.cut.parts(
                box, shard, kept=kept, is_far=is_far, wants_file=not kept
            )
    return _Held(place.leaf, place.shard_shape, parts, place)


class ArrayPlace(NamedTuple):
    """A leaf, and how this host's part of it is cut.

    Attributes:
      sharding: of the array.
      shape: of the array; its numbers have one dim more if it is a random key.
      dtype: of the array.
      is_key: whether it is a random key.
      leaf: of its numbers.
      shard_shape: likewise.
      boxes: those that are here, and the first shard with each.
      cut: the chunks of a shard, if there are several.
      num_bytes: of a shard or chunk.
      is_far: whether shards have to be fetched.
      is_large: whether the whole of it is.
      is_direct: whether it is one small shard, of which the bytes in memory are those
        in files. With more dims than one a program could have chosen another order.
    """

    sharding: Sharding
    shape: tuple[int, ...]
    dtype: np.dtype
    is_key: bool
    leaf: Leaf
    shard_shape: tuple[int, ...]
    boxes: tuple[tuple[int, boxes.Box], ...]
    cut: _Cut | None
    num_bytes: int
    is_far: bool
    is_large: bool
    is_direct: bool


def _place(path: str, array: jax.Array) -> ArrayPlace:
    is_key, held = _is_key(array.dtype), numbers(array)
    shape, dtype, sharding = held.shape, held.dtype, held.sharding
    leaf = Leaf(path=path, shape=shape, dtype=_dtype(path, dtype))
    indices = sharding.addressable_devices_indices_map(shape)
    first: dict[boxes.Box, int] = {}
    for number, index in enumerate(indices.values()):
        assert index is not None
        first.setdefault(boxes.of_index(index, shape), number)
    shard_shape = sharding.shard_shape(shape)
    cut = None if 0 in shape else _cut(leaf.dtype, shard_shape)
    num_bytes = 0 if cut is None else cut.num_bytes
    is_far = any(device.platform != "cpu" for device in indices)
    return ArrayPlace(
        sharding=array.sharding,
        shape=array.shape,
        dtype=array.dtype,
        is_key=is_key,
        leaf=leaf,
        shard_shape=shard_shape,
        boxes=tuple((number, box) for box, number in first.items() if box.volume),
        cut=cut if cut is not None and len(cut.chunks) > 1 else None,
        num_bytes=num_bytes,
        is_far=is_far,
        is_large=math.prod(shape) * np.dtype(leaf.dtype).itemsize >= LEAST_BYTES,
        is_direct=len(indices) == 1
        and len(shape) < 2
        and 0 < num_bytes < _LEAST_OF_MANY_BYTES
        and leaf.dtype not in _PACKED
        and not (is_far or is_key),
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
