"""Groups tensors by the rules, states and kept captures that their names match."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from elastic_ckpt.universal.moves import TargetTensor
from elastic_ckpt.universal.rules import name_pattern, quantization
from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.rules.leftovers import Leftovers
from elastic_ckpt.universal.rules.name_index import ANY_KIND, Entry, Match, NameIndex
from elastic_ckpt.universal.rules.name_pattern import NamePattern
from elastic_ckpt.universal.rules.relation import Relation
from elastic_ckpt.universal.rules.rows import Captured, Kept
from elastic_ckpt.universal.rules.state import PARAMETER
from elastic_ckpt.universal.stored import StoredTensor

_DROPPED = -1
# The rank axes of formats. A checkpoint that lacks one has one rank of it.
_AXES = ("dp", "ep", "pp", "tp", "vp")

# A tensor without its name: the number of its pattern, captures, ranks, shape, dtype.
Sketch = tuple[
    int, Captured, tuple[tuple[str, int], ...], tuple[int, ...], np.dtype | None
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A rule with one of its states.

    Attributes:
      relation: the rule.
      state: the kind of state.
      sources: the whole name patterns of its sources.
      targets: the whole name patterns of its targets.
    """

    relation: Relation
    state: str
    sources: Sequence[NamePattern]
    targets: Sequence[NamePattern]


@dataclasses.dataclass(slots=True)
class Group:
    """The tensors of an instance, by their numbers; see `instance.Instance`.

    Attributes:
      sources: in the checkpoint.
      targets: in the target.
    """

    sources: list[tuple[Sketch, int]]
    targets: list[tuple[Sketch, int]]


# By the number of the owner, then by kept captures.
Groups = list[dict[Kept, Group]]


def axis_counts(
    layout: Layout, stored: Sequence[StoredTensor], axes: Mapping[str, int]
) -> dict[str, int]:
    """The number of ranks by axis: of the checkpoint, the layout, or as they occur.

    It is 1 for axes that occur nowhere.

    Raises:
      LayoutError: if checkpoint and layout contradict each other.
    """
    for axis, count in layout.ranks.items():
        if axes.get(axis, count) != count:
            raise LayoutError(
                f"{layout.place}: `ranks` has {count} of {axis}, the checkpoint "
                f"{axes[axis]}; remove {axis} from `ranks`"
            )
    counts: dict[str, int] = {}
    for ranks in {tensor.ranks for tensor in stored}:
        for axis, number in ranks:
            counts[axis] = max(counts.get(axis, 0), number + 1)
    return {**dict.fromkeys(_AXES, 1), **counts, **layout.ranks, **axes}


def owners(layout: Layout, axes: Mapping[str, int]) -> Iterator[Owner]:
    """The rules of a layout, each with all of its states."""
    for rule in layout.rules:
        relation = Relation(layout.complete(rule), axes)
        sides = (relation.sources, relation.targets)
        if rule.kind is not None:
            names = [[tensor.name for tensor in side] for side in sides]
            yield Owner(
                relation=relation,
                state=rule.kind,
                sources=names[0],
                targets=names[1],
            )
            continue
        for kind in rule.states or layout.states:
            state = layout.states[kind]
            if state.source is None or state.target is None:
                continue
            sources, targets = (
                [_completed(text, tensor.name) for tensor in side]
                for text, side in zip((state.source, state.target), sides, strict=True)
            )
            yield Owner(relation=relation, state=kind, sources=sources, targets=targets)


