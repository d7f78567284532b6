"""Matches a layout with a checkpoint and a target: the moves between them.

Every tensor of the checkpoint is used once or dropped, every element of the target is
filled once; otherwise one error lists those that are left over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from elastic_ckpt.core import errors
from elastic_ckpt.universal import garbage_collection
from elastic_ckpt.universal.moves import Fill, Move, TargetTensor
from elastic_ckpt.universal.rules import instance, rows
from elastic_ckpt.universal.rules.checkpoint_value import CheckpointValue
from elastic_ckpt.universal.rules.grouping import (
    Group,
    Grouping,
    Owner,
    Sketch,
    axis_counts,
)
from elastic_ckpt.universal.rules.instance import Instance, Plan
from elastic_ckpt.universal.rules.layout import Layout
from elastic_ckpt.universal.rules.layout_error import LayoutError
from elastic_ckpt.universal.rules.rows import Kept
from elastic_ckpt.universal.stored import StoredTensor

# Empty tensors in a checkpoint may have dims of any size, of which targets are made.
MOST_DERIVED = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """A layout, matched with a checkpoint.

    Attributes:
      moves: from stored tensors to target tensors.
      fills: the elements of targets that are padding.
      targets: the target tensors, as given or derived.
      rules: each rule, for people, and the number of the first move after its moves; a
        rule occurs once for each of its states.
    """

    moves: list[Move]
    fills: list[Fill]
    targets: Mapping[str, TargetTensor]
    rules: Sequence[tuple[str, int]]


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
        return _moves(layout, stored, axes, targets)


def _moves(
    layout: Layout,
    stored: Sequence[StoredTensor],
    axes: Mapping[str, int],
    targets: Mapping[str, TargetTensor] | None,
) -> Matched:
    layout.check_choices()
    counts = axis_counts(layout, stored, axes)
    given = None if targets is None else list(targets.values())
    grouping = Grouping(layout, counts, stored, given)
    grouping.check()
    planning = _Planning(stored, given, counts)
    rules = []
    for owner, groups in zip(grouping.owners, grouping.groups, strict=True):
        plans: dict[object, Plan | None] = {}
        for kept, group in groups.items():
            planning.add(owner, kept, group, plans)
        rules.append((owner.relation.rule.text, len(planning.moves)))
    planning.check(layout.place)
    planning.fill(layout, grouping.filled)
    return Matched(
        moves=planning.moves,
        fills=planning.fills,
        targets=planning.derived if targets is None else targets,
        rules=rules,
    )


class _Planning:
    def __init__(
        self,
        stored: Sequence[StoredTensor],
        given: Sequence[TargetTensor] | None,
        counts: Mapping[str, int],
    ) -> None:
        self._stored = stored
        self._given = given
        self._counts = counts
        self._problems: list[str] = []
        self.moves: list[Move] = []
        self.fills: list[Fill] = []
        self.derived: dict[str, TargetTensor] = {}

    def add(
        self,
        owner: Owner,
        kept: Kept,
        group: Group,
        plans: dict[object, Plan | None],
    ) -> None:
        # Instances that are alike except for kept captures have the same plan.
        group.sources.sort(key=lambda each: each[0][:3])
        group.targets.sort(key=lambda each: each[0][:3])
        key = tuple(
            tuple(sketch for sketch, _ in side)
            for side in (group.sources, group.targets)
        )
        if key not in plans:
            plans[key] = self._planned(owner, kept, group)
        plan = plans[key]
        if plan is None:
            return
        names = self._names(owner, kept, group, plan)
        for source, target, sizes, source_side, target_side, arithmetic in plan.copies:
            self.moves.append(
                Move(
                    source=group.sources[source][1],
                    target=names[target],
                    sizes=sizes,
                    source_side=source_side,
                    target_side=target_side,
                    arithmetic=arithmetic,
                )
            )
        for target, start, stop, value in plan.fills:
            fill = Fill(target=names[target], start=start, stop=stop, value=value)
            self.fills.append(fill)

    def fill(self, layout: Layout, filled: Sequence[int]) -> None:
        """Fills targets with the numbers of a layout.

        Args:
          layout: with the values of the checkpoint.
          filled: the numbers of given targets; targets that are derived are those of
            `fill` that no rule makes, scalars of 32 bits.

        Raises:
          LayoutError: if the checkpoint lacks a value, or a dtype cannot have it.
        """
        if self._given is not None:
            targets = [self._given[number] for number in filled]
        else:
            names = [name for name in layout.fill if name not in self.derived]
            targets = [_scalar(name, layout.fill[name]) for name in names]
            self.derived |= {target.name: target for target in targets}
        for target in targets:
            number = layout.fill[target.name]
            if isinstance(number, CheckpointValue):
                raise LayoutError(f"{number.missing}; give a number, or a `default`")
            integers = np.iinfo(target.dtype) if target.dtype.kind in "iu" else None
            if integers and not (
                float(number).is_integer() and integers.min <= number <= integers.max
            ):
                raise LayoutError(
                    f"{layout.place}: {target.name} is of {target.dtype}, which cannot "
                    f"have {number} of `fill`"
                )
            start = (0,) * len(target.shape)
            self.fills.append(
                Fill(target=target.name, start=start, stop=target.shape, value=number)
            )

    def check(self, place: str) -> None:
        if self._problems:
            # States of a parameter have the same problems.
            problems = list(dict.fromkeys(self._problems))
            listed = "\n  ".join(problems[: errors.MOST_NAMED])
            more = "\n  ..." if problems[errors.MOST_NAMED :] else ""
            raise LayoutError(
                f"{place} does not fit the shapes of the checkpoint and the target:"
                f"\n  {listed}{more}"
            )

    def _planned(self, owner: Owner, kept: Kept, group: Group) -> Plan | None:
        stored, given = self._stored, self._given
        sources = [
            _row(sketch, stored[number].name) for sketch, number in group.sources
        ]
        targets = (
            None
            if given is None
            else [_row(sketch, given[number].name) for sketch, number in group.targets]
        )
        try:
            return instance.plan(
                Instance(
                    relation=owner.relation,
                    state=owner.state,
                    sources=sources,
                    targets=targets,
                    counts=self._counts,
                    names=owner.targets,
                    kept=kept,
                )
            )
        except LayoutError as error:
            self._problems.append(str(error))
            return None

    def _names(self, owner: Owner, kept: Kept, group: Group, plan: Plan) -> list[str]:
        if self._given is not None:
            return [self._given[number].name for _, number in group.targets]
        names = []
        named = owner.relation.named(kept)
        for row in plan.targets:
            name = owner.targets[row.tensor].format({**named, **dict(row.captured)})
            names.append(name)
            assert row.dtype is not None
            if name in self.derived:
                self._problems.append(
                    f"{owner.relation.rule.text}: {name} is made by another rule too"
                )
            self.derived[name] = TargetTensor(
                name=name, dtype=row.dtype, shape=row.shape
            )
        if len(self.derived) > MOST_DERIVED:
            raise LayoutError(
                f"{owner.relation.rule.text}: over {MOST_DERIVED} tensors would be "
                f"made; use the right checkpoint, or another layout"
            )
        return names


def _scalar(name: str, number: object) -> TargetTensor:
    dtype = np.float32 if isinstance(number, float) else np.int32
    return TargetTensor(name=name, dtype=np.dtype(dtype), shape=())


def _row(sketch: Sketch, name: str) -> rows.Row:
    tensor, captured, ranks, shape, dtype = sketch
    return rows.Row(
        tensor=tensor,
        name=name,
        captured=captured,
        ranks=ranks,
        shape=shape,
        dtype=dtype,
    )
