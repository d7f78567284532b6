"""Elastic data: global batches that are the same on any number of hosts."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from elastic_ckpt.data import lm
    from elastic_ckpt.data.data_keys import DataKeys
    from elastic_ckpt.data.elastic_data import ElasticData, End
    from elastic_ckpt.data.iterator import Batches
    from elastic_ckpt.data.lm.pipeline import from_config
    from elastic_ckpt.data.local_batches import LocalBatches, ShardedState
    from elastic_ckpt.data.mixing import Mixture
    from elastic_ckpt.data.positional_data import positional
    from elastic_ckpt.data.prefetch import ReadAhead
    from elastic_ckpt.data.records import ReadOptions, Records
    from elastic_ckpt.data.rows import suggest_num_shards
    from elastic_ckpt.data.sharded_data import sharded
    from elastic_ckpt.data.sources.arrayrecord import ArrayRecord
    from elastic_ckpt.data.sources.arrow import Arrow, from_hf
    from elastic_ckpt.data.sources.lines import JsonLines, Text
    from elastic_ckpt.data.sources.megatron import Megatron
    from elastic_ckpt.data.sources.parquet import Parquet
    from elastic_ckpt.data.sources.tfrecord import TFRecord
    from elastic_ckpt.data.sources.webdataset import WebDataset
    from elastic_ckpt.data.stages import Stage, staged
    from elastic_ckpt.data.torch_loader import TorchLoader

__all__ = [
    "ArrayRecord",
    "Arrow",
    "Batches",
    "DataKeys",
    "ElasticData",
    "End",
    "JsonLines",
    "LocalBatches",
    "Megatron",
    "Mixture",
    "Parquet",
    "ReadAhead",
    "ReadOptions",
    "Records",
    "ShardedState",
    "Stage",
    "TFRecord",
    "Text",
    "TorchLoader",
    "WebDataset",
    "from_config",
    "from_hf",
    "lm",
    "positional",
    "sharded",
    "staged",
    "suggest_num_shards",
]
