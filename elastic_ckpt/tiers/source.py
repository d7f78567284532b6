"""Sources: one holder's parts of one step.

A host's own RAM disk, a peer's RAM disk and persistent storage share one interface. A
source returns unverified bytes; the caller compares them with the manifest's digests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from etils import epath

from elastic_ckpt.core.boxes import Box
from elastic_ckpt.steps.manifest import Leaf, Manifest
from elastic_ckpt.steps.step import StepId

# A piece of this size fits into a processor cache, so processing it right after the
# read takes only a third of the time.
PIECE_BYTES = 256 * 2**10
OnPiece = Callable[[memoryview], object]


class ReadError(Exception):
    """Bytes cannot be read from a holder; the message lacks a subject."""


class RefusedError(ReadError):
    """The holder rejects the run's secret; the message lacks a subject."""


class RepairError(Exception):
    """A bad copy was not replaced; the message lacks a subject."""


def ignored(piece: memoryview) -> None:
    """Does nothing with a piece."""
    del piece


class Source(Protocol):
    """Reads parts of one step from one holder; any number of threads may call it."""

    @property
    def directory(self) -> str:
        """The path or URL of the step's files, used in error messages."""

    def read_into(
        self, leaf: Leaf, box: Box, into: memoryview, on_piece: OnPiece = ignored
    ) -> int:
        """Fills `into` with a part or the part's first bytes.

        Args:
          leaf: the leaf of the part.
          box: the box of the part, which the holder must have.
          into: a writable, contiguous buffer. If it is longer than the values, the rest
            is filled with the bytes stored after them.
          on_piece: a function that is called with each piece of `into`, in order, once
            the piece is read.

        Returns:
          The number of bytes stored for the part.

        Raises:
          ReadError: if the part is missing or too short, or the holder does not answer;
            the content of `into` is then undefined.
        """


@runtime_checkable
class LendingSource(Source, Protocol):
    """A source that has values in memory of its own."""

    def lent(self, leaf: Leaf, box: Box) -> np.ndarray:
        """Returns the values of a part, uint8, read-only.

        On a RAM disk, they may change once the step is removed.

        Raises:
          ReadError: see `read_into`.
        """


@runtime_checkable
class RepairableSource(Source, Protocol):
    """A source in a RAM disk's slot that this process does not own."""

    def repair(self, leaf: Leaf, box: Box, content: bytes) -> None:
        """Replaces a bad copy, atomically.

        Args:
          leaf: the leaf of the part.
          box: the box of the part.
          content: all bytes of the part's file, which are first compared with the
            manifest.

        Raises:
          RepairError: if the copy was not replaced.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leftover:
    """An uncommitted step: it is being written, or its save was interrupted.

    Attributes:
      save: the save that writes the step; None if the directory name does not contain
        it.
    """

    step: int
    save: str | None
    path: epath.Path


class HeldParts(NamedTuple):
    """One holder's parts of a save of a step."""

    manifest: Manifest
    source: Source


class Offered(NamedTuple):
    """The parts of a step that a tier holds.

    Attributes:
      held: the holders' parts of all saves of the step.
      problems: a message for each manifest that could not be read.
    """

    held: Sequence[HeldParts]
    problems: Sequence[str]


class SourceTier(Protocol):
    """A tier of storage that steps are restored from."""

    def known_saves(self) -> Sequence[StepId]:
        """The steps that the tier may have, with their saves; empty if unknown.

        Includes the newest save.
        """

    def offers(self, step: int) -> Offered:
        """The parts of all saves of a step, as manifests list them.

        Raises:
          LaterVersionError: if a later version of elastic_ckpt wrote the step in
            storage.
        """
