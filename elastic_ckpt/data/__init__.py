"""Elastic data: global batches that are the same on any number of hosts."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from elastic_ckpt.data.iterator import Batches, ElasticData
    from elastic_ckpt.data.positional import PositionalData, from_config
    from elastic_ckpt.data.rows import suggest_num_shards
    from elastic_ckpt.data.sharded import ShardedData, sharded
    from elastic_ckpt.data.shuffling import WindowShuffle
    from elastic_ckpt.data.text import write_arrayrecord

__all__ = [
    "Batches",
    "ElasticData",
    "PositionalData",
    "ShardedData",
    "WindowShuffle",
    "from_config",
    "sharded",
    "suggest_num_shards",
    "write_arrayrecord",
]
