"""A captured step as a source: a host uploads from it where no RAM disk has the step.

It offers the host's share of the upload, as a RAM disk would. If several processes hold
a box, one of them uploads it; the array's sharding decides which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import jax
import numpy as np
from jax.sharding import Sharding

from elastic_ckpt.core import boxes, digest, errors
from elastic_ckpt.host.capture import Shards, Value
from elastic_ckpt.manifests import layout
from elastic_ckpt.manifests.holdings import Offer
from elastic_ckpt.manifests.manifest import (
    ComponentFile,
    Contents,
    Fragment,
    Fragments,
    Host,
    Manifest,
)
from elastic_ckpt.tiers.captured import Captured
from elastic_ckpt.tiers.source import OnPiece, ReadError, ignored

IsOwn = Callable[[int, boxes.Box], bool]


class CapturedStep:
    """The parts of a step that a host has captured and uploads; a `source.Source`.

    Args:
      captured: not to be released while this is read.
      contents: of the whole step.
      files: of the components that this host wrote, with their contents.
      is_own: whether this host uploads a box, by the number of its leaf.
      identity: the run, the training step, and which save of it.
      host: this one.

    Attributes:
      offer: the parts that this host uploads.
      chunk_shapes: of all leaves, by path, uploaded here or not.
    """

    def __init__(
        self,
        captured: Captured,
        contents: Contents,
        files: Mapping[ComponentFile, bytes],
        *,
        is_own: IsOwn,
        identity: tuple[str, int, str],
        host: Host,
    ) -> None:
        self.chunk_shapes: dict[str, tuple[int, ...]] = {}
        self._values: dict[str, np.ndarray] = {
            file.path: np.frombuffer(content, np.uint8)
            for file, content in files.items()
        }
        fragments = []
        for number, part in enumerate(captured.parts):
            leaf = part.leaf
            chunk = tuple(max(1, size) for size in leaf.shape)
            if 0 not in leaf.shape:
                item_bytes = np.dtype(leaf.dtype).itemsize
                chunk = layout.chunk_shape(part.shard_shape, item_bytes=item_bytes)
            self.chunk_shapes[leaf.path] = chunk
            for box, values in part.boxes:
                if not is_own(number, box):
                    continue
                for piece in layout.cut(box, chunk):
                    file = layout.chunk_file(leaf.path, piece, chunk)
                    self._values[file] = values[boxes.relative(piece, box)]
                    fragments.append(
                        Fragment(
                            leaf=number,
                            box=piece,
                            digest=digest.values_digest(self._values[file]),
                            file=file,
                            offset=0,
                            stored_bytes=layout.num_bytes(piece, leaf.dtype),
                        )
                    )
        run, step, save = identity
        manifest = Manifest(
            run=run,
            step=step,
            save=save,
            host=host,
            contents=contents,
            fragments=Fragments.from_rows(fragments, contents=contents),
            component_files=tuple(sorted(files, key=lambda file: file.path)),
        )
        self.offer = Offer(tier="local", manifest=manifest)

    def values(self, fragment: Fragment) -> np.ndarray:
        """Returns the captured values of a fragment, without a copy.

        Raises:
          CheckpointError: if they are not those of `offer` any more.
        """
        values = self._values[fragment.file]
        if digest.values_digest(values) != fragment.digest:
            raise errors.CheckpointError(
                f"{fragment.file} changed in this host's memory after it was captured;"
                " save another step, and have the memory of the machine checked"
            )
        return values

    @property
    def directory(self) -> str:
        """Implements `source.Source`; the files are in memory alone."""
        return f"memory of host {self.offer.host.id}"

    def read_into(
        self, file: str, offset: int, into: memoryview, on_piece: OnPiece = ignored
    ) -> None:
        """Implements `source.Source`.

        Raises:
          ReadError: if there is no such file.
        """
        content = np.ascontiguousarray(self._content(file)).reshape(-1).view(np.uint8)
        into[:] = content[offset : offset + len(into)].data
        on_piece(into)

    def size(self, file: str) -> int:
        """Implements `source.Source`."""
        return self._content(file).nbytes

    def _content(self, file: str) -> np.ndarray:
        if file not in self._values:
            raise ReadError("is not in this host's memory")
        return self._values[file]


class Owners:
    """The process that uploads each box of a captured state.

    Args:
      values: of the state, by path.
      number: of this process.
      num_hosts: processes of the world.
    """

    def __init__(
        self, values: Mapping[str, Value], *, number: int, num_hosts: int
    ) -> None:
        self._number = number
        self._num_hosts = num_hosts
        # By number; whole ones are in every process. No array is kept, which may be
        # donated.
        self._leaves = [_placed(values[path]) for path in sorted(values)]
        self._owners: dict[int, dict[boxes.Box, int]] = {}

    def is_own(self, leaf: int, box: boxes.Box) -> bool:
        """Whether this process uploads a box of a leaf; some are uploaded by several.

        Other processes may hold the same boxes of random keys, so each holder uploads
        those.
        """
        placed = self._leaves[leaf]
        if callable(placed):
            return placed(box)
        if placed == "whole":
            return leaf % self._num_hosts == self._number
        if placed is None:
            return True
        if leaf not in self._owners:
            self._owners[leaf] = _owners(*placed)
        return self._owners[leaf][box] == self._number


_Placed = (
    tuple[Sharding, tuple[int, ...]]
    | Callable[[boxes.Box], bool]
    | Literal["whole"]
    | None
)


def _placed(value: Value) -> _Placed:
    if isinstance(value, np.ndarray | np.generic | int | float):
        return "whole"
    if isinstance(value, Shards):
        return value.is_own
    if not isinstance(value, jax.Array):
        return None
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    return None if is_key else (value.sharding, value.shape)


def _owners(sharding: Sharding, shape: tuple[int, ...]) -> dict[boxes.Box, int]:
    owners = {}
    for number, (box, devices) in enumerate(boxes.holders(sharding, shape).items()):
        processes = sorted({device.process_index for device in devices})
        owners[box] = processes[number % len(processes)]
    return owners
