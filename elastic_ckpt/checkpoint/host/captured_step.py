"""A captured step as a source: a host uploads from it where no RAM disk has the step.

It offers the host's share of the upload, as a RAM disk would. If several processes hold
a box, one of them uploads it; the array's sharding decides which. The digests of such
boxes are compared between all of them before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from elastic_ckpt.checkpoint.host.capture import ArrayPlace, Shards
from elastic_ckpt.core import boxes, digest, errors, storage
from elastic_ckpt.steps import layout
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
from elastic_ckpt.tiers.captured import Captured, Values, fetched
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
    """The process that uploads each box of a captured state.

    Args:
      captured: of the state; not released.
      number: of this process.
      num_hosts: processes of the world.
    """

    def __init__(self, captured: Captured, *, number: int, num_hosts: int) -> None:
        self._number = number
        self._num_hosts = num_hosts
        self._places = [part.place for part in captured.parts]
        self._owners: dict[int, dict[boxes.Box, tuple[int, str]]] = {}

    def is_own(self, leaf: int, box: boxes.Box) -> bool:
        """Whether this process uploads a box of a leaf; some are uploaded by several.

        Other processes may hold the same boxes of random keys, so each holder uploads
        those.
        """
        place = self._places[leaf]
        if isinstance(place, Shards):
            return place.is_own is None or place.is_own(box)
        if not isinstance(place, ArrayPlace):
            # In every process.
            return leaf % self._num_hosts == self._number
        if place.is_key:
            return True
        return self._held(leaf, place, box)[0] == self._number

    def group_of(self, leaf: int, box: boxes.Box) -> str:
        """The name of the hosts that hold a box; empty if this one alone does."""
        place = self._places[leaf]
        if self._num_hosts == 1:
            return ""
        if isinstance(place, Shards):
            return "" if place.group_of is None else place.group_of(box)
        if not isinstance(place, ArrayPlace):
            return "all"
        return self._held(leaf, place, box)[1]

    def _held(self, leaf: int, place: ArrayPlace, box: boxes.Box) -> tuple[int, str]:
        if leaf not in self._owners:
            self._owners[leaf] = _owners(place)
        # The numbers of a random key are its last dimension.
        rank = len(place.shape)
        return self._owners[leaf][
            boxes.Box(start=box.start[:rank], stop=box.stop[:rank])
        ]


def _owners(place: ArrayPlace) -> dict[boxes.Box, tuple[int, str]]:
    # By box, the process that uploads it, and the name of those that hold it.
    sharding, owners = place.sharding, {}
    held = boxes.holders(sharding, place.shape)
    for number, (box, devices) in enumerate(held.items()):
        processes = sorted({device.process_index for device in devices})
        group = ",".join(map(str, processes)) if len(processes) > 1 else ""
        if sharding.is_fully_addressable:
            # Each process has an array of its own.
            group = "all"
        owners[box] = processes[number % len(processes)], group
    return owners
