"""Documents: a shard's records as arrays of tokens."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from concurrent import futures
from typing import Any, Protocol, cast

import grain
import numpy as np

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import records, shard_steps
from elastic_ckpt.data import tokens as token_numbers
from elastic_ckpt.data.lm import tokenizers

# A document's text, its tokens if it is already tokenized, or None.
Value = str | bytes | np.ndarray | None

_BYTES = tokenizers.Bytes()
_NO_TOKENS = np.empty(0, np.int32)

# The number of documents that one thread tokenizes at a time.
_OF_A_THREAD = 8

# Set by `torchrun` and our launcher: the number of processes on this machine.
LOCAL_HOSTS_VARIABLE = "LOCAL_WORLD_SIZE"


def num_threads(asked: int, *, num_processes: int = 1) -> int:
    """The number of threads in each process that reads a host's data.

    Args:
      asked: the configured number of threads per host; 0 means the number of cores that
        this process may use, divided by the number of hosts on this machine.
      num_processes: the number of processes that share the threads.
    """
    hosts = int(os.environ.get(LOCAL_HOSTS_VARIABLE) or 1)
    return max(1, (asked or _num_cores() // hosts) // num_processes)


class Encoder(Protocol):
    """Converts records to the elements of `Tokens`; `Documents` is one encoder."""

    @property
    def column(self) -> str:
        """The column that the encoder reads, used in error messages."""

    @property
    def tokenizer(self) -> tokenizers.Tokenizer | None:
        """The tokenizer; None if records contain tokens."""

    def identity(self) -> dict[str, storage.Json]:
        """The settings that determine the tokens, keyed by configuration key."""

    def value(self, element: dict[str, Any]) -> Any:
        """The value in a record to encode.

        Raises:
          DataError: if the record lacks this value.
        """

    def tokens(self, values: Sequence[Any]) -> list[Any]:
        """The tokens of each value; called from multiple threads."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Documents:
    """Converts records to tokenized documents, for `Tokens`.

    Attributes:
      column: the name of the column with the text or the tokens.
      tokenizer: the tokenizer; None if the column contains tokens.
      add_begin: whether each document begins with the tokenizer's begin token.
      add_end: whether each document ends with the tokenizer's end token.
    """

    column: str = "text"
    tokenizer: tokenizers.Tokenizer | None = _BYTES
    add_begin: bool = True
    add_end: bool = True

    def __post_init__(self) -> None:
        if self.tokenizer is None:
            return
        for field, key, token, what in (
            ("add_begin", "add_bos", self.tokenizer.begin, "begins"),
            ("add_end", "add_eos", self.tokenizer.end, "ends"),
        ):
            if getattr(self, field) and token is None:
                raise errors.ConfigError(
                    f"Documents: {field}=True ({key}=true in a configuration), but the"
                    f" tokenizer has no token that {what} a document; set {key}=false,"
                    " or use a tokenizer with such a token"
                )

    def identity(self) -> dict[str, storage.Json]:
        """The settings that determine the tokens, keyed by configuration key."""
        return {
            "tokenizer": self.tokenizer.identity() if self.tokenizer else None,
            "train_data_columns": self.column,
            "add_bos": self.add_begin,
            "add_eos": self.add_end,
        }

    def value(self, element: dict[str, Any]) -> Value:
        """A record's text, or its tokens, int32 `[tokens]`; None for a null value.

        Raises:
          DataError: if the column is missing or has the wrong type.
        """
        value = token_numbers.in_column(element, self.column)
        if value is None:
            return None
        if self.tokenizer is None:
            return token_numbers.of_element(element, self.column)
        if not isinstance(value, str | bytes):
            raise errors.DataError(
                f"column {self.column!r} contains {type(value).__name__}, not text;"
                " if it contains tokens, set tokenizer=None (tokenize_train_data=false"
                " in a configuration)"
            )
        return value

    def tokens(self, values: Sequence[Value]) -> list[np.ndarray]:
        """The tokens of each value, int32 `[tokens]`; an empty array for None."""
        result: list[Any] = [_NO_TOKENS if value is None else value for value in values]
        texts = [n for n, value in enumerate(values) if isinstance(value, str | bytes)]
        if self.tokenizer and texts:
            begin = _as_tokens(self.tokenizer.begin if self.add_begin else None)
            end = _as_tokens(self.tokenizer.end if self.add_end else None)
            encoded = self.tokenizer.encode_batch([result[n] for n in texts])
            for number, tokens in zip(texts, encoded, strict=True):
                result[number] = np.concatenate([begin, tokens, end])
        return result


def _as_tokens(token: int | None) -> np.ndarray:
    return _NO_TOKENS if token is None else np.array([token], np.int32)


class Tokens(shard_steps.Step[np.ndarray]):
    """A dataset of documents: the tokens of each record, int32 `[tokens]`.

    Args:
      parent: a dataset of records, which are dicts of columns.
      documents: the encoder that converts records to tokens.
      num_threads: the number of tokenizer threads in this process, shared by all of its
        pipelines; 0 tokenizes in the calling thread. Tokens do not depend on this
        number.
    """

    holds_nothing = True

    def __init__(
        self,
        parent: grain.IterDataset,
        *,
        documents: Encoder,
        num_threads: int = 0,
    ) -> None:
        super().__init__(parent)
        self.documents, self.num_threads = documents, num_threads

    def __iter__(self) -> grain.DatasetIterator[np.ndarray]:
        return _TokensIterator(self, iter(self._parent))

    def settings(self) -> dict[str, storage.Json]:
        """The settings that determine the tokens of a record."""
        return dict(self.documents.identity())


class _TokensIterator(shard_steps.Elements[np.ndarray]):
    def __init__(self, dataset: Tokens, parent: grain.DatasetIterator) -> None:
        super().__init__(parent)
        self._documents, self._num_threads = dataset.documents, dataset.num_threads
        # The column of tokens, if it can be read directly.
        self._column = ""
        if (
            isinstance(self._documents, Documents)
            and self._documents.tokenizer is None
            and isinstance(parent, records.RecordsIterator)
        ):
            self._column = self._documents.column

    def some(self, at_most: int) -> list[np.ndarray]:
        if self._column:
            return cast(Any, self._parent).some_tokens(self._column, at_most)
        documents = self._documents
        found = shard_steps.take(self._parent, at_most)
        values = [records.named(documents.value, each) for each in found]
        if not self._num_threads or len(values) <= _OF_A_THREAD:
            return documents.tokens(values)
        parts = _pool(self._num_threads).map(
            documents.tokens,
            [values[n : n + _OF_A_THREAD] for n in range(0, len(values), _OF_A_THREAD)],
        )
        return [tokens for part in parts for tokens in part]

    def get_state(self) -> Any:
        return self._parent.get_state()

    def set_state(self, state: Any) -> None:
        self._parent.set_state(state)


# This process's pools of tokenizer threads, keyed by number of threads. A forked
# process does not inherit its parent's threads.
_pools: dict[int, futures.ThreadPoolExecutor] = {}
os.register_at_fork(after_in_child=_pools.clear)


def _pool(num_threads: int) -> futures.ThreadPoolExecutor:
    if num_threads not in _pools:
        pool = futures.ThreadPoolExecutor(num_threads, "elastic_ckpt-tokens")
        _pools.setdefault(num_threads, pool)
    return _pools[num_threads]


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
