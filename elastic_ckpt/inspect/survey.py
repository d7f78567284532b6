"""A survey: which steps are in which tiers, who holds them, and what could be lost.

A survey reads only manifests, and the files of components that describe themselves;
`verification` compares the values with their digests.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from elastic_ckpt.checkpoint.host import verified_read
from elastic_ckpt.core import digest, errors
from elastic_ckpt.core.errors import MOST_NAMED, first_of
from elastic_ckpt.inspect.tier_locations import Locations
from elastic_ckpt.steps.manifest import Holder
from elastic_ckpt.steps.table import StepTable
from elastic_ckpt.tiers.find import FoundStep

# The file of a component that describes itself, and files with the version of others.
_DESCRIPTION = "component.json"
_OTHERS = ("data_state.json", "callbacks.json")
_BY_SHARDING = "by sharding"
_OWN = "its own files"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepComponent:
    """A part of a step: a pytree or a component.

    Attributes:
      name: of the part.
      pattern: how hosts share it: `global`, `per_host` and so on as it was saved; for
        a pytree it follows from the shardings of its arrays.
      resize: what becomes of it when the number of hosts changes: the rule that the
        program which saved it declared, a function's by its name.
      required: whether that program declared it as required; None if it is not known,
        as for a pytree.
      version: of the format of its files; None if none of them has one.
      num_leaves: arrays and numbers, of a pytree.
      num_files: of a component.
      num_bytes: of one copy of all.
      digest: of the digests of all its parts: equal if they are equal, and cut alike.
      hosts: the ids of the hosts that hold something of it, ordered.
    """

    name: str
    pattern: str
    resize: str
    required: bool | None
    version: int | None
    num_leaves: int
    num_files: int
    num_bytes: int
    digest: str
    hosts: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierOfStep:
    """The part of a save of a step that one tier holds.

    Attributes:
      tier: `local` (the memory of all hosts) or `persistent`.
      problem: what is wrong with it there; None if all of it is there.
      holders: the ids of the hosts whose manifests are there, ordered.
      num_bytes: of all copies.
    """

    tier: str
    problem: str | None
    holders: tuple[str, ...]
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SurveyedStep:
    """A save of a step.

    Attributes:
      step: its number.
      save: which save of it; empty if Orbax alone saved it.
      problem: what is wrong with it in all tiers together; None if it is complete.
      preserved: whether it is preserved by hand, as far as it can be seen.
      abandoned: whether the run went on without it, from an earlier step.
      parent: the step, with its save, from which the run went on under this save; None
        of the first one.
      tiers: that have something of it.
      components: its parts; none of an incomplete step.
    """

    step: int
    save: str
    problem: str | None
    preserved: bool
    abandoned: bool
    parent: tuple[int, str] | None
    tiers: tuple[TierOfStep, ...]
    components: tuple[StepComponent, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class UncommittedStep:
    """A part of a step that is not committed: it is being written, or was interrupted.

    Attributes:
      step: its number.
      path: of the directory.
    """

    step: int
    path: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Survey:
    """The result of a survey.

    Attributes:
      known: the numbers of all steps of which there may be something, ascending.
      steps: that were looked at, ascending by step and save.
      leftovers: what is not committed: it is being written, or was cut short.
      problems: manifests that cannot be had.
    """

    known: tuple[int, ...]
    steps: tuple[SurveyedStep, ...]
    leftovers: tuple[UncommittedStep, ...]
    problems: tuple[str, ...]


def survey(
    locations: Locations, *, step: int | None, newest_only: bool = False
) -> Survey:
    """Looks at the steps of some locations.

    Args:
      locations: together.
      step: the only one to look at; None for all.
      newest_only: whether the newest complete one is enough, with those after it.
    """
    surveyed: list[SurveyedStep] = []
    problems: list[str] = []
    is_found = False
    preserved = set(locations.preserved())
    known = sorted({*locations.steps, *locations.foreign_steps})
    # Newest first, so that no more is read than it takes.
    for number in reversed(known):
        if step not in (None, number) or (newest_only and is_found):
            continue
        of_number = []
        is_preserved = number in preserved
        if number in locations.foreign_steps:
            of_number.append(_foreign(number, preserved=is_preserved))
        looked = locations.look(number)
        problems += looked.problems
        for found in reversed(looked.saves):
            abandoned = locations.line.abandons(found.step_id)
            of_number.append(
                _surveyed(found, preserved=is_preserved, abandoned=abandoned)
            )
            is_found |= found.problem is None and not abandoned
        surveyed = [*of_number, *surveyed]
    if not known:
        # Locations that cannot be read have no steps, either.
        problems = [*locations.look(step or 0).problems]
    return Survey(
        known=tuple(known),
        steps=tuple(surveyed),
        leftovers=tuple(
            UncommittedStep(step=each.step, path=str(each.path))
            for each in locations.leftovers()
        ),
        # A peer that fails does so at every step.
        problems=tuple(dict.fromkeys(problems)),
    )


def _surveyed(found: FoundStep, *, preserved: bool, abandoned: bool) -> SurveyedStep:
    table = found.table
    parents = table.contents.parents
    tiers = []
    for tier in sorted({holder.tier for holder in table.holders}):
        alone = in_tier(found, tier)
        assert alone is not None
        tiers.append(
            TierOfStep(
                tier=tier,
                problem=None if alone.complete else alone.lacking(),
                holders=tuple(sorted(each.host.id for each in alone.holders)),
                num_bytes=int(alone.num_bytes[alone.item].sum()),
            )
        )
    return SurveyedStep(
        step=table.step_id.step,
        save=table.step_id.save,
        problem=None if table.complete else table.lacking(),
        preserved=preserved,
        abandoned=abandoned,
        parent=parents[-1] if parents else None,
        tiers=tuple(tiers),
        components=_components(found) if table.complete else (),
    )


def in_tier(found: FoundStep, tier: str) -> StepTable | None:
    """The parts of a step in one tier; None if it has none."""
    return with_holders(found, lambda holder: holder.tier == tier)


def with_holders(
    found: FoundStep, counts: Callable[[Holder], bool]
) -> StepTable | None:
    """The parts of a step at some holders; None if there are none of them."""
    whole = found.table.manifest
    kept = [n for n, holder in enumerate(whole.holders) if counts(holder)]
    if not kept:
        return None
    number = np.full(len(whole.holders), -1, np.int32)
    number[kept] = np.arange(len(kept))
    parts = whole.parts.take(np.flatnonzero(number[whole.parts.holder] >= 0))
    parts = parts._replace(holder=number[parts.holder])
    holders = tuple(whole.holders[n] for n in kept)
    return StepTable([dataclasses.replace(whole, holders=holders, parts=parts)])


def _foreign(step: int, *, preserved: bool) -> SurveyedStep:
    tier = TierOfStep(tier="persistent", problem=None, holders=(), num_bytes=0)
    return SurveyedStep(
        step=step,
        save="",
        problem=None,
        preserved=preserved,
        abandoned=False,
        parent=None,
        tiers=(tier,),
    )


def _components(found: FoundStep) -> tuple[StepComponent, ...]:
    # The components of a complete step by name. Leaves without elements, and components
    # without files, have no items.
    table = found.table
    num_leaves = collections.Counter(leaf.part for leaf in table.contents.arrays)
    items: dict[str, list[int]] = {
        name: [] for name in sorted({*num_leaves, *table.contents.components})
    }
    for item in range(len(table)):
        items[table.leaf(item).part].append(item)
    return tuple(
        _described(found, name, of_name, num_leaves[name])
        for name, of_name in items.items()
    )


def _described(
    found: FoundStep, name: str, items: list[int], num_leaves: int
) -> StepComponent:
    table = found.table
    fields = _description(found, name)
    is_tree = name not in table.contents.components
    pattern = fields.get("pattern", _BY_SHARDING if is_tree else _OWN)
    resize = "its own rule" if pattern == _OWN else "none needed"
    if pattern in ("per_host", "per_node", "per_group"):
        # Older descriptions have no rule.
        resize = fields.get("on_resize") or "by the rule of the program that loads it"
    named = [[table.name(item), table.digest(item).hex()] for item in items]
    holders = {holder for item in items for holder in table.holders_of(item)}
    return StepComponent(
        name=name,
        pattern=" ".join([pattern, "+".join(fields.get("axes") or ())]).strip(),
        resize=resize,
        required=fields.get("required"),
        version=fields.get("version"),
        num_leaves=num_leaves,
        num_files=sum(table.leaf(item).is_file for item in items),
        num_bytes=int(table.num_bytes[np.array(items, int)].sum()),
        digest=digest.json_digest(named),
        hosts=tuple(sorted({table.holders[each].host.id for each in holders})),
    )


def _description(found: FoundStep, name: str) -> dict[str, Any]:
    table = found.table
    for kind in (_DESCRIPTION, *_OTHERS):
        number = table.contents.files.get(f"{name}/{kind}")
        if number is None:
            continue
        reader = verified_read.VerifiedReader(found)
        try:
            (item,) = table.of_leaf(number).tolist()
            fields = json.loads(reader.values(item).tobytes())
        except (errors.CheckpointError, ValueError):
            # Verification names what is wrong with a file.
            return {"pattern": "unreadable"}
        if not isinstance(fields, dict):
            return {}
        return fields if kind == _DESCRIPTION else {"version": fields.get("version")}
    return {}


def describe(run: str, survey: Survey) -> str:
    """The survey of a run, as lines."""
    named = f"run {run}" if run else "no run"
    lines = [f"{named}: {numbered(survey.known, 'in tiers')}"]
    save = ""
    for step in (each for each in survey.steps if not each.abandoned):
        lines += _step_lines(step, goes_on=step.save != save, known=survey.known)
        save = step.save
    abandoned = [each for each in survey.steps if each.abandoned]
    if abandoned:
        lines.append(
            "abandoned, since the run went on from an earlier step; they are restored"
            " only by their numbers:"
        )
    for step in abandoned:
        lines += _step_lines(step, goes_on=False)
    lines += [
        f"step {each.step} is being written, or was cut short: {each.path}"
        for each in survey.leftovers
    ]
    lines += survey.problems
    return "\n".join(lines)


def numbered(steps: Sequence[int], location: str) -> str:
    """How many steps there are, with the numbers of the first and the last."""
    count = f"{len(steps)} steps {location}"
    if not steps:
        return count
    some = list(map(str, steps))
    if len(some) > 2 * MOST_NAMED:
        some = [*some[:MOST_NAMED], "...", *some[-MOST_NAMED:]]
    return f"{count}: {', '.join(some)}"


def _step_lines(
    step: SurveyedStep, *, goes_on: bool, known: Sequence[int] = ()
) -> Iterator[str]:
    state = "complete" if step.problem is None else f"incomplete: {step.problem}"
    if not step.save:
        state = "saved by Orbax alone, without manifests"
    if goes_on and step.parent is not None:
        before = step.parent[0]
        # A save in place of another goes on from it; once it had the line before it.
        is_again = before == step.step or (
            before == step.step - 1 and before not in known
        )
        state += ", saved again" if is_again else f", goes on from step {before}"
    yield f"step {step.step}: {state}" + ", preserved" * step.preserved
    for each in step.tiers if step.save else ():
        alone = "all of it" if each.problem is None else each.problem
        yield (
            f"  {each.tier:<10}  {each.num_bytes:>15,} bytes  at {len(each.holders)}"
            f" ({first_of(each.holders)})  {alone}"
        )
    yield from _component_lines(step.components)


def _component_lines(parts: Sequence[StepComponent]) -> Iterator[str]:
    """A line for each component of a step."""
    width = max((len(each.name) for each in parts), default=0)
    for each in parts:
        size = f"{each.num_leaves:,} leaves"
        if each.num_files:
            size = f"{each.num_files:,} files"
        version = "" if each.version is None else f" version {each.version},"
        declared = {None: "", True: " required,", False: " optional,"}[each.required]
        yield (
            f"  {each.name:<{width}}  {each.pattern},{declared}{version} {size},"
            f" {each.num_bytes:,} bytes at {len(each.hosts)}"
            f" ({first_of(each.hosts)}), digest {each.digest[:12]}; resize:"
            f" {each.resize}"
        )
