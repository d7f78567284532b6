"""Data of language models: documents, tokens, examples, and rows packed of them."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from elastic_ckpt.data.language import Documents, Examples, packed
    from elastic_ckpt.data.multimodal import Encoded, Modality, packed_multimodal
    from elastic_ckpt.data.packing import ConcatThenSplit
    from elastic_ckpt.data.text import write_arrayrecord
    from elastic_ckpt.data.token_blocks import Tokens
    from elastic_ckpt.data.tokenizers import Tokenizer
    from elastic_ckpt.data.tokenizers import load as load_tokenizer

__all__ = [
    "ConcatThenSplit",
    "Documents",
    "Encoded",
    "Examples",
    "Modality",
    "Tokenizer",
    "Tokens",
    "load_tokenizer",
    "packed",
    "packed_multimodal",
    "write_arrayrecord",
]
