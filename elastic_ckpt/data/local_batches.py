"""The rows of one host as NumPy arrays, for PyTorch and other training loops.

`LocalBatches` is a plain iterator with the state methods of both Grain, `get_state` and
`set_state`, and torchdata, `state_dict` and `load_state_dict`. `data.torch_dataset`
wraps it as a PyTorch dataset.

A state is JSON. The state of a rank has the cursors of the shards that it runs, so a
world of another size loads the states of all ranks together:
`load_state_dict([one, two])`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from elastic_ckpt.core import checked_json, errors, storage
from elastic_ckpt.data import cursors, delivery, elastic_data, prefetch, rows, state

_VERSION = 2
# States of this version have no digest.
_FIRST_VERSION = 1

_FIELDS = {"engine": str, "position": dict, "pipeline": dict, "cursors": dict}

StateDict = dict[str, storage.Json]


class LocalBatches:
    """One rank's rows of each global batch, as NumPy arrays, without JAX devices.

    For PyTorch and other frameworks, and for tests; `ec.batches` gives a JAX program
    global arrays. Its state is JSON, and one of another number of ranks can be loaded.

    Args:
      data: from `ec.data.from_config`, `positional` or `sharded`.
      rank: the number of this process.
      num_ranks: the number of processes.
      global_batch_size: rows of all ranks together, B; each has B / num_ranks of them.
      agree: an all-reduce of a bool over the ranks, needed if finite data is read by
        several: for `end="padded"` whether any rank passes True, for `"dropped"`
        whether all do.
      read_ahead: how far a thread reads ahead: a number of batches, or
        `ec.data.ReadAhead`. By default nothing is read ahead.
    """

    def __init__(
        self,
        data: elastic_data.ElasticData,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        global_batch_size: int,
        agree: Callable[[bool], bool] | None = None,
        read_ahead: prefetch.ReadAhead | int = prefetch.IN_CALLER,
    ) -> None:
        elastic_data.check(data, caller="LocalBatches")
        global_batch_size = elastic_data.batch_size(
            global_batch_size, caller="LocalBatches"
        )
        if not 0 <= rank < num_ranks:
            raise errors.ConfigError(
                f"LocalBatches: rank={rank} of num_ranks={num_ranks}; ranks are"
                " numbered from 0 to num_ranks - 1"
            )
        if global_batch_size < 1 or global_batch_size % num_ranks:
            raise errors.ConfigError(
                f"LocalBatches: global_batch_size={global_batch_size} cannot be"
                f" divided evenly among num_ranks={num_ranks}; choose a positive"
                " multiple of num_ranks"
            )
        if data.end is not elastic_data.End.NEVER and num_ranks > 1 and agree is None:
            raise errors.ConfigError(
                f"LocalBatches: finite data must end on all {num_ranks} ranks at once;"
                " pass agree=, a function that all-reduces a bool over the ranks"
            )
        self._data = data
        self._identity = data.identity()
        self._agree = agree or (lambda goes_on: goes_on)
        self._batches_of_end = delivery.batches_of_end(data, global_batch_size)
        self._placement = rows.Placement.in_order(
            rank, num_hosts=num_ranks, global_batch_size=global_batch_size
        )
        self._read_ahead = prefetch.ReadAhead.of(read_ahead)
        self._rows = self._begin(data)
        self._at_end = False

    def __iter__(self) -> LocalBatches:
        return self

    @property
    def at_end(self) -> bool:
        """Whether the data has ended; then `reset` starts another pass."""
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
        """Moves to the beginning."""
        self._rows.close()
        self._rows, self._at_end = self._begin(self._data), False

    def get_state(self) -> StateDict:
        """The state after the last batch, as JSON."""
        fields: StateDict = {
            "engine": self._data.engine,
            "position": self._rows.position(),
            "pipeline": self._identity,
            "cursors": {str(s): c for s, c in self._rows.shard_cursors().items()},
            "at_end": self._at_end,
        }
        return checked_json.sealed(fields, version=_VERSION)

    def set_state(self, saved: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Moves to a state, or to the combined state of all ranks of a world.

        Raises:
          DataError: if a state is invalid, was altered or is of another pipeline or
            version, if the states of the ranks are of different steps, or if cursors of
            shards are missing or differ. The position then does not change.
        """
        ranks = [saved] if isinstance(saved, Mapping) else saved
        if not isinstance(ranks, Sequence) or isinstance(ranks, str) or not ranks:
            raise errors.DataError(
                f"{saved!r} is not a state of LocalBatches; load what its get_state or"
                " state_dict returned, or a list of what it returned on all ranks"
            )
        checked = [_checked(each, rank) for rank, each in enumerate(ranks)]
        position = checked[0]["position"]
        data = self._data.continuing(checked[0]["pipeline"])
        identity = self._identity if data is self._data else data.identity()
        by_shard: dict[int, cursors.Cursor] = {}
        for rank, fields in enumerate(checked):
            data_state = state.DataState(
                **{key: fields[key] for key in ("engine", "position", "pipeline")}
            )
            state.check_same_pipeline(data_state, data.engine, identity)
            if data_state.position != position:
                raise errors.DataError(
                    f"the state of rank {rank} has position {data_state.position}, and"
                    f" that of rank 0 {position}; load states that were saved at the"
                    " same step"
                )
            added = {int(shard): cur for shard, cur in fields["cursors"].items()}
            differing = [s for s, cur in added.items() if by_shard.get(s, cur) != cur]
            if differing:
                raise errors.DataError(
                    f"the state of rank {rank} has other cursors of logical shards"
                    f" {differing} than earlier ranks; load the states of one run"
                )
            by_shard |= added

        def read(shards: Sequence[int]) -> cursors.Cursors:
            missing = sorted(set(shards) - by_shard.keys())
            if missing:
                raise errors.DataError(
                    f"the state lacks logical shards {missing}; load the states of all"
                    " ranks together, as a list"
                )
            return {shard: by_shard[shard] for shard in shards}

        loaded = self._begin(data)
        loaded.go_to(position, read)
        self._rows.close()
        self._data, self._identity, self._rows = data, identity, loaded
        self._at_end = bool(checked[0].get("at_end"))

    def state_dict(self) -> StateDict:
        """`get_state` under torchdata's name."""
        return self.get_state()

    def load_state_dict(
        self, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> None:
        """`set_state` under torchdata's name."""
        self.set_state(state_dict)

    def at(self, saved: Mapping[str, Any]) -> LocalBatches:
        """Another iterator over the same rows, at a state."""
        other = copy.copy(self)
        other._rows = other._begin(other._data)
        other.set_state(saved)
        return other

    def close(self) -> None:
        """Stops reading ahead."""
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
    # The fields of a state of any version, checked.
    try:
        if isinstance(saved, Mapping) and saved.get("version") == _FIRST_VERSION:
            fields = dict(saved)
        else:
            what = "state of LocalBatches"
            content = dict(saved) if isinstance(saved, Mapping) else saved
            fields = checked_json.unsealed(content, what=what, version=_VERSION)
        wrong = [
            name
            for name, kind in _FIELDS.items()
            if not isinstance(fields.get(name), kind)
        ] or _invalid(fields)
        if wrong:
            raise checked_json.UnreadableError(f"has missing or invalid fields {wrong}")
    except checked_json.UnreadableError as problem:
        raise errors.DataError(
            f"the state of rank {rank} {problem}; load the result of get_state or"
            " state_dict of LocalBatches"
        ) from None
    return fields


def _invalid(fields: Mapping[str, Any]) -> list[str]:
    # The fields of the right types with invalid content.
    positions = list(fields["position"].values())
    shards = fields["cursors"].keys()
    return [
        *["position"] * (list(map(type, positions)) != [int] or positions[0] < 0),
        *["cursors"] * (not all(str(shard).isdecimal() for shard in shards)),
    ]
