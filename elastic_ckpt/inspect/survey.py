"""A survey: which steps are in which tiers, who holds them, and what could be lost.

A survey reads only manifests, and the files of components that describe themselves;
`verification` compares the values with their digests.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from elastic_ckpt.checkpoint.host import verified_read
from elastic_ckpt.core import digest, errors
from elastic_ckpt.core.errors import MOST_NAMED, first_of
from elastic_ckpt.inspect.tier_locations import Locations
from elastic_ckpt.steps import search
from elastic_ckpt.steps.holdings import Holdings, Offer
from elastic_ckpt.tiers.source import Source

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
        copies, unread = locations.look(number)
        problems += unread
        for offers in reversed(search.saves(list(copies))):
            examined = search.Step.from_offers(offers)
            abandoned = locations.line.abandons(examined.step_id)
            of_number.append(
                _surveyed(examined, copies, preserved=is_preserved, abandoned=abandoned)
            )
            is_found |= examined.complete and not abandoned
        surveyed = [*of_number, *surveyed]
    if not known:
        # Locations that cannot be read have no steps, either.
        _, problems = locations.look(step or 0)
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


def _surveyed(
    step: search.Step,
    copies: Mapping[Offer, Source],
    *,
    preserved: bool,
    abandoned: bool,
) -> SurveyedStep:
    offers = step.holdings.offers
    parents = step.holdings.contents.parents
    tiers = []
    for tier in sorted({each.tier for each in offers}):
        held = [each for each in offers if each.tier == tier]
        alone = search.Step.from_offers(held)
        tiers.append(
            TierOfStep(
                tier=tier,
                problem=None if alone.complete else alone.lacking(),
                holders=tuple(sorted(each.host.id for each in held)),
                num_bytes=sum(each.manifest.stored_bytes for each in held),
            )
        )
    return SurveyedStep(
        step=step.step,
        save=step.save,
        problem=None if step.complete else step.lacking(),
        preserved=preserved,
        abandoned=abandoned,
        parent=parents[-1] if parents else None,
        tiers=tuple(tiers),
        components=_components(step, copies) if step.complete else (),
    )


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


def _components(
    step: search.Step, copies: Mapping[Offer, Source]
) -> tuple[StepComponent, ...]:
    """The components of a step by name. A step without all of them is incomplete.

    Args:
      step: the save of it.
      copies: the holders of its parts.
    """
    holdings = step.holdings
    # Leaves without elements, and components without files, have no items.
    num_leaves = collections.Counter(
        leaf.path.partition("/")[0] for leaf in holdings.contents.leaves
    )
    items: collections.defaultdict[str, list[int]] = collections.defaultdict(list)
    items |= {name: [] for name in (*num_leaves, *holdings.contents.components)}
    for item in range(holdings.num_items):
        items[_component(holdings, item)].append(item)
    return tuple(
        _described(holdings, name, items[name], num_leaves[name], copies)
        for name in sorted(items)
    )


def _described(
    holdings: Holdings,
    name: str,
    items: list[int],
    num_leaves: int,
    copies: Mapping[Offer, Source],
) -> StepComponent:
    fields = _description(holdings, name, copies)
    is_tree = name not in holdings.contents.components
    pattern = fields.get("pattern", _BY_SHARDING if is_tree else _OWN)
    resize = "its own rule" if pattern == _OWN else "none needed"
    if pattern in ("per_host", "per_node", "per_group"):
        # Older descriptions have no rule.
        resize = fields.get("on_resize") or "by the rule of the program that loads it"
    return StepComponent(
        name=name,
        pattern=" ".join([pattern, "+".join(fields.get("axes") or ())]).strip(),
        resize=resize,
        required=fields.get("required"),
        version=fields.get("version"),
        num_leaves=num_leaves,
        num_files=sum(item >= len(holdings.leaf) for item in items),
        num_bytes=int(holdings.stored_bytes[np.array(items, int)].sum()),
        digest=digest.json_digest([_part(holdings, item) for item in items]),
        hosts=tuple(
            sorted({o.host.id for item in items for o in holdings.holders(item)})
        ),
    )


def _component(holdings: Holdings, item: int) -> str:
    if item >= len(holdings.leaf):
        return holdings.files[item - len(holdings.leaf)].component
    path = holdings.contents.leaves[int(holdings.leaf[item])].path
    return path.partition("/")[0]


def _part(holdings: Holdings, item: int) -> list[str]:
    if item >= len(holdings.leaf):
        checksum = holdings.files[item - len(holdings.leaf)].digest
    else:
        checksum = holdings.fragment(int(holdings.first_row[item])).digest
    return [holdings.name(item), checksum.hex()]


def _description(
    holdings: Holdings, name: str, copies: Mapping[Offer, Source]
) -> dict[str, Any]:
    numbers = {file.path: number for number, file in enumerate(holdings.files)}
    for kind in (_DESCRIPTION, *_OTHERS):
        number = numbers.get(f"{name}/{kind}")
        if number is None:
            continue
        offers = holdings.holders(len(holdings.leaf) + number)
        reader = verified_read.VerifiedReader({each: copies[each] for each in offers})
        try:
            fields = json.loads(reader.file(holdings.files[number], offers))
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
