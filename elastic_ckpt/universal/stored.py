"""The tensors of a checkpoint of any format, and where their bytes lie.

A reader of a format opens a path as a `Checkpoint`. Its tensors are those of the files:
if each rank saved a shard, each shard is a separate tensor, with the coordinates of
that rank. A layout (`elastic_ckpt.universal.rules`) describes which of them belong
together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from elastic_ckpt.core.boxes import Box


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """A box of a tensor in a file, uncompressed and little-endian.

    Attributes:
      box: in the coordinates of the tensor.
      file: its path or URL.
      offset: the first byte of the box's first element.
      strides: bytes from an element to the next, by dim; not negative.
    """

    box: Box
    file: str
    offset: int
    strides: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint, as its format has it.

    Attributes:
      name: in the words of its format, `decoder.layers.3.mlp.linear_fc1.weight`.
      ranks: the coordinates of the rank that saved it, by axis (`tp`, `pp`, `dp`);
        empty where tensors are global.
      kind: what it is to its parameter: `parameter`, `master`, `first_moment`,
        `second_moment`, or the format's name of another state.
      dtype: of its elements.
      shape: in elements.
      fragments: boxes that cover it, each element once; empty if `spec` is there, or
        if names alone are matched.
      spec: of the TensorStore array that holds it, where its bytes are encoded.
      view: what is done with each element that is stored: "conj" (the conjugate),
        "neg" (the negative) or "conj neg"; "" if its values are those that are stored.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    ranks: tuple[tuple[str, int], ...] = ()
    kind: str = "parameter"
    fragments: tuple[Fragment, ...] = ()
    spec: Mapping[str, Any] | None = None
    view: str = ""


class Checksum(NamedTuple):
    """What a format says of a range of a file.

    Attributes:
      start: the first byte.
      stop: the byte after the last.
      crc: the CRC-32.
    """

    start: int
    stop: int
    crc: int


class Checkpoint(Protocol):
    """An open checkpoint. It holds no values, and files only while one is read."""

    @property
    def format(self) -> str:
        """The name of the format, for people: `DeepSpeed ZeRO-1`."""
        ...

    @property
    def tensors(self) -> Sequence[StoredTensor]:
        """All tensors; a name, its kind and its ranks together occur once."""
        ...

    @property
    def axes(self) -> Mapping[str, int]:
        """The number of ranks by axis; empty where tensors are global."""
        ...

    @property
    def values(self) -> Mapping[str, Any]:
        """Numbers and texts beside the tensors, by path: `iteration`, `args/lr`."""
        ...

    @property
    def checksums(self) -> Callable[[str], Sequence[Checksum]]:
        """Finds the ranges of a file of which the format has a checksum.

        It raises FormatError if they cannot be read.
        """
        ...

    def check(self, files: Sequence[str]) -> list[str]:
        """Compares the checksums that the format has of these files.

        Returns:
          Those of `files` that have no checksum, and cannot be verified.

        Raises:
          FormatError: if a file has another checksum.
        """
        ...
