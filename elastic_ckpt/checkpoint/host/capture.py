"""Capture: copies this process's portion of a state for a save.

Training is blocked only while this copy is made: digests and copies for peers are
computed from it in the background. The method depends on the kind of array:

* Threads copy values in host memory (NumPy, JAX on CPUs) into files on the RAM disk,
  which become files of the step (`ram.chunk_files`), or, if the step goes only to
  storage, into memory.
* Accelerators send their values to pinned host memory by themselves. A state that fits
  into `pinned_bytes` is sent in one piece. A larger state is copied on the devices, if
  they have room, and the writer fetches the copy chunk by chunk. In both cases,
  training waits only until the transfers are launched.
* If the devices have no room, their values are fetched in waves and copied in the same
  way as values in host memory.

If a state goes only to storage and host memory has no room for it either, the state is
lent: the trainer must not donate it before the save is done.

Replicas on the devices of one process are copied once. Each process copies its own
replica, because replicas count as holders.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from elastic_ckpt.checkpoint.host import trees
from elastic_ckpt.core import background, boxes, errors, host_memory
from elastic_ckpt.steps import layout
from elastic_ckpt.steps.manifest import Leaf
from elastic_ckpt.steps.owners import Holders
from elastic_ckpt.tiers.captured import (
    Captured,
    CapturedLeaf,
    Values,
    chunked,
)
from elastic_ckpt.tiers.choices import PINNED_BYTES, CaptureIn
from elastic_ckpt.tiers.ram.chunk_files import LEAST_BYTES, ChunkFile, ChunkFiles
from elastic_ckpt.tiers.ram.local import LocalHost

Whole = np.ndarray | np.generic | int | float | bool

# The JAX dtypes that TensorStore's zarr v3 arrays store bit by bit.
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
# JAX packs multiple elements of these dtypes into a byte; files do not.
_PACKED = frozenset({"float4_e2m1fn", "int2", "int4", "uint2", "uint4"})
_ALIGNMENT_BYTES = 64
# Small chunks are copied into memory. If they exceed this size in total, the larger
# ones also get files.
_MOST_SMALL_BYTES = 2**27
_LEAST_OF_MANY_BYTES = 2**16
# The minimum memory to leave for the rest of the process, and on a device for programs.
_SPARE_BYTES = 2**29
# How much devices send to host memory at a time, while the last wave is copied.
_WAVE_BYTES = 2**27
_MOST_PLACES = 2**17
_PINNED = "pinned_host"


class Shards(NamedTuple):
    """A host's shards of an array, assembled by other code.

    Attributes:
      shard_shape: the shape of every shard, on this host and elsewhere.
      boxes: each box on this host, once, with its values.
      kept: whether the values are safe to use without a copy, because no other code
        changes them.
      holders: a function that returns the indices of the hosts that hold a box, in
        ascending order; None for all hosts.
      is_far: whether the values are on accelerators.
    """

    leaf: Leaf
    shard_shape: tuple[int, ...]
    boxes: Sequence[tuple[boxes.Box, Any]]
    kept: bool
    holders: Callable[[boxes.Box], Holders | None] = lambda _: (0,)
    is_far: bool = False


Value = jax.Array | Whole | Shards


@dataclasses.dataclass(slots=True, eq=False)
class _Chunk:
    # A chunk of a shard. `source` is the shard: a NumPy array, or a JAX array on a
    # single accelerator (`is_far`). `within` is the chunk's place in the shard, if the
    # shard has more than one chunk. `values` are set once captured, and `file` if they
    # are in a file.
    box: boxes.Box
    source: Any
    within: tuple[slice, ...] | None
    num_bytes: int
    is_far: bool = False
    values: Values | None = None
    file: ChunkFile | None = None


class Memory:
    """Memory that one host reuses for one capture after another.

    Args:
      files: the RAM disk's chunk files; None if steps go only to storage.
      where: where to keep values without a file; see `Persistent.capture`.
      num_threads: the number of copying threads; by default half of the processors, at
        most 8.
      pinned_bytes: the maximum size of a state that is sent to pinned memory in one
        piece.

    Attributes:
      notice: why training waits for the last capture; empty if it does not wait, or if
        the reason was already reported.
    """

    def __init__(
        self,
        files: ChunkFiles | None = None,
        where: CaptureIn = "auto",
        *,
        num_threads: int | None = None,
        pinned_bytes: int = PINNED_BYTES,
    ) -> None:
        processors = len(os.sched_getaffinity(0))
        self.num_threads = num_threads or max(1, min(8, processors // 2))
        self._files = files
        self._where: CaptureIn = where
        self._pinned_bytes = pinned_bytes
        self.notice = ""
        self._is_told = False
        self._pool = host_memory.Pool()
        # The size of the last copy on each device, which may be part of its peak usage.
        self._copied_bytes: collections.Counter[jax.Device] = collections.Counter()
        # The place of each array in the last capture, by path, which rarely changes.
        self._places: dict[str, ArrayPlace] = {}

    def place(self, path: str, array: jax.Array) -> ArrayPlace:
        """Returns an array's leaf, and how this host's shards of the array are cut.

        Raises:
          CheckpointError: if no tier stores the array's dtype.
        """
        last = self._places.get(path)
        if (
            last is not None
            and last.sharding is array.sharding
            and last.shape == array.shape
            and last.dtype is array.dtype
        ):
            return last
        if len(self._places) >= _MOST_PLACES:
            self._places.clear()
        place = self._places[path] = _place(path, array)
        return place

    def hold(self, chunks: Sequence[_Chunk]) -> None:
        """Captures chunks on accelerators without waiting, if there is room."""
        where, num_bytes = self._where, sum(chunk.num_bytes for chunk in chunks)
        if where in ("auto", "host") and num_bytes <= self._pinned_bytes:
            chunks = [chunk for chunk in chunks if _pinned(chunk.source) is not None]
            for chunk, sent in zip(chunks, _to_pinned(chunks) or (), strict=False):
                chunk.values = _Later(sent, None, chunk.num_bytes, is_far=False)
        elif where == "device" or (where == "auto" and self._fit(chunks)):
            # One program per device.
            of_devices: dict[Sharding, dict[int, jax.Array]] = {}
            for chunk in chunks:
                of_device = of_devices.setdefault(chunk.source.sharding, {})
                of_device[id(chunk.source)] = chunk.source
            copies: dict[int, jax.Array] = {}
            for shards in of_devices.values():
                copies |= zip(shards, _copied([*shards.values()]), strict=True)
            for chunk in chunks:
                copy = copies[id(chunk.source)]
                chunk.values = _Later(copy, chunk.within, chunk.num_bytes)
        elif where == "auto":
            self._tell(
                "its devices have no room for a copy of the state, which is larger than"
                f" pinned_bytes={self._pinned_bytes}, so training waits while the"
                " state is fetched"
            )

    def take_files(self, chunks: Sequence[_Chunk]) -> None:
        """Assigns a file on the RAM disk to each large chunk, while there is room."""
        if self._files is None:
            return
        least = LEAST_BYTES
        small = [each.num_bytes for each in chunks if each.num_bytes < least]
        if sum(small) > _MOST_SMALL_BYTES:
            least = _LEAST_OF_MANY_BYTES
        with contextlib.suppress(OSError):
            for chunk in chunks:
                if chunk.num_bytes >= least:
                    chunk.file = self._files.take(chunk.num_bytes)

    def lacks(self, num_bytes: int) -> bool:
        """Whether chunks without a file must be lent, because memory is short."""
        if self._where != "auto" or self._pool.has(num_bytes):
            return self._where == "wait"
        free = host_memory.available_bytes()
        if num_bytes + _SPARE_BYTES <= free:
            return False
        self._tell(
            f"the host has {free} bytes of memory left, too few for a copy of"
            f" {num_bytes} bytes, so training waits until the state is in storage"
        )
        return True

    def take(self, num_bytes: int) -> np.ndarray:
        """Returns a piece of memory, if possible the last one, whose pages are warm."""
        return self._pool.take(num_bytes)

    def release(self, files: Iterable[ChunkFile], piece: np.ndarray) -> None:
        """Releases memory and files, except files that became part of a step."""
        self._pool.release(piece)
        self.discard(files)

    def discard(self, files: Iterable[ChunkFile]) -> None:
        """Removes files that did not become part of a step."""
        for file in files:
            assert self._files is not None
            self._files.discard(file)

    def _fit(self, chunks: Iterable[_Chunk]) -> bool:
        # Whether devices report room for a copy, in addition to their programs.
        of_devices: collections.Counter[jax.Device] = collections.Counter()
        for chunk in chunks:
            of_devices.update(dict.fromkeys(chunk.source.devices(), chunk.num_bytes))
        for device, num_bytes in of_devices.items():
            stats = device.memory_stats() or {}
            peak = stats.get("peak_bytes_in_use", 0) - self._copied_bytes[device]
            used = max(stats.get("bytes_in_use", 0), peak)
            if stats.get("bytes_limit", 0) - used < num_bytes + _SPARE_BYTES:
                return False
        self._copied_bytes = of_devices
        return True

    def _tell(self, why: str) -> None:
        self.notice, self._is_told = "" if self._is_told else why, True


def capture(leaves: Mapping[str, Value], memory: Memory) -> Captured:
    """Copies this process's portion of a state; arrays may be donated afterwards.

    Args:
      leaves: keyed by path, JAX arrays under any sharding, typed random keys (whose
        data is captured), values that are whole in every process (NumPy arrays or
        numbers), or `Shards`.
      memory: the memory for the copies, which they return on release.

    Raises:
      CheckpointError: if a leaf has any other type, or a dtype that no tier stores; the
        message names the leaf.
    """
    here = [_held(path, leaves[path], memory) for path in sorted(leaves)]
    chunks = [chunk for _, of_leaf in here for chunk in of_leaf]
    memory.notice = ""
    memory.hold([chunk for chunk in chunks if chunk.is_far])
    rest = [chunk for chunk in chunks if chunk.values is None]
    try:
        memory.take_files(rest)
        bare = [chunk for chunk in rest if chunk.file is None]
        num_bytes = sum(_aligned(chunk.num_bytes) for chunk in bare)
        # A caller that passes `Shards` cannot wait for a save.
        given = [value for value in leaves.values() if isinstance(value, Shards)]
        is_waited_for = bool(bare) and all(each.kept for each in given)
        is_lent = is_waited_for and memory.lacks(num_bytes)
        if is_lent:
            for chunk in bare:
                chunk.values = _Later(
                    chunk.source, chunk.within, chunk.num_bytes, chunk.is_far
                )
        piece = memory.take(0 if is_lent else num_bytes)
        _copy([c for c in rest if c.values is None], piece, memory.num_threads)
    except BaseException:
        memory.discard(_files(rest))
        raise
    return Captured(
        [_captured(array, of_leaf) for array, of_leaf in here],
        # Only the files: chunks refer to arrays, whose memory could then not be reused.
        on_release=functools.partial(memory.release, _files(rest), piece),
        is_lent=is_lent,
    )


def prepare(leaves: Mapping[str, Value], own: LocalHost, pinned_bytes: int) -> None:
    """Prepares memory in the background for the first capture of a state.

    Args:
      leaves: see `capture`; leaves that cannot be captured are skipped.
      own: the host that saves the state.
      pinned_bytes: see `Memory`.
    """
    chunks: list[_Chunk] = []
    memory = Memory()
    for path, value in leaves.items():
        with contextlib.suppress(errors.CheckpointError):
            chunks += _held(path, value, memory)[1]
    own.prepare([chunk.num_bytes for chunk in chunks])
    far = [chunk for chunk in chunks if chunk.is_far]
    place = _pinned(far[0].source) if far else None
    if place is not None:
        num_bytes = min(pinned_bytes, sum(chunk.num_bytes for chunk in far))
        zeros = np.zeros(num_bytes, np.uint8)
        # JAX keeps pinned memory for later use.
        background.in_thread(lambda: jax.device_put(zeros, place), name="pinned memory")


def numbers(value: Any) -> Any:
    """Returns `value`, or the data of typed random keys."""
    if isinstance(value, jax.Array) and trees.is_key(value):
        return jax.random.key_data(value)
    return value


def leaf_of(path: str, value: jax.Array | Whole) -> Leaf:
    """Describes the leaf `value`, without its elements.

    Raises:
      CheckpointError: see `capture`.
    """
    if not isinstance(value, jax.Array | np.ndarray | np.generic | int | float):
        raise errors.CheckpointError(
            f"leaf {path!r} is of type {type(value).__name__}, but a state can contain"
            " only arrays and numbers; remove the leaf from the state, or save it as a"
            " separate checkpointable"
        )
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    dtype = array.dtype.name
    if dtype not in STORABLE:
        raise errors.CheckpointError(
            f"leaf {path!r} has dtype {dtype}, which no tier can store; cast the"
            " leaf to a wider dtype before you save it"
        )
    return Leaf(path=path, shape=array.shape, dtype=dtype)


def _files(chunks: Iterable[_Chunk]) -> list[ChunkFile]:
    return [chunk.file for chunk in chunks if chunk.file is not None]


def _copy(chunks: Sequence[_Chunk], piece: np.ndarray, num_threads: int) -> None:
    # Copies chunks into their files, or one after another into a piece of memory.
    # Devices send chunks in waves, each while the previous wave is copied.
    sent_bytes = itertools.accumulate(each.num_bytes * each.is_far for each in chunks)
    waves = itertools.groupby(
        zip(chunks, sent_bytes, strict=True), lambda each: each[1] // _WAVE_BYTES
    )
    before: Sequence[_Chunk] = ()
    arriving: Sequence[Any] = ()
    offset = 0
    with background.pool(num_threads, "capture") as pool:
        for wave in [*([chunk for chunk, _ in wave] for _, wave in waves), []]:
            sent = [_near(chunk) if chunk.is_far else None for chunk in wave]
            copies = []
            for chunk, values in zip(before, arriving, strict=True):
                values = jax.device_get(values if chunk.is_far else _near(chunk))
                memory, begin = piece, offset
                if chunk.file is not None:
                    memory, begin = chunk.file.memory, 0
                else:
                    offset += _aligned(chunk.num_bytes)
                chunk.values = np.ndarray(values.shape, values.dtype, memory, begin)
                if values.nbytes < LEAST_BYTES:
                    np.copyto(chunk.values, values)
                else:
                    copies.append(pool.submit(np.copyto, chunk.values, values))
            for copy in copies:
                copy.result()
            before, arriving = wave, sent


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _near(chunk: _Chunk | _Later) -> Any:
    # A chunk in host memory, or on its way there. Its source must not be donated until
    # the chunk has arrived.
    if not chunk.is_far:
        return _part(chunk.source, chunk.within)
    sent = _to_pinned([chunk])
    if sent is not None:
        return sent[0]
    # JAX keeps fetched values with their array, so this fetches a clone.
    clone = _part(chunk.source, chunk.within).clone()
    clone.copy_to_host_async()
    return clone


def _to_pinned(chunks: Sequence[_Chunk | _Later]) -> list[jax.Array] | None:
    # Copies of chunks in pinned memory; None if there is none. A GPU sends values there
    # at bus speed, 26 times as fast as to ordinary memory (H100).
    parts = [_part(chunk.source, chunk.within) for chunk in chunks]
    places = [_pinned(part) for part in parts]
    if None in places:
        return None
    try:
        return jax.device_put(parts, places, may_alias=False)
    except jax.errors.JaxRuntimeError:
        # Other processes may have locked all lockable memory.
        return None


def _pinned(shard: jax.Array) -> Sharding | None:
    (device,) = shard.devices()
    kinds = {memory.kind for memory in device.addressable_memories()}
    if _PINNED not in kinds or shard.dtype.name in _PACKED:
        return None
    return SingleDeviceSharding(device, memory_kind=_PINNED)


class _Later(NamedTuple):
    # A part of an array that is on an accelerator (`is_far`), or in host memory or on
    # its way there; a `captured.OnDevice`.
    source: Any
    within: tuple[slice, ...] | None
    nbytes: int
    is_far: bool = True

    def fetch(self) -> np.ndarray:
        return jax.device_get(_near(self))


def _part(shard: Any, within: tuple[slice, ...] | None) -> Any:
    if within is None or isinstance(shard, np.ndarray):
        return shard if within is None else shard[within]
    # Copied to separate memory on the device.
    start = np.array([each.start for each in within])
    # An argument of a compiled function would be an implicit transfer.
    start = jax.device_put(start, shard.sharding)
    return _sliced(shard, start, tuple(each.stop - each.start for each in within))


@functools.partial(jax.jit, static_argnums=2)
def _sliced(shard: jax.Array, start: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    made = jax.lax.dynamic_slice(trees.as_bits(shard), start, sizes)
    return trees.of_bits(made, shard.dtype)


@jax.jit
def _copied(shards: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(shard) for shard in shards]


@functools.lru_cache(maxsize=2**14)
def _cut(
    dtype: str, shard_shape: tuple[int, ...]
) -> tuple[int, tuple[tuple[boxes.Box, tuple[slice, ...] | None], ...]]:
    # A chunk's size, and a shard's chunks with their places in it; None if the chunk is
    # the whole shard.
    item_bytes = np.dtype(dtype).itemsize
    chunk = layout.chunk_shape(shard_shape, item_bytes=item_bytes)
    whole = boxes.whole(shard_shape)
    return math.prod(chunk) * item_bytes, tuple(
        (box, None if box == whole else (*map(slice, box.start, box.stop),))
        for box in layout.cut(whole, chunk)
    )


def _held(path: str, value: Value, memory: Memory) -> tuple[CapturedLeaf, list[_Chunk]]:
    # This process's chunks of a leaf, without replicas.
    shards, chunks = _shards(path, value, memory), []
    for box, shard in shards.boxes:
        num_bytes, cut = _cut(shards.leaf.dtype, box.shape)
        for chunk, within in cut:
            here = box
            if within is not None:
                here = boxes.Box(
                    start=tuple(map(operator.add, box.start, chunk.start)),
                    stop=tuple(map(operator.add, box.start, chunk.stop)),
                )
            values = _part(shard, within) if shards.kept else None
            chunks.append(_Chunk(here, shard, within, num_bytes, shards.is_far, values))
    leaf, shape = shards.leaf, shards.shard_shape
    leaf = leaf if leaf.chunk else chunked(leaf, shape)
    return CapturedLeaf(leaf, shape, (), holders=shards.holders), chunks


def _captured(array: CapturedLeaf, chunks: Sequence[_Chunk]) -> CapturedLeaf:
    files = {c.box: c.file for c in chunks if c.file is not None} or array.files
    values = tuple((c.box, c.values) for c in chunks if c.values is not None)
    return array._replace(boxes=values, files=files)


def _shards(path: str, value: Value, memory: Memory) -> Shards:
    if isinstance(value, Shards):
        return value
    if isinstance(value, jax.Array):
        place = memory.place(path, value)
        shard = numbers(value).addressable_data
        holders, is_far = place.holders, place.is_far
        # Not JAX's shard objects, which would need rounds of garbage collection.
        held = [
            (box, shard(number) if is_far else jax.device_get(shard(number)))
            for number, box in place.boxes
        ]
        return Shards(place.leaf, place.shard_shape, held, False, holders, is_far)
    # In this machine's byte order, which is also the byte order of the files.
    leaf = leaf_of(path, value)
    array = np.asarray(value, np.dtype(leaf.dtype))
    held = [(boxes.whole(array.shape), array)] if array.size else []
    return Shards(leaf, array.shape, held, False, lambda _: None)


class ArrayPlace(NamedTuple):
    """A leaf, and how this host's shards of it are cut.

    Attributes:
      shape: the shape of the array; the data of random keys has one more dim.
      leaf: the leaf of the array's data.
      shard_shape: the shape of the data's shards.
      boxes: the boxes on this host, each with the index of the first shard that has
        it.
      is_far: whether the shards are on accelerators.
    """

    sharding: Sharding
    shape: tuple[int, ...]
    dtype: np.dtype
    leaf: Leaf
    shard_shape: tuple[int, ...]
    boxes: tuple[tuple[int, boxes.Box], ...]
    is_far: bool

    def holders(self, shard: boxes.Box) -> Holders | None:
        """The hosts that hold a shard; None if every host has the whole array."""
        if self.sharding.is_fully_addressable:
            return None
        # A random key's data has one more dim.
        rank = len(self.shape)
        whole = boxes.Box(start=shard.start[:rank], stop=shard.stop[:rank])
        return _hosts(self.sharding, self.shape)[whole]


# A small cache is enough: an array's shards are requested one after another.
@functools.lru_cache(maxsize=16)
def _hosts(sharding: Sharding, shape: tuple[int, ...]) -> dict[boxes.Box, Holders]:
    return {
        box: tuple(sorted({each.process_index for each in devices}))
        for box, devices in boxes.devices_by_box(sharding, shape).items()
    }


def _place(path: str, array: jax.Array) -> ArrayPlace:
    held = numbers(array)
    shard_shape = held.sharding.shard_shape(held.shape)
    indices = held.sharding.addressable_devices_indices_map(held.shape)
    first: dict[boxes.Box, int] = {}
    for number, index in enumerate(indices.values()):
        assert index is not None
        first.setdefault(boxes.of_index(index, held.shape), number)
    return ArrayPlace(
        sharding=array.sharding,
        shape=array.shape,
        dtype=array.dtype,
        leaf=chunked(leaf_of(path, held), shard_shape),
        shard_shape=shard_shape,
        boxes=tuple((number, box) for box, number in first.items() if box.volume),
        is_far=any(device.platform != "cpu" for device in indices),
    )
