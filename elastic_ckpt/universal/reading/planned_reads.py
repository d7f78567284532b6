"""The plan of some boxes of targets, with the sources of its bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from absl import logging

from elastic_ckpt.core import errors
from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal.formats.checkpoint import Checkpoint, no_checksums
from elastic_ckpt.universal.moves import Fill, Move, TargetTensor
from elastic_ckpt.universal.plan import load_plan
from elastic_ckpt.universal.plan.load_plan import LoadPlan
from elastic_ckpt.universal.plan.spans import Limits
from elastic_ckpt.universal.reading.byte_source import (
    ByteSource,
    LocalFiles,
    RemoteFiles,
)
from elastic_ckpt.universal.reading.encoded_arrays import LIMITS, EncodedArrays
from elastic_ckpt.universal.reading.read_checks import ReadChecks


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PlannedReads:
    """A plan and how its files are read.

    Attributes:
      plan: of what a process reads.
      encoded: the arrays that TensorStore decodes.
      source: of all other files; None if they are files and objects.
    """

    plan: LoadPlan
    encoded: EncodedArrays
    source: ByteSource | None = None

    @classmethod
    def of_boxes(
        cls,
        checkpoint: Checkpoint,
        moves: Sequence[Move],
        fills: Sequence[Fill],
        needed: Mapping[TargetTensor, Sequence[Box]],
        *,
        source: ByteSource | None = None,
    ) -> PlannedReads:
        """Plans the reads of some boxes, and proves that they are filled.

        Args:
          checkpoint: that is open.
          moves: from its tensors; those into targets that are not needed are left out.
          fills: parts of targets that no tensor has.
          needed: the distinct boxes, by target.
          source: of the checkpoint's files, each of which is one request, whatever is
            needed of it; None if they are files and objects.

        Raises:
          CheckpointError: if an element is filled by no source or by two.
        """
        names = {tensor.name for tensor in needed}
        used = {
            source.tensor
            for move in moves
            if move.target in names
            for source in move.sources
        }
        encoded = EncodedArrays(checkpoint.tensors, sorted(used))

        def limits(file: str) -> Limits:
            in_one = source is not None or file in encoded
            return LIMITS if in_one else load_plan.limits_of(file)

        plan = load_plan.plan(encoded.tensors, moves, fills, needed, limits=limits)
        return cls(plan=plan, encoded=encoded, source=source)

    @property
    def files(self) -> list[str]:
        """The files that are read as they are."""
        if self.source is not None:
            return []
        return [file for file in self.plan.files if file not in self.encoded]

    def sources(self) -> dict[str, ByteSource]:
        """The source of each file of the plan."""
        local: ByteSource = self.source or LocalFiles()
        remote: ByteSource = self.source or RemoteFiles()
        return {
            file: self.encoded
            if file in self.encoded
            else (remote if "://" in file else local)
            for file in self.plan.files
        }

    def checks(self, checkpoint: Checkpoint) -> ReadChecks | None:
        """The checksums that the format has of the files; None if it has none.

        Raises:
          FormatError: if checksums cannot be read.
        """
        if self.source is not None or checkpoint.checksums is no_checksums:
            return None
        checks = ReadChecks(checkpoint, self.plan, self.files)
        if checks.unverified:
            logging.info(
                "%s has no checksums of %d of the files that are read: %s",
                checkpoint.format,
                len(checks.unverified),
                errors.first_of(checks.unverified),
            )
        return checks
