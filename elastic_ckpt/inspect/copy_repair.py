"""Puts right the bad copies that a verification has found, from good ones.

A copy is written anew only if it is bad, from a copy of the same save whose digest was
compared again. A file in RAM is replaced as an agent does it (`tiers.ram.file_repair`),
a part in storage as `tiers.persistent.step_repair` describes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from elastic_ckpt.checkpoint.host import verified_read
from elastic_ckpt.core import errors
from elastic_ckpt.inspect.all_copies import AllCopies
from elastic_ckpt.steps.holdings import Offer
from elastic_ckpt.steps.manifest import ComponentFile
from elastic_ckpt.tiers import stored_part
from elastic_ckpt.tiers.persistent import step_repair
from elastic_ckpt.tiers.source import RepairableSource, RepairError

_NO_COPY = "no good copy is left"
_DIVERGED = "its holders saved different values, and the right ones are unknown"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repair:
    """A bad copy, and whether it was put right.

    Attributes:
      step: its number.
      save: which save of it.
      part: a leaf and box, or a file of a component.
      tier: of the holder, `local` or `persistent`.
      path: of the copy.
      problem: why it was not put right; None if it was.
    """

    step: int
    save: str
    part: str
    tier: str
    path: str
    problem: str | None

    def __str__(self) -> str:
        outcome = "was put right"
        if self.problem is not None:
            outcome = f"was not put right: {self.problem}"
        return (
            f"step {self.step}, {self.part}, {self.tier} tier ({self.path}) {outcome}"
        )


class CopyRepair:
    """Puts right the bad copies of one save of a step.

    Args:
      reading: of all copies, that is done.
    """

    def __init__(self, reading: AllCopies) -> None:
        self._reading = reading
        self._holdings = reading.holdings
        self._reader = verified_read.VerifiedReader(reading.copies)
        self._items = self._holdings.item
        self._damaged = reading.damaged
        self._diverged = set(self._holdings.diverged.tolist())

    def run(self, *, rewrite: bool) -> Iterator[Repair]:
        """Repairs what can be repaired, and yields the outcome of each bad copy.

        Args:
          rewrite: whether chunks in storage are written anew that only Orbax cannot
            read; otherwise only the index that Orbax reads is made anew for them.
        """
        good: dict[Offer, list[int]] = {}
        for row in self._reading.repairable:
            problem = self._obstacle(row)
            if problem is None:
                good.setdefault(self._reading.offer(row), []).append(row)
            else:
                yield self._outcome(row, problem)
        for offer, rows in good.items():
            source = self._reading.copies[offer]
            if isinstance(source, RepairableSource):
                for row in rows:
                    yield self._outcome(row, self._replace(source, row))
            else:
                yield from self._store(offer, rows, rewrite=rewrite)

    def _obstacle(self, row: int) -> str | None:
        item = self._item(row)
        if item in self._diverged:
            return _DIVERGED
        return None if self._good(item) else _NO_COPY

    def _good(self, item: int) -> list[int]:
        first, end = self._holdings.first_row[item : item + 2].tolist()
        return [row for row in range(first, end) if row not in self._damaged]

    def _replace(self, source: RepairableSource, row: int) -> str | None:
        part = self._reading.part(row)
        try:
            if isinstance(part, ComponentFile):
                source.put_right(part.path, self._file(row))
            else:
                _, values = self._values(row)
                source.put_right(part.file, stored_part.chunk_content(values))
        except (errors.CheckpointError, RepairError) as error:
            return str(error)
        return None

    def _store(
        self, offer: Offer, rows: Sequence[int], *, rewrite: bool
    ) -> Iterator[Repair]:
        # In persistent storage, where the chunks of a host are in one store.
        repair = step_repair.StepRepair(
            self._reading.copies[offer].directory,
            self._holdings.contents,
            self._stores(offer),
        )
        files: dict[str, int] = {}
        chunks: dict[str, list[int]] = {}
        for row in rows:
            part = self._reading.part(row)
            if isinstance(part, ComponentFile):
                files[part.path] = row
            else:
                chunks.setdefault(part.file.partition("//")[0], []).append(row)
        for path, row in files.items():
            problem = repair.file(path, lambda row=row: self._file(row))
            yield self._outcome(row, problem)
        for store, of_store in chunks.items():
            bad = [row for row in of_store if rewrite or row in self._damaged]
            problem = repair.store(
                store,
                lambda bad=bad: map(self._values, bad),
                is_all=len(bad) == self._num_chunks(offer, store),
            )
            yield from (self._outcome(row, problem) for row in of_store)

    def _values(self, row: int) -> step_repair.Values:
        item = self._item(row)
        choices = [
            (self._reading.offer(each), self._holdings.fragment(each))
            for each in self._good(item)
        ]
        part = self._holdings.fragment(row)
        leaf = self._holdings.contents.leaves[part.leaf]
        name = self._holdings.name(item)
        values = verified_read.read_choices(choices, leaf, self._reader, name=name)
        return part, values

    def _file(self, row: int) -> bytes:
        item = self._item(row)
        file = self._holdings.files[item - len(self._holdings.leaf)]
        return self._reader.file(
            file, [self._reading.offer(n) for n in self._good(item)]
        )

    def _stores(self, offer: Offer) -> list[str]:
        # All hosts wrote into the directory of the step.
        directory = self._reading.copies[offer].directory
        held: Iterable[str] = (
            file
            for each in self._holdings.offers
            if each.tier == "persistent"
            and self._reading.copies[each].directory == directory
            for file in each.manifest.fragments.files
        )
        return sorted({file.partition("//")[0] for file in held})

    def _num_chunks(self, offer: Offer, store: str) -> int:
        files = offer.manifest.fragments.files
        return sum(file.partition("//")[0] == store for file in files)

    def _item(self, row: int) -> int:
        return int(self._items[row])

    def _outcome(self, row: int, problem: str | None) -> Repair:
        offer, part = self._reading.offer(row), self._reading.part(row)
        file = part.path if isinstance(part, ComponentFile) else part.file
        return Repair(
            step=offer.manifest.step,
            save=offer.manifest.save,
            part=self._holdings.name(self._item(row)),
            tier=offer.tier,
            path=f"{self._reading.copies[offer].directory}/{file}",
            problem=problem,
        )
