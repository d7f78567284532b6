"""The search of one host for a complete step, in the tiers that it can reach.

The RAM of all hosts is searched as they have reported it (`step_sharing`), or by asking
each of them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from etils import epath

from elastic_ckpt.checkpoint.host.answers import CheckpointMetadata, SearchOutcome
from elastic_ckpt.checkpoint.host.step_sharing import StepSharing
from elastic_ckpt.checkpoint.host.world import HostWorld
from elastic_ckpt.core import calls, errors
from elastic_ckpt.steps import line
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers import find as tier_search
from elastic_ckpt.tiers import surveyed_ram
from elastic_ckpt.tiers.find import FoundStep
from elastic_ckpt.tiers.peers import peer, secret
from elastic_ckpt.tiers.source import Tier


class StepSearch:
    """Searches for steps.

    Args:
      world: the host among the others.
      sharing: of the steps that are chosen.
    """

    def __init__(self, world: HostWorld, sharing: StepSharing) -> None:
        self._world = world
        self._sharing = sharing

    @calls.call()
    def find(
        self,
        step: int | None = None,
        *,
        save: str = "",
        without: tuple[StepId, ...] = (),
        own_line: line.Line | None = None,
        is_shared: bool = False,
        surveyed: tuple[int, ...] | None = None,
    ) -> SearchOutcome:
        """Finds the newest complete step, or a certain one.

        Args:
          step: None for the newest.
          save: which save of the step; empty for the newest.
          without: steps that proved to be unreadable.
          own_line: the line of the caller, if it has saved something.
          is_shared: whether the parts of the step are kept, to deal them to all hosts.
          surveyed: the steps whose parts all hosts have reported, after the steps that
            they have; None if this host asks each of the others.

        Raises:
          CheckpointError: if a certain step is not complete.
        """
        find = functools.partial(self._find, step, save, without, own_line)
        if surveyed is None or not self._world.is_connected:
            return find(False, self._world.ram_tiers)
        ram = self._sharing.survey(surveyed)
        if ram.is_partial:
            # Hosts whose reports are missing may have newer steps: this one asks all.
            return find(is_shared, self._world.ram_tiers)
        try:
            return find(is_shared, [ram])
        except surveyed_ram.UnreportedStepError as error:
            return SearchOutcome(needs=error.step)

    def _find(
        self,
        step: int | None,
        save: str,
        without: Sequence[StepId],
        own_line: line.Line | None,
        is_shared: bool,
        ram_tiers: Sequence[Tier],
    ) -> SearchOutcome:
        tiers, foreign, recorded, out_of_reach = self._within_reach(ram_tiers)
        own = [] if own_line is None else [own_line]
        looking = tier_search.Search(
            tiers, lines=[*own, *recorded], without=set(without)
        )
        passed_over: Mapping[int, str] = {}
        refusal: str | None = None
        missing: str | None = None
        chosen: FoundStep | None = None
        if step is None:
            outcome = looking.newest()
            passed_over = outcome.passed_over
            chosen = outcome.found_step
            counted = _counted(looking, foreign)
            numbers = [] if chosen is None else [chosen.step.step]
            newer = [each for each in counted[-1:] if [each] > numbers]
            foreign_step = newer[0] if newer else None
            refusal = outcome.refusal(max([*numbers, *newer], default=None))
            if not (numbers or newer or passed_over or out_of_reach):
                missing = f"{self._nothing()}; save a step first"
        elif step in foreign and not save and self._is_newest(step, foreign, looking):
            foreign_step = step
        elif looking.lacks(step):
            foreign_step = None
            missing = self._missing(step, looking, foreign, out_of_reach)
        else:
            foreign_step = None
            of_save = tier_search.of_save(tiers, StepId(step, save)) if save else None
            chosen = of_save or looking.of_step(step)
        complete: CheckpointMetadata | None = None
        if foreign_step is not None:
            complete, chosen = self._foreign_step(foreign_step, foreign), None
        elif chosen is not None:
            complete = self._complete(chosen)
        kept = chosen if is_shared else None
        self._sharing.choose(kept)
        return SearchOutcome(
            checkpoint=complete,
            newest_save=looking.line.save,
            passed_over=tuple(passed_over.items()),
            out_of_reach=out_of_reach,
            refusing=tuple(self._refusing(tiers)),
            refusal=refusal,
            is_shared=kept is not None,
            missing=missing,
        )

    def _is_newest(
        self, step: int, foreign: Mapping[int, str], looking: tier_search.Search
    ) -> bool:
        # Whether no complete save of ours is newer than what Orbax alone has saved.
        if looking.lacks(step):
            return True
        try:
            return looking.of_step(step).step.save < foreign[step]
        except errors.CheckpointError:
            return True

    def _missing(
        self,
        step: int,
        looking: tier_search.Search,
        foreign: Mapping[int, str],
        out_of_reach: str | None,
    ) -> str:
        if out_of_reach is not None:
            raise errors.CheckpointError(
                f"step {step} is not in RAM, and {out_of_reach}"
            )
        newest = looking.newest().found_step
        numbers = _counted(looking, foreign)
        numbers += [] if newest is None else [newest.step.step]
        if not numbers:
            return f"there is no step {step}: {self._nothing()}"
        return (
            f"step {step} is not in any tier of {self._places()}; newest complete step"
            f" is {max(numbers)}: restore it with step={max(numbers)}"
        )

    def _nothing(self) -> str:
        # Why there is no step, for a message.
        if not any(place.exists() for place in self._directories()):
            return f"there is no directory {self._places()}"
        return f"{self._places()} has no checkpoints yet"

    def _places(self) -> str:
        return " or ".join(map(str, self._directories()))

    def _directories(self) -> list[epath.Path]:
        # Of the tiers.
        places = [] if self._world.root is None else [self._world.root.path]
        if self._world.local_tier is not None:
            places.append(self._world.disk.root)
        return places

    @calls.call()
    def complete_steps(self) -> tuple[CheckpointMetadata, ...]:
        """The steps that are complete, ascending, without those that are abandoned.

        Those that Orbax alone saved are among them.
        """
        tiers, foreign, recorded, _ = self._within_reach(self._world.ram_tiers)
        looking = tier_search.Search(tiers, lines=recorded)
        complete = [self._complete(each) for each in looking.complete_steps()]
        others = {each.step for each in complete}
        complete += [
            self._foreign_step(step, foreign)
            for step in _counted(looking, foreign)
            if step not in others
        ]
        return tuple(sorted(complete, key=lambda each: each.step))

    def _within_reach(self, ram_tiers: Sequence[Tier]) -> _Reach:
        storage_tier = self._world.persistent
        if storage_tier is None:
            return _Reach(list(ram_tiers), {}, [], None)
        try:
            foreign = storage_tier.foreign_saves()
        except errors.CheckpointError as error:
            return _Reach(list(ram_tiers), {}, [], str(error))
        recorded = storage_tier.recorded_lines()
        return _Reach([*ram_tiers, storage_tier], foreign, recorded, None)

    def _refusing(self, tiers: Sequence[Tier]) -> list[str]:
        known = secret.path(self._world.disk.root)
        return [
            f"{url} does not take the secret in {known}, so nothing that it may hold of"
            " this run is restored; copy that file from a machine of the run, for"
            " example the agent's, and start again"
            for tier in tiers
            for url in _refusing(tier)
        ]

    def _foreign_step(
        self, step: int, foreign: Mapping[int, str]
    ) -> CheckpointMetadata:
        assert self._world.persistent is not None
        return CheckpointMetadata(
            step=step,
            save="",
            line=line.after(StepId(step, foreign[step]), ()),
            path=self._path(step),
            **self._world.persistent.notes(step),
        )

    def _complete(self, step_found: FoundStep) -> CheckpointMetadata:
        step = step_found.step
        contents = step.holdings.contents
        return CheckpointMetadata(
            step=step.step,
            save=step.save,
            line=line.after(step.step_id, contents.parents),
            path=self._path(step.step),
            metrics=json.loads(contents.metrics or "null"),
            custom_metadata=json.loads(contents.custom_metadata or "null"),
            commit_timestamp_nsecs=1_000_000 * contents.time_ms,
        )

    def _path(self, step: int) -> epath.Path | None:
        root = self._world.root
        return None if root is None else root.final(step)


class _Reach(NamedTuple):
    """The tiers and steps that can be searched.

    Attributes:
      tiers: those that answer.
      foreign: the steps that Orbax alone saved, with the saves that they count as.
      recorded: lines that are recorded in storage.
      out_of_reach: why storage does not answer; None if it does, or there is none.
    """

    tiers: list[Tier]
    foreign: dict[int, str]
    recorded: list[line.Line]
    out_of_reach: str | None


def _refusing(tier: Tier) -> Sequence[str]:
    if isinstance(tier, peer.Peers):
        return tier.refusing()
    return tier.refusing if isinstance(tier, surveyed_ram.SurveyedRam) else ()


def _counted(looking: tier_search.Search, foreign: Mapping[int, str]) -> list[int]:
    # The steps of Orbax alone that are not abandoned, ascending.
    return sorted(
        step
        for step, save in foreign.items()
        if not looking.line.abandons(StepId(step, save))
    )
