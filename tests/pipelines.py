"""Pipelines of a logical shard, most of it Grain's own transformations."""

import functools

import grain
import numpy as np
from grain import experimental

from elastic_ckpt.data import mixing, sharded_data
from elastic_ckpt.data.lm import rows

NUM_DOCUMENTS = 120
# A pool of threads for each shard of each host would be slower than none.
IN_CALLER = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


def document(number: int) -> dict[str, np.ndarray]:
    """A text of 3 to 9 tokens that contain its number."""
    length = 3 + number * 7 % 7
    return {"tokens": np.full(length, number, np.int32)}


def documents(shard: int, num_shards: int, number: int = 0) -> grain.MapDataset:
    """The first `number` documents once, or all of them endlessly."""
    drawn = grain.MapDataset.range(shard, number or NUM_DOCUMENTS, num_shards)
    return (drawn if number else drawn.repeat()).map(document)


def plain(shard, num_shards):
    ds = documents(shard, num_shards).map(lambda d: {"tokens": d["tokens"][:3]})
    return ds.to_iter_dataset(IN_CALLER)


def is_kept(element):
    """Two thirds of the documents of every shard."""
    return element["tokens"][0] // 12 % 3 > 0


def filtered(shard, num_shards):
    return plain(shard, num_shards).filter(is_kept)


def batched(shard, num_shards):
    """Rows of two documents each."""
    return filtered(shard, num_shards).batch(2)


class Halves(grain.experimental.FlatMapTransform):
    max_fan_out = 2

    def flat_map(self, element):
        tokens = element["tokens"]
        return [{"tokens": tokens[:2]}, {"tokens": tokens[-2:]}]


def chunked(shard, num_shards):
    ds = documents(shard, num_shards).to_iter_dataset(IN_CALLER)
    return experimental.FlatMapIterDataset(ds, Halves())


def shuffled(shard, num_shards):
    ds = plain(shard, num_shards)
    return experimental.WindowShuffleIterDataset(ds, window_size=5, seed=shard)


def concatenated(shard, num_shards):
    ds = documents(shard, num_shards).to_iter_dataset(IN_CALLER)
    return experimental.ConcatThenSplitIterDataset(ds, length_struct={"tokens": 8})


def packed(shard, num_shards, *, packer=experimental.FirstFitPackIterDataset):
    ds = documents(shard, num_shards).to_iter_dataset(IN_CALLER)
    return packer(ds, length_struct={"tokens": 10}, num_packing_bins=4)


def everything(shard, num_shards):
    ds = documents(shard, num_shards).to_iter_dataset(IN_CALLER)
    ds = ds.filter(is_kept)
    ds = experimental.FlatMapIterDataset(ds, Halves())
    return experimental.FirstFitPackIterDataset(
        ds, length_struct={"tokens": 7}, num_packing_bins=3
    )


def mixture(shard, num_shards, *, packing, length=8, sizes=(0, 0)):
    """A mixture of two sets of documents, shuffled in windows and packed.

    Without `packing` a document is a row, so that a shard can restart at each of them.
    """
    parts = {
        name: documents(shard, num_shards, number)
        .map(lambda document, add=add: document["tokens"] + add)
        .to_iter_dataset(IN_CALLER)
        for (name, add), number in zip(
            (("web", 0), ("books", 1000)), sizes, strict=True
        )
    }
    mixed = mixing.Mixture(parts, {"web": 3, "books": 1}, shard=shard)
    if packing is None:
        return mixed.map(lambda tokens: {"tokens": tokens[:3]})
    return rows.Rows(
        mixed, length=length + 4, packing=packing, window=5, truncate=False, shard=shard
    )


ALL = {
    "plain": plain,
    "filtered": filtered,
    "batched": batched,
    "chunked": chunked,
    "shuffled": shuffled,
    "concatenated": concatenated,
    "first_fit": packed,
    "best_fit": functools.partial(packed, packer=experimental.BestFitPackIterDataset),
    "everything": everything,
}


def sharded(name: str, num_shards: int = 12, **settings) -> sharded_data.ShardedData:
    """Elastic data of a pipeline."""
    make_shard = functools.partial(ALL[name], num_shards=num_shards)
    return sharded_data.sharded(
        make_shard, num_shards=num_shards, pipeline=name, **settings
    )
