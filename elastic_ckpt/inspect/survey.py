"""Surveys which steps are in which tiers, which hosts hold them, and their content.

A survey reads manifests and the files that describe components. For steps in storage,
it also reads array metadata and the data state. To compare values with their digests,
use `verification`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from elastic_ckpt.checkpoint import foreign_steps
from elastic_ckpt.checkpoint.host import verified_read
from elastic_ckpt.core import digest, errors
from elastic_ckpt.core.errors import MOST_NAMED, first_of
from elastic_ckpt.data import cursors, mixing, records, state
from elastic_ckpt.inspect.tier_locations import Locations
from elastic_ckpt.steps import layout
from elastic_ckpt.steps.manifest import TierName
from elastic_ckpt.steps.table import StepTable
from elastic_ckpt.tiers.find import FoundStep

# The file that describes a component, and other files that have a version.
_DESCRIPTION = "component.json"
_OTHERS = ("data_state.json",)
_OWN = "its own files"
# MaxText's names for the checkpointables of a step.
_ITEMS, _ITERATOR = "items", "iter"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCheckpointable:
    """A checkpointable of a step: a pytree or a component.

    Attributes:
      name: the checkpointable's name.
      pattern: the sharing pattern among hosts when the component was saved, such as
        `global` or `per_host`; a pytree is shared according to its arrays' shardings.
      resize: the rule for a different number of hosts, which the program that saved the
        checkpointable declared; the name of a function.
      required: whether that program declared the checkpointable as required; None if
        unknown, which includes every pytree.
      version: the format version of a component's files; None if they have none.
      num_leaves: the number of arrays and numbers in a pytree.
      num_files: the number of files in a component.
      num_bytes: the size of one copy.
      digest: a digest of the parts' digests, which is the same for identical values
        that are split into the same parts.
      hosts: the sorted IDs of the hosts that hold a part.
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
    """One tier's part of a save of a step.

    Attributes:
      tier: the tier, `local` (the memory of all hosts) or `persistent`.
      problem: what is missing or contradictory; None if the save is complete.
      holders: the sorted IDs of the hosts whose manifests are in the tier.
      num_bytes: the total size of all copies.
    """

    tier: str
    problem: str | None
    holders: tuple[str, ...]
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedData(state.DataState):
    """The data state of a step.

    Attributes:
      taken: the number of documents taken so far from each dataset of a mixture.
      skipped: the number of corrupt records skipped.
    """

    taken: Mapping[str, int]
    skipped: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SurveyedStep:
    """A save of a step.

    Attributes:
      step: the step number.
      save: the ID of the save; empty if stock Orbax saved the step.
      problem: what is missing or contradictory in all tiers together; None if the save
        is complete.
      preserved: whether the step is known to be pinned.
      abandoned: whether the run rolled back to an earlier step and abandoned this one.
      parent: the step and save from which the run continued to this save; None for the
        first save.
      tiers: the tiers that have a part of the save.
      components: the save's checkpointables; empty if the save is incomplete.
      state: the arrays in storage, as Orbax reads them; empty if the step is not in
        storage.
      data: the data state in storage, or the reason why it cannot be read; None if
        there is none.
    """

    step: int
    save: str
    preserved: bool
    tiers: tuple[TierOfStep, ...]
    problem: str | None = None
    abandoned: bool = False
    parent: tuple[int, str] | None = None
    components: tuple[StepCheckpointable, ...] = ()
    state: tuple[foreign_steps.LeafSummary, ...] = ()
    data: SavedData | str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class UncommittedStep:
    """An uncommitted part of a step: it is being written or was interrupted.

    Attributes:
      step: the step number.
      path: the part's directory.
    """

    step: int
    path: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Survey:
    """The result of a survey.

    Attributes:
      known: all step numbers that may have files, in ascending order.
      steps: the surveyed saves, ordered by step and save.
      leftovers: the uncommitted parts of steps.
      problems: the reasons why manifests cannot be read.
    """

    known: tuple[int, ...]
    steps: tuple[SurveyedStep, ...]
    leftovers: tuple[UncommittedStep, ...]
    problems: tuple[str, ...]


def survey(
    locations: Locations, *, step: int | None, newest_only: bool = False
) -> Survey:
    """Surveys the steps in `locations`.

    `step` limits the survey to one step; `newest_only` stops at the newest complete
    step.
    """
    surveyed: list[SurveyedStep] = []
    problems: list[str] = []
    # Newest first, to read no more than necessary.
    for number in reversed(locations.known):
        if step not in (None, number):
            continue
        looked = locations.look(number)
        problems += looked.problems
        of_number = [_surveyed(each, locations, problems) for each in looked.saves]
        if number in locations.foreign_steps:
            of_number.append(
                SurveyedStep(
                    step=number,
                    save="",
                    preserved=number in locations.preserved,
                    tiers=(
                        TierOfStep(
                            tier="persistent", problem=None, holders=(), num_bytes=0
                        ),
                    ),
                    **_stored(locations.stored.get(number), problems),
                )
            )
        surveyed += of_number
        if newest_only and any(not (s.problem or s.abandoned) for s in of_number):
            break
    if not locations.known:
        # Locations that cannot be read also show no steps.
        problems += locations.look(step or 0).problems
    return Survey(
        known=tuple(locations.known),
        steps=tuple(reversed(surveyed)),
        leftovers=tuple(
            UncommittedStep(step=each.step, path=str(each.path))
            for each in locations.leftovers()
        ),
        # A failing peer has the same problem at every step.
        problems=tuple(dict.fromkeys(problems)),
    )


