"""Sources: one holder's parts of one step, read by byte ranges.

A host's own RAM disk, a peer's, and persistent storage are read alike. A source returns
bytes as it read them: the caller compares them with the manifest's digests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from etils import epath

from elastic_ckpt.steps.holdings import Offer
from elastic_ckpt.steps.step_id import StepId

# A piece of this size fits into a processor's cache: processing it directly after the
# read takes a third of the time that it takes later.
PIECE_BYTES = 256 * 2**10
OnPiece = Callable[[memoryview], object]


class ReadError(Exception):
    """Bytes of a file cannot be read from a holder; the message has no subject."""


class RefusedError(ReadError):
    """The holder does not take the run's secret; as `ReadError`."""


class RepairError(Exception):
    """A bad copy was not replaced; the message has no subject."""


def ignored(piece: memoryview) -> None:
    """Does nothing with a piece."""
    del piece


class Source(Protocol):
    """Reads the files of one step at one holder; any number of threads may call it."""

    @property
    def directory(self) -> str:
        """The path or URL of the step's files, for messages."""
        ...

    def read_into(
        self, file: str, offset: int, into: memoryview, on_piece: OnPiece = ignored
    ) -> None:
        """Fills `into`, of bytes, with those of `file` from `offset` on.

        Args:
          file: as a manifest names it.
          offset: of the first byte.
          into: writable and contiguous.
          on_piece: called with each part of `into`, in order, once it is read.

        Raises:
          ReadError: if the file is missing or too short, or the holder does not answer;
            what `into` holds then is undefined.
        """
        ...

    def size(self, file: str) -> int:
        """The length of `file` in bytes.

        Raises:
          ReadError: if the file is missing, or the holder does not answer.
        """
        ...


@runtime_checkable
class RepairableSource(Source, Protocol):
    """A source in a slot of a RAM disk that this process does not own."""

    def put_right(self, file: str, content: bytes) -> None:
        """Replaces a bad copy by what was saved, atomically.

        Args:
          file: as a manifest names it.
          content: all bytes of the file; they are compared with its manifest first.

        Raises:
          RepairError: if it was not replaced.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leftover:
    """A step that was not committed: it is being written, or was cut short.

    Attributes:
      step: its number.
      save: that writes it; None if the directory's name does not contain it.
      path: of the directory.
    """

    step: int
    save: str | None
    path: epath.Path


class Offered(NamedTuple):
    """The parts of a step that a tier holds.

    Attributes:
      sources: where to read what is offered.
      problems: manifests that could not be had or read, and why, a sentence each.
    """

    sources: Mapping[Offer, Source]
    problems: Sequence[str]


def merged(several: Iterable[Offered]) -> Offered:
    """Merges what several holders or tiers offer."""
    sources: dict[Offer, Source] = {}
    problems: list[str] = []
    for offered in several:
        sources.update(offered.sources)
        problems.extend(offered.problems)
    return Offered(sources=sources, problems=problems)


class Tier(Protocol):
    """A tier of storage that steps are restored from."""

    def known_saves(self) -> Sequence[StepId]:
        """Steps with their saves; the newest save there is among them."""
        ...

    def steps(self) -> Sequence[int]:
        """The steps that may have files, ascending."""
        ...

    def offers(self, step: int) -> Offered:
        """The parts of a step, of all its saves, as the manifests list them."""
        ...
