"""All hosts of a world in one process: what they load, and what they save."""

import base64
import contextlib
import json

import numpy as np

from elastic_ckpt.core import allgather
from elastic_ckpt.data import (
    cursors,
    delivery,
    elastic_data,
    prefetch,
    rows,
    state,
)


class World:
    """H hosts that share the batches of `data`.

    Args:
      data: what they load.
      num_hosts: H.
      size: rows of a global batch.
      row_hosts: the host that holds each row; without it the h-th part is the h-th's.
      read_ahead: batches that a thread of each host reads ahead.
    """

    def __init__(self, data, num_hosts, size, row_hosts=None, read_ahead=0):
        if row_hosts is None:
            row_hosts = np.arange(size) * num_hosts // size
        self._data = data
        self._row_hosts = row_hosts
        placements = [
            rows.Placement(
                global_batch_size=size, held=np.flatnonzero(row_hosts == host)
            )
            for host in range(num_hosts)
        ]
        held = {host: each.held for host, each in enumerate(placements)}
        self._saves = rows.shard_hosts(data.num_shards, size, held)
        self.hosts = [
            prefetch.Prefetched(
                data.host_batches(each),
                make=dict,
                read_ahead=prefetch.ReadAhead(batches=read_ahead),
            )
            for each in placements
        ]

    def batch(self):
        """The next global batch as a loop gets it, features of shape `[B, ...]`.

        Every host is asked, also at the end: none may come to it before the others.
        """
        data, size = self._data, len(self._row_hosts)
        if data.end is elastic_data.End.NEVER:
            return self.whole()
        for _ in range(delivery.batches_of_end(data, size)):
            batch = self.whole()
            if batch[elastic_data.MASK].any():
                return batch
        raise StopIteration

    def whole(self):
        """The next global batch, even if it is padding alone."""
        loaded = [next(host) for host in self.hosts]
        whole = {}
        for name in loaded[0]:
            parts = [features[name] for features in loaded]
            feature = np.empty(
                (len(self._row_hosts), *parts[0].shape[1:]), parts[0].dtype
            )
            for host, part in enumerate(parts):
                assert part.dtype == feature.dtype
                feature[self._row_hosts == host] = part
            whole[name] = feature
        assert all(features.keys() == whole.keys() for features in loaded)
        return whole

    def next(self):
        """The next global batch, row after row, as (id, bytes of every feature)."""
        return by_row(self.batch())

    def rest(self):
        """All batches until the end."""
        batches = []
        with contextlib.suppress(StopIteration):
            while len(batches) < 1000:
                batches.append(self.batch())
            raise AssertionError("data of a few hundred rows does not end")
        return batches

    def save(self):
        """The saved state of the hosts, as JSON that went through text."""
        (position,) = {json.dumps(host.get_state()[0]) for host in self.hosts}
        merged = {shard: each for one in self._saved() for shard, each in one.items()}
        assert len(merged) == self._data.num_shards
        return json.loads(json.dumps([json.loads(position), sorted(merged.items())]))

    def _saved(self):
        # The cursors that each host saves; another may run the same shard.
        runs = [host.get_state()[1] for host in self.hosts]
        for shard, host in enumerate(self._saves.tolist()):
            saved = runs[host][shard]
            assert all(one.get(shard, saved) == saved for one in runs)
        return [
            {shard: each for shard, each in one.items() if self._saves[shard] == host}
            for host, one in enumerate(runs)
        ]

    def load(self, saved):
        """Goes to what a world of any size saved."""
        position, of_shards = saved
        by_shard = dict(map(tuple, of_shards))
        for host in self.hosts:
            host.go_to(position, lambda shards: {s: by_shard[s] for s in shards})

    def write(self, directory):
        """Saves into files, as the hosts of a run do."""
        position, _ = self.hosts[0].get_state()
        for saved in self._saved():
            cursors.write(directory, saved, position)
        state.write(
            directory,
            state.DataState(
                engine=self._data.engine,
                position=position,
                pipeline=self._data.identity(),
            ),
        )

    def read(self, directory):
        """Continues from the files of a world of any size."""
        saved = state.read(directory)
        state.check_same_pipeline(saved, self._data.engine, self._data.identity())
        for host in self.hosts:
            host.go_to(
                saved.position,
                lambda shards: cursors.read(directory, shards, saved.position),
            )

    def close(self):
        """Ends threads and processes."""
        for host in self.hosts:
            host.close()


def content(batch):
    """A batch as values that are equal if every byte, type and shape is."""
    return {
        name: (feature.dtype.str, feature.shape, feature.tobytes())
        for name, feature in batch.items()
    }


def gathered(batch):
    """A global batch as arrays of NumPy, on every host of its world.

    No program gathers it, which would be compiled for each form of a batch.
    """
    own = [
        [name, shard.index[0].start or 0, base64.b64encode(shard.data).decode()]
        for name, feature in batch.items()
        for shard in feature.addressable_shards
    ]
    whole = {name: np.zeros(each.shape, each.dtype) for name, each in batch.items()}
    hosts = allgather.new().gather("batch", own, timeout_secs=600)
    for name, start, content in (each for of_host in hosts for each in of_host):
        rows_of = np.frombuffer(base64.b64decode(content), whole[name].dtype)
        rows_of = rows_of.reshape(-1, *whole[name].shape[1:])
        whole[name][start : start + len(rows_of)] = rows_of
    return whole


def by_row(batch):
    """The rows of a batch as (id, bytes of every other feature, by name)."""
    features = dict(sorted(batch.items()))
    ids = elastic_data.join_ids(features.pop("example_id")).tolist()
    return [
        (number, *(feature.tobytes() for feature in row))
        for number, row in zip(ids, zip(*features.values(), strict=True), strict=True)
    ]
