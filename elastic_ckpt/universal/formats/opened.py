"""An open checkpoint of any format, as its opener has read its structure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

from elastic_ckpt.universal.stored import StoredTensor

# Files whose checksums are compared at a time: each is read piece by piece.
_THREADS = 4


def _without_checksum(file: str) -> bool:
    del file
    return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedCheckpoint:
    """See `stored.Checkpoint`.

    Attributes:
      format: its name, for people.
      tensors: a name, its kind and its ranks together occur once.
      axes: the number of ranks by axis.
      values: numbers and texts beside the tensors, by path.
      verify: compares the checksums of a file; False if the format has none of it. It
        is called by several threads.
    """

    format: str
    tensors: Sequence[StoredTensor]
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    verify: Callable[[str], bool] = _without_checksum

    def check(self, files: Sequence[str]) -> list[str]:
        """Compares the checksums that the format has of these files.

        Returns:
          Those that have no checksum.

        Raises:
          FormatError: if a file has another checksum.
        """
        with futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="check") as pool:
            verified = pool.map(self.verify, files)
            return [
                file
                for file, is_verified in zip(files, verified, strict=True)
                if not is_verified
            ]
