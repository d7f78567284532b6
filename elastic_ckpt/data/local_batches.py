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

from elastic_ckpt.core import checked_json, errors, storage
from elastic_ckpt.data import cursors, delivery, elastic_data, prefetch, rows, state

_VERSION = 2
# Its states have no digest.
_FIRST_VERSION = 1

_FIELDS = {"engine": str, "position": dict, "pipeline": dict, "cursors": dict}

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
        if not 0 <= rank < num_ranks:
            raise errors.ConfigError(
                f"LocalBatches: rank={rank} of num_ranks={num_ranks}; ranks are"
                " numbered from 0 to num_ranks - 1"
            )
        if global_batch_size < 1 or global_batch_size % num_ranks:
            raise errors.ConfigError(
                f"LocalBatches: global_batch_size={global_batch_size} does not divide"
                f" over num_ranks={num_ranks}; choose a positive multiple of it"
            )
        if data.end is not elastic_data.End.NEVER and num_ranks > 1 and agree is None:
            raise errors.ConfigError(
                f"data that ends has to end on all {num_ranks} ranks at once; give"
                " LocalBatches agree=, an all-reduce of a bool"
            )
        self._data = data
        self._identity = data.identity()
        self._agree = agree or (lambda goes_on: goes_on)
        self._batches_of_end = delivery.batches_of_end(data, global_batch_size)
        self._placement = rows.Placement.in_order(
            rank, num_hosts=num_ranks, global_batch_size=global_batch_size
        )
        self._read_ahead = read_ahead
        self._rows = self._begin(data)
        self._at_end = False

    def __iter__(self) -> LocalBatches:
        return self

    @property
    def at_end(self) -> bool:
        """Whether the data has ended; then `reset` begins another pass."""
        return self._at_end

    def __next__(self) -> dict[str, np.ndarray]:
        for _ in range(self._batches_of_end):
            batch = next(self._rows)
            if self._data.end is elastic_data.End.NEVER:
                return batch
            mask = batch[elastic_data.MASK]
            padded = self._data.end is elastic_data.End.PADDED
            if self._agree(bool(mask.any() if padded else mask.all())):
                return batch
        self._at_end = True
        raise StopIteration

    def reset(self) -> None:
        """Goes to the beginning."""
        self._rows.close()
        self._rows, self._at_end = self._begin(self._data), False

    def get_state(self) -> StateDict:
        """The state after the last batch, JSON."""
        fields: StateDict = {
            "engine": self._data.engine,
            "position": self._rows.position(),
            "pipeline": self._identity,
            "cursors": {str(s): c for s, c in self._rows.shard_cursors().items()},
            "at_end": self._at_end,
        }
        return checked_json.sealed(fields, version=_VERSION)

    def set_state(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Goes to a state, or to that which the ranks of a world have saved together.

        Raises:
          DataError: if a state is not one, was altered, is of another pipeline or
            version, the ranks' states are not of one moment, or shards are missing or
            differ. The iterator then stays where it is.
        """
        ranks = [saved] if isinstance(saved, Mapping) else saved
        if not isinstance(ranks, Sequence) or isinstance(ranks, str) or not ranks:
            raise errors.DataError(
                f"{saved!r} is no state of LocalBatches; load what its get_state or"
                " state_dict returned, or a list of what those of all ranks returned"
            )
        data, identity = self._data, self._identity
        position, at_end = self._rows.position(), False
        found: dict[int, cursors.Cursor] = {}
        for rank, of_rank in enumerate(ranks):
            fields = _checked(of_rank, rank)
            own = state.DataState(
                **{key: fields[key] for key in ("engine", "position", "pipeline")}
            )
            if not rank:
                data = self._data.continuing(own.pipeline)
                identity = self._identity if data is self._data else data.identity()
            state.check_same_pipeline(own, data.engine, identity)
            if not rank:
                position, at_end = own.position, bool(fields.get("at_end"))
            elif own.position != position:
                raise errors.DataError(
                    f"the state of rank {rank} is that of {own.position}, and of rank 0"
                    f" of {position}; load states that were saved at the same step"
                )
            of_shards = {int(shard): cur for shard, cur in fields["cursors"].items()}
            differing = [s for s, cur in of_shards.items() if found.get(s, cur) != cur]
            if differing:
                raise errors.DataError(
                    f"the state of rank {rank} has other cursors of logical shards"
                    f" {differing} than those before it; load the states of one run"
                )
            found |= of_shards

        def read(shards: Sequence[int]) -> cursors.Cursors:
            missing = sorted(set(shards) - found.keys())
            if missing:
                raise errors.DataError(
                    f"the state lacks logical shards {missing}; load the states of all"
                    " ranks together, as a list"
                )
            return {shard: found[shard] for shard in shards}

        batches = self._rows if data is self._data else self._begin(data)
        batches.go_to(position, read)
        if data is not self._data:
            self._rows.close()
            self._data, self._identity, self._rows = data, identity, batches
        self._at_end = at_end

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

    def _begin(
        self, data: elastic_data.ElasticData
    ) -> prefetch.Prefetched[dict[str, np.ndarray]]:
        return prefetch.Prefetched(
            data.host_batches(self._placement),
            make=dict,
            read_ahead=self._read_ahead,
        )


def _checked(saved: Any, rank: int) -> dict[str, Any]:
    # The fields of a state of any version.
    try:
        if isinstance(saved, Mapping) and saved.get("version") == _FIRST_VERSION:
            fields = dict(saved)
        else:
            what = "state of LocalBatches"
            content = dict(saved) if isinstance(saved, Mapping) else saved
            fields = checked_json.unsealed(content, what=what, version=_VERSION)
        wrong = [
            name for name, of in _FIELDS.items() if not isinstance(fields.get(name), of)
        ] or _invalid(fields)
        if wrong:
            raise checked_json.Unreadable(f"lacks {wrong}, or has something else there")
    except checked_json.Unreadable as problem:
        raise errors.DataError(
            f"the state of rank {rank} {problem}; load what get_state or state_dict of"
            " LocalBatches returned"
        ) from None
    return fields


def _invalid(fields: Mapping[str, Any]) -> list[str]:
    # Of fields that are of their types, those whose content is none.
    positions = list(fields["position"].values())
    shards = fields["cursors"].keys()
    return [
        *["position"] * (list(map(type, positions)) != [int] or positions[0] < 0),
        *["cursors"] * (not all(str(shard).isdecimal() for shard in shards)),
    ]