def _surveyed(
    found: FoundStep, locations: Locations, problems: list[str]
) -> SurveyedStep:
    table, (step, save) = found.table, found.step_id
    stored, contents = locations.stored.get(step), table.contents
    is_committed = str(stored) in {source.directory for source in found.sources}
    tiers = sorted({holder.tier for holder in table.holders})
    names = {leaf.checkpointable for leaf in contents.arrays}.union(contents.components)
    return SurveyedStep(
        step=step,
        save=save,
        problem=None if table.complete else table.lacking(),
        preserved=step in locations.preserved,
        abandoned=locations.line.abandons(found.step_id),
        # A run's first saves continue from a step without a save.
        parent=next((each for each in contents.parents[-1:] if each.save), None),
        tiers=tuple(_tier(table, each) for each in tiers),
        components=tuple(
            _described(found, each) for each in sorted(names) if table.complete
        ),
        **_stored(stored if is_committed else None, problems),
    )


def _tier(table: StepTable, tier: TierName) -> TierOfStep:
    alone = table.held_by(lambda holder: holder.tier == tier)
    return TierOfStep(
        tier=tier,
        problem=None if alone.complete else alone.lacking(),
        holders=tuple(
            sorted(each.host.id for each in table.holders if each.tier == tier)
        ),
        num_bytes=int(alone.num_bytes[alone.item].sum()),
    )


def _stored(path: epath.Path | None, problems: list[str]) -> dict[str, Any]:
    # The arrays and the data state of a step that Orbax can read.
    if path is None:
        return {}
    arrays: list[foreign_steps.LeafSummary] = []
    try:
        arrays = foreign_steps.arrays(
            path, _ITEMS if (path / _ITEMS).exists() else layout.STATE
        )
    except errors.CheckpointError as error:
        problems.append(str(error))
    return {"state": tuple(arrays), "data": data_of(path)}


def data_of(path: epath.Path) -> SavedData | str | None:
    """A step's data state, or why it cannot be read; None if the step has none.

    The state is not guaranteed to be one from which a run can continue.
    """
    directory = path / (_ITERATOR if (path / _ITEMS).exists() else layout.DATA)
    if not directory.exists():
        return None
    try:
        saved = state.read(directory)
        num_shards: Any = saved.pipeline.get("num_logical_shards", 0)
        shards = cursors.read(directory, range(num_shards), saved.position)
    except errors.DataError as error:
        return str(error)
    return SavedData(
        engine=saved.engine,
        position=saved.position,
        pipeline=saved.pipeline_now,
        left_out=saved.left_out,
        progress=saved.progress,
        taken=mixing.taken(shards.values()),
        skipped=records.skipped(shards.values()),
    )


def _described(found: FoundStep, name: str) -> StepCheckpointable:
    # Leaves without elements, and components without files, have no items.
    table, fields = found.table, _description(found, name)
    leaves = [
        n for n, leaf in enumerate(table.contents.leaves) if leaf.checkpointable == name
    ]
    num_files = sum(table.contents.leaves[each].is_file for each in leaves)
    items = np.flatnonzero(np.isin(table.items.leaf, leaves)).tolist()
    is_tree = name not in table.contents.components
    pattern = fields.get("pattern", "by sharding" if is_tree else _OWN)
    needed = fields.get("on_resize", "none needed")
    rules = {_OWN: "its own rule", "global": "none needed"}
    named = [[table.name(item), table.digest(item).hex()] for item in items]
    holders = {holder for item in items for holder in table.holders_of(item)}
    return StepCheckpointable(
        name=name,
        pattern=" ".join([pattern, "+".join(fields.get("axes") or ())]).strip(),
        resize=rules.get(pattern, needed),
        required=fields.get("required"),
        version=fields.get("version"),
        num_leaves=len(leaves) - num_files,
        num_files=num_files,
        num_bytes=int(table.num_bytes[items].sum()),
        digest=digest.json_digest(named),
        hosts=tuple(sorted({table.holders[each].host.id for each in holders})),
    )


