"""The peer sides: a frozen `Peer` is a different loader that does the same job.

The jobs, each in one process without worker processes:

* `packed`: documents of varying length become rows of 2048 tokens.
* `packed_shuffled`: the same, after documents are shuffled in a window of 100.
* `packed_first_fit`, `packed_best_fit`: documents of at most 2048 tokens stay whole;
  16 rows are filled at a time.
* `unpacked`: each document is padded to a row.
* `fixed_rows`: rows of 2048 tokens, packed beforehand and stored in the peer's own
  format, arrive as stacked batches of 16.

A peer does the jobs for which it has a feature, in the fastest form found, and states
the reason for each job that it lacks. It yields int32 arrays, rows or batches; a driver
counts their tokens. A peer imports its packages inside functions: if a package is
missing, the peer is still listed, and `not_installed` reports the package.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.documents import Documents

Setting = Literal[
    "packed",
    "packed_shuffled",
    "packed_first_fit",
    "packed_best_fit",
    "unpacked",
    "fixed_rows",
]

ROW_LENGTH = 2048
ROWS_A_BATCH = 16
SHUFFLE_WINDOW = 100

PACKED: tuple[Setting, ...] = ("packed", "packed_shuffled")
# Settings for which other loaders have no feature.
FITTED: dict[Setting, str] = dict.fromkeys(
    ("packed_first_fit", "packed_best_fit", "unpacked"),
    "it has no feature to fit whole documents into rows or to pad them",
)
INSTALL = "see benchmarks/peers/pyproject.toml"

Tokens = NDArray[np.int32]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """A loader and how it does the jobs.

    `prepare` writes the corpus in the peer's own format to the peer's own directory,
    which does not exist yet; it is not timed, and None for a peer that reads the
    corpus's Parquet files. `rows` is a generator of the tokens for a setting, from the
    corpus or the files that `prepare` wrote: one pass, int32 arrays of shape (2048,) or
    (rows, 2048). Closing the generator stops the peer's threads.
    """

    name: str  # in the figure `ratio_<name>`
    packages: tuple[str, ...]  # the packages that it needs, the main one first
    lacks: Mapping[Setting, str]  # why it does not support a setting
    prepare: Callable[[Documents, pathlib.Path], None] | None
    rows: Callable[[Setting, Documents, pathlib.Path], Iterator[Tokens]]

    @property
    def not_installed(self) -> str | None:
        """The missing packages and how to install them; None if there are none."""
        missing = [package for package in self.packages if not is_installed(package)]
        if not missing:
            return None
        return f"{self.name}: not installed: {', '.join(missing)}; {INSTALL}"


def is_installed(package: str) -> bool:
    """Whether a distribution is installed."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
