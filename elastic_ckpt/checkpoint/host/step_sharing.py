"""How hosts restore a step without each of them reading the manifests of all.

They report what they hold up a tree (`part_exchange`) to host 0, which searches it. It
passes down the contents of the step that it chose, receives the boxes that each host
needs, and deals each host the parts that it reads.

    offer_saves, survey               the steps that hosts have
    offer_step, survey                the parts of one of them, until one is complete
    share, contents                   the contents of the step
    offer_wanted, plan, parts         what each host reads

Between two of these, hosts `merge` and `pass_on` level by level.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastic_ckpt.checkpoint.host import part_offers
from elastic_ckpt.checkpoint.host.world import HostWorld
from elastic_ckpt.core import calls, errors
from elastic_ckpt.steps import part_choices, read_plan, search
from elastic_ckpt.steps.holdings import Holdings
from elastic_ckpt.steps.manifest import Contents
from elastic_ckpt.steps.part_message import PartMessage
from elastic_ckpt.steps.part_table import Holder, PartTable, SavedStep
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.find import FoundStep
from elastic_ckpt.tiers.surveyed_ram import SurveyedRam

_NO_ROWS = np.empty(0, np.int64)


class StepSharing:
    """One host's part in sharing a step.

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
    def offer_saves(self) -> None:
        """Offers the steps that this host has."""
        self._part_exchange.offer(part_offers.of_all(self._world))

    @calls.call()
    def offer_step(self, step: int) -> None:
        """Offers what this host has of a step."""
        self._part_exchange.offer(part_offers.of_step(self._world, step))

    def offer_wanted(self, saved: SavedStep, wanted: read_plan.Wanted | None) -> None:
        """Offers a list of the boxes that this host needs of a step.

        Args:
          saved: the step.
          wanted: the boxes; None if this host reads all manifests itself.
        """
        if wanted is None:
            self._part_exchange.offer(PartMessage())
            return
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
        self._part_exchange.offer(PartMessage(tables=(table,)))

    def survey(self, steps: Sequence[int]) -> SurveyedRam:
        """The RAM of all hosts as far as they have reported it; on host 0.

        Args:
          steps: of which they have reported the parts, the last one just now; none if
            they have just reported which steps they have.
        """
        message = self._part_exchange.merged()
        if not steps:
            self._ram = SurveyedRam(message)
            return self._ram
        self._ram.add(steps[-1], message)
        return self._ram

    def choose(self, step_found: FoundStep | None) -> None:
        """Keeps the step that was found, or drops what was reported; on host 0."""
        self._chosen = step_found
        if step_found is None:
            self._ram = SurveyedRam(PartMessage())

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
        self.choose(None)

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
