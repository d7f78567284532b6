"""Repairs of a committed step in persistent storage, of which a good copy is elsewhere.

A file of a component is replaced. Chunks lie in the store of the host that wrote them:
they are written there once more, in one commit, and the index of the merged store, by
which Orbax reads, is made to refer to them. So a reader gets the bad values or the good
ones, killed at any point or not, and values that are good are not written. An index
that cannot be read is made anew if all that it lists is at hand.

The step is leased meanwhile: the run does not remove it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from etils import epath

from elastic_ckpt.core import boxes, bucket_clients, errors, storage
from elastic_ckpt.steps.manifest import Contents, Fragment, Leaf
from elastic_ckpt.tiers.persistent import leases, ocdbt

# The bytes of one commit.
_COMMIT_BYTES = 2**28


# A bad chunk as the manifest in storage lists it, and its verified values, which are of
# its box and of the leaf's dtype.
Values = tuple[Fragment, np.ndarray]


class StepRepair:
    """Repairs one committed step.

    Args:
      directory: of the step.
      contents: of the step.
      stores: of all hosts, as `state/ocdbt.process_<n>`.
    """

    def __init__(
        self, directory: epath.PathLike, contents: Contents, stores: Sequence[str]
    ) -> None:
        self._directory = storage.absolute(directory)
        self._contents = contents
        self._stores = stores

    def file(self, path: str, content: Callable[[], bytes]) -> str | None:
        """Replaces a file of a component; returns why it could not.

        Args:
          path: in the directory of the step.
          content: reads the content from a good copy, verified.
        """
        return self._attempt(
            lambda: storage.write_atomic(self._directory / path, content())
        )

    def store(
        self, store: str, values: Callable[[], Iterable[Values]], *, is_all: bool
    ) -> str | None:
        """Writes chunks of a host's store anew; returns why it could not.

        Args:
          store: of the host.
          values: reads the chunks from good copies.
          is_all: whether these are all chunks of the store.
        """
        return self._attempt(functools.partial(self._rewrite, store, values, is_all))

    def _attempt(self, act: Callable[[], None]) -> str | None:
        try:
            with leases.lease(self._directory):
                act()
        # TensorStore raises ValueErrors.
        except (
            errors.CheckpointError,
            ValueError,
            *bucket_clients.failures(),
        ) as error:
            return str(error).partition("\n")[0]
        return None

    def _rewrite(
        self, store: str, values: Callable[[], Iterable[Values]], is_all: bool
    ) -> None:
        directory = self._directory / store
        if storage.is_local(directory):
            ocdbt.remove_stale_lock(directory)
        try:
            self._write(directory, values())
        except ValueError:
            if not is_all:
                raise
            # Its index cannot be read, so none of its values can.
            storage.remove(directory / ocdbt.MANIFEST)
            self._write(directory, values())
        self._merge(store.rpartition("/")[0])

    def _write(self, directory: epath.Path, values: Iterable[Values]) -> None:
        context = ocdbt.new_context()
        chunks: list[ocdbt.Chunk] = []
        num_bytes = 0
        for fragment, part in values:
            leaf = self._contents.leaves[fragment.leaf]
            chunks.append(_chunk(fragment, leaf, part))
            num_bytes += part.nbytes
            if num_bytes >= _COMMIT_BYTES:
                ocdbt.write(directory, chunks, context)
                chunks, num_bytes = [], 0
        if chunks:
            ocdbt.write(directory, chunks, context)

    def _merge(self, checkpointable: str) -> None:
        directory = self._directory / checkpointable
        stores = [
            each.rpartition("/")[2]
            for each in self._stores
            if each.rpartition("/")[0] == checkpointable
        ]
        if storage.is_local(directory):
            ocdbt.remove_stale_lock(directory)
        try:
            ocdbt.merge(directory, stores)
        except ValueError:
            # The index is not what was saved; the stores have all that it lists.
            storage.remove(directory / ocdbt.MANIFEST)
            ocdbt.merge(directory, stores)
        # These have no chunks in a host's store, so the merge leaves them out.
        empty = [
            _empty(checkpointable, leaf)
            for leaf in self._contents.leaves
            if 0 in leaf.shape and leaf.path.startswith(f"{checkpointable}/")
        ]
        if empty:
            ocdbt.write(directory, empty, ocdbt.new_context())


def _chunk(fragment: Fragment, leaf: Leaf, values: np.ndarray) -> ocdbt.Chunk:
    store, _, key = fragment.file.partition("//")
    # Behind the prefix of the array, a `c` and a number for each dim.
    name = "/".join(key.split("/")[: -len(leaf.shape) - 1])
    return ocdbt.Chunk(
        leaf=leaf,
        array=ocdbt.StoredArray(
            checkpointable=store.rpartition("/")[0],
            name=name,
            # All chunks of an array have one shape.
            chunk=fragment.box.shape,
        ),
        box=fragment.box,
        values=values,
    )


def _empty(checkpointable: str, leaf: Leaf) -> ocdbt.Chunk:
    # The name that Orbax gives it, unless a key of the tree is unusual: the
    # verification that follows compares it with Orbax's list.
    parts = leaf.path.removeprefix(f"{checkpointable}/").split("/")
    name = ".".join(each.replace("~1", "/").replace("~0", "~") for each in parts)
    return ocdbt.Chunk(
        leaf=leaf,
        array=ocdbt.StoredArray(
            checkpointable=checkpointable,
            name=name,
            chunk=tuple(max(1, size) for size in leaf.shape),
        ),
        box=boxes.whole(leaf.shape),
        values=np.empty(leaf.shape, leaf.dtype),
    )
