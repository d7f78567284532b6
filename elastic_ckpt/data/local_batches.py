"""One host's rows as NumPy arrays, for loops of PyTorch or of no framework at all.

`LocalBatches` is a plain iterator with both spellings of a state: Grain's `get_state`
and `set_state`, and torchdata's `state_dict` and `load_state_dict`.
`data.torch_dataset` makes a PyTorch dataset of it.

A state is JSON. Each rank has the cursors of the shards that it runs, so a world of
another size takes the states of all ranks together: `load_state_dict([one, two])`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from elastic_ckpt.core import errors, storage
from elastic_ckpt.data import cursors, delivery, elastic_data, prefetch, rows, state

_VERSION = 1

StateDict = dict[str, storage.Json]


class LocalBatches:
    """The rows of each global batch that one rank loads.

    Args:
      data: what to iterate over; if hosts load others than their own rows, those that
        this rank loads.
      rank: this host's number.
      num_ranks: hosts.
      global_batch_size: rows of all hosts together, B.
      agree: of data that ends, tells whether any rank has a row left (or, if the data
        drops what fills no batch, whether all have): for several ranks an all-reduce
        of what it is given.
      read_ahead: how far a thread reads ahead; by default none does.
    """

    def __init__(
        self,
        data: elastic_data.ElasticData,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        global_batch_size: int,
        agree: Callable[[bool], bool] | None = None,
        read_ahead: prefetch.ReadAhead = prefetch.IN_CALLER,
    ) -> None:
        if data.end is not elastic_data.End.NEVER and num_ranks > 1 and agree is None:
            raise errors.ConfigError(
                f"data that ends has to end on all {num_ranks} ranks at once; give"
                " LocalBatches agree=, an all-reduce of a bool"
            )
        self._data = data
        self._agree = agree or (lambda goes_on: goes_on)
        self._batches_of_end = delivery.batches_of_end(data, global_batch_size)
        placement = rows.Placement.in_order(
            rank, num_hosts=num_ranks, global_batch_size=global_batch_size
        )
        self._rows = prefetch.Prefetched(
            data.host_batches(placement), make=dict, read_ahead=read_ahead
        )

    def __iter__(self) -> LocalBatches:
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        for _ in range(self._batches_of_end):
            batch = next(self._rows)
            if self._data.end is elastic_data.End.NEVER:
                return batch
            mask = batch[elastic_data.MASK]
            padded = self._data.end is elastic_data.End.PADDED
            if self._agree(bool(mask.any() if padded else mask.all())):
                return batch
        raise StopIteration

    def get_state(self) -> StateDict:
        """The state after the last batch, JSON."""
        return {
            "version": _VERSION,
            "engine": self._data.engine,
            "position": self._rows.position(),
            "pipeline": self._data.identity(),
            "cursors": {str(s): c for s, c in self._rows.shard_cursors().items()},
        }

    def set_state(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Goes to a state, or to that which the ranks of a world have saved together.

        Raises:
          DataError: if a state is of another pipeline or version, the ranks' states are
            not of one moment, or shards are missing.
        """
        ranks = [saved] if isinstance(saved, Mapping) else list(saved)
        position = ranks[0].get("position")
        found: dict[int, cursors.Cursor] = {}
        for rank, of_rank in enumerate(ranks):
            if of_rank.get("version") != _VERSION:
                raise errors.DataError(
                    f"the state of rank {rank} is not one of version {_VERSION} of"
                    " LocalBatches; load what its get_state or state_dict gave"
                )
            own = state.DataState(
                **{key: of_rank[key] for key in ("engine", "position", "pipeline")}
            )
            state.check_same_pipeline(own, self._data.engine, self._data.identity())
            if own.position != position:
                raise errors.DataError(
                    f"the state of rank {rank} is that of {own.position}, and of rank 0"
                    f" of {position}; load states that were saved at the same step"
                )
            found |= {int(shard): cur for shard, cur in of_rank["cursors"].items()}

        def read(shards: Sequence[int]) -> cursors.Cursors:
            missing = sorted(set(shards) - found.keys())
            if missing:
                raise errors.DataError(
                    f"the state lacks logical shards {missing}; load the states of all"
                    " ranks together, as a list"
                )
            return {shard: found[shard] for shard in shards}

        self._rows.go_to(ranks[0]["position"], read)

    def state_dict(self) -> StateDict:
        """`get_state`, as torchdata calls it."""
        return self.get_state()

    def load_state_dict(
        self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> None:
        """`set_state`, as torchdata calls it."""
        self.set_state(state_dict)

    def close(self) -> None:
        """Ends what reads ahead."""
        self._rows.close()
