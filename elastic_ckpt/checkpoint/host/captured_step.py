"""A captured step as a source: a host uploads from it where no RAM disk has the step.

It offers the host's share of the upload, as a RAM disk would. If several processes hold
a box, one of them uploads it (`steps.owners`). The digests of such boxes are compared
between all of them before.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from elastic_ckpt.checkpoint.host.capture import ArrayPlace, Shards
from elastic_ckpt.core import boxes, digest, errors, storage
from elastic_ckpt.steps import layout, owners
from elastic_ckpt.steps.holdings import Offer
from elastic_ckpt.steps.manifest import (
    ComponentFile,
    Contents,
    Fragment,
    Fragments,
    Host,
    Manifest,
)
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.captured import Captured, CapturedLeaf, Values, fetched
from elastic_ckpt.tiers.source import OnPiece, ReadError, ignored

IsOwn = Callable[[int, boxes.Box], bool]
GroupOf = Callable[[int, boxes.Box], str]


class CapturedStep:
    """The parts of a step that a host has captured and uploads; a `source.Source`.

    Args:
      captured: not to be released while this is read.
      contents: of the whole step.
      files: of the components that this host wrote, with their contents.
      is_own: whether this host uploads a box, by the number of its leaf.
      group_of: the name of the hosts that hold a box; empty if this one alone does.
      identity: the run, and the step.
      host: this one.

    Attributes:
      offer: the parts that this host uploads.
      chunk_shapes: of all leaves, by path, uploaded here or not.
      shared: the digests of what other hosts hold too, by group, leaf and box.
    """

    def __init__(
        self,
        captured: Captured,
        contents: Contents,
        files: Mapping[ComponentFile, bytes],
        *,
        is_own: IsOwn,
        group_of: GroupOf = lambda *_: "",
        identity: tuple[str, StepId],
        host: Host,
    ) -> None:
        self.chunk_shapes: dict[str, tuple[int, ...]] = {}
        self._values: dict[str, Values] = {
            file.path: np.frombuffer(content, np.uint8)
            for file, content in files.items()
        }
        self.shared: dict[tuple[str, str, str], str] = {}
        fragments = []
        for number, part in enumerate(captured.parts):
            leaf = part.leaf
            chunk = self.chunk_shapes[leaf.path] = part.chunk
            for box, values in part.boxes:
                shard = part.shard(box)
                group, uploaded = group_of(number, shard), is_own(number, shard)
                if not (group or uploaded):
                    continue
                named = digest.values_digest(fetched(values))
                if group:
                    self.shared[group, leaf.path, str(box)] = named.hex()
                if not uploaded:
                    continue
                file = layout.chunk_file(leaf.path, box, chunk)
                self._values[file] = values
                fragments.append(
                    Fragment(
                        leaf=number,
                        box=box,
                        digest=named,
                        file=file,
                        offset=0,
                        stored_bytes=layout.num_bytes(box, leaf.dtype),
                    )
                )
        run, (step, save) = identity
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

    def digests(self, under: tuple[str, ...]) -> dict[str, str]:
        """Digests of what other hosts hold too, to be compared with theirs.

        Args:
          under: nothing, a group, or a group and a leaf of it.

        Returns:
          By group, by leaf, or by box.
        """
        rows: dict[str, dict[str, storage.Json]] = {}
        for named, each in self.shared.items():
            if named[: len(under)] == under:
                rows.setdefault(named[len(under)], {})[" ".join(named)] = each
        return {name: digest.json_digest(of) for name, of in rows.items()}

    def values(self, fragment: Fragment) -> np.ndarray:
        """Returns the captured values of a fragment, without a copy.

        Raises:
          CheckpointError: if they are not those of `offer` any more.
        """
        return self._verified(fragment.file, fragment.digest)

    def content(self, file: ComponentFile) -> memoryview:
        """Returns the content of a component's file, without a copy.

        Raises:
          CheckpointError: if it is not that of `offer` any more.
        """
        return self._verified(file.path, file.digest).data

    def _verified(self, path: str, expected: bytes) -> np.ndarray:
        values = fetched(self._values[path])
        if digest.values_digest(values) != expected:
            raise errors.CheckpointError(
                f"{path} changed in this host's memory after it was captured; save"
                " another step, and have the memory of the machine checked"
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
        content = (
            np.ascontiguousarray(fetched(self._listed(file))).reshape(-1).view(np.uint8)
        )
        into[:] = content[offset : offset + len(into)].data
        on_piece(into)

    def size(self, file: str) -> int:
        """Implements `source.Source`."""
        return self._listed(file).nbytes

    def _listed(self, file: str) -> Values:
        if file not in self._values:
            raise ReadError("is not in this host's memory")
        return self._values[file]


class Owners:
    """The hosts that hold the boxes of a captured state, and the one that uploads each.

    Args:
      captured: of the state; not released.
      number: of this process.
      num_hosts: processes of the world.
    """

    def __init__(self, captured: Captured, *, number: int, num_hosts: int) -> None:
        self._number = number
        self._num_hosts = num_hosts
        self._parts = captured.parts

    def is_own(self, leaf: int, box: boxes.Box) -> bool:
        """Whether this process uploads a box of a leaf; some are uploaded by several.

        Other processes may hold the same boxes of random keys, so each holder uploads
        those.
        """
        return self._held[leaf, self._item(leaf, box)][0]

    def group_of(self, leaf: int, box: boxes.Box) -> str:
        """The name of the hosts that hold a box; empty if this one alone does."""
        return self._held[leaf, self._item(leaf, box)][1]

    def _item(self, leaf: int, box: boxes.Box) -> boxes.Box | None:
        return box if self._is_cut(self._parts[leaf].place) else None

    def _is_cut(self, place: object) -> bool:
        # Every process has a value of its own of a leaf that is not cut.
        if isinstance(place, ArrayPlace):
            return not place.sharding.is_fully_addressable
        return isinstance(place, Shards)

    @functools.cached_property
    def _held(self) -> dict[tuple[int, boxes.Box | None], tuple[bool, str]]:
        # By the number of the leaf, and its boxes if it is cut: whether this process
        # uploads it, and the name of all that hold it.
        held: dict[tuple[int, boxes.Box | None], tuple[bool, str]] = {}
        # Of arrays by process, and of those that other code has assembled by device.
        for is_by_device in (False, True):
            items, holders, num_bytes = [], [], []
            for number, part in enumerate(self._parts):
                if isinstance(part.place, Shards) != is_by_device:
                    continue
                for box, of_box in self._holders(part):
                    shape = part.leaf.shape if box is None else box.shape
                    items.append((number, box))
                    holders.append(of_box)
                    item_bytes = np.dtype(part.leaf.dtype).itemsize
                    num_bytes.append(math.prod(shape) * item_bytes)
            uploaders = owners.shares(holders, np.array(num_bytes))
            for item, of_item, uploader in zip(items, holders, uploaders, strict=True):
                place = self._parts[item[0]].place
                own = place.own if isinstance(place, Shards) else (self._number,)
                is_key = isinstance(place, ArrayPlace) and place.is_key
                group = ",".join(map(str, of_item)) if of_item[1:] else ""
                held[item] = uploader in own or is_key, group
        return held

    def _holders(
        self, part: CapturedLeaf
    ) -> Iterable[tuple[boxes.Box | None, tuple[int, ...]]]:
        place = part.place
        shards = sorted({part.shard(chunk) for chunk, _ in part.boxes})
        if isinstance(place, Shards):
            return [(box, place.holders(box)) for box in shards]
        if not (isinstance(place, ArrayPlace) and self._is_cut(place)):
            return [(None, tuple(range(self._num_hosts)))]
        everywhere = boxes.holders(place.sharding, place.shape)
        # The numbers of a random key are its last dimension.
        rank = len(place.shape)
        return [
            (box, tuple(sorted({device.process_index for device in everywhere[whole]})))
            for box in shards
            for whole in [boxes.Box(start=box.start[:rank], stop=box.stop[:rank])]
        ]
