"""A host's part in the search for a complete step, and in sharing it with all hosts.

Host 0 searches the tiers that it can reach: storage, and the RAM of all hosts as they
have reported it up a tree (`part_exchange`), or by asking each of them. It passes down
the contents of the step that it chose, receives the boxes that each host needs, and
deals each host the parts that it reads, so that no other host reads the manifests of
all.

    offer_saves, find                 the steps that hosts have
    offer_step, find                  the parts of one of them, until one is complete
    share, contents                   the contents of the step
    offer_wanted, plan, parts         what each host reads

What hosts offer goes up to host 0, and what it shares or plans goes down.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence

import numpy as np
from etils import epath

from elastic_ckpt.checkpoint.host import part_offers
from elastic_ckpt.checkpoint.host.answers import CheckpointMetadata, SearchOutcome
from elastic_ckpt.checkpoint.host.part_exchange import Letter
from elastic_ckpt.checkpoint.host.world import HostWorld
from elastic_ckpt.core import calls, errors
from elastic_ckpt.steps import line, part_choices, read_plan, search
from elastic_ckpt.steps.holdings import Holdings
from elastic_ckpt.steps.manifest import Contents
from elastic_ckpt.steps.part_message import PartMessage
from elastic_ckpt.steps.part_table import Holder, PartTable, SavedStep
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers import find as tier_search
from elastic_ckpt.tiers.find import FoundStep
from elastic_ckpt.tiers.peers import peer, secret
from elastic_ckpt.tiers.source import Tier
from elastic_ckpt.tiers.surveyed_ram import SurveyedRam, UnreportedStepError

_NO_ROWS = np.empty(0, np.int64)


class StepSearch:
    """Searches for steps, and shares the one that host 0 has found.

    Args:
      world: the host among the others.
    """

    def __init__(self, world: HostWorld) -> None:
        self._world = world
        self._part_exchange = world.exchanges["restore"]
        # On host 0, what hosts have reported, and the step that it chose.
        self._ram = SurveyedRam(PartMessage())
        self._chosen: FoundStep | None = None

    @calls.call()
    def find(
        self,
        step: int | None = None,
        *,
        save: str = "",
        without: tuple[StepId, ...] = (),
        own_line: line.Line | None = None,
        is_dealt: bool = False,
        surveyed: tuple[int, ...] | None = None,
    ) -> SearchOutcome:
        """Finds the newest complete step, or a certain one.

        Args:
          step: None for the newest.
          save: which save of the step; empty for the newest.
          without: steps that proved to be unreadable.
          own_line: the line of the caller, if it has saved something.
          is_dealt: whether the parts of the step are kept, to deal them to all hosts.
          surveyed: the steps whose parts all hosts have reported, after the steps that
            they have; None if this host asks each of the others.

        Raises:
          CheckpointError: if a certain step is not complete.
        """
        find = functools.partial(self._find, step, save, without, own_line)
        if surveyed is None or not self._world.is_connected:
            return find(False, self._world.ram_tiers)
        ram = self._survey(surveyed)
        if ram.is_partial:
            # Hosts whose reports are missing may have newer steps: this one asks all.
            return find(is_dealt, self._world.ram_tiers)
        try:
            return find(is_dealt, [ram])
        except UnreportedStepError as error:
            return SearchOutcome(needs=error.step)

    def _find(
        self,
        step: int | None,
        save: str,
        without: Sequence[StepId],
        own_line: line.Line | None,
        is_dealt: bool,
        ram_tiers: Sequence[Tier],
    ) -> SearchOutcome:
        tiers, foreign, recorded, out_of_reach = self._within_reach(ram_tiers)
        own = [] if own_line is None else [own_line]
        looking = tier_search.Search(
            tiers, lines=[*own, *recorded], without=set(without)
        )
        passed_over: Mapping[int, str] = {}
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
        kept = chosen if is_dealt else None
        self._choose(kept)
        return SearchOutcome(
            checkpoint=complete,
            newest_save=looking.line.save,
            passed_over=tuple(passed_over.items()),
            out_of_reach=out_of_reach,
            refusing=tuple(self._refusing(tiers)),
            is_dealt=kept is not None,
            missing=missing,
        )

    def _survey(self, steps: Sequence[int]) -> SurveyedRam:
        # The RAM of all hosts as far as they have reported it: first which steps they
        # have, then the parts of `steps`, the last one just now.
        message = self._part_exchange.merged()
        if not steps:
            self._ram = SurveyedRam(message)
            return self._ram
        self._ram.add(steps[-1], message)
        return self._ram

    def _choose(self, step_found: FoundStep | None) -> None:
        # Keeps the step that was found, or drops what was reported.
        self._chosen = step_found
        if step_found is None:
            self._ram = SurveyedRam(PartMessage())

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

    @calls.call()
    def stored_before(
        self, step: int, own_line: line.Line
    ) -> CheckpointMetadata | None:
        """The newest step before another one that persistent storage has completely.

        Args:
          step: the other one.
          own_line: the line of the caller, to which the step belongs.

        Raises:
          CheckpointError: if storage is out of reach.
        """
        tier = self._world.persistent
        if tier is None:
            return None
        foreign = tier.foreign_saves()
        looking = tier_search.Search([tier], lines=[own_line])
        found = looking.newest(before=step).found_step
        newest = -1 if found is None else found.step.step
        for number in _counted(looking, foreign)[::-1]:
            if newest < number < step:
                return self._foreign_step(number, foreign)
        return None if found is None else self._complete(found)

    @calls.call(order="up")
    def offer_saves(self) -> tuple[Letter, ...]:
        """Offers the steps that this host has; see `PartExchange.offer`."""
        return self._part_exchange.offer(part_offers.of_all(self._world))

    @calls.call(order="up")
    def offer_step(self, step: int) -> tuple[Letter, ...]:
        """Offers what this host has of a step; see `PartExchange.offer`."""
        return self._part_exchange.offer(part_offers.of_step(self._world, step))

    def offer_wanted(
        self, saved: SavedStep, wanted: read_plan.Wanted | None
    ) -> tuple[Letter, ...]:
        """Offers a list of the boxes that this host needs; see `PartExchange.offer`.

        Args:
          saved: the step.
          wanted: the boxes; None if this host reads all manifests itself.
        """
        if wanted is None:
            return self._part_exchange.offer(PartMessage())
        num_boxes = len(wanted.leaf)
        table = PartTable(
            saved=saved,
            holders=(Holder(self._world.own.host),),
            holder=np.zeros(num_boxes, np.int32),
            target=np.full(num_boxes, self._world.number, np.int32),
            leaf=wanted.leaf,
            boxes=wanted.boxes,
            digest=np.zeros((num_boxes, 2), np.uint64),
            stored_bytes=np.zeros(num_boxes, np.int64),
            files=(),
        )
        return self._part_exchange.offer(PartMessage(tables=(table,)))

    @calls.call()
    def share(self, step_id: StepId) -> None:
        """Passes the contents of the chosen step to all hosts; host 0 does it.

        Raises:
          CheckpointError: if another step was chosen.
        """
        offer = self._chosen_step(step_id).holdings.offers[0]
        self._part_exchange.deal([PartTable.from_offer(offer).take(_NO_ROWS, [])])

    def contents(self, step_id: StepId) -> Contents:
        """The contents that this host has received.

        Raises:
          CheckpointError: if they cannot be had.
        """
        tables = part_offers.received(self._part_exchange, step_id)
        if not tables:
            raise errors.CheckpointError(
                f"step {step_id.step}: its contents were not received"
            )
        return tables[0].saved.contents

    @calls.call()
    def plan(self, step_id: StepId, components: tuple[str, ...]) -> None:
        """Plans the reads of all hosts, and deals each its parts; host 0 does it.

        Args:
          step_id: the step.
          components: that all hosts read.

        Raises:
          CheckpointError: if another step was chosen, or it is of another model.
        """
        chosen = self._chosen_step(step_id)
        table = self._ram.table(chosen.holdings.offers)
        asked = self._part_exchange.merged().of_save(step_id) or table.take(
            _NO_ROWS, []
        )
        plan = read_plan.plan(
            chosen,
            self._world.hosts,
            read_plan.Wanted(reader=asked.target, leaf=asked.leaf, boxes=asked.boxes),
            domain=self._world.peers.domain,
        )
        self._part_exchange.deal([part_choices.of_reads(table, plan, components)])
        # The holdings of all hosts are large.
        self._choose(None)

    def parts(self, step_id: StepId) -> FoundStep:
        """The parts that this host reads, and where.

        Raises:
          CheckpointError: if they cannot be had.
        """
        world = self._world
        tables = part_offers.received(self._part_exchange, step_id)
        in_ram = [table.of_tier("local") for table in tables]
        sources = part_offers.sources(world, in_ram)
        stored = {
            holder.host.id
            for table in tables
            for holder in table.of_tier("persistent").holders
        }
        if stored and world.persistent is not None:
            of_storage = world.persistent.offers(step_id.step, hosts=stored).sources
            sources |= {
                offer: source
                for offer, source in of_storage.items()
                if offer.manifest.save == step_id.save
            }
        if not sources:
            offer = part_offers.nothing(world.own.host, tables)
            sources = {offer: world.source(offer.host, "", step_id)}
        # Host 0 has found the whole to be complete. Where saved boxes overlap, so do
        # parts, which is an error of the plan: then all holders are read.
        complete = search.Step(
            step=step_id.step,
            save=step_id.save,
            holdings=Holdings.from_offers(list(sources)),
            gaps={},
            missing_parts={},
            overlapping=frozenset(),
        )
        return FoundStep(step=complete, sources=sources)

    @calls.call()
    def end(self) -> None:
        """Removes the messages of this host, which all hosts have read."""
        self._part_exchange.end()

    def _chosen_step(self, step_id: StepId) -> search.Step:
        chosen = self._chosen
        if chosen is None or chosen.step.step_id != step_id:
            raise errors.CheckpointError(
                f"step {step_id.step}, save {step_id.save}, is not the one that host 0"
                " has found"
            )
        return chosen.step

    def _within_reach(
        self, ram_tiers: Sequence[Tier]
    ) -> tuple[list[Tier], dict[int, str], list[line.Line], str | None]:
        # The tiers that answer; the steps that Orbax alone saved, with the saves that
        # they count as; lines that are recorded in storage; and why storage does not
        # answer, None if it does or there is none.
        if self._world.persistent is None:
            return list(ram_tiers), {}, [], None
        try:
            storage_tier = self._world.persistent.as_now()
            foreign = storage_tier.foreign_saves()
        except errors.CheckpointError as error:
            return list(ram_tiers), {}, [], str(error)
        recorded = storage_tier.recorded_lines()
        return [*ram_tiers, storage_tier], foreign, recorded, None

    def _refusing(self, tiers: Sequence[Tier]) -> list[str]:
        known = secret.path(self._world.disk.root)
        return [
            f"{url} does not take the secret in {known}, so nothing that it may hold of"
            " this run is restored; copy that file from a machine of the run, for"
            " example the agent's, and start again"
            for tier in tiers
            if isinstance(tier, peer.Peers | SurveyedRam)
            for url in tier.refusing()
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


def _counted(looking: tier_search.Search, foreign: Mapping[int, str]) -> list[int]:
    # The steps of Orbax alone that are not abandoned, ascending.
    return sorted(
        step
        for step, save in foreign.items()
        if not looking.line.abandons(StepId(step, save))
    )
