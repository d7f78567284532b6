"""The decisions of a run over simulated manifests, cached by equivalent inputs.

The state is that of a run: sharded over the hosts of a slice, and the same in all
slices. Each host also writes one file of the data state. Hosts are named by their place
in the world, so that worlds of the same shape have equal manifests.

Every answer is that of `steps.owners`, `search` or `read_plan`. Without the cache
these are called for each world and each restore, with all hosts. With it, inputs count
as equal when they differ only in what the functions must not depend on:

* placement: which machines the hosts are.
* completeness: which holders an item has, as long as the least number of holders that
  an item has left is the same.
* nearness of a read: which reader and which item, as long as the same kinds of holders
  (the reader, its failure domain, others, storage) have the item.

The tests compare both ways: a decision that came to depend on more would differ.

Glossary: s slices, h hosts of a slice, n hosts of the world.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from elastic_ckpt.core import boxes
from elastic_ckpt.steps import owners, read_plan
from elastic_ckpt.steps.manifest import Contents, Holder, Host, Leaf, Manifest, Parts
from elastic_ckpt.steps.step import StepId
from elastic_ckpt.steps.table import StepTable

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

    def contents(self, shape: Shape) -> Contents:
        """The leaves and components of a step."""
        size = shape.hosts_per_slice * self.part_bytes(shape)
        leaves = [
            Leaf(
                path=f"params/{number}",
                shape=(size,),
                dtype="uint8",
                chunk=(self.part_bytes(shape),),
            )
            for number in range(shape.parts)
        ]
        leaves += [
            Leaf.of_file(f"data/{number:06d}", _FILE_BYTES)
            for number in range(shape.hosts)
        ]
        return Contents(leaves=tuple(leaves), components=("data",))

    def boxes(self, shape: Shape, items: np.ndarray) -> tuple[np.ndarray, boxes.Boxes]:
        """The leaf and the box of items of the table, int64 `[i]`.

        Items are numbered by leaf, then by the host's position in its slice; then come
        the files, by host.

        Returns:
          int32 `[i]`, and as many boxes.
        """
        leaf, position = np.divmod(items, shape.hosts_per_slice)
        is_file = items >= shape.num_boxes
        leaf = np.where(is_file, shape.parts + items - shape.num_boxes, leaf)
        size = np.where(is_file, _FILE_BYTES, self.part_bytes(shape))[:, None]
        start = np.where(is_file, 0, position)[:, None] * size
        return leaf.astype(np.int32), boxes.Boxes(start=start, stop=start + size)

    def saved(self, shape: Shape) -> list[Manifest]:
        """The manifests of the hosts of a world that has saved a step."""
        contents, per_slice = self.contents(shape), shape.hosts_per_slice
        of_place = [
            np.arange(shape.parts) * per_slice + place for place in range(per_slice)
        ]
        return [
            self._manifest(
                shape,
                contents,
                Holder(self.host(number, domain)),
                np.append(of_place[number % per_slice], shape.num_boxes + number),
            )
            for number, domain in enumerate(shape.domains.tolist())
        ]

    def copies(
        self,
        shape: Shape,
        saved: Sequence[Manifest],
        item: np.ndarray,
        host: np.ndarray,
    ) -> list[tuple[int, Manifest]]:
        """The manifests of copies that hosts have taken, with the numbers of the hosts.

        Args:
          shape: of the world.
          saved: of its hosts, as `saved`.
          item: of each copy, its number in the table.
          host: of each copy, the number of the host that has it.
        """
        contents = saved[0].contents
        order = np.lexsort([item, host])
        item, host = item[order], host[order]
        holders, first = np.unique(host, return_index=True)
        taken = np.split(item, first[1:]) if len(item) else []
        return [
            (
                number,
                self._manifest(shape, contents, Holder(saved[number].host), items),
            )
            for number, items in zip(holders.tolist(), taken, strict=True)
        ]

    def stored(self, shape: Shape) -> Manifest:
        """The manifest of a step in persistent storage."""
        host = Host(id="storage", number=0, domains={})
        items = np.arange(shape.num_boxes + shape.hosts)
        holder = Holder(host, "persistent")
        return self._manifest(shape, self.contents(shape), holder, items)

    def _manifest(
        self, shape: Shape, contents: Contents, holder: Holder, items: np.ndarray
    ) -> Manifest:
        leaf, of_items = self.boxes(shape, items)
        return Manifest(
            run="simulated",
            step_id=StepId(1, ""),
            contents=contents,
            holders=(holder,),
            parts=Parts(
                holder=np.zeros(len(items), np.int32),
                leaf=leaf,
                start=of_items.start,
                stop=of_items.stop,
                digest=np.zeros((len(items), 2), np.uint64),
            ),
        )


# Shapes whose placement is kept; 10,000 hosts take about 50 MB each.
_MOST_SHAPES = 12
_NOT_OF_WORLD = -1


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Held:
    """The parts that the hosts of a world hold of a step that they saved.

    Attributes:
      shape: of the world.
      saved: manifests with the numbers of their hosts: saved parts, then copies.
      item: of each row (an item at a host), its number in the table.
      host: of each row, the number of the host.
      copy_bytes: of all copies.
      most_copy_bytes: that one host takes.
    """

    shape: Shape
    saved: Sequence[tuple[int, Manifest]]
    item: np.ndarray
    host: np.ndarray
    copy_bytes: int
    most_copy_bytes: int

    def least_holders(self, dead: Collection[int]) -> int:
        """The least number of holders that an item has without the dead hosts."""
        return int(np.bincount(self.item, self.is_live(dead)).min())

    def is_live(self, dead: Collection[int]) -> np.ndarray:
        """Whether each row is at a host whose memory is there."""
        is_dead = np.zeros(self.shape.hosts, bool)
        is_dead[list(dead)] = True
        return ~is_dead[self.host]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Readers:
    """The hosts of a world that restores a step.

    Attributes:
      saver: of each host, its number in the world that saved the step; -1 if it was not
        in it.
      domain: of each host, its failure domain among those of that world, or a number
        that none of them has.
    """

    saver: np.ndarray
    domain: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reads:
    """The bytes of the state that hosts read, in the order of `read_plan.NEARNESS`.

    Attributes:
      all_hosts: by kind of place.
      most: that one host reads from each kind of place.
    """

    all_hosts: tuple[int, ...]
    most: tuple[int, ...]

    @property
    def farthest(self) -> str:
        """The farthest kind of place that anything is read from."""
        used = [
            name
            for name, size in zip(read_plan.NEARNESS, self.all_hosts, strict=True)
            if size
        ]
        return used[-1] if used else "none"


class Decisions:
    """Answers for worlds of any shape.

    Args:
      layout: of the state on hosts.
      policy: of copies.
      is_cached: whether answers are kept.
    """

    def __init__(
        self, layout: WorldLayout, policy: owners.Policy, *, is_cached: bool = True
    ) -> None:
        self._layout = layout
        self._policy = policy
        self._is_cached = is_cached
        self._kept = functools.lru_cache(_MOST_SHAPES)(self._held)
        self._complete: dict[tuple[int, bool], bool] = {}
        self._nearness: dict[int, int] = {}
        self._last: tuple[tuple[Any, ...], StepTable | None] | None = None

    def held(self, shape: Shape) -> Held:
        """A save of a world with the copies that placement gives it."""
        return self._kept(shape) if self._is_cached else self._held(shape)

    def _held(self, shape: Shape) -> Held:
        saved = self._layout.saved(shape)
        table = StepTable(saved)
        hosts = [each.host for each in saved]
        placed = owners.Owners(hosts, self._policy).place(
            table.holder_sets(hosts), table.num_bytes
        )
        size = table.num_bytes[placed.item]
        per_host = np.bincount(placed.target, size, shape.hosts)
        copies = self._layout.copies(shape, saved, placed.item, placed.target)
        return Held(
            shape=shape,
            saved=[*enumerate(saved), *copies],
            item=np.concatenate([table.item, placed.item]),
            host=np.concatenate([table.holder, placed.target]).astype(np.int64),
            copy_bytes=int(size.sum()),
            most_copy_bytes=int(per_host.max(initial=0)),
        )

    def without_copies(self, held: Held) -> Held:
        """The same save before its copies are made."""
        saved = held.saved[: held.shape.hosts]
        num_rows = held.shape.hosts * (held.shape.parts + 1)
        return dataclasses.replace(
            held,
            saved=saved,
            item=held.item[:num_rows],
            host=held.host[:num_rows],
            copy_bytes=0,
            most_copy_bytes=0,
        )

    def is_complete(
        self, held: Held, dead: Collection[int], *, is_stored: bool
    ) -> bool:
        """Whether the step can be restored from what is left of it.

        Args:
          held: the save.
          dead: the hosts that have lost their memory since.
          is_stored: whether persistent storage has all of it.
        """
        if not self._is_cached:
            return self._newest(held, dead, is_stored=is_stored) is not None
        key = (held.least_holders(dead), is_stored)
        if key not in self._complete:
            step = self._newest(held, dead, is_stored=is_stored)
            self._complete[key] = step is not None
        return self._complete[key]

    def reads(
        self, held: Held, dead: Collection[int], readers: Readers, *, is_stored: bool
    ) -> Reads:
        """The bytes that a world reads of a complete step, by kind of place.

        Args:
          held: the save.
          dead: the hosts that have lost their memory since.
          readers: the hosts of the world, in the order of its slices.
          is_stored: whether persistent storage has all of it.
        """
        everyone, parts = np.arange(len(readers.saver)), held.shape.parts
        if self._is_cached:
            near = self._cached_nearness(held, dead, readers, is_stored=is_stored)
        else:
            reader = np.repeat(everyone, parts)
            part = np.tile(np.arange(parts), len(everyone))
            near = self._planned(
                held, dead, readers, is_stored=is_stored, wanted=(reader, part)
            ).reshape(-1, parts)
        size = self._layout.part_bytes(held.shape)
        by_kind = np.stack(
            [size * (near == kind).sum(axis=1) for kind in range(4)], axis=1
        )
        return Reads(
            all_hosts=tuple(by_kind.sum(axis=0).tolist()),
            most=tuple(by_kind.max(axis=0, initial=0).tolist()),
        )

    def _newest(
        self, held: Held, dead: Collection[int], *, is_stored: bool
    ) -> StepTable | None:
        gone = frozenset(dead)
        key = (held.shape, len(held.saved), gone, is_stored)
        if self._last is not None and self._last[0] == key:
            # The step that was searched for is read.
            return self._last[1]
        left = [each for number, each in held.saved if number not in gone]
        if is_stored:
            left.append(self._layout.stored(held.shape))
        table = StepTable(left) if left else None
        step = table if table is not None and table.complete else None
        self._last = (key, step)
        return step

    def _cached_nearness(
        self, held: Held, dead: Collection[int], readers: Readers, *, is_stored: bool
    ) -> np.ndarray:
        # The nearness of each part of each reader, `[readers, parts]`.
        kinds = _kinds_of_holders(held, dead, readers) + 8 * is_stored
        near = np.empty(kinds.shape, np.int64)
        for kind in np.unique(kinds).tolist():
            if kind not in self._nearness:
                reader, part = np.argwhere(kinds == kind)[:1].T
                (self._nearness[kind],) = self._planned(
                    held, dead, readers, is_stored=is_stored, wanted=(reader, part)
                ).tolist()
            near[kinds == kind] = self._nearness[kind]
        return near

    def _planned(
        self,
        held: Held,
        dead: Collection[int],
        readers: Readers,
        *,
        is_stored: bool,
        wanted: tuple[np.ndarray, np.ndarray],
    ) -> np.ndarray:
        # The nearness of the holder that is read first, for pairs of reader and part.
        step = self._newest(held, dead, is_stored=is_stored)
        assert step is not None
        reader, part = wanted
        per_slice = held.shape.hosts_per_slice
        leaf, wanted_boxes = self._layout.boxes(
            held.shape, part * per_slice + reader % per_slice
        )
        first = np.empty(len(part), np.int64)
        for each in np.unique(reader).tolist():
            rows = np.flatnonzero(reader == each)
            own, domain = self._reader(readers, each), self._layout.domain
            near = read_plan.Nearness(step, own, domain=domain)
            wanted_here = read_plan.Wanted(leaf[rows], wanted_boxes.take(rows))
            plan = read_plan.ReadPlan(near, wanted_here)
            first[rows] = near.holders[step.first_row[plan.item]]
        numbers = [
            _NOT_OF_WORLD if each.tier == "persistent" else each.host.number
            for each in step.holders
        ]
        holder = np.array(numbers)[first]
        near = np.where(
            held.shape.domains[holder] == readers.domain[reader],
            read_plan.CLOSE,
            read_plan.DISTANT,
        )
        near[holder == readers.saver[reader]] = read_plan.LOCAL
        near[holder == _NOT_OF_WORLD] = read_plan.PERSISTENT
        return near

    def _reader(self, readers: Readers, number: int) -> Host:
        saver, domain = int(readers.saver[number]), int(readers.domain[number])
        if saver == _NOT_OF_WORLD:
            return self._layout.host(number, domain, name="new")
        return self._layout.host(saver, domain)


def _kinds_of_holders(
    held: Held, dead: Collection[int], readers: Readers
) -> np.ndarray:
    # For each reader and part, bits: 1 the reader has it, 2 others in its failure
    # domain, 4 others.
    shape = held.shape
    live = held.is_live(dead)
    is_box = held.item < shape.num_boxes
    item, host = held.item[live & is_box], held.host[live & is_box]
    num_domains = int(shape.domains.max()) + 1
    in_domain = np.zeros((shape.num_boxes, num_domains + 1), np.int64)
    np.add.at(in_domain, (item, shape.domains[host]), 1)
    place = np.arange(len(readers.saver)) % shape.hosts_per_slice
    wanted = np.arange(shape.parts)[None, :] * shape.hosts_per_slice + place[:, None]
    pairs = np.unique(item * (shape.hosts + 1) + host)
    saver = np.where(readers.saver < 0, shape.hosts, readers.saver)
    own = np.isin(wanted * (shape.hosts + 1) + saver[:, None], pairs)
    domain = np.minimum(readers.domain, num_domains)
    close = in_domain[wanted, domain[:, None]] - own
    others = in_domain.sum(axis=1)[wanted] - close - own
    return own + 2 * (close > 0) + 4 * (others > 0)
