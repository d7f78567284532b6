"""A committed step as stock Orbax reads it: the merged store, and Orbax's JSON files.

This library reads values by their keys in the merged store. Orbax finds arrays through
its JSON files and decodes them by each array's metadata. This module checks these files
without Orbax.

    <step>/orbax-digests.json    `files`: by path in the step, XXH3-128 of the content

contains the digests of Orbax's files (version 1) and is written before the commit. Only
verification reads this file; the value digests are in manifests.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import numpy as np
import tensorstore as ts
from etils import epath

from elastic_ckpt.core import (
    boxes,
    bucket_clients,
    checked_json,
    digest,
    errors,
    storage,
)
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.steps.manifest import Contents, Leaf
from elastic_ckpt.tiers import stored_part
from elastic_ckpt.tiers.persistent import ocdbt

FILE = "orbax-digests.json"
_VERSION = 1


def to_bytes(files: Mapping[str, bytes]) -> bytes:
    """The content of `FILE`; `files` maps the paths of Orbax's files to contents."""
    listed = {path: digest.bytes_digest(files[path]) for path in sorted(files)}
    return checked_json.to_bytes({"files": listed}, version=_VERSION)


class OrbaxView:
    """A committed step as Orbax sees it; any number of threads may call it."""

    def __init__(self, directory: epath.Path) -> None:
        self._directory = directory
        self._context = ocdbt.new_context()
        # Each array is opened once.
        self._array = functools.cache(self._open)

    def chunk_problem(self, leaf: Leaf, box: Box, named: bytes) -> str | None:
        """Returns the problem with a chunk as Orbax reads it; None if it is good.

        TensorStore checks the CRC-32C after the values; this method checks the digest.
        """
        try:
            array = self._array(leaf)[tuple(map(slice, box.start, box.stop))]
            values = array.read().result()
        # Raised by TensorStore and by the file system.
        except (OSError, ValueError) as error:
            errors.check_open_files(error)
            first_line = str(error).partition("\n")[0][:200]
            return f"cannot be read from the merged store ({first_line})"
        if digest.values_digest(np.asarray(values)) != named:
            return "is not what was saved: the merged store has different values"
        return None

    def problems(self, contents: Contents) -> Iterator[tuple[str, str]]:
        """Checks what manifests omit: Orbax's files and arrays without elements.

        Yields:
          The path of a bad file or array, and the problem.
        """
        for leaf in contents.arrays:
            if 0 in leaf.shape:
                empty = digest.values_digest(np.empty(0, leaf.dtype))
                why = self.chunk_problem(leaf, boxes.whole(leaf.shape), empty)
                if why is not None:
                    yield leaf.path, why
        try:
            listed = checked_json.parse(
                storage.read_bytes(self._directory / FILE),
                what="list of files",
                version=_VERSION,
            )["files"]
        except (*bucket_clients.failures(), checked_json.UnreadableError) as error:
            errors.check_open_files(error)
            yield FILE, f"{error}; Orbax's own files cannot be verified"
            return
        for path, expected in listed.items():
            try:
                content = storage.read_bytes(self._directory / path)
                if digest.bytes_digest(content) != expected:
                    yield path, stored_part.DIFFERS
            except bucket_clients.failures() as error:
                errors.check_open_files(error)
                yield path, f"cannot be read ({error})"

    def _open(self, leaf: Leaf) -> ts.TensorStore:
        spec = {
            "driver": "zarr3",
            "kvstore": {
                **ocdbt.store_spec(self._directory / leaf.checkpointable),
                "path": ocdbt.array_prefix(leaf.name),
            },
            "fill_missing_data_reads": False,
        }
        opened = ts.open(spec, open=True, read=True, context=self._context).result()
        stored = opened.shape, opened.dtype.numpy_dtype
        if stored != (leaf.shape, np.dtype(leaf.dtype)):
            raise ValueError(
                f"the array is {opened.dtype.name}{list(opened.shape)}, not"
                f" {leaf.dtype}{list(leaf.shape)}"
            )
        return opened
