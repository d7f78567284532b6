"""The peer sides: a frozen `Peer` is another loader that does the same job.

The jobs, each in one process without worker processes:

* `packed`: documents of varying length become rows of 2048 tokens.
* `packed_shuffled`: the same, documents shuffled in a window of 100 before.
* `packed_first_fit`, `packed_best_fit`: documents of at most 2048 tokens stay whole, in
  rows of which 16 are filled at a time.
* `unpacked`: each document is padded to a row.
* `fixed_rows`: rows of 2048 tokens, packed beforehand and kept in the peer's own
  format, come as stacked batches of 16.

A peer does the jobs that it has a feature for, in the fastest form found, and gives the
reason for each job that it lacks. It yields int32 arrays, rows or batches; a driver
counts their tokens. A peer imports its packages inside of functions: if one is missing,
the peer is still listed, and `not_installed` names the package.
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
# Of settings that other loaders have no feature for.
FITTED: dict[Setting, str] = dict.fromkeys(
    ("packed_first_fit", "packed_best_fit", "unpacked"),
    "fits no whole documents into rows, and pads none, by a feature of its own",
)
INSTALL = "see benchmarks/peers/pyproject.toml"

Tokens = NDArray[np.int32]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """Another loader, and how it does the jobs.

    `prepare` writes the corpus in the peer's own format below a directory that is its
    own and does not exist yet; it is not timed, and None for a peer that reads the
    Parquet files of the corpus. `rows` is a generator of the tokens of a setting, from
    the corpus or from what `prepare` wrote: one pass, int32 arrays of shape (2048,) or
    (rows, 2048). Closing it ends the peer's threads.
    """

    name: str  # in the figure `ratio_<name>`
    packages: tuple[str, ...]  # that it needs, the one that it is about first
    lacks: Mapping[Setting, str]  # why it does not do a setting
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
    """Whether a distribution is."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
