"""Elastic data: global batches that are the same on any number of hosts."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from elastic_ckpt.data.elastic_data import ElasticData, End
    from elastic_ckpt.data.grain_states import adopt as adopt_grain_states
    from elastic_ckpt.data.iterator import Batches
    from elastic_ckpt.data.language import Documents, Examples, packed
    from elastic_ckpt.data.local_batches import LocalBatches
    from elastic_ckpt.data.mixing import Mixture
    from elastic_ckpt.data.packing import ConcatThenSplit
    from elastic_ckpt.data.pipeline import from_config
    from elastic_ckpt.data.positional import PositionalData
    from elastic_ckpt.data.prefetch import ReadAhead
    from elastic_ckpt.data.records import RandomMap, Reading, Records
    from elastic_ckpt.data.rows import suggest_num_shards
    from elastic_ckpt.data.sharded_data import ShardedData, sharded
    from elastic_ckpt.data.shuffling import WindowShuffle
    from elastic_ckpt.data.sources.arrayrecord import ArrayRecord
    from elastic_ckpt.data.sources.parquet import Parquet
    from elastic_ckpt.data.sources.tfrecord import TFRecord
    from elastic_ckpt.data.text import write_arrayrecord
    from elastic_ckpt.data.token_blocks import Tokens
    from elastic_ckpt.data.tokenizers import Tokenizer
    from elastic_ckpt.data.tokenizers import load as load_tokenizer
    from elastic_ckpt.data.torch_dataset import TorchDataset

__all__ = [
    "ArrayRecord",
    "Batches",
    "ConcatThenSplit",
    "Documents",
    "ElasticData",
    "End",
    "Examples",
    "LocalBatches",
    "Mixture",
    "Parquet",
    "PositionalData",
    "RandomMap",
    "ReadAhead",
    "Reading",
    "Records",
    "ShardedData",
    "TFRecord",
    "Tokenizer",
    "Tokens",
    "TorchDataset",
    "WindowShuffle",
    "adopt_grain_states",
    "from_config",
    "load_tokenizer",
    "packed",
    "sharded",
    "suggest_num_shards",
    "write_arrayrecord",
]
