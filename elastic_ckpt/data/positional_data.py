"""The positional engine: each record is one example, and the state is a position.

Records are shuffled differently in each epoch and repeated endlessly, so example number
`n` of the run is a pure function of `n`, and the state is the number of the next
example. Row `r` of the batch at position `p` is example `p + r`. There are two ways to
load it:

* in place: each host loads the rows that its devices hold, so every batch equals that
  of one host, row by row;
* by Grain's `ElasticIterator`, unchanged: host `h` of H loads the rows `h + j * H`, so
  every batch has the rows of one host in a different order.

Both have the same state, and a run may change from one to the other.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
from grain import experimental as grain_experimental

from elastic_ckpt.core import storage
from elastic_ckpt.data import cursors, data_keys, elastic_data, example_id, rows, tokens
from elastic_ckpt.data.sources import arrayrecord, files, source

Example = dict[str, np.ndarray]

# The name that Grain's `ElasticIterator` gives to a position.
_POSITION = "global_next_index"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionalData:
    """Elastic data of text records as examples for a language model.

    Attributes are those of `positional`.
    """

    files: tuple[str, ...]
    max_target_length: int
    shuffle: bool = True
    shuffle_seed: int = 0
    in_place: bool = True
    num_threads: int = 4
    prefetch_records: int = 16
    num_epochs: int | None = None

    def __post_init__(self) -> None:
        source.take_names(self, required="files")

    @property
    def end(self) -> elastic_data.End:
        """How the data ends."""
        if self.num_epochs is None:
            return elastic_data.End.NEVER
        return elastic_data.End.PADDED

    @property
    def num_shards(self) -> int:
        """There are no logical shards."""
        return 0

    @property
    def rows_of_end(self) -> int:
        """One: no real row follows a padding row."""
        return 1

    @property
    def engine(self) -> str:
        """The name of the engine, which determines the form of its positions."""
        return "positional"

    def num_records(self) -> int:
        """The number of examples in an epoch."""
        return len(arrayrecord.ArrayRecordFiles(self.files))

    def identity(self) -> dict[str, storage.Json]:
        """The settings that determine the order of examples, by configuration key."""
        return {
            "grain_train_files": arrayrecord.ArrayRecordFiles(self.files).identity(),
            "max_target_length": self.max_target_length,
            "tokenizer": "bytes",
            "enable_data_shuffling": self.shuffle,
            "data_shuffle_seed": self.shuffle_seed,
            "num_epoch": self.num_epochs or 0,
        }

    def examples(self) -> grain.MapDataset:
        """All examples of the run in order.

        An example is `inputs` and `targets`, int32 `[L]` with 0 for padding, and
        `example_id`, uint32 `[2]`: the record number.
        """
        return self._in_order(arrayrecord.ArrayRecordFiles(self.files)).map(
            self._example
        )

    def record_numbers(self) -> grain.MapDataset:
        """The record number of each example of the run in order; reads no record."""
        return self._in_order(range(self.num_records()))

    def _in_order(self, source: Any) -> grain.MapDataset:
        records = grain.MapDataset.source(source)
        if self.shuffle:
            records = records.seed(self.shuffle_seed).shuffle()
        return records.repeat(self.num_epochs)

    def host_batches(self, placement: rows.Placement) -> elastic_data.HostBatches:
        """The rows of each global batch that one host loads."""
        read_options = grain.ReadOptions(
            num_threads=self.num_threads,
            prefetch_buffer_size=self.prefetch_records if self.num_threads else 0,
        )
        # At the end of an epoch Grain's ElasticIterator leaves out what fills no batch.
        size, part = placement.global_batch_size, placement.part
        if self.in_place or part is None:
            mine = placement.held
        elif self.num_epochs is not None or placement.every > 1:
            # The rows that Grain's ElasticIterator deals to this host.
            mine = np.arange(part[0], size, part[1])
        else:
            elastic = grain_experimental.ElasticIterator(
                self.examples(),
                size,
                grain.sharding.ShardOptions(shard_index=part[0], shard_count=part[1]),
                read_options=read_options,
            )
            return _HostBatches(iter(elastic))
        return _HostBatches(
            _InPlaceIterator(self.examples(), placement, mine, read_options)
        )

    def _example(self, record: tuple[int, bytes]) -> Example:
        number, text = record
        text_tokens = tokens.encode(text, self.max_target_length + 1)
        example = {
            "inputs": text_tokens[:-1],
            "targets": text_tokens[1:],
            "example_id": example_id.split(number),
        }
        if self.end is not elastic_data.End.NEVER:
            example[elastic_data.MASK] = np.array(True)
        return example


class _HostBatches:
    """The rows of one host, from an iterator whose state is a position."""

    # Threads of Grain's read the records.
    in_process_by_default = False

    def __init__(self, batches: grain.DatasetIterator) -> None:
        self._batches = batches

    def __next__(self) -> Example:
        try:
            return next(self._batches)
        except StopIteration:
            return _padding(self._first())
        except BaseException:  # Ctrl-C too
            # Some rows of this batch were already taken: start the batch again.
            self._batches.set_state(self._batches.get_state())
            raise

    def position(self) -> cursors.Position:
        return dict(self._batches.get_state())

    def shard_cursors(self) -> cursors.Cursors:
        return {}

    def changed(self) -> cursors.Cursors:
        return {}

    def go_to(self, position: cursors.Position, read: elastic_data.ReadCursors) -> None:
        del read  # there are none
        self._batches.set_state(position)

    def close(self) -> None:
        self._batches.close()

    def _first(self) -> Example:
        # A batch, used only for its shapes.
        at_end = self._batches.get_state()
        self._batches.set_state({_POSITION: 0})
        first = next(self._batches)
        self._batches.set_state(at_end)
        return first


class _InPlaceIterator(grain.DatasetIterator[Example]):
    """The examples in the rows of one host."""

    def __init__(
        self,
        examples: grain.MapDataset,
        placement: rows.Placement,
        batch_rows: np.ndarray,
        read_options: grain.ReadOptions,
    ) -> None:
        super().__init__()
        self._examples = examples
        self._rows = batch_rows
        self._every, self._skips = placement.every, placement.first
        self._global_batch_size = placement.global_batch_size
        self._read_options = read_options
        self._batches: grain.DatasetIterator | None = None
        self._next_index = 0

    def __next__(self) -> Example:
        first = self._next_index + self._skips * self._global_batch_size
        if self._batches is None:
            stride = self._every * self._global_batch_size
            mine = _RowExamples(self._examples, self._rows, stride, first)
            reader = mine.to_iter_dataset(self._read_options)
            self._batches = iter(reader.batch(len(self._rows)))
        batch = next(self._batches)
        self._next_index = first + self._global_batch_size
        self._skips = self._every - 1
        return batch

    def get_state(self) -> dict[str, Any]:
        return {_POSITION: self._next_index}

    def set_state(self, state: dict[str, Any]) -> None:
        self.close()
        self._next_index = state[_POSITION]

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()
        self._batches = None


class _RowExamples(grain.MapDataset):
    """The given rows of batches, of which each begins `stride` examples later."""

    def __init__(
        self,
        examples: grain.MapDataset,
        batch_rows: np.ndarray,
        stride: int,
        first: int,
    ) -> None:
        super().__init__(examples)
        self._batch_rows = batch_rows.tolist()
        self._stride = stride
        self._first = first

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        batch, row = divmod(index, len(self._batch_rows))
        number = self._first + batch * self._stride + self._batch_rows[row]
        if number < len(self._parent):
            return self._parent[number]
        # Padding, so that the caller can detect that all hosts have reached the end.
        first = self._parent[0]
        assert first is not None
        return _padding(first)


def _padding(example: Example) -> Example:
    # Padding with the shapes of `example` or of a batch, for the end of the data.
    padding = {name: np.zeros_like(array) for name, array in example.items()}
    padding["example_id"] = np.broadcast_to(
        example_id.split(example_id.NONE), example["example_id"].shape
    )
    return padding


def positional(
    files: Sequence[str],
    *,
    max_target_length: int,
    shuffle: bool = True,
    shuffle_seed: int = 0,
    in_place: bool = True,
    num_threads: int = 4,
    prefetch_records: int = 16,
    num_epochs: int | None = None,
) -> PositionalData:
    """Elastic data in which each record is one example.

    The state is the number of rows that were read: the simplest data there is, with any
    global shuffle, as long as nothing is filtered or packed. `sharded` does the rest.

    Args:
      files: paths of ArrayRecord files, of which each record is the bytes of a text.
      max_target_length: tokens of an example, L.
      shuffle: whether to shuffle all records, anew in each epoch.
      shuffle_seed: the seed of the shuffle.
      in_place: whether each host loads the rows that its devices hold; if not, Grain's
        `ElasticIterator` deals rows to hosts, which then exchange them.
      num_threads: threads that read on each host; 0 reads in the caller.
      prefetch_records: records read ahead on each host.
      num_epochs: the number of epochs; None repeats the records endlessly.

    Raises:
      ConfigError: if `files` is not a list of paths.
      DataError: if a file is missing, or not in ArrayRecord's format.
    """
    return PositionalData(
        files=files,  # pyrefly: ignore
        max_target_length=max_target_length,
        shuffle=shuffle,
        shuffle_seed=shuffle_seed,
        in_place=in_place,
        num_threads=num_threads,
        prefetch_records=prefetch_records,
        num_epochs=num_epochs,
    )


def from_config(data: data_keys.DataKeys) -> PositionalData:
    """The data that a configuration describes.

    Raises:
      DataError: if its files are missing.
    """
    return PositionalData(
        files=files.find_files(data.grain_train_files),
        max_target_length=data.max_target_length,
        shuffle=data.enable_data_shuffling,
        shuffle_seed=data.data_shuffle_seed,
        in_place=not data.grain_use_elastic_iterator,
        num_threads=data.grain_num_threads,
        prefetch_records=data.grain_prefetch_buffer_size,
        num_epochs=data.num_epoch or None,
    )
