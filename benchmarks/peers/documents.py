"""The corpus that every peer reads: pre-tokenized documents, drawn from a seed.

`Documents` describes the corpus and writes it as Parquet files with one column,
`tokens` (list<int32>). Lengths are log-normal with a mean of about `mean_length`
tokens. Tokens are at least `FIRST_TOKEN`, so that they differ from the end-of-document
and the padding token. Everything is a function of the seed and the file index.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

COLUMN = "tokens"
PADDING = 0
END_OF_DOCUMENT = 1
FIRST_TOKEN = 2
# Tokens are drawn uniformly below this value.
_VOCABULARY_SIZE = 32_000
_SEED = 0

# The standard deviation of the logarithm of the length: with a mean of 500, half of all
# documents are shorter than 363.
_SIGMA = 0.8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Documents:
    """A corpus of `num_files` Parquet files in `directory`."""

    directory: pathlib.Path
    num_files: int = 16
    documents_a_file: int = 5000
    documents_a_row_group: int = 1000  # decoded as a unit
    mean_length: int = 500

    @property
    def files(self) -> list[str]:
        """The paths of the files, in order."""
        return [
            str(self.directory / f"documents-{file:05d}.parquet")
            for file in range(self.num_files)
        ]

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all documents; reads nothing."""
        return sum(int(self._lengths(file).sum()) for file in range(self.num_files))

    def write(self) -> None:
        """Writes the files and overwrites existing ones."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.directory.mkdir(parents=True, exist_ok=True)
        for file, path in enumerate(self.files):
            tokens, offsets = self._drawn(file)
            column = pa.ListArray.from_arrays(offsets, tokens)
            pq.write_table(
                pa.table({COLUMN: column}),
                path,
                row_group_size=self.documents_a_row_group,
            )

    def documents(self) -> Iterator[NDArray[np.int32]]:
        """All documents, file by file; draws them again instead of reading them."""
        for file in range(self.num_files):
            tokens, offsets = self._drawn(file)
            yield from np.split(tokens, offsets[1:-1])

    def packed(self, length: int) -> Iterator[NDArray[np.int32]]:
        """All documents one after the other, cut into rows; drops the tail."""
        left = np.empty(0, np.int32)
        for file in range(self.num_files):
            tokens = np.concatenate([left, self._drawn(file)[0]])
            num_rows = len(tokens) // length
            yield from tokens[: num_rows * length].reshape(num_rows, length)
            left = tokens[num_rows * length :]

    def _drawn(self, file: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        # A file's tokens and the `documents_a_file + 1` offsets into them.
        offsets = np.concatenate([[0], np.cumsum(self._lengths(file))]).astype(np.int32)
        generator = np.random.default_rng((_SEED, file, 1))
        tokens = generator.integers(
            FIRST_TOKEN, _VOCABULARY_SIZE, size=int(offsets[-1]), dtype=np.int32
        )
        return tokens, offsets

    def _lengths(self, file: int) -> NDArray[np.int64]:
        generator = np.random.default_rng((_SEED, file, 0))
        mu = np.log(self.mean_length) - _SIGMA**2 / 2  # makes the mean mean_length
        lengths = generator.lognormal(mu, _SIGMA, size=self.documents_a_file)
        return np.maximum(lengths, 1).astype(np.int64)
