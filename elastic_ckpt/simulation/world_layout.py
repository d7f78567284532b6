"""The manifests of a simulated save: what each host of a world holds of a step.

The state is that of a run: sharded over the hosts of a slice, and the same in all
slices. Each host also writes one file of the data state. Hosts are named by their place
in the world, so that worlds of the same shape have equal manifests: which machines they
are does not matter to a decision.

Glossary: s slices, h hosts of a slice, n hosts of the world.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from elastic_ckpt.core import boxes
from elastic_ckpt.steps.holdings import Offer, Tier
from elastic_ckpt.steps.manifest import (
    ComponentFile,
    Contents,
    Fragments,
    Host,
    Leaf,
    Manifest,
)

# Boxes of each host, if no other slice has them: placement copies them to several
# hosts, which matters where copies are all that is left.
_MOST_PARTS = 8
_FILE_BYTES = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """All that decisions depend on of a world.

    Attributes:
      slices: their number.
      hosts_per_slice: the hosts of each.
      racks: of each host, its rack, numbered by its first host; empty if racks do not
        matter.
    """

    slices: int
    hosts_per_slice: int
    racks: tuple[int, ...] = ()

    @property
    def hosts(self) -> int:
        """All hosts: n."""
        return self.slices * self.hosts_per_slice

    @property
    def parts(self) -> int:
        """The boxes of each host."""
        return max(1, _MOST_PARTS // self.slices)

    @property
    def num_boxes(self) -> int:
        """The different boxes of the state."""
        return self.parts * self.hosts_per_slice

    @property
    def domains(self) -> np.ndarray:
        """The failure domain of each host, int64 `[n]`."""
        if self.racks:
            return np.array(self.racks, np.int64)
        return np.arange(self.hosts) // self.hosts_per_slice


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorldLayout:
    """How the state lies on the hosts of worlds.

    Attributes:
      state_bytes: of the whole state, in one slice.
      domain: the kind of failure domain that copies are spread over.
    """

    state_bytes: int
    domain: str = "slice"

    def part_bytes(self, shape: Shape) -> int:
        """The bytes of a box."""
        return max(1, -(-self.state_bytes // shape.num_boxes))

    def host(self, number: int, domain: int, *, name: str = "host") -> Host:
        """A host, by its place in the world, or a newcomer with another name."""
        identity = f"{name}-{number:05d}"
        return Host(
            id=identity,
            number=number,
            domains={"host": identity, self.domain: str(domain)},
        )

    def hosts(self, shape: Shape) -> list[Host]:
        """The hosts of a world, in the order of their places."""
        return [
            self.host(number, domain)
            for number, domain in enumerate(shape.domains.tolist())
        ]

    def contents(self, shape: Shape) -> Contents:
        """The leaves and components of a step."""
        size = shape.hosts_per_slice * self.part_bytes(shape)
        leaves = [
            Leaf(path=f"params/{number}", shape=(size,), dtype="uint8")
            for number in range(shape.parts)
        ]
        return Contents(leaves=tuple(leaves), components={"data": shape.hosts})

    def boxes(
        self, shape: Shape, positions: np.ndarray
    ) -> tuple[np.ndarray, boxes.Boxes]:
        """The leaf and the box of each part that hosts of some positions hold.

        Args:
          shape: of the world.
          positions: of hosts in their slices, int64 `[p]`.

        Returns:
          int32 `[p * parts]`, and as many boxes.
        """
        size = self.part_bytes(shape)
        start = np.repeat(positions, shape.parts)[:, None] * size
        leaf = np.tile(np.arange(shape.parts, dtype=np.int32), len(positions))
        return leaf, boxes.Boxes(start=start, stop=start + size)

    def saved(self, shape: Shape) -> list[Offer]:
        """The manifests of the hosts of a world that has saved a step."""
        return _saved(self, shape)

    def saved_anew(self, shape: Shape) -> list[Offer]:
        """As `saved`, which keeps those of the last shapes."""
        contents = self.contents(shape)
        parts = [
            self._fragments(
                shape, np.arange(shape.parts) * shape.hosts_per_slice + place
            )
            for place in range(shape.hosts_per_slice)
        ]
        return [
            _offer(contents, host, parts[number % len(parts)], [_file(number)])
            for number, host in enumerate(self.hosts(shape))
        ]

    def copies(
        self, shape: Shape, offers: Sequence[Offer], item: np.ndarray, host: np.ndarray
    ) -> list[tuple[int, Offer]]:
        """The manifests of copies that hosts have taken, with the numbers of the hosts.

        Args:
          shape: of the world.
          offers: of its hosts, as `saved`.
          item: of each copy, its number in the holdings.
          host: of each copy, the number of the host that has it.
        """
        contents = offers[0].manifest.contents
        num_boxes = shape.num_boxes
        order = np.lexsort([item, host])
        item, host = item[order], host[order]
        holders, first = np.unique(host, return_index=True)
        taken = np.split(item, first[1:]) if len(item) else []
        return [
            (
                number,
                _offer(
                    contents,
                    offers[number].host,
                    self._fragments(shape, items[items < num_boxes]),
                    [_file(n) for n in (items[items >= num_boxes] - num_boxes)],
                ),
            )
            for number, items in zip(holders.tolist(), taken, strict=True)
        ]

    def stored(self, shape: Shape) -> Offer:
        """The manifest of a step in persistent storage."""
        num_boxes = shape.num_boxes
        return _offer(
            self.contents(shape),
            Host(id="storage", number=0, domains={}),
            self._fragments(shape, np.arange(num_boxes)),
            [_file(number) for number in range(shape.hosts)],
            tier="persistent",
        )

    def _fragments(self, shape: Shape, items: np.ndarray) -> Fragments:
        # The number of a box in the holdings: by leaf, then by place.
        leaf, place = np.divmod(items, shape.hosts_per_slice)
        size = self.part_bytes(shape)
        start = place[:, None] * size
        zeros = np.zeros(len(items), np.int64)
        return Fragments(
            leaf=leaf.astype(np.int32),
            boxes=boxes.Boxes(start=start, stop=start + size),
            digest=np.zeros((len(items), 2), np.uint64),
            file=zeros.astype(np.int32),
            offset=zeros,
            stored_bytes=np.full(len(items), size),
            files=("values",),
        )


@functools.lru_cache(maxsize=4)
def _saved(layout: WorldLayout, shape: Shape) -> list[Offer]:
    return layout.saved_anew(shape)


def _file(number: int) -> ComponentFile:
    return ComponentFile(
        component="data",
        parts=(number, number + 1),
        path=f"data/{number:06d}",
        digest=bytes(16),
        stored_bytes=_FILE_BYTES,
    )


def _offer(
    contents: Contents,
    host: Host,
    fragments: Fragments,
    files: Sequence[ComponentFile],
    *,
    tier: Tier = "local",
) -> Offer:
    manifest = Manifest(
        run="simulated",
        step=1,
        save="",
        host=host,
        contents=contents,
        fragments=fragments,
        component_files=tuple(files),
    )
    return Offer(tier=tier, manifest=manifest)
