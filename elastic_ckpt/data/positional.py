"""The positional engine: one record in, one example out, a position for a state.

Records are shuffled anew each epoch and repeated without end, so example number `n` of
the run is a pure function of `n`. Grain's `ElasticIterator` gives host `h` of `H` the
examples `t * B + h + r * H` as its rows `r` of batch `t`: every batch holds the same
rows at any H that divides B, and the state is the number of the next example.
"""

from __future__ import annotations

import dataclasses

import grain
import numpy as np
from grain import experimental as grain_experimental

from elastic_ckpt.config import schema
from elastic_ckpt.core import storage
from elastic_ckpt.data import cursors, example_id, iterator, rows, tokens
from elastic_ckpt.data.sources import arrayrecord


@dataclasses.dataclass(frozen=True, kw_only=True)
class PositionalData:
    """Text records as examples for a language model, endless and elastic.

    Attributes:
      files: ArrayRecord files; a record is the bytes of one text.
      max_target_length: tokens of an example, L.
      shuffle: whether each epoch has an order of its own.
      shuffle_seed: seed of these orders.
      num_threads: threads that read on each host; 0 reads in the caller.
      prefetch_records: records read ahead on each host.
    """

    files: tuple[str, ...]
    max_target_length: int
    shuffle: bool = True
    shuffle_seed: int = 0
    num_threads: int = 4
    prefetch_records: int = 16

    @property
    def engine(self) -> str:
        """Names the kind of position that the batches have."""
        return "positional"

    def num_records(self) -> int:
        """Examples of an epoch."""
        return len(arrayrecord.ArrayRecordFiles(self.files))

    def identity(self) -> dict[str, storage.Json]:
        """What decides which example has which number, named by configuration keys."""
        return {
            "grain_train_files": arrayrecord.ArrayRecordFiles(self.files).identity(),
            "max_target_length": self.max_target_length,
            "tokenizer": "bytes",
            "enable_data_shuffling": self.shuffle,
            "data_shuffle_seed": self.shuffle_seed,
        }

    def examples(self) -> grain.MapDataset:
        """All examples of the run in order, endless.

        An example is `inputs` and `targets`, int32 `[L]` with 0 for padding, and
        `example_id`, uint32 `[2]`: the record number.
        """
        records = grain.MapDataset.source(arrayrecord.ArrayRecordFiles(self.files))
        if self.shuffle:
            records = records.seed(self.shuffle_seed).shuffle()
        return records.repeat().map(self._example)

    def host_batches(self, placement: rows.Placement) -> iterator.HostBatches:
        """The rows of each global batch that one host loads.

        Grain deals them out by number, so they are the right rows of each batch, but
        not those that `placement` puts on the host's devices.
        """
        elastic = grain_experimental.ElasticIterator(
            self.examples(),
            len(placement.row_hosts),
            grain.sharding.ShardOptions(
                shard_index=placement.host, shard_count=placement.num_hosts
            ),
            read_options=grain.ReadOptions(
                num_threads=self.num_threads,
                prefetch_buffer_size=self.prefetch_records if self.num_threads else 0,
            ),
        )
        return _HostBatches(iter(elastic))

    def _example(self, record: tuple[int, bytes]) -> dict[str, np.ndarray]:
        number, text = record
        text_tokens = tokens.encode(text, self.max_target_length + 1)
        return {
            "inputs": text_tokens[:-1],
            "targets": text_tokens[1:],
            "example_id": example_id.split(number),
        }


class _HostBatches:
    """Grain's elastic iterator, whose state is a position and no cursors."""

    def __init__(self, elastic: grain.DatasetIterator) -> None:
        self._elastic = elastic

    def __iter__(self) -> _HostBatches:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        return next(self._elastic)

    def position(self) -> cursors.Position:
        return dict(self._elastic.get_state())

    def shard_cursors(self) -> cursors.Cursors:
        return {}

    def go_to(self, position: cursors.Position, read: iterator.ReadCursors) -> None:
        del read  # there are none
        self._elastic.set_state(position)


def from_config(data: schema.DataSection) -> PositionalData:
    """The data that a configuration describes.

    Raises:
      DataError: if its files are missing.
    """
    return PositionalData(
        files=arrayrecord.find_files(data.grain_train_files),
        max_target_length=data.max_target_length,
        shuffle=data.enable_data_shuffling,
        shuffle_seed=data.data_shuffle_seed,
        num_threads=data.grain_num_threads,
        prefetch_records=data.grain_prefetch_buffer_size,
    )
