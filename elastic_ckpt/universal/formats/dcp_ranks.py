"""The metadata of PyTorch's distributed checkpoints: one file, or one of each rank.

Ranks that save with `use_collectives=False` write `__0.metadata`, `__1.metadata`, each
with its own chunks. They are joined: of what several ranks have, the first one's
counts, as in checkpoints with one file.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Sequence
from typing import Any

from etils import epath

from elastic_ckpt.core.boxes import Box
from elastic_ckpt.universal.formats import coverage, dcp_metadata, source_file
from elastic_ckpt.universal.formats.dcp_metadata import Item, Metadata, Tensor
from elastic_ckpt.universal.formats.format_error import FormatError
from elastic_ckpt.universal.formats.source_budget import SourceBudget

_OF_RANK = re.compile(r"__(\d{1,9})\.metadata")


def is_metadata(name: str) -> bool:
    """Whether a file of this name has metadata."""
    return name == dcp_metadata.FILE or _OF_RANK.fullmatch(name) is not None


def budget_of(directory: epath.Path) -> SourceBudget:
    """The limits of the checkpoint in `directory`.

    A tensor takes about 120 opcodes and 250 bytes of metadata, and over 800 bytes of
    another file: so a large checkpoint may take more than the limits of small ones.
    """
    files = [each for each in directory.iterdir() if not is_metadata(each.name)]
    return SourceBudget(sum(map(source_file.num_stored_bytes, files)))


def read(directory: epath.Path, budget: SourceBudget) -> Metadata:
    """The metadata of the checkpoint in `directory`.

    Raises:
      FormatError: if it is missing, malformed, names a file outside of the directory,
        or the chunks of a tensor overlap or leave a gap.
    """
    names = _names([each.name for each in directory.iterdir()], directory)
    parts = [dcp_metadata.read(directory / name, budget) for name in names]
    if len(parts) == 1:
        metadata, path = parts[0], directory / names[0]
    else:
        metadata, path = _joined(parts, directory), directory
    for name, tensor in metadata.tensors.items():
        boxes = [box for box, _ in tensor.chunks]
        coverage.check(tensor.shape, boxes, f"{path}: {name}")
    return metadata


def _names(names: Collection[str], directory: epath.Path) -> list[str]:
    # The files of metadata, in the order of ranks.
    matches = filter(None, map(_OF_RANK.fullmatch, names))
    ranks = {int(match[1]): match[0] for match in matches}
    if not ranks:
        return [dcp_metadata.FILE]
    if dcp_metadata.FILE in names:
        raise FormatError(
            f"{directory} has {dcp_metadata.FILE} and {ranks[min(ranks)]}, which are of"
            " two saves; remove the files of one"
        )
    lacking = next((rank for rank in range(len(ranks)) if rank not in ranks), None)
    if lacking is not None:
        raise FormatError(
            f"{directory} lacks __{lacking}.metadata, and has that of a later one; copy"
            " it from the machine that saved it"
        )
    return [ranks[rank] for rank in sorted(ranks)]


def _joined(parts: Sequence[Metadata], directory: epath.Path) -> Metadata:
    tensors: dict[str, Tensor] = {}
    chunks: dict[str, dict[Box, Item]] = {}
    values: dict[str, Item] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    # Entries of the first rank replace the others'.
    for part in reversed(parts):
        values |= part.values
        paths |= part.paths
        for name, tensor in part.tensors.items():
            other = tensors.setdefault(name, tensor)
            if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
                raise FormatError(
                    f"{directory} has {name} as {tensor.dtype}{list(tensor.shape)} and,"
                    f" of another rank, as {other.dtype}{list(other.shape)}; save with"
                    " collectives, and tensors of ranks under separate names"
                )
            chunks.setdefault(name, {}).update(tensor.chunks)
    joined = {
        name: dataclasses.replace(tensor, chunks=tuple(chunks[name].items()))
        for name, tensor in tensors.items()
    }
    return Metadata(tensors=joined, values=values, paths=paths)