def _description(found: FoundStep, name: str) -> dict[str, Any]:
    files = found.table.contents.files
    kinds = [kind for kind in (_DESCRIPTION, *_OTHERS) if f"{name}/{kind}" in files]
    if not kinds:
        return {}
    try:
        (item,) = found.table.of_leaf(files[f"{name}/{kinds[0]}"]).tolist()
        content = verified_read.VerifiedReader(found).values(item).tobytes()
        fields = dict(json.loads(content))
    except (errors.CheckpointError, TypeError, ValueError):
        # Verification reports what is wrong with the file.
        return {"pattern": "unreadable"}
    return fields if kinds[0] == _DESCRIPTION else {"version": fields.get("version")}


def describe(run: str, survey: Survey, *, is_brief: bool) -> str:
    """A run's survey as text; if `is_brief`, arrays are counted but not listed."""
    known = list(map(str, survey.known))
    count = f"{len(known)} step{'s' * (len(known) != 1)}"
    if len(known) > 2 * MOST_NAMED:
        known = [*known[:MOST_NAMED], "...", *known[-MOST_NAMED:]]
    named = f"run {run}" if run else "no run"
    lines = [f"{named}: {count}{': ' * bool(known)}{', '.join(known)}"]
    steps = sorted(survey.steps, key=lambda each: each.abandoned)
    for before, step in itertools.pairwise([None, *steps]):
        assert step is not None
        if step.abandoned and not (before and before.abandoned):
            lines.append(
                "abandoned, because the run continued from an earlier step; restored"
                " only by number:"
            )
        lines += _step_lines(step, before, is_brief=is_brief)
    lines += [
        f"step {each.step} is being written, or was interrupted: {each.path}"
        for each in survey.leftovers
    ]
    return "\n".join([*lines, *survey.problems])


def _step_lines(
    step: SurveyedStep, before: SurveyedStep | None, *, is_brief: bool
) -> Iterator[str]:
    state = "complete" if step.problem is None else f"incomplete: {step.problem}"
    if not step.save:
        state = "saved by stock Orbax, without manifests"
    is_first = not (step.abandoned or (before and before.save == step.save))
    if is_first and step.parent is not None:
        # A save that replaces an earlier one continues from it.
        from_step = f", continues from step {step.parent[0]}"
        state += ", saved again" if step.parent[0] == step.step else from_step
    yield f"step {step.step}: {state}" + ", preserved" * step.preserved
    for each in step.tiers if step.save else ():
        yield (
            f"  {each.tier:<10}  {each.num_bytes:>15,} bytes  at {len(each.holders)}"
            f" ({first_of(each.holders)})  {each.problem or 'all of it'}"
        )
    yield from _component_lines(step.components)
    if step.state:
        num_bytes = sum(leaf.num_bytes for leaf in step.state)
        yield f"  {len(step.state):,} arrays, {num_bytes:,} bytes"
    shown = () if is_brief else step.state
    if shown and before is not None and shown == before.state:
        shown = ()
        yield f"    as in step {before.step}"
    for leaf in shown:
        yield (
            f"    {leaf.path:<40} {leaf.dtype}{list(leaf.shape)}"
            f"  {leaf.num_bytes:,} bytes  {leaf.sharding}"
        )
    yield from _data_lines(step.data, is_brief=is_brief)


def _component_lines(components: Sequence[StepCheckpointable]) -> Iterator[str]:
    width = max((len(each.name) for each in components), default=0)
    for each in components:
        size = f"{each.num_files:,} files"
        if not each.num_files:
            size = f"{each.num_leaves:,} leaves"
        version = "" if each.version is None else f" version {each.version},"
        declared = {None: "", True: " required,", False: " optional,"}[each.required]
        yield (
            f"  {each.name:<{width}}  {each.pattern},{declared}{version} {size},"
            f" {each.num_bytes:,} bytes at {len(each.hosts)}"
            f" ({first_of(each.hosts)}), digest {each.digest[:12]}; resize:"
            f" {each.resize}"
        )


def _data_lines(data: SavedData | str | None, *, is_brief: bool) -> Iterator[str]:
    if not isinstance(data, SavedData):
        yield from () if data is None else (f"  data: {data}",)
        return
    pipeline: dict[str, Any] = {**data.pipeline}
    datasets, stage = pipeline.pop("datasets", {}), pipeline.pop("stage", None)
    where = ""
    if stage is not None:
        number, begins = stage["number"], stage["begin_steps"]
        where = f", stage {number + 1} of {len(begins)}, from step {begins[number]}"
    yield f"  data: {data.engine}, position {json.dumps(data.position)}{where}"
    if not is_brief:
        yield from (f"    {key}: {json.dumps(pipeline[key])}" for key in pipeline)
    weights = sum(each["weight"] for each in datasets.values()) or 1
    all_taken = sum(data.taken.values()) or 1
    for name, dataset in datasets.items():
        taken = data.taken.get(name, 0)
        achieved = f", {taken:,} documents taken so far, {taken / all_taken:.2%}"
        yield (
            f"    dataset {name}: weight {dataset['weight'] / weights:.2%}"
            f"{achieved if data.taken else ''}, {len(dataset['files'])} files"
        )
    if data.skipped:
        yield f"    corrupt records skipped: {data.skipped:,}"