class Grouping:
    """Tensors by owner and instance.

    Args:
      layout: the rules.
      axes: the number of ranks by axis.
      stored: the tensors of the checkpoint.
      targets: those of the target; None if they are derived.

    Attributes:
      owners: the rules of the layout, each with all of its states.
      groups: by owner and kept captures.
      left: tensors that no rule has, and others that do not fit.
      filled: the targets that `fill` of the layout fills, by their numbers.
    """

    def __init__(
        self,
        layout: Layout,
        axes: Mapping[str, int],
        stored: Sequence[StoredTensor],
        targets: Sequence[TargetTensor] | None,
    ) -> None:
        self.owners = list(owners(layout, axes))
        self.filled: list[int] = []
        self._layout = layout
        self._stored = stored
        self._targets = targets
        self._alone = tuple((axis, 0) for axis, count in axes.items() if count == 1)
        self.groups: Groups = [{} for _ in self.owners]
        entries = [
            [
                Entry(
                    owner=number,
                    tensor=at,
                    kind=owner.state,
                    name=name,
                    numbers=owner.relation.numbers,
                    kept=owner.relation.kept,
                )
                for number, owner in enumerate(self.owners)
                for at, name in enumerate(side(owner))
            ]
            for side in (lambda owner: owner.sources, lambda owner: owner.targets)
        ]
        patterns = [
            {
                each.name.text: self.owners[each.owner].relation.rule.text
                for each in side
            }
            for side in entries
        ]
        self.left = Leftovers(place=layout.place, patterns=(patterns[0], patterns[1]))
        self._indices = (
            NameIndex(entries[0] + list(_drops(layout))),
            NameIndex(entries[1]),
        )
        self._add_sources()
        self._add_targets()

    def _add_sources(self) -> None:
        dropped: set[str] = set()
        quantized: list[str] = []
        for number, tensor in enumerate(self._stored):
            matches = self._indices[0].matches(tensor.name, tensor.kind)
            if len(matches) > 1:
                matches = self._chosen(matches)
            match = self._one(tensor.name, matches)
            if match is not None:
                sketch = (
                    match.entry.tensor,
                    match.captured,
                    tuple(dict.fromkeys((*tensor.ranks, *self._alone))),
                    tensor.shape,
                    tensor.dtype,
                )
                self._group(match).sources.append((sketch, number))
                if quantization.may_be_quantized(tensor.dtype):
                    quantized.append(tensor.name)
            elif matches:
                dropped.add(tensor.name)
            elif tensor.name not in self._layout.fill_inverse:
                text = "" if tensor.kind == ANY_KIND else f" ({tensor.kind})"
                self.left.sources.append(tensor.name + text)
        self.left.unscaled += quantization.without_scales(quantized, dropped)

    def _add_targets(self) -> None:
        # Optional rules that have no sources leave their targets to others.
        for number, tensor in enumerate(self._targets or ()):
            matches = self._indices[1].matches(tensor.name)
            used = [each for each in matches if self._is_used(each.entry.owner)]
            if not used and tensor.name in self._layout.fill:
                self.filled.append(number)
                continue
            matches = used or matches
            match = self._one(tensor.name, matches)
            if match is not None:
                sketch = (
                    match.entry.tensor,
                    match.captured,
                    (),
                    tensor.shape,
                    tensor.dtype,
                )
                self._group(match).targets.append((sketch, number))
            elif not matches:
                self.left.targets.append(tensor.name)

    def check(self) -> None:
        """Checks that every pattern and every instance has tensors on both sides.

        Raises:
          LayoutError: lists the tensors and patterns that have no partner.
        """
        with_targets = self._targets is not None
        matched = {
            (id(owner.relation), side, sketch[0])
            for owner, groups in zip(self.owners, self.groups, strict=True)
            for group in groups.values()
            for side, rows in enumerate((group.sources, group.targets))
            for sketch, _ in rows
        }
        used = {relation for relation, _, _ in matched}
        relations = {id(owner.relation): owner.relation for owner in self.owners}
        for key, relation in relations.items():
            if relation.rule.optional and key not in used:
                continue
            for side, tensors in enumerate((relation.sources, relation.targets)):
                for at, tensor in enumerate(tensors):
                    if (key, side, at) not in matched and (with_targets or not side):
                        self.left.unmatched.append(tensor.place)
        for owner, groups in zip(self.owners, self.groups, strict=True):
            for kept, group in groups.items():
                rows = (group.sources, group.targets)[: 1 + with_targets]
                for side, listed in enumerate(rows):
                    present = {sketch[0] for sketch, _ in listed}
                    names = (owner.sources, owner.targets)[side]
                    for at in set(range(len(names))) - present:
                        if (id(owner.relation), side, at) in matched:
                            name = names[at].format(owner.relation.named(kept))
                            text = f"{name} ({owner.relation.rule.text})"
                            self.left.incomplete.append(text)
        self.left.check()

    def _one(self, name: str, matches: Sequence[Match]) -> Match | None:
        # The match with a rule; None if there is none, or the tensor is dropped.
        owners = [match.entry.owner for match in matches]
        if all(owner == _DROPPED for owner in owners):
            return None
        if len(matches) > 1:
            self.left.ambiguous[name] = [
                "`drop`" if owner == _DROPPED else self.owners[owner].relation.rule.text
                for owner in owners
            ]
            return None
        return matches[0]

    def _chosen(self, matches: list[Match]) -> list[Match]:
        # The first of several optional rules that have all of their tensors.
        owners = [match.entry.owner for match in matches]
        if not all(map(self._is_optional, owners)):
            return matches
        complete = [each for each in matches if each.entry.owner in self._complete]
        return complete[:1] or matches

    @functools.cached_property
    def _complete(self) -> set[int]:
        # The owners of which each pattern matches a tensor.
        matched = {
            (match.entry.owner, 0, match.entry.tensor)
            for tensor in self._stored
            for match in self._indices[0].matches(tensor.name, tensor.kind)
        }
        matched |= {
            (match.entry.owner, 1, match.entry.tensor)
            for tensor in self._targets or ()
            for match in self._indices[1].matches(tensor.name)
        }
        return {
            number
            for number, owner in enumerate(self.owners)
            if matched.issuperset((number, 0, at) for at in range(len(owner.sources)))
            and (
                self._targets is None
                or matched.issuperset(
                    (number, 1, at) for at in range(len(owner.targets))
                )
            )
        }

    def _is_optional(self, owner: int) -> bool:
        return owner != _DROPPED and self.owners[owner].relation.rule.optional

    def _is_used(self, owner: int) -> bool:
        return bool(self.groups[owner]) or not self._is_optional(owner)

    def _group(self, match: Match) -> Group:
        groups = self.groups[match.entry.owner]
        group = groups.get(match.kept)
        if group is None:
            group = groups[match.kept] = Group([], [])
        return group


def _drops(layout: Layout) -> Iterator[Entry]:
    names: list[tuple[str | None, str]] = [(None, text) for text in layout.drop]
    names += layout.drop_of_kind
    for kind, state in layout.states.items():
        if state.source is not None and state.target is None:
            names.append((kind, state.source.replace(PARAMETER, "*")))
    for kind, text in names:
        yield Entry(
            owner=_DROPPED,
            tensor=0,
            kind=kind,
            name=name_pattern.glob(text),
            numbers=(),
            kept=(),
            # Such a state has the name of its parameter.
            is_of_any_kind=text != "*",
        )


def _completed(state: str, name: NamePattern) -> NamePattern:
    return name_pattern.parse(state.replace(PARAMETER, name.text))
