"""The arrays of a pytree that Orbax saved: their TensorStore specs, types and shapes.

Orbax stores arrays as zarr, version 2 or 3, each in a directory or all together in an
OCDBT store. Only the metadata of each array is read here, many at once: opening one in
TensorStore takes ten times as long.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts
from etils import epath

from elastic_ckpt.tiers.persistent import ocdbt
from elastic_ckpt.universal.formats import coverage, source_files
from elastic_ckpt.universal.formats.format_error import FormatError

_READ_AT_ONCE = 1024
_PLAIN_TYPE = re.compile(r"[<>|][biufc][0-9]{1,2}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayStore:
    """A directory of arrays.

    Attributes:
      directory: of the pytree.
      use_ocdbt: whether one store holds all arrays.
      use_zarr3: whether they are zarr version 3, not 2.
      stores_fill_values: whether every chunk was written: a missing one is lost.
    """

    directory: epath.Path
    use_ocdbt: bool
    use_zarr3: bool
    stores_fill_values: bool

    def spec(self, name: str) -> dict[str, Any]:
        """TensorStore's spec of the array `name`, such as `params.w`."""
        return {
            "driver": "zarr3" if self.use_zarr3 else "zarr",
            "kvstore": self._kvstore(ocdbt.array_prefix(name)),
            "fill_missing_data_reads": not self.stores_fill_values,
        }

    def read(
        self, names: Sequence[str]
    ) -> Iterator[tuple[str, np.dtype, tuple[int, ...]]]:
        """The name, type and shape of each array.

        Raises:
          FormatError: if an array is missing, its metadata are malformed, or its name
            leads to another directory.
        """
        file = "zarr.json" if self.use_zarr3 else ".zarray"
        for name in names:
            # Keys of OCDBT may be anything.
            parts = name.split("/")
            if not self.use_ocdbt and not all(part.strip(".") for part in parts):
                raise FormatError(
                    f"{self.directory} lists the array {name!r}, which is not in it"
                )
        try:
            store = ts.KvStore.open(self._kvstore("")).result()
            for first in range(0, len(names), _READ_AT_ONCE):
                batch = names[first : first + _READ_AT_ONCE]
                reads = [store.read(ocdbt.array_prefix(name) + file) for name in batch]
                for name, read in zip(batch, reads, strict=True):
                    yield name, *self._array(name, read.result())
        # Raised by TensorStore and by the file system.
        except (OSError, ValueError) as error:
            reason = str(error).partition("\n")[0][:300]
            raise FormatError(
                f"{self.directory} cannot be read ({reason}); restore it from a copy"
            ) from error

    def _kvstore(self, path: str) -> dict[str, Any] | str:
        if self.use_ocdbt:
            spec = ocdbt.store_spec(self.directory)
            # The reader has a context, and limits the memory of all caches together.
            del spec["cache_pool"]
            return {**spec, "path": path}
        base = ocdbt.base_spec(self.directory)
        if isinstance(base, str):
            return base + path
        return {**base, "path": base["path"] + path}

    def _array(
        self, name: str, read: ts.KvStore.ReadResult
    ) -> tuple[np.dtype, tuple[int, ...]]:
        place = f"{self.directory}: {name}"
        if read.state != "value":
            raise FormatError(f"{place} is listed, and is not in the store")
        fields = source_files.parse_json(bytes(read.value), place)
        dtype = fields.get("data_type" if self.use_zarr3 else "dtype")
        shape = fields.get("shape")
        compression = json.dumps([fields.get("compressor"), fields.get("codecs")])
        if '"blosc"' in compression:
            # TensorStore allocates as much as a chunk claims to have, whatever it has.
            raise FormatError(
                f"{place} is compressed by blosc, which is not read; save it with zstd,"
                " as Orbax does"
            )
        if not isinstance(shape, list) or not isinstance(dtype, str):
            raise FormatError(f"{place} has no shape or type")
        return _dtype(dtype, place), coverage.checked_shape(shape, place)


def open_store(directory: epath.Path, fields: Mapping[str, Any]) -> ArrayStore:
    """The store of a pytree.

    Args:
      directory: of the pytree.
      fields: of its `_METADATA`.
    """
    use_ocdbt = fields.get("use_ocdbt")
    if use_ocdbt is None:
        use_ocdbt = (directory / "manifest.ocdbt").exists()
    return ArrayStore(
        directory=directory,
        use_ocdbt=bool(use_ocdbt),
        use_zarr3=bool(fields.get("use_zarr3")),
        stores_fill_values=bool(fields.get("store_array_data_equal_to_fill_value")),
    )


def _dtype(name: str, place: str) -> np.dtype:
    try:
        if _PLAIN_TYPE.fullmatch(name):
            return np.dtype(name).newbyteorder("=")
        dtype = ts.dtype(name).numpy_dtype
        if dtype.hasobject:
            raise TypeError("texts and JSON are no numbers")
        return dtype
    except (TypeError, ValueError):
        raise FormatError(f"{place} is of the unsupported type {name[:40]!r}") from None
