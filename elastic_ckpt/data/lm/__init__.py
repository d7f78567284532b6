"""Data of language models: documents, conversations, tokens, examples and rows."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from elastic_ckpt.data.lm.chat import Conversations, MaskedTargets
    from elastic_ckpt.data.lm.chat_templates import ChatTemplate, load_chat_template
    from elastic_ckpt.data.lm.language import Documents, Examples, packed
    from elastic_ckpt.data.lm.multimodal import Encoded, Modality, packed_multimodal
    from elastic_ckpt.data.lm.packing import ConcatThenSplit
    from elastic_ckpt.data.lm.text import write_arrayrecord
    from elastic_ckpt.data.lm.token_blocks import Tokens
    from elastic_ckpt.data.lm.tokenizers import Tokenizer
    from elastic_ckpt.data.lm.tokenizers import load as load_tokenizer

__all__ = [
    "ChatTemplate",
    "ConcatThenSplit",
    "Conversations",
    "Documents",
    "Encoded",
    "Examples",
    "MaskedTargets",
    "Modality",
    "Tokenizer",
    "Tokens",
    "load_chat_template",
    "load_tokenizer",
    "packed",
    "packed_multimodal",
    "write_arrayrecord",
]
