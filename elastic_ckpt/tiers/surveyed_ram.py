"""The RAM of all hosts as a tier: what they have reported, step by step.

Host 0 searches it without a request to any other host. The parts of a step have to be
reported before they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_ckpt.steps.holdings import Offer
from elastic_ckpt.steps.part_message import PartMessage
from elastic_ckpt.steps.part_table import PartTable, joined
from elastic_ckpt.steps.step_id import StepId
from elastic_ckpt.tiers.source import (
    Offered,
    OnPiece,
    ReadError,
    Source,
    ignored,
)


class UnreportedStepError(Exception):
    """The parts of a step have not been reported yet.

    Attributes:
      step: that has to be.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"step {step}")
        self.step = step


class _Elsewhere:
    # The parts are read by the hosts that they are dealt to.

    directory = "RAM of the world"

    def read_into(
        self, file: str, offset: int, into: memoryview, on_piece: OnPiece = ignored
    ) -> None:
        """See `source.Source`."""
        del file, offset, into, on_piece
        raise ReadError("is read by other hosts")

    def size(self, file: str) -> int:
        """See `source.Source`."""
        raise ReadError(f"{file} is read by other hosts")


class SurveyedRam:
    """The RAM of all hosts; a `source.Tier`.

    Args:
      message: with the steps that hosts have.

    Attributes:
      is_partial: whether the report of a host is missing.
    """

    def __init__(self, message: PartMessage) -> None:
        self.is_partial = message.is_partial
        self._message = message
        self._of_step: dict[int, Offered] = {}
        self._tables: list[tuple[PartTable, list[Offer]]] = []

    def add(self, step: int, message: PartMessage) -> None:
        """Adds the parts of a step that hosts have reported."""
        self.is_partial |= message.is_partial
        sources: dict[Offer, Source] = {}
        for table in message.tables:
            offers = table.offers()
            sources |= dict.fromkeys(offers, _Elsewhere())
            self._tables.append((table, offers))
        self._of_step[step] = Offered(
            sources,
            problems=(*self._message.problems, *message.problems),
        )

    def table(self, offers: Sequence[Offer]) -> PartTable:
        """The parts of some offers of one save, those of other tiers among them."""
        urls: dict[str, str] = {}
        for table, reported in self._tables:
            if list(map(id, reported)) == list(map(id, offers)):
                return table
            urls |= {holder.host.id: holder.url for holder in table.holders}
        tables = (
            PartTable.from_offer(each, url=urls.get(each.host.id, ""))
            for each in offers
        )
        (table,) = joined(list(tables))
        return table

    def refusing(self) -> Sequence[str]:
        """The urls of agents that do not take the run's secret."""
        return self._message.refusing

    def steps(self) -> Sequence[int]:
        """See `source.Tier`."""
        return sorted({step for step, _ in self._message.saves})

    def known_saves(self) -> Sequence[StepId]:
        """See `source.Tier`."""
        return sorted(self._message.saves)

    def offers(self, step: int) -> Offered:
        """See `source.Tier`.

        Raises:
          UnreportedStepError: if hosts have the step and its parts are unknown.
        """
        if step in self._of_step:
            return self._of_step[step]
        if step in self.steps():
            raise UnreportedStepError(step)
        return Offered(sources={}, problems=self._message.problems)
