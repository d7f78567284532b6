"""Copies of values that should be equal, and findings where they are not.

Everything here is a pure function of what hosts have found out about their copies, so
that all hosts come to the same findings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from elastic_ckpt.core import boxes, errors, storage


class Holder(NamedTuple):
    """The memory that a copy is in.

    Attributes:
      host: the number of the host.
      device: the id of the device in JAX; -1 for the memory of the host.
    """

    host: int
    device: int

    def __str__(self) -> str:
        if self.device < 0:
            return f"host {self.host}"
        return f"device {self.device} of host {self.host}"


class Copies(NamedTuple):
    """Copies of a box of a leaf that one host has found to be equal.

    Attributes:
      leaf: the number of the leaf in the tree.
      box: the part of it.
      content: equal for copies that are equal.
      holders: of the copies.
      differing: elements that differ from the first replica; None if not compared.
    """

    leaf: int
    box: boxes.Box
    content: str
    holders: tuple[Holder, ...]
    differing: int | None = None

    def to_json(self) -> storage.Json:
        """As it is sent to other hosts."""
        box = [list(self.box.start), list(self.box.stop)]
        holders = [list(holder) for holder in self.holders]
        return [self.leaf, box, self.content, holders, self.differing]

    @classmethod
    def from_json(cls, value: Any) -> Copies:
        """The copies that `to_json` of another host describes."""
        leaf, (start, stop), content, holders, differing = value
        return cls(
            leaf=leaf,
            box=boxes.Box(start=tuple(start), stop=tuple(stop)),
            content=content,
            holders=tuple(Holder(*holder) for holder in holders),
            differing=differing,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A part of a leaf whose copies should be equal and are not.

    Attributes:
      leaf: the path of the leaf, such as `opt_state/1/0/mu/embedding`; empty if the
        trees of the hosts differ in more than one leaf.
      box: the part of the leaf, such as `[0:64, 0:32]`; empty for the whole value.
      groups: hosts and devices by the copy that they hold, those with equal copies
        together; the largest group comes first.
      differing: the number of elements in which the copy that differs most differs from
        the first replica; None if elements were not compared.
      why: in what the copies differ, if not in their values.
    """

    leaf: str
    box: str = ""
    groups: tuple[tuple[Holder, ...], ...]
    differing: int | None = None
    why: str = ""

    @property
    def is_certain(self) -> bool:
        """Whether one group is the largest, so that the others are the suspects."""
        first, second, *_ = map(len, self.groups)
        return first > second

    @property
    def suspects(self) -> tuple[Holder, ...]:
        """The holders outside of the largest group; all if no group is the largest."""
        groups = self.groups[1:] if self.is_certain else self.groups
        return tuple(sorted(holder for group in groups for holder in group))

    @property
    def hosts(self) -> tuple[int, ...]:
        """The hosts of the suspects."""
        return tuple(sorted({holder.host for holder in self.suspects}))

    @property
    def devices(self) -> tuple[int, ...]:
        """The ids of the suspects' devices."""
        return tuple(sorted(h.device for h in self.suspects if h.device >= 0))

    def __str__(self) -> str:
        part = f"{self.leaf}{self.box}"
        who = errors.first_of(map(str, self.suspects))
        elements = (
            f", in {self.differing} element{'s' * (self.differing != 1)}"
            if self.differing
            else ""
        )
        why = f": {self.why}" if self.why else ""
        if self.is_certain:
            others = len(self.groups[0])
            return f"{part} of {who} differs from {others} equal copies{elements}{why}"
        return f"{part} differs between {who}{elements}, and either may be right{why}"


def findings(copies: Iterable[Copies], paths: Sequence[str]) -> list[Finding]:
    """The boxes whose copies differ, in the order of leaves.

    Args:
      copies: of all hosts.
      paths: of the leaves, by number.
    """
    by_box: dict[tuple[int, boxes.Box], list[Copies]] = {}
    for each in copies:
        by_box.setdefault((each.leaf, each.box), []).append(each)
    different = []
    for (leaf, box), of_box in sorted(by_box.items(), key=lambda item: item[0]):
        groups = _groups({each.holders: each.content for each in of_box})
        if len(groups) > 1:
            counts = [c.differing for c in of_box if c.differing is not None]
            different.append(
                Finding(
                    leaf=paths[leaf],
                    box=str(box) if box.start else "",
                    groups=groups,
                    differing=max(counts, default=None),
                )
            )
    return different


def structure_finding(structures: Sequence[Mapping[str, str]]) -> Finding | None:
    """The first leaf that only some hosts have, or have as another kind.

    Args:
      structures: of each host, by path: type, shape and dtype of a leaf.
    """
    for path in sorted(set().union(*structures)):
        kinds = [structure.get(path, "missing") for structure in structures]
        if len(set(kinds)) > 1:
            holders: dict[tuple[Holder, ...], str] = {
                (Holder(n, -1),): kind for n, kind in enumerate(kinds)
            }
            each = ", ".join(f"host {n}: {kind}" for n, kind in enumerate(kinds))
            return Finding(
                leaf=path, groups=_groups(holders), why=f"the trees differ ({each})"
            )
    return None


def _groups(
    contents: Mapping[tuple[Holder, ...], str],
) -> tuple[tuple[Holder, ...], ...]:
    # Holders of equal contents; the largest group first.
    groups: dict[str, list[Holder]] = {}
    for holders, content in contents.items():
        groups.setdefault(content, []).extend(holders)
    ordered = [tuple(sorted(group)) for group in groups.values()]
    return tuple(sorted(ordered, key=lambda group: (-len(group), group)))
