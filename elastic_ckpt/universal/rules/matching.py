"""Matches a layout with a checkpoint and a target: the moves between them.

The names of the checkpoint's tensors choose their rules. A rule holds for each value of
the captures that all of its names have, and the names of its targets follow from these:
a target is never matched by its looks alone. Every tensor of the checkpoint is used
once or dropped, every element of the target is filled once; otherwise one error lists
those that are left over.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.universal import garbage_collection
from elastic_ckpt.universal.formats.checkpoint import StoredTensor
from elastic_ckpt.universal.moves import (
    Fill,
    Matched,
    Move,
    Source,
    TargetTensor,
    is_half_a_byte,
)
from elastic_ckpt.universal.rules import (
    composition,
    dtypes,
    instance,
    name_pattern,
    sizes,
)
from elastic_ckpt.universal.rules.instance import Instance, Plan
from elastic_ckpt.universal.rules.layout import (
    PARAMETER,
    CheckpointValue,
    Layout,
    LayoutError,
)
from elastic_ckpt.universal.rules.name_pattern import (
    ANY_KIND,
    Entry,
    Match,
    NameIndex,
    NamePattern,
)
from elastic_ckpt.universal.rules.relation import Kept, ParsedTensor, Relation, Row

# Empty tensors in a checkpoint may have dims of any size, of which targets are made.
MOST_DERIVED = 1 << 20
# The rank axes of formats. A checkpoint that lacks one has one rank of it.
_AXES = ("dp", "ep", "pp", "tp", "vp")
# The most names among which the nearest one is searched.
_MOST_COMPARED = 2000
# Of a name: some patterns take the square of their number.
_MOST_CHARACTERS = 2**12

# A tensor without its name: the number of its pattern, captures, ranks, shape, dtype.
_Sketch = tuple[
    int,
    tuple[tuple[str, int | str], ...],
    tuple[tuple[str, int], ...],
    tuple[int, ...],
    np.dtype | None,
]


def moves(
    layout: Layout,
    stored: Sequence[StoredTensor],
    axes: Mapping[str, int],
    targets: Mapping[str, TargetTensor] | None,
) -> Matched:
    """The moves from the tensors of a checkpoint to those of a target.

    Args:
      layout: the rules.
      stored: the tensors of the checkpoint.
      axes: the number of ranks by axis, as the checkpoint has it.
      targets: by name; None if they are those that the rules make.

    Raises:
      LayoutError: if the layout does not fit; one error lists all that is left over.
    """
    with garbage_collection.paused():
        if layout.through:
            return _through(layout, stored, axes, targets)
        matching = _Matching(layout, stored, axes, targets)
        made = _Planning(matching).matched()
        _check_halves(made.moves, stored)
        return made


def _as_stored(matched: Matched) -> list[StoredTensor]:
    return [
        StoredTensor(name=name, dtype=target.dtype, shape=target.shape)
        for name, target in matched.targets.items()
    ]


def _through(
    layout: Layout,
    stored: Sequence[StoredTensor],
    axes: Mapping[str, int],
    targets: Mapping[str, TargetTensor] | None,
) -> Matched:
    first, *others = layout.with_sizes(layout.sizes).through
    first = dataclasses.replace(
        first, fill_inverse={**first.fill_inverse, **layout.fill_inverse}
    )
    *firsts, last = first, *others
    last = dataclasses.replace(last, fill={**last.fill, **layout.fill})
    made: Matched | None = None
    between = stored
    for each in (*firsts, last):
        wanted = targets if each is last else None
        following = moves(each, between, axes if made is None else {}, wanted)
        try:
            made = (
                following
                if made is None
                else composition.composed(made, following, between)
            )
        except LayoutError as error:
            raise LayoutError(f"{layout.place}: {error}") from None
        between = _as_stored(following)
    assert made is not None
    _check_halves(made.moves, stored)
    return made


def _check_halves(moves: Iterable[Move], stored: Sequence[StoredTensor]) -> None:
    # Elements of half a byte are read as whole bytes along the last dim.
    for move in moves:
        for source in move.sources:
            if not is_half_a_byte(source.viewed_as):
                continue
            tensor, side = stored[source.tensor], source.side
            last = len(tensor.shape) - 1
            steps = [
                step for dim, step in zip(side.dims, side.steps, strict=True)
                if dim == last
            ]  # fmt: skip
            odd = [step for step in steps if step % 2]
            if odd != [1] or side.start[last] % 2:
                raise LayoutError(
                    f"{tensor.name}, which becomes {move.target}: elements of half a "
                    "byte are read two at a time, and the dims of the rule separate "
                    "them; convert the checkpoint to another dtype with dims as they "
                    "are stored, and apply this layout to the result"
                )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Owner:
    """A rule with one of its states.

    Attributes:
      relation: the rule.
      state: the kind of state.
      sources: the whole name patterns of its sources.
      targets: the whole name patterns of its targets.
      excepted: the names that its sources do not match.
      groups: the tensors of each instance, by kept captures.
    """

    relation: Relation
    state: str
    sources: Sequence[NamePattern]
    targets: Sequence[NamePattern]
    excepted: Sequence[re.Pattern[str]]
    groups: dict[Kept, _Group] = dataclasses.field(default_factory=dict)

    @property
    def text(self) -> str:
        """The rule, for people."""
        return self.relation.rule.text

    @property
    def is_optional(self) -> bool:
        """Whether the checkpoint may lack its tensors."""
        return self.relation.rule.optional


@dataclasses.dataclass(slots=True)
class _Group:
    """The tensors of an instance, by their numbers; and targets that are not there."""

    sources: list[tuple[_Sketch, int]]
    targets: list[tuple[_Sketch, int]]
    absent: dict[int, str] = dataclasses.field(default_factory=dict)


def _axis_counts(
    layout: Layout, stored: Sequence[StoredTensor], axes: Mapping[str, int]
) -> dict[str, int]:
    # The number of ranks by axis: of the checkpoint, the layout, or as they occur; 1
    # for axes that occur nowhere.
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


def _owners(layout: Layout, axes: Mapping[str, int]) -> Iterator[_Owner]:
    for rule in layout.rules:
        if rule.only == "inverse":
            continue
        relation = Relation(layout.complete(rule), axes)
        sides = (relation.sources, relation.targets)
        excepted = [name_pattern.glob(text).expression(()) for text in rule.excepted]
        if rule.kind is not None:
            names = [[tensor.name for tensor in side] for side in sides]
            yield _Owner(
                relation=relation,
                state=rule.kind,
                sources=names[0],
                targets=names[1],
                excepted=excepted,
            )
            continue
        for kind in rule.states or layout.states:
            state = layout.states[kind]
            if state.source is None or state.target is None:
                continue
            sources, targets = (
                [_completed(text, tensor.name, relation) for tensor in side]
                for text, side in zip((state.source, state.target), sides, strict=True)
            )
            yield _Owner(
                relation=relation,
                state=kind,
                sources=sources,
                targets=targets,
                excepted=excepted,
            )


def _completed(state: str, name: NamePattern, relation: Relation) -> NamePattern:
    text = state.replace(PARAMETER, name.text)
    return name_pattern.parse(text).with_forms(relation.forms)


def _dropped_names(layout: Layout) -> Iterator[Entry]:
    names: list[tuple[str | None, str]] = [(None, text) for text in layout.drop]
    names += layout.drop_of_kind
    for kind, state in layout.states.items():
        if state.source is not None and state.target is None:
            names.append((kind, state.source.replace(PARAMETER, "*")))
    for kind, text in names:
        yield Entry(
            kind=kind,
            name=name_pattern.glob(text),
            # Such a state has the name of its parameter.
            is_of_any_kind=text != "*",
        )


class _Matching:
    """The tensors of each rule and instance.

    Attributes:
      owners: the rules, each with all of its states.
      index: the patterns of sources.
      filled: the targets that `fill` of the layout fills, with their values.

    Raises:
      LayoutError: lists the tensors and patterns that have no partner.
    """

    def __init__(
        self,
        layout: Layout,
        stored: Sequence[StoredTensor],
        axes: Mapping[str, int],
        targets: Mapping[str, TargetTensor] | None,
    ) -> None:
        self.layout = layout
        self.stored = stored
        self.counts = _axis_counts(layout, stored, axes)
        self.given = None if targets is None else list(targets.values())
        self.owners = list(_owners(layout, self.counts))
        self.filled: list[tuple[TargetTensor, float | CheckpointValue]] = []
        self._unboxed_sources = name_pattern.unboxed(each.name for each in stored)
        self._unboxed_targets = name_pattern.unboxed(targets or ())
        # Of the tensors of the checkpoint, for people.
        self._names = [
            self._unboxed_sources.get(each.name, each.name) for each in stored
        ]
        self._numbers = {
            each.name: number for number, each in enumerate(self.given or ())
        }
        self._numbers |= {
            shorter: self._numbers[name]
            for name, shorter in self._unboxed_targets.items()
        }
        self._alone = tuple((axis, 0) for axis, n in self.counts.items() if n == 1)
        self._with_alone: dict[
            tuple[tuple[str, int], ...], tuple[tuple[str, int], ...]
        ] = {}
        self.index = NameIndex(self.entries(range(len(self.owners))))
        self._problems: dict[str, list[str]] = collections.defaultdict(list)
        self._unused: set[tuple[int, int]] = set()
        self._add_sources()
        if self.given is not None:
            self._add_targets()
        self._check_patterns()
        self._check()

    def entries(
        self, numbers: Iterable[int], *, of_targets: bool = False
    ) -> Iterator[Entry]:
        """The patterns of rules, by their numbers."""
        for number in numbers:
            owner = self.owners[number]
            names = owner.targets if of_targets else owner.sources
            for at, name in enumerate(names):
                yield Entry(
                    owner=number,
                    tensor=at,
                    kind=owner.state,
                    name=name,
                    numbers=owner.relation.numbers,
                    kept=owner.relation.kept,
                )

    def of_source(self, index: NameIndex, tensor: StoredTensor) -> Sequence[Match]:
        """The patterns that match a tensor: its name, or if none does, the shorter."""
        name, kind = tensor.name, tensor.kind
        found = index.matches(name, kind)
        if found or name not in self._unboxed_sources:
            return found
        return index.matches(self._unboxed_sources[name], kind)

    def of_target(self, index: NameIndex, tensor: TargetTensor) -> Sequence[Match]:
        """As `of_source`, of a target."""
        name = tensor.name
        found = index.matches(name)
        if found or name not in self._unboxed_targets:
            return found
        return index.matches(self._unboxed_targets[name])

    def matches(self, tensor: StoredTensor) -> Sequence[Match]:
        """The patterns that match a source, but for names that their rules except."""
        found = self.of_source(self.index, tensor)
        excepted = [self.owners[each.entry.owner].excepted for each in found]
        if not any(excepted):
            return found
        names = (tensor.name, self._unboxed_sources.get(tensor.name, tensor.name))
        return [
            match
            for match, patterns in zip(found, excepted, strict=True)
            if not any(any(map(each.fullmatch, names)) for each in patterns)
        ]

    def _add_sources(self) -> None:
        drops = list(_dropped_names(self.layout))
        drop_index = NameIndex(drops)
        leftovers: list[str] = []
        complete: _Complete | None = None
        for number, tensor in enumerate(self.stored):
            if len(tensor.name) > _MOST_CHARACTERS:
                raise LayoutError(
                    f"the checkpoint has a tensor whose name has {len(tensor.name)} "
                    f"characters, {tensor.name[:60]!r}..., and names of up to "
                    f"{_MOST_CHARACTERS} are matched"
                )
            shorter = self._names[number]
            matches = self.matches(tensor)
            if drops and self._is_dropped(drop_index, tensor, matches):
                self._unused.update(
                    (each.entry.owner, each.entry.tensor) for each in matches
                )
                continue
            if len(matches) > 1:
                complete = complete or _Complete(self)
                matches = complete.chosen(matches)
            if len(matches) > 1:
                owners = [self.owners[each.entry.owner] for each in matches]
                is_lacking = all(owner.is_optional for owner in owners)
                problem = "lacking" if is_lacking else "several"
                self._note_rules(problem, shorter, owners)
            elif matches:
                (match,) = matches
                owner = self.owners[match.entry.owner]
                if lacking := owner.relation.rule.unmet:
                    self._note("unmet", f"{tensor.name} ({owner.text}: {lacking})")
                sketch = (
                    match.entry.tensor,
                    match.captured,
                    self._ranks(tensor.ranks),
                    *_viewed(tensor, owner.relation.sources[match.entry.tensor]),
                )
                self._group(match).sources.append((sketch, number))
            elif not self.layout.fill_inverse.keys() & {tensor.name, shorter}:
                text = "" if tensor.kind == ANY_KIND else f" ({tensor.kind})"
                leftovers.append(shorter + text)
        self._note_leftovers("sources", leftovers)

    def _ranks(self, ranks: tuple[tuple[str, int], ...]) -> tuple[tuple[str, int], ...]:
        # With those of axes of one rank.
        found = self._with_alone.get(ranks)
        if found is None:
            found = tuple(dict.fromkeys((*ranks, *self._alone)))
            self._with_alone[ranks] = found
        return found

    def _is_dropped(
        self, drops: NameIndex, tensor: StoredTensor, matches: Sequence[Match]
    ) -> bool:
        kinds = {each.entry.kind for each in self.of_source(drops, tensor)}
        if not kinds or kinds & {None, tensor.kind}:
            return bool(kinds)
        # A format without kinds has the names of states alone.
        return all(each.entry.kind != tensor.kind for each in matches)

    def _number(self, name: str, pattern: NamePattern) -> int | None:
        # Of the target that a rule calls so. What a capture took over from a source in
        # a box may be the name of a target without one.
        number = self._numbers.get(name)
        if number is None and not pattern.text.endswith(name_pattern.BOX):
            number = self._numbers.get(name.removesuffix(name_pattern.BOX))
        return number

    def _add_targets(self) -> None:
        assert self.given is not None
        claims: dict[str, list[tuple[_Owner, Kept, _Sketch]]] = {}
        absent: list[tuple[str, str]] = []
        open_patterns: list[tuple[int, int]] = []
        for number, owner in enumerate(self.owners):
            for at, pattern in enumerate(owner.targets):
                if _open_captures(pattern, owner.relation):
                    open_patterns.append((number, at))
                    continue
                for kept in owner.groups:
                    name = pattern.format(owner.relation.named(kept))
                    target = self._number(name, pattern)
                    if target is None:
                        if any(each.has_sum for each in owner.relation.sources):
                            owner.groups[kept].absent[at] = name
                        else:
                            absent.append((name, owner.text))
                        continue
                    tensor = self.given[target]
                    sketch = (at, (), (), tensor.shape, tensor.dtype)
                    claims.setdefault(tensor.name, []).append((owner, kept, sketch))
        self._add_open(open_patterns, claims)
        leftovers, fill = [], self.layout.fill
        for number, tensor in enumerate(self.given):
            shorter = self._unboxed_targets.get(tensor.name, tensor.name)
            of_tensor = claims.get(tensor.name, ())
            if len(of_tensor) > 1:
                owners = [owner for owner, _, _ in of_tensor]
                self._note_rules("several", shorter, owners)
            elif of_tensor:
                ((owner, kept, sketch),) = of_tensor
                owner.groups[kept].targets.append((sketch, number))
            elif tensor.name in fill or shorter in fill:
                name = tensor.name if tensor.name in fill else shorter
                self.filled.append((tensor, fill[name]))
            else:
                leftovers.append(shorter)
        for name, rule in absent:
            near = self._nearest("absent", name, leftovers)
            self._note("absent", f"{name} ({rule}{near})")
        self._note_leftovers("targets", leftovers)

    def _add_open(
        self,
        patterns: Sequence[tuple[int, int]],
        claims: dict[str, list[tuple[_Owner, Kept, _Sketch]]],
    ) -> None:
        # Patterns whose targets have numbers of their own, for each group.
        if not patterns:
            return
        assert self.given is not None
        index = NameIndex(
            Entry(
                owner=number,
                tensor=at,
                name=self.owners[number].targets[at],
                numbers=self.owners[number].relation.numbers,
                kept=self.owners[number].relation.kept,
            )
            for number, at in patterns
        )
        for tensor in self.given:
            if tensor.name in claims:
                continue
            found = [
                each
                for each in self.of_target(index, tensor)
                if each.kept in self.owners[each.entry.owner].groups
            ]
            for match in name_pattern.most_specific(found) if found else ():
                owner = self.owners[match.entry.owner]
                at = match.entry.tensor
                sketch = (at, match.captured, (), tensor.shape, tensor.dtype)
                claims.setdefault(tensor.name, []).append((owner, match.kept, sketch))

    def _check_patterns(self) -> None:
        # That every pattern and every instance has tensors on both sides.
        by_relation: dict[int, list[_Owner]] = {}
        for owner in self.owners:
            by_relation.setdefault(id(owner.relation), []).append(owner)
        names = self._names
        for owners in by_relation.values():
            relation = owners[0].relation
            if not any(owner.groups for owner in owners) and relation.rule.optional:
                continue
            matched = self._matched(owners)
            numbers = [self.owners.index(owner) for owner in owners]
            for at, tensor in enumerate(relation.sources):
                is_used = any((number, at) in self._unused for number in numbers)
                may_lack = any(owner.groups for owner in owners) and any(
                    each.has_sum for each in relation.targets
                )
                is_used = is_used or may_lack
                if (0, at) not in matched and not tensor.role and not is_used:
                    near = (
                        self._taken(owners[0], at, names)
                        or self._with_path(owners[0], at, names)
                        or self._nearest("unmatched", owners[0].sources[at].text, names)
                    )
                    self._note("unmatched", tensor.place + near)
            for at, tensor in enumerate(relation.targets):
                held = (1, at) in matched or not any(owner.groups for owner in owners)
                is_open = _open_captures(tensor.name, relation)
                # A sum may have no elements of a part; one that does is an error later.
                may_lack = any(each.has_sum for each in relation.sources)
                if self.given is not None and not held and is_open and not may_lack:
                    text = owners[0].targets[at].text
                    near = self._nearest("unmatched", text, self._numbers)
                    self._note("unmatched", tensor.place + near)
            for owner in owners:
                self._check_groups(owner, matched)

    def _matched(self, owners: Sequence[_Owner]) -> set[tuple[int, int]]:
        return {
            (side, sketch[0])
            for owner in owners
            for group in owner.groups.values()
            for side, rows in enumerate((group.sources, group.targets))
            for sketch, _ in rows
        }

    def _check_groups(self, owner: _Owner, matched: set[tuple[int, int]]) -> None:
        tensors = owner.relation.sources
        if any(each.has_sum for each in owner.relation.targets):
            # An instance may lack an addend, on both sides.
            return
        number = self.owners.index(owner)
        needed = {
            at
            for at, each in enumerate(tensors)
            # What is dropped is not compared.
            if not each.role
            and not (each.pattern.copy and (number, at) in self._unused)
        }
        for kept, group in owner.groups.items():
            for at in needed - {sketch[0] for sketch, _ in group.sources}:
                is_dropped = (number, at) in self._unused
                if (0, at) in matched or is_dropped:
                    name = owner.sources[at].format(owner.relation.named(kept))
                    dropped = ", `drop` lists it" * is_dropped
                    self._note("incomplete", f"{name} ({owner.text}{dropped})")

    def _group(self, match: Match) -> _Group:
        groups = self.owners[match.entry.owner].groups
        group = groups.get(match.kept)
        if group is None:
            group = groups[match.kept] = _Group([], [])
        return group

    def _note(self, problem: str, text: str) -> None:
        self._problems[problem].append(text)

    def _note_rules(self, problem: str, name: str, owners: Sequence[_Owner]) -> None:
        rules = " and ".join(dict.fromkeys(owner.text for owner in owners))
        self._note(problem, f"{name} ({rules})")

    def _note_leftovers(self, side: str, names: Sequence[str]) -> None:
        # A name may be that of tensors of several ranks.
        is_target = side == "targets"
        patterns = {
            pattern.text: owner.text + self._without_sources(number) * is_target
            for number, owner in enumerate(self.owners)
            for pattern in (owner.targets if is_target else owner.sources)
        }
        for name in dict.fromkeys(names):
            near: list[str] = []
            if self._is_listed(side):
                near = difflib.get_close_matches(name, patterns, n=1, cutoff=0.0)
            shown = f" (nearest: {near[0]!r}, {patterns[near[0]]})" if near else ""
            self._note(side, name + shown)

    def _without_sources(self, owner: int) -> str:
        is_dropped = any(number == owner for number, _ in self._unused)
        is_empty = is_dropped and not self.owners[owner].groups
        return ", whose tensors `drop` lists" if is_empty else ""

    def _taken(self, owner: _Owner, at: int, names: Sequence[str]) -> str:
        # The rule that has what a pattern matches.
        matches = owner.sources[at].expression(owner.relation.numbers).fullmatch
        found = next(filter(matches, names), None)
        for other in self.owners if found else ():
            if any(
                self._names[number] == found
                for group in other.groups.values()
                for _, number in group.sources
            ):
                return f", {found!r} is in {other.text}"
        return ""

    def _with_path(self, owner: _Owner, at: int, names: Iterable[str]) -> str:
        # A remedy if captures that take any text would match.
        if not self._is_listed("unmatched"):
            return ""
        pattern, numbers = owner.sources[at], owner.relation.numbers
        texts = {
            each.key
            for each in pattern.captures
            if not each.is_number(numbers) and not each.form
        }
        wide = pattern.with_forms(dict.fromkeys(texts, "path")).expression(numbers)
        found = next(filter(wide.fullmatch, names), None) if texts else None
        if found is not None:
            return f", {found!r} has dots: write {{{min(texts)}:path}}"
        dims_of = {c.key for c in pattern.captures if not c.is_always_number} - texts
        found = next(filter(pattern.expression(()).fullmatch, names), None)
        if found is None or not dims_of:
            return ""
        return (
            f", {found!r} has a text for {min(dims_of)}, which is a dim: list its "
            f"texts in their order, {{{min(dims_of)}:one|other}}"
        )

    def _is_listed(self, problem: str) -> bool:
        # Whether the error lists the next tensor with the problem.
        return len(self._problems[problem]) <= errors.MOST_NAMED

    def _nearest(self, problem: str, name: str, names: Iterable[str]) -> str:
        if not self._is_listed(problem):
            return ""
        few = list(dict.fromkeys(names))
        if len(few) > _MOST_COMPARED:
            few = list({name_pattern.skeleton(each): each for each in few}.values())
            few = few[:_MOST_COMPARED]
        near = difflib.get_close_matches(name, few, n=1, cutoff=0.5)
        return f", the nearest is {near[0]!r}" if near else ""

    def _check(self) -> None:
        texts = {
            "sources": "tensors of the checkpoint are in no rule",
            "targets": "tensors of the target are in no rule",
            "several": "tensors are in several rules",
            "unmet": "tensors are in rules that require other values",
            "lacking": "tensors are in optional rules, none of which has all that it "
            "needs",
            "unmatched": "patterns match no tensor",
            "incomplete": "tensors are missing beside others of their rules",
            "absent": "tensors are made by rules, and missing in the target",
        }
        lines = [
            f"\n  {len(names)} {text}: {errors.first_of(names)}"
            for problem, text in texts.items()
            if (names := list(dict.fromkeys(self._problems[problem])))
        ]
        if lines:
            raise LayoutError(
                f"{self.layout.place} does not fit the checkpoint and the target; add "
                f"or change rules, list tensors of the checkpoint in `drop`, or leave "
                f"those of the target out of its tree:{''.join(lines)}"
            )


class _Complete:
    """Which of several rules that match a tensor has all of its tensors."""

    def __init__(self, matching: _Matching) -> None:
        self._owners = matching.owners
        # The kept captures for which each pattern has a tensor.
        self._sources: dict[tuple[int, int], set[Kept]] = collections.defaultdict(set)
        for tensor in matching.stored:
            for match in matching.matches(tensor):
                place = (match.entry.owner, match.entry.tensor)
                self._sources[place].add(match.kept)
        self._targets: set[tuple[int, int]] | None = None
        if matching.given is not None:
            index = NameIndex(
                matching.entries(range(len(self._owners)), of_targets=True)
            )
            self._targets = {
                (match.entry.owner, match.entry.tensor)
                for tensor in matching.given
                for match in matching.of_target(index, tensor)
            }

    def chosen(self, matches: Sequence[Match]) -> Sequence[Match]:
        """The matches with the rule that counts; several if they are ambiguous.

        A rule gives way to others for the kept captures for which it lacks a factor of
        `times` or `plus`, or any tensor if it is optional. Of optional rules alone, the
        first one counts; otherwise the one that matches fewer names.
        """
        held = [each for each in matches if self._is_complete(each)]
        if all(self._owners[each.entry.owner].is_optional for each in matches):
            return held[:1] or matches
        return name_pattern.most_specific(held or matches)

    def _is_complete(self, match: Match) -> bool:
        number = match.entry.owner
        owner = self._owners[number]
        tensors = owner.relation.sources
        if any(
            match.kept not in self._sources[number, at]
            for at, tensor in enumerate(tensors)
            if tensor.role or owner.is_optional
        ):
            return False
        return (
            not owner.is_optional
            or self._targets is None
            or all((number, at) in self._targets for at in range(len(owner.targets)))
        )


class _Planning:
    """The moves of the instances of a matching.

    Instances that are alike except for kept captures have the same plan.
    """

    def __init__(self, matching: _Matching) -> None:
        self._matching = matching
        self._problems: dict[str, None] = {}
        self._moves: list[Move] = []
        self._fills: list[Fill] = []
        self._derived: dict[str, TargetTensor] = {}

    def matched(self) -> Matched:
        """The moves of all instances.

        Raises:
          LayoutError: if shapes do not fit; it lists the rules.
        """
        matching = self._matching
        rules = []
        for owner, plans in zip(matching.owners, self._plans(), strict=True):
            for kept, group in owner.groups.items():
                plan = plans.get(_class_of(group))
                if plan is not None:
                    self._add(owner, kept, group, plan)
            rules.append((owner.text, len(self._moves)))
        if self._problems:
            problems = list(self._problems)
            listed = "\n  ".join(problems[: errors.MOST_NAMED])
            more = "\n  ..." if problems[errors.MOST_NAMED :] else ""
            raise LayoutError(
                f"{matching.layout.place} does not fit the shapes of the checkpoint "
                f"and the target:\n  {listed}{more}"
            )
        self._fill()
        targets: Mapping[str, TargetTensor] = self._derived
        if matching.given is not None:
            targets = {each.name: each for each in matching.given}
        return Matched(
            moves=self._moves, fills=self._fills, targets=targets, rules=rules
        )

    def _plans(self) -> list[dict[object, Plan]]:
        # By owner and class. Sizes that shapes do not tell may be known from others.
        plans: list[dict[object, Plan]] = []
        unknown: list[tuple[dict[object, Plan], object, Instance]] = []
        values: dict[str, set[int]] = {}
        for owner in self._matching.owners:
            of_owner: dict[object, Plan] = {}
            seen = set()
            plans.append(of_owner)
            for kept, group in owner.groups.items():
                group.sources.sort(key=lambda each: each[0][:3])
                group.targets.sort(key=lambda each: each[0][:3])
                key = _class_of(group)
                if key in seen:
                    continue
                seen.add(key)
                try:
                    made = self._instance(owner, kept, group)
                    try:
                        of_owner[key] = instance.plan(made)
                    except sizes.UnknownSizeError:
                        unknown.append((of_owner, key, made))
                        continue
                except LayoutError as error:
                    # States of a parameter have the same problems.
                    self._problems[str(error)] = None
                    continue
                for name, size in of_owner[key].sizes.items():
                    values.setdefault(name, set()).add(size)
        shared = {name: min(held) for name, held in values.items() if len(held) == 1}
        for of_owner, key, made in unknown:
            try:
                of_owner[key] = instance.plan(made, shared)
            except LayoutError as error:
                self._problems[str(error)] = None
        return plans

    def _instance(self, owner: _Owner, kept: Kept, group: _Group) -> Instance:
        stored, given = self._matching.stored, self._matching.given
        sources = [
            _row(sketch, stored[number].name) for sketch, number in group.sources
        ]
        targets = None
        if given is not None:
            targets = [
                _row(sketch, given[number].name) for sketch, number in group.targets
            ]
        first = sources[0]
        return Instance(
            relation=owner.relation.with_rest(len(first.shape), first.tensor),
            state=owner.state,
            sources=sources,
            targets=targets,
            counts=self._matching.counts,
            names=owner.targets,
            kept=kept,
            absent={
                at: f"the target lacks {name}, which its tensors make"
                for at, name in group.absent.items()
            },
        )

    def _add(self, owner: _Owner, kept: Kept, group: _Group, plan: Plan) -> None:
        names = self._names(owner, kept, group, plan)
        views = [each.pattern.viewed_as for each in owner.relation.sources]
        for target, factor_sizes, side, read, arithmetic in plan.copies:
            sources = []
            for number, source_side in read:
                (at, *_), tensor = group.sources[number]
                view = views[at]
                sources.append(
                    Source(
                        tensor=tensor,
                        side=source_side,
                        viewed_as=None if view is None else np.dtype(view),
                    )
                )
            self._moves.append(
                Move(
                    target=names[target],
                    sizes=factor_sizes,
                    target_side=side,
                    sources=tuple(sources),
                    arithmetic=arithmetic,
                )
            )
        for target, start, stop, value in plan.fills:
            dtype = plan.targets[target].dtype
            if dtype is not None and not dtypes.can_be(value, dtype):
                problem = f"{owner.text}: {names[target]} is of {dtype}, which cannot "
                self._problems[f"{problem}have {value:g} of `pad`"] = None
            fill = Fill(target=names[target], start=start, stop=stop, value=value)
            self._fills.append(fill)

    def _names(self, owner: _Owner, kept: Kept, group: _Group, plan: Plan) -> list[str]:
        given = self._matching.given
        if given is not None:
            return [given[number].name for _, number in group.targets]
        names = []
        named = owner.relation.named(kept)
        for row in plan.targets:
            name = owner.targets[row.tensor].format({**named, **dict(row.captured)})
            names.append(name)
            assert row.dtype is not None
            if name in self._derived:
                self._problems[f"{owner.text}: {name} is made by another rule too"] = (
                    None
                )
            self._derived[name] = TargetTensor(
                name=name, dtype=row.dtype, shape=row.shape
            )
        if len(self._derived) > MOST_DERIVED:
            raise LayoutError(
                f"{owner.text}: over {MOST_DERIVED} tensors would be made; use the "
                "right checkpoint, or another layout"
            )
        return names

    def _fill(self) -> None:
        # Fills targets with the numbers of the layout. Those that are derived are the
        # names of `fill` that no rule makes, scalars of 32 bits.
        layout = self._matching.layout
        filled = self._matching.filled
        if self._matching.given is None:
            filled = [
                (_scalar(name, value), value)
                for name, value in layout.fill.items()
                if name not in self._derived
            ]
            self._derived |= {target.name: target for target, _ in filled}
        for target, number in filled:
            if isinstance(number, CheckpointValue):
                raise LayoutError(f"{number.missing}; give a number, or a `default`")
            if not dtypes.can_be(number, target.dtype):
                raise LayoutError(
                    f"{layout.place}: {target.name} is of {target.dtype}, which cannot "
                    f"have {number} of `fill`"
                )
            start = (0,) * len(target.shape)
            self._fills.append(
                Fill(target=target.name, start=start, stop=target.shape, value=number)
            )


def _open_captures(name: NamePattern, relation: Relation) -> set[str]:
    # Captures whose values a group does not have.
    return {each.key for each in name.captures} - set(relation.kept)


def _viewed(
    tensor: StoredTensor, parsed: ParsedTensor
) -> tuple[tuple[int, ...], np.dtype]:
    # The shape and dtype that a rule gives to the bytes of a tensor.
    if parsed.pattern.viewed_as is None:
        return tensor.shape, tensor.dtype
    dtype = np.dtype(parsed.pattern.viewed_as)
    if tensor.dtype.itemsize != dtype.itemsize or not tensor.shape:
        raise LayoutError(
            f"{parsed.place}: {tensor.name!r} of {tensor.dtype}{list(tensor.shape)} "
            f"cannot be read as {dtype}; its elements have other bits"
        )
    *outer, last = tensor.shape
    return (*outer, last * (2 if is_half_a_byte(dtype) else 1)), dtype


def _class_of(group: _Group) -> object:
    sides = (group.sources, group.targets)
    return *(tuple(sketch for sketch, _ in side) for side in sides), *group.absent


def _scalar(name: str, number: object) -> TargetTensor:
    dtype = np.float32 if isinstance(number, float) else np.int32
    return TargetTensor(name=name, dtype=np.dtype(dtype), shape=())


def _row(sketch: _Sketch, name: str) -> Row:
    tensor, captured, ranks, shape, dtype = sketch
    return Row(
        tensor=tensor,
        name=name,
        captured=captured,
        ranks=ranks,
        shape=shape,
        dtype=dtype,
    )
