"""A committed step as stock Orbax reads it: one store of all hosts, and metadata.

Our manifests name values in the store that each host wrote. Orbax reads the same values
through the index of the merged store, decodes them by the array's own metadata, and
finds the arrays by its JSON files. This module checks all of these without Orbax.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorstore as ts
from etils import epath

from elastic_ckpt.core import digest
from elastic_ckpt.steps.manifest import Contents, Fragment
from elastic_ckpt.tiers.persistent import ocdbt, orbax_digests

_TREE_FILE = "_METADATA"


class OrbaxView:
    """A committed step as Orbax sees it; any number of threads may call it.

    Args:
      directory: of the step.
      contents: of the step.
    """

    def __init__(self, directory: epath.Path, contents: Contents) -> None:
        self._directory = directory
        self._contents = contents
        self._context = ocdbt.new_context()
        self._lock = threading.Lock()
        self._open: dict[int, ts.TensorStore] = {}
        self._names: dict[str, set[str]] = {}

    def chunk_problem(self, fragment: Fragment) -> str | None:
        """The problem of a chunk as read from the merged store; None if there is none.

        TensorStore compares the CRC-32C behind the values, and then their digest is
        compared.
        """
        place = tuple(map(slice, fragment.box.start, fragment.box.stop))
        try:
            values = self._array(fragment)[place].read().result()
        # Raised by TensorStore and by the file system.
        except (OSError, ValueError) as error:
            return f"cannot be read from the merged store ({_first_line(error)})"
        if digest.values_digest(np.asarray(values)) != fragment.digest:
            return "is not what was saved: the merged store gives other values"
        return None

    def metadata_problems(self) -> Iterator[tuple[str, str]]:
        """The problems of Orbax's JSON files, after all chunks were read.

        Yields:
          The path of a file in the step's directory, and what is wrong with it.
        """
        reported = dict(orbax_digests.problems(self._directory))
        yield from reported.items()
        for part, saved in sorted(self._names.items()):
            file = f"{part}/{_TREE_FILE}"
            if file not in reported:
                yield from ((file, why) for why in self._tree_problems(part, saved))

    def _tree_problems(self, part: str, saved: set[str]) -> Iterator[str]:
        try:
            tree = json.loads((self._directory / part / _TREE_FILE).read_bytes())
            listed = set(_array_names(tree))
        except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
            yield f"does not list arrays as Orbax does ({error!r})"
            return
        for name in sorted(saved - listed):
            yield f"does not list the array {_shown(name)!r}, so Orbax does not load it"
        for name in sorted(listed - saved):
            # Arrays without elements have no chunks.
            try:
                array = ocdbt.open_saved_array(
                    self._directory / part, name, self._context
                )
            except (OSError, ValueError):
                yield f"lists the array {_shown(name)!r}, which is not in the store"
                continue
            if 0 not in array.shape:
                yield f"lists the array {_shown(name)!r}, which was not saved"

    def _array(self, fragment: Fragment) -> ts.TensorStore:
        leaf = self._contents.leaves[fragment.leaf]
        store, _, key = fragment.file.partition("//")
        checkpointable = store.rpartition("/")[0]
        # Behind the prefix of the array, a `c` and a number for each dim.
        parts = key.split("/")
        name = "/".join([*parts[: -len(leaf.shape) - 1], ""])
        with self._lock:
            self._names.setdefault(checkpointable, set()).add(name)
            if fragment.leaf not in self._open:
                opened = ocdbt.open_saved_array(
                    self._directory / checkpointable, name, self._context
                )
                stored = (opened.shape, opened.dtype.numpy_dtype)
                if stored != (leaf.shape, np.dtype(leaf.dtype)):
                    raise ValueError(
                        f"the array is {opened.dtype.name}{list(opened.shape)}, not"
                        f" {leaf.dtype}{list(leaf.shape)}"
                    )
                self._open[fragment.leaf] = opened
            return self._open[fragment.leaf]


def _array_names(tree: dict[str, Any]) -> Iterator[str]:
    for entry in tree["tree_metadata"].values():
        value = entry["value_metadata"]
        if not value["skip_deserialize"] and value["value_type"] != "string":
            name = ".".join(key["key"] for key in entry["key_metadata"])
            yield ocdbt.array_prefix(name)


def _shown(prefix: str) -> str:
    return prefix.removesuffix("/")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
