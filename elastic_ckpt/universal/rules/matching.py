"""Matches a layout with a checkpoint and a target and returns the moves between them.

Each checkpoint tensor belongs to the first rule in the layout that matches its name and
all of whose tensors exist. A rule has an instance for each value of the captures that
are in all of its names; these also determine the names of its targets. Every tensor
must be used or dropped, and every element of the target must be filled once. One error
lists all violations.
"""

from __future__ import annotations

import collections
import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.universal.formats.checkpoint import StoredTensor, collector_paused
from elastic_ckpt.universal.moves import (
    Derived,
    Fill,
    Matched,
    Move,
    Side,
    TargetTensor,
    is_half_a_byte,
)
from elastic_ckpt.universal.rules import names
from elastic_ckpt.universal.rules.layout import (
    PARAMETER,
    CheckpointValue,
    Layout,
    LayoutError,
    State,
)
from elastic_ckpt.universal.rules.names import NamePattern, Value
from elastic_ckpt.universal.rules.rule import (
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

# The kind of all tensors in formats without kinds. It matches any state.
ANY_KIND = "parameter"
# The rank axes of all formats. A checkpoint that lacks an axis has one rank on it.
_AXES = ("dp", "ep", "pp", "tp", "vp")

# The maximum number of names to search for the nearest one.
_MOST_COMPARED = 2000
_MISFIT = "rules do not match the shapes in the checkpoint and the target"

# The values of the captures that are in all names of a rule.
Kept = tuple[Value, ...]
_Captured = tuple[Kept, Items]
_Search = dict[Kept, list[dict[str, Value]]]
_Reader = Callable[[str], _Captured | None]


def moves(
    layout: Layout,
    stored: Sequence[StoredTensor],
    axes: Mapping[str, int],
    targets: Mapping[str, TargetTensor] | None,
) -> Matched:
    """Plans the moves from a checkpoint's tensors to a target's tensors.

    `axes` maps each axis to its number of ranks in the checkpoint. `targets` is None
    for all targets that the rules make.

    Raises:
      LayoutError: if the layout does not match; one error lists all problems.
    """
    with collector_paused():
        if layout.through:
            return _through(layout, stored, axes, targets)
        return _Matching(layout, stored, axes, targets).matched()


@dataclasses.dataclass(eq=False)
class _Owner:
    """A rule with one of its states.

    Attributes:
      sources: the complete name patterns of its sources.
      targets: the complete name patterns of its targets.
      excepted: a regular expression for names that its sources must not match.
      present: the indices of each instance's existing sources, keyed by kept captures.
      groups: each instance's tensors with their indices in the checkpoint, keyed by
        kept captures.
    """

    rule: ParsedRule
    state: str
    sources: list[NamePattern]
    targets: list[NamePattern]
    excepted: re.Pattern[str]
    present: dict[Kept, set[int]] = dataclasses.field(default_factory=dict)
    groups: dict[Kept, list[tuple[Row, int]]] = dataclasses.field(default_factory=dict)

    def reader(self, name: NamePattern) -> _Reader:
        """Returns a function that parses the kept and all other captures of a name."""
        fullmatch = name.regex(self.rule.numbers).fullmatch
        readers = [(c.key, c.reader(self.rule.numbers)[1]) for c in name.captures]

        def read(text: str) -> _Captured | None:
            match = fullmatch(text)
            if match is None:
                return None
            texts = match.groups()
            values = {key: of(t) for (key, of), t in zip(readers, texts, strict=True)}
            if -1 in values.values():
                return None
            return tuple([values.pop(k) for k in self.rule.kept]), tuple(values.items())

        return read

    def name_of(self, kept: Kept, number: int, values: Mapping[str, Value]) -> str:
        """Formats a source's name; captures without a value remain."""
        return self.sources[number].format({**self.named(kept), **values})

    def named(self, kept: Kept) -> dict[str, Value]:
        """Maps the keys of kept captures to their values."""
        return dict(zip(self.rule.kept, kept, strict=True))


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
            if state.source is not None and state.target is not None:
                sides = (state.source, parsed.sources), (state.target, parsed.targets)
                sources, targets = (
                    [
                        names.parse(text.replace(PARAMETER, e.name.text), parsed.forms)
                        for e in side
                    ]
                    for text, side in sides
                )
                yield _Owner(parsed, kind, sources, targets, names.glob(rule.excepted))


def _dropped(layout: Layout) -> list[tuple[str | None, bool, re.Pattern[str]]]:
    # For each entry, the kind of the tensors to drop, whether tensors without kinds are
    # also dropped, and the names.
    listed = [
        *((None, text) for text in layout.drop),
        *layout.drop_of_kind,
        *(
            (kind, state.source.replace(PARAMETER, "*"))
            for kind, state in layout.states.items()
            if state.source is not None and state.target is None
        ),
    ]
    # Only formats with kinds have a state with the same name as its parameter.
    return [(k, k is None or text != "*", names.glob([text])) for k, text in listed]


class _Matching:
    def __init__(
        self,
        layout: Layout,
        stored: Sequence[StoredTensor],
        axes: Mapping[str, int],
        targets: Mapping[str, TargetTensor] | None,
    ) -> None:
        self._layout, self._stored, self._given = layout, stored, targets
        for axis, count in layout.ranks.items():
            if count != axes.get(axis, count):
                raise LayoutError(
                    f"{layout.place}: `ranks` sets {axis} to {count}, but the "
                    f"checkpoint has {axes[axis]}; remove {axis} from `ranks`"
                )
        self._counts = {**layout.ranks, **axes}
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
        """Plans the moves of all instances.

        Raises:
          LayoutError: if the layout does not match.
        """
        plans = self._plans()
        if _MISFIT in self._problems:
            self._raise()
        made: list[Move] = []
        fills: list[Fill] = []
        derived: list[Derived] = []
        targets: dict[str, TargetTensor] = {}
        rules = []
        for owner in self._owners:
            for kept, group in owner.groups.items():
                plan = plans[owner, kept]
                held = self._targets(owner, kept, plan, targets)
                first = len(self._stored) + len(derived)
                numbers = [at for _, at in group]
                for each in plan.derived:
                    rows = each.operands
                    rows = tuple(e._replace(tensor=numbers[e.tensor]) for e in rows)
                    derived.append(dataclasses.replace(each, operands=rows))
                numbers += range(first, len(self._stored) + len(derived))
                made += [
                    Move(
                        target=held[target].name,
                        sizes=sizes,
                        target_side=into,
                        source=numbers[source],
                        source_side=of,
                        scale=scale,
                        shift=shift,
                    )
                    for target, sizes, into, source, of, scale, shift in plan.moves
                ]
                for number, start, stop, value in plan.fills:
                    box = held[number], start, stop
                    fills.append(
                        self._filled(*box, value, f"`pad` ({owner.rule.text})")
                    )
            rules.append((owner.rule.text, len(made)))
        self._fill(targets, fills)
        for name in self._given or ():
            if name not in targets:
                shorter = self._shorter_targets.get(name, name)
                self._note_left("target tensors are not made by any rule", shorter, 1)
        self._raise()
        return Matched(
            moves=made, derived=derived, fills=fills, targets=targets, rules=rules
        )

    def _assign(self) -> None:
        # Assigns each tensor to the first rule that matches it and all of whose tensors
        # exist.
        dropped = _dropped(self._layout)
        readers = [
            (owner, number, name.skeleton(owner.rule.numbers), owner.reader(name))
            for owner in self._owners
            for number, name in enumerate(owner.sources)
        ]
        by_skeleton: dict[str, list[tuple[_Owner, int, _Reader]]] = {}
        found: list[tuple[int, list[_Match]]] = []
        taken: set[tuple[ParsedRule, int]] = set()
        for at, tensor in enumerate(self._stored):
            shorter = self._shorter.get(tensor.name, tensor.name)
            matches: list[_Match] = []
            for name in dict.fromkeys((tensor.name, shorter)):
                skeleton = names.skeleton(name)
                if skeleton not in by_skeleton:
                    by_skeleton[skeleton] = [
                        (owner, number, read)
                        for owner, number, of_skeleton, read in readers
                        if of_skeleton.fullmatch(skeleton)
                    ]
                for owner, number, read in () if matches else by_skeleton[skeleton]:
                    captured = read(name)
                    if captured and not _fits(owner.excepted, tensor.name, shorter):
                        matches.append((owner, number, *captured))
            exact = [each for each in matches if each[0].state == tensor.kind]
            if exact or tensor.kind != ANY_KIND:
                matches = exact
            is_dropped = any(
                _fits(name, tensor.name, shorter)
                for kind, is_of_any, name in dropped
                if kind in (None, tensor.kind)
                or (tensor.kind == ANY_KIND and is_of_any and not exact)
            )
            for owner, number, kept, _ in matches:
                if not is_dropped:
                    owner.present.setdefault(kept, set()).add(number)
                if is_dropped or owner.rule.needed != owner.rule.wanted:
                    taken.add((owner.rule, number))
            if not is_dropped:
                found.append((at, matches))
        axes = [e for e in (*_AXES, *self._counts) if self._counts.get(e, 1) == 1]
        alone = {
            owner.rule: {axis: 0 for axis in axes if axis in owner.rule.names}
            for owner in self._owners
        }
        for at, matches in found:
            tensor = self._stored[at]
            first = self._first(matches)
            if first is None:
                self._note_source(tensor, matches)
                continue
            owner, number, kept, captured = first
            taken.add((owner.rule, number))
            if unmet := owner.rule.rule.unmet:
                text = f"{tensor.name} ({owner.rule.text}: {unmet})"
                self._note("tensors match rules that require different values", text)
            shape, dtype = _viewed(tensor, owner.rule.sources[number])
            values = alone[owner.rule] | dict((*tensor.ranks, *captured))
            name = self._shorter.get(tensor.name, tensor.name)
            row = Row(number, tuple(values.items()), shape, dtype, name)
            owner.groups.setdefault(kept, []).append((row, at))
        self._check_patterns(taken)

    def _first(self, matches: Sequence[_Match]) -> _Match | None:
        # Of the rules that match a tensor, the first all of whose tensors exist;
        # otherwise, the first whose needed tensors exist.
        found = []
        for each in matches:
            owner, _, kept, _ = each
            if owner.present[kept] >= owner.rule.wanted and (
                not owner.rule.rule.optional or self._has_targets(owner, kept)
            ):
                return each
            if (
                owner.present[kept] >= owner.rule.needed
                and not owner.rule.rule.optional
            ):
                found.append(each)
        return found[0] if found else None

    def _has_targets(self, owner: _Owner, kept: Kept) -> bool:
        return self._given is None or all(
            each is not None or self._search(owner, kept, number)
            for number, each in enumerate(self._first_targets(owner, kept))
        )

    def _first_targets(self, owner: _Owner, kept: Kept) -> list[TargetTensor | None]:
        # For each pattern, the target whose other captures are 0.
        named = owner.named(kept)
        return [
            self._find(name, {c.key: named.get(c.key, 0) for c in name.captures})
            for name in owner.targets
        ]

    def _find(
        self, pattern: NamePattern, values: Mapping[str, Value]
    ) -> TargetTensor | None:
        name = pattern.format(values)
        if name in self._by_name or pattern.text.endswith(names.BOX):
            return self._by_name.get(name)
        # The captured text may come from a source that Flax wraps.
        return self._by_name.get(name.removesuffix(names.BOX))

    def _search(self, owner: _Owner, kept: Kept, number: int) -> list[dict[str, Value]]:
        # The captures, except kept ones, of each target that matches a pattern.
        if (owner, number) not in self._searched:
            found = self._searched[owner, number] = collections.defaultdict(list)
            read = owner.reader(owner.targets[number])
            for name in self._given or ():
                captured = read(self._shorter_targets.get(name, name))
                if captured is not None:
                    found[captured[0]].append(dict(captured[1]))
        return self._searched[owner, number][kept]

    def _listed(self, owner: _Owner, kept: Kept) -> dict[int, list[dict[str, Value]]]:
        return {
            at: self._search(owner, kept, at)
            for at in owner.rule.listed
            if self._given is not None
        }

    def _plans(self) -> dict[tuple[_Owner, Kept], Plan]:
        # Plans each instance. Instances that differ only in kept captures share a plan.
        # Sizes that shapes do not determine may come from other rules.
        classes: dict[object, int] = {}
        class_of: dict[tuple[_Owner, Kept], int] = {}
        pending: dict[int, tuple[_Owner, Kept, list[TargetTensor | None]]] = {}
        for owner in self._owners:
            for kept, group in owner.groups.items():
                group.sort(key=lambda each: each[0][:2])
                given = self._first_targets(owner, kept) if self._given else []
                shapes = tuple([each and each.shape for each in given])
                # Without names.
                rows = tuple([row[:-1] for row, _ in group])
                key = (owner, rows, shapes, repr(self._listed(owner, kept)))
                number = classes.setdefault(key, len(classes))
                pending.setdefault(number, (owner, kept, given))
                class_of[owner, kept] = number
        plans: dict[int, Plan] = {}
        lent: dict[str, int] = {}
        for is_last in (False, True):
            for number, (owner, kept, given) in pending.items():
                rows = [row for row, _ in owner.groups[kept]]
                listed = self._listed(owner, kept)
                try:
                    if number not in plans:
                        planner = Planner(
                            *(owner.rule, owner.state, rows, self._counts),
                            *(given, listed, lent),
                            functools.partial(owner.name_of, kept),
                        )
                        plans[number] = planner.plan()
                except LayoutError as error:
                    if is_last or not isinstance(error, UnknownSizeError):
                        rule = owner.rule.text
                        rule = "" if rule in str(error) else f"{rule}: "
                        self._note(_MISFIT, f"{rule}{error}")
            sizes = {each for plan in plans.values() for each in plan.sizes.items()}
            times = collections.Counter(name for name, _ in sizes)
            lent = {name: size for name, size in sizes if times[name] == 1}
        return {each: plans[n] for each, n in class_of.items() if n in plans}

    def _targets(
        self, owner: _Owner, kept: Kept, plan: Plan, targets: dict[str, TargetTensor]
    ) -> list[TargetTensor]:
        # Adds an instance's targets to `targets` and returns them.
        named = owner.named(kept)
        held = []
        for each in plan.targets:
            tensor, pattern = (
                owner.rule.targets[each.pattern],
                owner.targets[each.pattern],
            )
            values = {**named, **each.captured}
            name = pattern.format(values)
            text = f"{name} ({owner.rule.text})"
            given = self._find(pattern, values)
            dtype = np.dtype(np.float32)
            try:
                dtype = target_dtype(
                    tensor, each.sources, given.dtype if given else None
                )
            except LayoutError as error:
                self._note("dtypes do not match", f"{tensor.place}: {name!r} {error}")
            if given is None and self._given is not None:
                self._note(
                    "tensors are made by rules but missing from the target", text
                )
            elif given is not None and given.shape != each.shape:
                text = f"{text}: rule {list(each.shape)}, target {list(given.shape)}"
                self._note("targets have a different shape", text)
            made = given or TargetTensor(name=name, dtype=dtype, shape=each.shape)
            if made.name in targets:
                self._note("tensors are made more than once", text)
            targets[made.name] = made
            held.append(made)
        return held

    def _filled(
        self,
        target: TargetTensor,
        start: tuple[int, ...],
        stop: tuple[int, ...],
        value: float,
        option: str,
    ) -> Fill:
        if not can_be(value, target.dtype):
            text = f"{target.name} is {target.dtype}, but {option} sets it to {value}"
            self._note("targets cannot represent a value", text)
        return Fill(target=target.name, start=start, stop=stop, value=value)

    def _fill(self, targets: dict[str, TargetTensor], fills: list[Fill]) -> None:
        # Fills targets with the layout's numbers. If no targets were passed in, the
        # numbers become scalars.
        for name, value in self._layout.fill.items():
            target = self._by_name.get(name)
            if self._given is None:
                dtype = np.dtype(np.float32 if isinstance(value, float) else np.int32)
                target = TargetTensor(name=name, dtype=dtype, shape=())
            if target is None or target.name in targets:
                continue
            if isinstance(value, CheckpointValue):
                raise LayoutError(f"{value.missing}; set a number, or add a `default`")
            targets[target.name] = target
            box = target, (0,) * len(target.shape), target.shape
            fills.append(self._filled(*box, value, "`fill`"))

    def _note(self, problem: str, text: str) -> None:
        self._problems[problem][text] = None

    def _note_source(self, tensor: StoredTensor, matches: Sequence[_Match]) -> None:
        name = self._shorter.get(tensor.name, tensor.name)
        if {name, tensor.name} & self._layout.fill_inverse.keys():
            return
        if not matches:
            of_kind = "" if tensor.kind == ANY_KIND else f" ({tensor.kind})"
            problem = "checkpoint tensors are not matched by any rule"
            self._note_left(problem, name, 0, of_kind)
            return
        lacking = [
            owner.rule.wanted - owner.present[kept] for owner, _, kept, _ in matches
        ]
        # Reports the rule that lacks the fewest tensors.
        at = min(range(len(matches)), key=lambda n: len(lacking[n]))
        owner, _, kept, _ = matches[at]
        names_of = (owner.name_of(kept, n, {}) for n in sorted(lacking[at]))
        lacks = ", ".join(names_of) or "targets in the tree"
        problem = "tensors match rules that lack other tensors"
        self._note(problem, f"{name} ({owner.rule.text} lacks {lacks})")

    def _note_left(self, problem: str, name: str, side: int, kind: str = "") -> None:
        # Adds the side's nearest pattern and its rule if the error will list the name.
        near = ""
        if len(self._problems[problem]) <= errors.MOST_NAMED:
            texts = {
                each.text: owner.rule.text
                for owner in self._owners
                for each in (owner.sources, owner.targets)[side]
            }
            found = difflib.get_close_matches(name, texts, n=1, cutoff=0.0)
            near = "".join(f" (nearest: {each!r}, {texts[each]})" for each in found)
        self._note(problem, f"{name}{kind}{near}")

    def _check_patterns(self, taken: set[tuple[ParsedRule, int]]) -> None:
        # Checks that each pattern that must match a tensor does.
        used = {owner.rule for owner in self._owners if owner.groups}
        unmatched = [
            tensor
            for rule in dict.fromkeys(owner.rule for owner in self._owners)
            if (rule.wanted if rule in used else not rule.rule.optional)
            for number, tensor in enumerate(rule.sources)
            if tensor.main is None and (rule, number) not in taken
        ]
        stored = [each.name for each in self._stored[:_MOST_COMPARED]]
        for tensor in unmatched:
            near = difflib.get_close_matches(tensor.name.text, stored, n=1)
            shown = "".join(f" (nearest: {each!r})" for each in near)
            problem = "patterns do not match any tensor that earlier rules left"
            self._note(problem, tensor.place + shown)

    def _raise(self) -> None:
        lines = [
            f"\n  {len(held)} {problem}: {errors.first_of(held)}"
            for problem, held in self._problems.items()
            if held
        ]
        if lines:
            raise LayoutError(
                f"{self._layout.place} does not match the checkpoint and the target; "
                "add or change rules, list unused checkpoint tensors in `drop`, or "
                f"remove target tensors from the tree:{''.join(lines)}"
            )


def _fits(pattern: re.Pattern[str], name: str, shorter: str) -> bool:
    return bool(pattern.fullmatch(name) or pattern.fullmatch(shorter))


def _viewed(tensor: StoredTensor, pattern: Tensor) -> tuple[tuple[int, ...], np.dtype]:
    # The shape and dtype that a tensor has when a rule reads it.
    if pattern.view is None:
        return tensor.shape, tensor.dtype
    if tensor.dtype.itemsize != pattern.view.itemsize or not tensor.shape:
        raise LayoutError(
            f"{pattern.place}: {tensor.name!r} is {tensor.dtype}{list(tensor.shape)} "
            f"and cannot be read as {pattern.view}; `as` requires elements of the same "
            "size and at least one dim"
        )
    *outer, last = tensor.shape
    return (*outer, last * (2 if is_half_a_byte(pattern.view) else 1)), pattern.view


def _through(
    layout: Layout,
    stored: Sequence[StoredTensor],
    axes: Mapping[str, int],
    targets: Mapping[str, TargetTensor] | None,
) -> Matched:
    chain = list(layout.with_sizes(layout.sizes).through)
    fills = {**chain[0].fill_inverse, **layout.fill_inverse}
    chain[0] = dataclasses.replace(chain[0], fill_inverse=fills)
    chain[-1] = dataclasses.replace(chain[-1], fill={**chain[-1].fill, **layout.fill})
    made = moves(chain[0], stored, axes, None if chain[1:] else targets)
    for number, each in enumerate(chain[1:], start=2):
        between = [
            StoredTensor(name=name, dtype=target.dtype, shape=target.shape)
            for name, target in made.targets.items()
        ]
        after = moves(each, between, {}, targets if number == len(chain) else None)
        made = _composed(made, after, layout.place)
    return made


def _composed(first: Matched, second: Matched, place: str) -> Matched:
    # Joins two layouts: the first one's targets are the second one's tensors.
    between = list(first.targets.values())
    into: dict[str, list[Move]] = collections.defaultdict(list)
    for move in (*first.moves, *_of_fills(first.fills)):
        into[move.target].append(move)
    made: list[Move] = []
    fills, rules, begin = list(second.fills), [], 0
    for rule, end in second.rules:
        for after in second.moves[begin:end]:
            if after.source >= len(between):
                raise LayoutError(
                    f"{place}: {rule} makes {after.target} from multiple tensors, or "
                    "with `times`, `plus` or `as`; only the first layout in `through` "
                    "can do this"
                )
            for before in into[between[after.source].name]:
                move = _chained(before, after, between[after.source].shape, place)
                if before.source >= 0:
                    made.append(move)
                    continue
                side = move.target_side
                factors = zip(side.dims, side.steps, move.sizes, strict=True)
                fills += [
                    Fill(target=after.target, start=start, stop=stop, value=move.shift)
                    for start, stop in boxes_of(side.start, factors)
                ]
        begin = end
        rules.append((rule, len(made)))
    made_of = first.derived
    return dataclasses.replace(
        second, moves=made, derived=made_of, fills=fills, rules=rules
    )


def _of_fills(fills: Sequence[Fill]) -> Iterator[Move]:
    # Represents fills as moves without a source, whose shift is the value.
    for fill in fills:
        lengths = [b - a for a, b in zip(fill.start, fill.stop, strict=True)]
        # As in other moves, a dim of length 1 is not a factor.
        dims = tuple(dim for dim, length in enumerate(lengths) if length != 1)
        side = Side(start=fill.start, dims=dims, steps=(1,) * len(dims))
        yield Move(
            target=fill.target,
            sizes=tuple(lengths[dim] for dim in dims),
            target_side=side,
            source=-1,
            source_side=side,
            shift=fill.value,
        )


def _chained(before: Move, after: Move, shape: Sequence[int], place: str) -> Move:
    # Joins two moves: the result moves the elements that the first writes to a tensor
    # and the second reads from it.
    into, of = before.target_side, after.source_side
    if _is_whole(of, after.sizes, shape):
        # The factors along which the intermediate tensor is repeated.
        repeated = [n for n, dim in enumerate(of.dims) if dim < 0]
        sizes = (*before.sizes, *(after.sizes[n] for n in repeated))
        source = _with_factors(before.source_side, [(-1, 0)] * len(repeated))
        side = after.target_side
        outer = [(side.dims[n], side.steps[n]) for n in repeated]
        target = _with_factors(_beyond(into, of, side), outer)
    elif _is_whole(into, before.sizes, shape):
        sizes, target = after.sizes, after.target_side
        source = _beyond(of, into, before.source_side)
    else:
        raise LayoutError(
            f"{place}: both layouts regroup a dim of {before.target}, which "
            f"{after.target} is made from; combine them into one layout"
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


def _with_factors(side: Side, factors: Sequence[tuple[int, int]]) -> Side:
    dims = (*side.dims, *(dim for dim, _ in factors))
    return Side(
        start=side.start, dims=dims, steps=(*side.steps, *(step for _, step in factors))
    )


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
    # The position of the elements at `inner` in a tensor on the other side of a move of
    # the whole tensor.
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
