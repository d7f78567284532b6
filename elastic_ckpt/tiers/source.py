"""Sources: one holder's parts of one step.

A host's own RAM disk, a peer's, and persistent storage are read alike. A source returns
bytes as it read them: the caller compares them with the manifest's digests.
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
    """Reads parts of one step at one holder; any number of threads may call it."""

    @property
    def directory(self) -> str:
        """The path or URL of the step's files, for messages."""

    def read_into(
        self, leaf: Leaf, box: Box, into: memoryview, on_piece: OnPiece = ignored
    ) -> int:
        """Fills `into` with a part, or with the first bytes of it.

        Args:
          leaf: the leaf.
          box: of the part, one that the holder has.
          into: writable and contiguous. If it is longer than the values, the rest is
            what lies behind them.
          on_piece: called with each part of `into`, in order, once it is read.

        Returns:
          The length of what the part is stored in, in bytes.

        Raises:
          ReadError: if the part is missing or too short, or the holder does not answer;
            what `into` holds then is undefined.
        """


@runtime_checkable
class MappedSource(Source, Protocol):
    """A source in the memory of this machine."""

    def mapped(self, leaf: Leaf, box: Box) -> np.ndarray:
        """The values of a part where they lie, uint8, not to be written.

        They may change once the step is removed.

        Raises:
          ReadError: as `read_into`.
        """


@runtime_checkable
class RepairableSource(Source, Protocol):
    """A source in a slot of a RAM disk that this process does not own."""

    def put_right(self, leaf: Leaf, box: Box, content: bytes) -> None:
        """Replaces a bad copy by what was saved, atomically.

        Args:
          leaf: the leaf.
          box: of the part.
          content: all bytes of its file; they are compared with its manifest first.

        Raises:
          RepairError: if it was not replaced.
        """


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


class Copy(NamedTuple):
    """What one holder has of a save of a step.

    Attributes:
      manifest: of one holder.
      source: where to read the parts.
    """

    manifest: Manifest
    source: Source


class Offered(NamedTuple):
    """The parts of a step that a tier holds.

    Attributes:
      copies: of all saves of the step.
      problems: manifests that could not be had or read, and why, a sentence each.
    """

    copies: Sequence[Copy]
    problems: Sequence[str]


class Tier(Protocol):
    """A tier of storage that steps are restored from."""

    def known_saves(self) -> Sequence[StepId]:
        """The steps that may be there, with their saves; an unknown one is empty.

        The newest save is among them.
        """

    def offers(self, step: int) -> Offered:
        """The parts of a step, of all its saves, as the manifests list them.

        Raises:
          LaterVersionError: if a later version of elastic_ckpt wrote it in storage.
        """
