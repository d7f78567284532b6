"""A host's store on this machine, whose values go to the disk with one copy.

TensorStore copies values several times into fresh memory, and through the page cache.
Here the chunks of a write become a file, in memory that is reused; `commit` writes the
index that refers to all files.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Sequence

import google_crc32c
import numpy as np
import tensorstore as ts
from etils import epath

from elastic_ckpt.core import storage
from elastic_ckpt.steps import layout
from elastic_ckpt.tiers import zarr_array
from elastic_ckpt.tiers.persistent import ocdbt
from elastic_ckpt.tiers.source import ReadError
from elastic_ckpt.universal.writing import direct_io, ocdbt_index
from elastic_ckpt.universal.writing.ocdbt_index import Extent

_VALUES = "d"


class PackedStore:
    """See `ocdbt.Store`.

    Values that an earlier process has committed are kept; files of others are removed.

    Args:
      directory: of the store, local.
      context: of TensorStore.
    """

    def __init__(self, *, directory: epath.Path, context: ts.Context) -> None:
        self._directory = directory
        self._values: dict[str, Extent] = {}
        if (directory / ocdbt.MANIFEST).exists():
            self._values = ocdbt_index.read(directory, context)
        used = {extent.file for extent in self._values.values()}
        for child in storage.make_directory(directory / _VALUES).iterdir():
            if f"{_VALUES}/{child.name}" not in used:
                storage.remove(child)
        self._unsynced: set[str] = set()
        self._free: list[np.ndarray] = []
        self._lock = threading.Lock()
        self._committing = threading.Lock()

    def write(self, chunks: Sequence[ocdbt.Chunk]) -> None:
        """See `ocdbt.Store`."""
        contents = self._described(chunks)
        needed = sum(len(content) for content in contents.values())
        needed += sum(each.values.nbytes + layout.CHECKSUM_BYTES for each in chunks)
        memory = self._taken(needed)
        file = f"{_VALUES}/{secrets.token_hex(16)}"
        extents: dict[str, Extent] = {}
        at = 0

        def put(key: str, *parts: np.ndarray) -> None:
            nonlocal at
            start = at
            for part in parts:
                memory[at : at + part.nbytes] = part
                at += part.nbytes
            extents[key] = Extent(file=file, offset=start, num_bytes=at - start)

        for key, content in contents.items():
            put(key, np.frombuffer(content, np.uint8))
        for each in chunks:
            if each.box.volume:
                values = np.ascontiguousarray(each.values).reshape(-1).view(np.uint8)
                put(each.array.key(each.box), values, _checksum(values))
        try:
            direct_io.write(os.fspath(self._directory / file), memory, at)
        except OSError:
            # The next attempt needs the room.
            storage.remove(self._directory / file)
            raise
        with self._lock:
            self._free.append(memory)
            self._values.update(extents)
            self._unsynced.add(file)

    def commit(self) -> None:
        """See `ocdbt.Store`."""
        with self._committing:
            with self._lock:
                values, unsynced = dict(self._values), set(self._unsynced)
            if not unsynced:
                return
            for file in unsynced:
                storage.sync(self._directory / file)
            ocdbt_index.write(self._directory, values)
            with self._lock:
                self._unsynced -= unsynced

    def _described(self, chunks: Sequence[ocdbt.Chunk]) -> dict[str, bytes]:
        # The metadata of the arrays that have none yet, by key.
        arrays = {each.array.prefix: each for each in chunks}
        return {
            prefix + zarr_array.METADATA: zarr_array.metadata_file(
                each.leaf.shape, each.leaf.dtype, each.array.chunk
            )
            for prefix, each in arrays.items()
            if prefix + zarr_array.METADATA not in self._values
        }

    def _taken(self, num_bytes: int) -> np.ndarray:
        with self._lock:
            while self._free:
                memory = self._free.pop()
                if memory.nbytes >= num_bytes:
                    return memory
        return direct_io.allocate(num_bytes)


class PackedValues:
    """Reads values of the stores of a step from the disk; any thread may call it.

    Args:
      directory: of the step, local, committed or not.
      context: of TensorStore (`ocdbt.new_context`).
    """

    def __init__(self, directory: epath.Path, context: ts.Context) -> None:
        self._directory = directory
        self._context = context
        self._stores: dict[str, dict[str, Extent]] = {}
        self._lock = threading.Lock()
        self._of_thread = threading.local()

    def read(self, file: str, num_bytes: int) -> np.ndarray:
        """Reads the first bytes of a value.

        Args:
          file: of a fragment.
          num_bytes: of its values.

        Returns:
          The bytes until the next call of this thread, uint8.

        Raises:
          ReadError: if the value is missing, too short or unreadable.
        """
        store, _, key = file.partition("//")
        try:
            extent = self._extents(store).get(key)
            if extent is None:
                raise ReadError("is missing")
            path = os.fspath(self._directory / store / extent.file)
            size = min(num_bytes, extent.num_bytes)
            values = self._reader().read(path, extent.offset, size)
        # TensorStore raises ValueErrors.
        except (OSError, ValueError) as error:
            raise ReadError(f"cannot be read ({error})") from error
        if values.nbytes < num_bytes:
            raise ReadError(f"ends after {values.nbytes} bytes, before {num_bytes}")
        return values

    def _reader(self) -> direct_io.Reader:
        if not hasattr(self._of_thread, "reader"):
            self._of_thread.reader = direct_io.Reader()
        return self._of_thread.reader

    def _extents(self, store: str) -> dict[str, Extent]:
        with self._lock:
            if store not in self._stores:
                path = self._directory / store
                self._stores[store] = ocdbt_index.read(path, self._context)
            return self._stores[store]


def _checksum(values: np.ndarray) -> np.ndarray:
    # CRC-32C, which does not take memory that can be written.
    read_only = values.view()
    read_only.flags.writeable = False
    return np.array([google_crc32c.value(read_only)], "<u4").view(np.uint8)
