"""Matches a layout with a checkpoint and a target: the moves between them.

Each tensor of the checkpoint belongs to the first rule of the layout whose pattern
matches its name, and that has all of its tensors. A rule holds for each value of the
captures that all of its names have, and the names of its targets follow from these.
Every tensor is used or dropped, every element of the target is filled once; otherwise
one error lists what is left over.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import functools
import gc
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.universal.new_moves import (
    Derived,
    Fill,
    Matched,
    Move,
    Side,
    TargetTensor,
    is_half_a_byte,
)
from elastic_ckpt.universal.new_rules import names
from elastic_ckpt.universal.new_rules.names import NamePattern, Value
from elastic_ckpt.universal.new_rules.rule import (
    Items,
    ParsedRule,
    Plan,
    Planner,
    Row,
    Tensor,
    UnknownSizeError,
    boxes_of,
    can_be,
    target_dtype,
)
from elastic_ckpt.universal.rules.checkpoint_value import CheckpointValue
from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.rules.state import PARAMETER, State
from elastic_ckpt.universal.stored import StoredTensor

# The kind of all tensors of formats that have no kinds; it fits any state.
ANY_KIND = "parameter"
# The rank axes of formats. A checkpoint that lacks one has one rank of it.
_AXES = ("dp", "ep", "pp", "tp", "vp")
# The most names among which the nearest one is searched.
_MOST_COMPARED = 2000

# The values of the captures that all names of a rule have.
Kept = tuple[Value, ...]
_Captured = tuple[Kept, Items]
_Search = dict[Kept, list[dict[str, Value]]]


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
    # The collector would scan millions of tensors again and again.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        if layout.through:
            return _through(layout, stored, axes, targets)
        return _Matching(layout, stored, axes, targets).matched()
    finally:
        if was_enabled:
            gc.enable()


def _axis_counts(
    layout: Layout, stored: Sequence[StoredTensor], axes: Mapping[str, int]
) -> dict[str, int]:
    # The number of ranks by axis: of the checkpoint, the layout, or as they occur.
    found = dict.fromkeys(_AXES, 1)
    for axis, number in {each for tensor in stored for each in tensor.ranks}:
        found[axis] = max(found.get(axis, 1), number + 1)
    for axis, count in layout.ranks.items():
        if not found.get(axis, 1) <= count == axes.get(axis, count):
            raise LayoutError(
                f"{layout.place}: `ranks` has {count} of {axis}, and the checkpoint "
                f"{axes.get(axis, found.get(axis))}; remove {axis} from `ranks`"
            )
    return {**found, **layout.ranks, **axes}


@dataclasses.dataclass(eq=False)
class _Owner:
    """A rule with one of its states.

    Attributes:
      rule: the rule.
      state: the kind of state.
      sources: the whole name patterns of its sources.
      targets: the whole name patterns of its targets.
      excepted: matches the names that its sources do not match.
      present: the sources that each instance has, by kept captures.
      groups: the tensors of each instance, with their numbers.
    """

    rule: ParsedRule
    state: str
    sources: list[NamePattern]
    targets: list[NamePattern]
    excepted: re.Pattern[str]
    present: dict[Kept, set[int]] = dataclasses.field(default_factory=dict)
    groups: dict[Kept, list[tuple[Row, int]]] = dataclasses.field(default_factory=dict)

    def captured(self, name: NamePattern, texts: Sequence[str]) -> _Captured | None:
        """The values that texts give to kept captures, and to the others."""
        numbers = self.rule.numbers
        values = {
            each.key: each.value(text, numbers)
            for each, text in zip(name.captures, texts, strict=True)
        }
        # Names that count from 1 have no 0.
        if any(isinstance(each, int) and each < 0 for each in values.values()):
            return None
        kept = tuple([values.pop(key) for key in self.rule.kept])
        return kept, tuple(values.items())


# A pattern of an owner that matches a name.
_Match = tuple[_Owner, int, Kept, Items]


def _owners(layout: Layout) -> Iterator[_Owner]:
    for rule in layout.rules:
        if rule.only == "inverse":
            continue
        parsed = ParsedRule(layout.complete(rule))
        states = {kind: layout.states[kind] for kind in rule.states or layout.states}
        if rule.kind is not None:
            states = {rule.kind: State(source=PARAMETER, target=PARAMETER)}
        for kind, state in states.items():
            if state.source is None or state.target is None:
                continue
            sources, targets = (
                [
                    names.parse(text.replace(PARAMETER, each.name.text), parsed.forms)
                    for each in side
                ]
                for text, side in (
                    (state.source, parsed.sources),
                    (state.target, parsed.targets),
                )
            )
            yield _Owner(parsed, kind, sources, targets, names.glob(rule.excepted))


def _dropped(layout: Layout) -> Iterator[tuple[str | None, bool, re.Pattern[str]]]:
    # The kind of tensors, whether those of formats without kinds are dropped too, and
    # their names.
    yield None, True, names.glob(layout.drop)
    listed = list(layout.drop_of_kind)
    for kind, state in layout.states.items():
        if state.source is not None and state.target is None:
            listed.append((kind, state.source.replace(PARAMETER, "*")))
    for of_kind, text in listed:
        # Such a state has the name of its parameter.
        yield of_kind, text != "*", names.glob([text])


class _Matching:
    def __init__(
        self,
        layout: Layout,
        stored: Sequence[StoredTensor],
        axes: Mapping[str, int],
        targets: Mapping[str, TargetTensor] | None,
    ) -> None:
        self._layout, self._stored, self._given = layout, stored, targets
        self._counts = _axis_counts(layout, stored, axes)
        self._shorter = names.unboxed({each.name for each in stored})
        self._shorter_targets = names.unboxed((targets or {}).keys())
        self._by_name = dict(targets or {})
        for name, shorter in self._shorter_targets.items():
            self._by_name[shorter] = self._by_name[name]
        self._searched: dict[tuple[_Owner, int], _Search] = {}
        self._problems: dict[str, dict[str, None]] = collections.defaultdict(dict)
        self._owners = list(_owners(layout))
        self._assign()

    def matched(self) -> Matched:
        """The moves of all instances.

        Raises:
          LayoutError: if the layout does not fit.
        """
        plans = self._plans()
        if "rules do not fit" in self._problems:
            self._raise()
        made: list[Move] = []
        fills: list[Fill] = []
        derived: list[Derived] = []
        targets: dict[str, TargetTensor] = {}
        rules = []
        for owner, of_owner in zip(self._owners, plans, strict=True):
            for kept, group in owner.groups.items():
                plan = of_owner[kept]
                if plan is None:
                    continue
                held = self._targets(owner, kept, plan, targets)
                first = len(self._stored) + len(derived)
                numbers = [at for _, at in group]
                derived += [_numbered(each, numbers) for each in plan.derived]
                numbers += range(first, len(self._stored) + len(derived))
                made += [
                    dataclasses.replace(
                        each, target=held[target].name, source=numbers[each.source]
                    )
                    for target, each in plan.moves
                ]
                for number, start, stop, value in plan.fills:
                    self._check_value(
                        held[number], value, f"`pad` of {owner.rule.text}"
                    )
                    name = held[number].name
                    fills.append(Fill(target=name, start=start, stop=stop, value=value))
            rules.append((owner.rule.text, len(made)))
        self._fill(targets, fills)
        self._note_targets(targets)
        self._raise()
        if self._given is not None:
            targets = {name: targets[name] for name in self._given}
        return Matched(
            moves=made, derived=derived, fills=fills, targets=targets, rules=rules
        )

    def _assign(self) -> None:
        # Each tensor to the first rule that matches it and has all of its tensors.
        readers = [
            (owner, number, name.skeleton(numbers), name.regex(numbers))
            for owner in self._owners
            for numbers in [owner.rule.numbers]
            for number, name in enumerate(owner.sources)
        ]
        candidates: dict[str, list[tuple[_Owner, int, re.Pattern[str]]]] = {}
        dropped = list(_dropped(self._layout))
        found: list[tuple[int, list[_Match]]] = []
        taken: set[tuple[ParsedRule, int]] = set()
        for at, tensor in enumerate(self._stored):
            spellings = [tensor.name]
            if tensor.name in self._shorter:
                spellings.append(self._shorter[tensor.name])
            matches: list[_Match] = []
            for name in spellings:
                skeleton = names.skeleton(name)
                if skeleton not in candidates:
                    candidates[skeleton] = [
                        (owner, number, regex)
                        for owner, number, of_skeleton, regex in readers
                        if of_skeleton.fullmatch(skeleton)
                    ]
                for owner, number, regex in () if matches else candidates[skeleton]:
                    match = regex.fullmatch(name)
                    if match and not any(map(owner.excepted.fullmatch, spellings)):
                        pattern = owner.sources[number]
                        captured = owner.captured(pattern, match.groups())
                        if captured is not None:
                            matches.append((owner, number, *captured))
            exact = [each for each in matches if each[0].state == tensor.kind]
            if exact or tensor.kind != ANY_KIND:
                matches = exact
            is_dropped = any(
                any(map(name.fullmatch, spellings))
                for kind, is_of_any, name in dropped
                if kind in (None, tensor.kind)
                or (tensor.kind == ANY_KIND and is_of_any and not exact)
            )
            if is_dropped:
                taken |= {(owner.rule, number) for owner, number, _, _ in matches}
                continue
            for owner, number, kept, _ in matches:
                owner.present.setdefault(kept, set()).add(number)
                if owner.rule.needed != owner.rule.wanted:
                    taken.add((owner.rule, number))
            found.append((at, matches))
        alone = [(axis, 0) for axis, count in self._counts.items() if count == 1]
        for at, matches in found:
            tensor = self._stored[at]
            first = self._first(matches)
            if first is None:
                self._note_source(tensor, matches)
                continue
            owner, number, kept, captured = first
            taken.add((owner.rule, number))
            if unmet := owner.rule.rule.unmet:
                self._note(
                    "tensors are in rules that require other values",
                    f"{tensor.name} ({owner.rule.text}: {unmet})",
                )
            shape, dtype = _viewed(tensor, owner.rule.sources[number])
            ranks = tuple(dict.fromkeys((*tensor.ranks, *alone)))
            row = Row(number, (*ranks, *captured), shape, dtype)
            owner.groups.setdefault(kept, []).append((row, at))
        self._check_patterns(taken)

    def _first(self, matches: Sequence[_Match]) -> _Match | None:
        # Of the rules that match a tensor, the one that counts.
        for each in matches:
            owner, _, kept, _ = each
            if owner.present[kept] >= owner.rule.wanted and (
                not owner.rule.rule.optional or self._has_targets(owner, kept)
            ):
                return each
        for each in matches:
            owner, _, kept, _ = each
            if (
                owner.present[kept] >= owner.rule.needed
                and not owner.rule.rule.optional
            ):
                return each
        return None

    def _has_targets(self, owner: _Owner, kept: Kept) -> bool:
        return self._given is None or all(
            each is not None or self._search(owner, kept, number)
            for number, each in enumerate(self._first_targets(owner, kept))
        )

    def _first_targets(self, owner: _Owner, kept: Kept) -> list[TargetTensor | None]:
        # Of each pattern, the target whose other captures are 0.
        named = dict(zip(owner.rule.kept, kept, strict=True))
        return [
            self._find(
                each, {**dict.fromkeys((c.key for c in each.captures), 0), **named}
            )
            for each in owner.targets
        ]

    def _find(
        self, pattern: NamePattern, values: Mapping[str, Value]
    ) -> TargetTensor | None:
        name = pattern.format(values)
        if name in self._by_name or pattern.text.endswith(names.BOX):
            return self._by_name.get(name)
        # A capture may be the name of a source in a box.
        return self._by_name.get(name.removesuffix(names.BOX))

    def _search(self, owner: _Owner, kept: Kept, number: int) -> list[dict[str, Value]]:
        # The captures of the targets that match a pattern, without those kept.
        if (owner, number) not in self._searched:
            found = self._searched[owner, number] = collections.defaultdict(list)
            pattern = owner.targets[number]
            regex = pattern.regex(owner.rule.numbers)
            for name in self._given or ():
                match = regex.fullmatch(self._shorter_targets.get(name, name))
                captured = owner.captured(pattern, match.groups()) if match else None
                if captured is not None:
                    found[captured[0]].append(dict(captured[1]))
        return self._searched[owner, number][kept]

    def _plans(self) -> list[dict[Kept, Plan | None]]:
        # By owner and instance. Instances that are alike but for kept captures share
        # one; sizes that shapes do not tell may be known from other rules.
        found: list[dict[Kept, Plan | None]] = []
        pending = []
        for owner in self._owners:
            classes: dict[object, tuple[Kept, list[Kept]]] = {}
            found.append({})
            for kept, group in owner.groups.items():
                group.sort(key=lambda each: each[0][:2])
                given = self._first_targets(owner, kept) if self._given else []
                shapes = tuple(each and each.shape for each in given)
                key = (tuple([row for row, _ in group]), shapes)
                if key not in classes:
                    classes[key] = kept, []
                    pending.append((owner, kept, given, classes[key][1], found[-1]))
                classes[key][1].append(kept)
        lent: dict[str, int] = {}
        sizes: dict[str, set[int]] = collections.defaultdict(set)
        for is_last in (False, True):
            unknown = []
            for each in pending:
                owner, kept, given, alike, plans = each
                rows = [row for row, _ in owner.groups[kept]]
                search, plan = None, None
                if self._given is not None:
                    search = functools.partial(self._search, owner, kept)
                try:
                    planner = Planner(
                        owner.rule, owner.state, rows, self._counts, given, search, lent
                    )
                    plan = planner.plan()
                except UnknownSizeError as error:
                    if is_last:
                        self._note("rules do not fit", str(error))
                    unknown.append(each)
                except LayoutError as error:
                    self._note("rules do not fit", str(error))
                plans |= dict.fromkeys(alike, plan)
                for name, size in plan.sizes.items() if plan else ():
                    sizes[name].add(size)
            lent = {name: min(held) for name, held in sizes.items() if len(held) == 1}
            pending = unknown
        return found

    def _targets(
        self,
        owner: _Owner,
        kept: Kept,
        plan: Plan,
        targets: dict[str, TargetTensor],
    ) -> list[TargetTensor]:
        # The targets of an instance, which are added to the others.
        named = dict(zip(owner.rule.kept, kept, strict=True))
        held = []
        for each in plan.targets:
            tensor, pattern = (
                owner.rule.targets[each.pattern],
                owner.targets[each.pattern],
            )
            values = {**named, **each.captured}
            name = pattern.format(values)
            given = self._find(pattern, values) if self._given is not None else None
            try:
                dtype = target_dtype(tensor, each.sources, given and given.dtype)
            except LayoutError as error:
                self._note("rules do not fit", str(error))
                dtype = np.dtype(np.float32)
            made = TargetTensor(name=name, dtype=dtype, shape=each.shape)
            text = f"{name} ({owner.rule.text})"
            if given is None and self._given is not None:
                self._note("tensors are made by rules, and missing in the target", text)
            elif given is not None and given.shape != each.shape:
                shapes = f"{list(each.shape)} by rule, and {list(given.shape)}"
                self._note("targets have other shapes", f"{shapes}: {text}")
            made = given or made
            if made.name in targets:
                self._note("tensors are made by several rules, or twice", text)
            targets[made.name] = made
            held.append(made)
        return held

    def _check_value(self, target: TargetTensor, value: float, of: str) -> None:
        if not can_be(value, target.dtype):
            text = f"{target.name} of {target.dtype}: {value:g} in {of}"
            self._note("targets cannot have a value", text)

    def _fill(self, targets: dict[str, TargetTensor], fills: list[Fill]) -> None:
        # Fills targets with the numbers of the layout; those that are made are scalars.
        for name, value in self._layout.fill.items():
            dtype = np.dtype(np.float32 if isinstance(value, float) else np.int32)
            target: TargetTensor | None = TargetTensor(name=name, dtype=dtype, shape=())
            if self._given is not None:
                target = self._by_name.get(name)
            if target is None or target.name in targets:
                continue
            if isinstance(value, CheckpointValue):
                raise LayoutError(f"{value.missing}; give a number, or a `default`")
            self._check_value(target, value, "`fill`")
            targets[target.name] = target
            start = (0,) * len(target.shape)
            fill = Fill(target=target.name, start=start, stop=target.shape, value=value)
            fills.append(fill)

    def _note(self, problem: str, text: str) -> None:
        self._problems[problem][text] = None

    def _note_source(self, tensor: StoredTensor, matches: Sequence[_Match]) -> None:
        name = self._shorter.get(tensor.name, tensor.name)
        if {name, tensor.name} & self._layout.fill_inverse.keys():
            return
        text = name if tensor.kind == ANY_KIND else f"{name} ({tensor.kind})"
        problem = "tensors of the checkpoint are in no rule"
        for owner, _, kept, _ in matches[:1]:
            named = dict(zip(owner.rule.kept, kept, strict=True))
            lacking = sorted(owner.rule.wanted - owner.present[kept])
            beside = [owner.sources[number].format(named) for number in lacking]
            needed = ", ".join(beside) or "targets that are missing"
            text += f" ({owner.rule.text} needs {needed} beside it)"
        if not matches:
            text += self._nearest(problem, name, [o.sources for o in self._owners])
        self._note(problem, text)

    def _note_targets(self, targets: Mapping[str, TargetTensor]) -> None:
        problem = "tensors of the target are in no rule"
        for name in self._given or ():
            if name not in targets:
                shown = self._shorter_targets.get(name, name)
                near = self._nearest(problem, shown, [o.targets for o in self._owners])
                self._note(problem, shown + near)

    def _nearest(
        self, problem: str, name: str, patterns: Sequence[Sequence[NamePattern]]
    ) -> str:
        # The nearest pattern and its rule; for names that an error lists.
        if len(self._problems[problem]) > errors.MOST_NAMED:
            return ""
        texts = {
            each.text: owner.rule.text
            for owner, of_owner in zip(self._owners, patterns, strict=True)
            for each in of_owner
        }
        near = difflib.get_close_matches(name, texts, n=1, cutoff=0.0)
        return "".join(f" (nearest: {each!r}, {texts[each]})" for each in near)

    def _check_patterns(self, taken: set[tuple[ParsedRule, int]]) -> None:
        # That rules that have to match tensors do so.
        by_rule: dict[ParsedRule, list[_Owner]] = {}
        for owner in self._owners:
            by_rule.setdefault(owner.rule, []).append(owner)
        for rule, owners in by_rule.items():
            is_used = any(owner.groups for owner in owners)
            may_lack = rule.rule.optional if not is_used else not rule.wanted
            for number, tensor in enumerate(rule.sources):
                if tensor.main is None and not may_lack and (rule, number) not in taken:
                    held = [each.name for each in self._stored[:_MOST_COMPARED]]
                    text = owners[0].sources[number].text
                    near = difflib.get_close_matches(text, held, n=1)
                    shown = "".join(f", the nearest is {each!r}" for each in near)
                    problem = "patterns match no tensor that earlier rules leave"
                    self._note(problem, tensor.place + shown)

    def _raise(self) -> None:
        lines = [
            f"\n  {len(held)} {problem}: {errors.first_of(held)}"
            for problem, held in self._problems.items()
            if held
        ]
        if lines:
            raise LayoutError(
                f"{self._layout.place} does not fit the checkpoint and the target; add "
                "or change rules, list tensors of the checkpoint in `drop`, or leave "
                f"those of the target out of its tree:{''.join(lines)}"
            )


def _viewed(tensor: StoredTensor, pattern: Tensor) -> tuple[tuple[int, ...], np.dtype]:
    # The shape and dtype that a rule gives to the bytes of a tensor.
    if pattern.view is None:
        return tensor.shape, tensor.dtype
    if tensor.dtype.itemsize != pattern.view.itemsize or not tensor.shape:
        raise LayoutError(
            f"{pattern.place}: {tensor.name!r} of {tensor.dtype}{list(tensor.shape)} "
            f"cannot be read as {pattern.view}; its elements have other bits"
        )
    *outer, last = tensor.shape
    return (*outer, last * (2 if is_half_a_byte(pattern.view) else 1)), pattern.view


def _numbered(derived: Derived, numbers: Sequence[int]) -> Derived:
    # Of tensors, in place of rows.
    operands = (each._replace(tensor=numbers[each.tensor]) for each in derived.operands)
    return dataclasses.replace(derived, operands=tuple(operands))


def _through(
    layout: Layout,
    stored: Sequence[StoredTensor],
    axes: Mapping[str, int],
    targets: Mapping[str, TargetTensor] | None,
) -> Matched:
    first, *others = layout.with_sizes(layout.sizes).through
    filled = {**first.fill_inverse, **layout.fill_inverse}
    *firsts, last = dataclasses.replace(first, fill_inverse=filled), *others
    last = dataclasses.replace(last, fill={**last.fill, **layout.fill})
    made: Matched | None = None
    between = stored
    for each in (*firsts, last):
        wanted = targets if each is last else None
        after = moves(each, between, axes if made is None else {}, wanted)
        made = after if made is None else _composed(made, after, between, layout.place)
        between = [
            StoredTensor(name=name, dtype=target.dtype, shape=target.shape)
            for name, target in after.targets.items()
        ]
    assert made is not None
    return made


def _composed(
    first: Matched, second: Matched, between: Sequence[StoredTensor], place: str
) -> Matched:
    # Two layouts as one: the tensors between them are the targets of the first.
    into: dict[str, list[Move]] = collections.defaultdict(list)
    for move in first.moves:
        into[move.target].append(move)
    padding: dict[str, list[Fill]] = collections.defaultdict(list)
    for fill in first.fills:
        padding[fill.target].append(fill)
    made: list[Move] = []
    fills, rules, begin = list(second.fills), [], 0
    for rule, end in second.rules:
        for after in second.moves[begin:end]:
            if after.source >= len(between):
                raise LayoutError(
                    f"{place}: {rule} makes {after.target} of several tensors, or by "
                    "`times`, `plus` or `as`; only the first layout of `through` can"
                )
            tensor = between[after.source]
            made += [_chained(e, after, tensor.shape, place) for e in into[tensor.name]]
            for fill in padding[tensor.name]:
                fills += _filled(fill, after, tensor.shape, place)
        begin = end
        rules.append((rule, len(made)))
    return dataclasses.replace(
        second, moves=made, derived=first.derived, fills=fills, rules=rules
    )


def _chained(before: Move, after: Move, shape: Sequence[int], place: str) -> Move:
    """The move of what one writes into a tensor and the other reads from it."""
    into, of = before.target_side, after.source_side
    if _is_whole(of, after.sizes, shape):
        sizes, source = before.sizes, before.source_side
        target = _beyond(into, of, after.target_side)
        # What the tensor between is repeated along.
        for size, dim, at, step in zip(
            after.sizes,
            of.dims,
            after.target_side.dims,
            after.target_side.steps,
            strict=True,
        ):
            if dim < 0:
                sizes = (*sizes, size)
                source = Side(
                    start=source.start,
                    dims=(*source.dims, -1),
                    steps=(*source.steps, 0),
                )
                target = Side(
                    start=target.start,
                    dims=(*target.dims, at),
                    steps=(*target.steps, step),
                )
    elif _is_whole(into, before.sizes, shape):
        sizes, target = after.sizes, after.target_side
        source = _beyond(of, into, before.source_side)
    else:
        raise LayoutError(
            f"{place}: both layouts regroup a dim of {before.target}, of which "
            f"{after.target} is made; write them as one"
        )
    return Move(
        target=after.target,
        sizes=sizes,
        target_side=target,
        source=before.source,
        source_side=source,
        scale=before.scale * after.scale,
        shift=before.shift * after.scale + after.shift,
    )


def _filled(
    fill: Fill, after: Move, shape: Sequence[int], place: str
) -> Iterator[Fill]:
    # The padding of a tensor that a move reads.
    sizes = tuple(b - a for a, b in zip(fill.start, fill.stop, strict=True))
    rank = len(sizes)
    side = Side(start=fill.start, dims=tuple(range(rank)), steps=(1,) * rank)
    before = Move(
        target=fill.target, sizes=sizes, target_side=side, source=0, source_side=side
    )
    move = _chained(before, after, shape, place)
    into = move.target_side
    for start, stop in boxes_of(
        into.start, zip(into.dims, into.steps, move.sizes, strict=True)
    ):
        value = fill.value * after.scale + after.shift
        yield Fill(target=after.target, start=start, stop=stop, value=value)


def _is_whole(side: Side, sizes: Sequence[int], shape: Sequence[int]) -> bool:
    # Whether the factors of a move are the dims of a tensor.
    lengths = {
        dim: size
        for dim, step, size in zip(side.dims, side.steps, sizes, strict=True)
        if step == 1 and dim >= 0
    }
    is_factor_each = len(lengths) == sum(dim >= 0 for dim in side.dims)
    return is_factor_each and all(lengths.get(d, 1) == n for d, n in enumerate(shape))


def _beyond(inner: Side, whole: Side, outer: Side) -> Side:
    # Where elements that are `inner` in a tensor lie on the other side of a move, which
    # has the whole tensor.
    factors = {dim: n for n, dim in enumerate(whole.dims) if dim >= 0}
    start = list(outer.start)
    for dim, at in enumerate(inner.start):
        if at and outer.dims[factors[dim]] >= 0:
            start[outer.dims[factors[dim]]] += at * outer.steps[factors[dim]]
    places = [
        (outer.dims[factors[dim]], step * outer.steps[factors[dim]])
        if dim >= 0
        else (-1, 0)
        for dim, step in zip(inner.dims, inner.steps, strict=True)
    ]
    return Side(
        start=tuple(start),
        dims=tuple(dim for dim, _ in places),
        steps=tuple(step for _, step in places),
    )
