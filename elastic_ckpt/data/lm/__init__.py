"""Data for language models: documents, conversations, tokens and rows."""

from etils import epy

with epy.lazy_api_imports(globals()):
    from elastic_ckpt.data.lm.chat import Conversations
    from elastic_ckpt.data.lm.chat_templates import ChatTemplate, load_chat_template
    from elastic_ckpt.data.lm.documents import Documents, Tokens
    from elastic_ckpt.data.lm.multimodal import Encoded, Modality, MultimodalRows
    from elastic_ckpt.data.lm.rows import Rows
    from elastic_ckpt.data.lm.text import write_arrayrecord
    from elastic_ckpt.data.lm.tokenizers import Tokenizer
    from elastic_ckpt.data.lm.tokenizers import load as load_tokenizer

__all__ = [
    "ChatTemplate",
    "Conversations",
    "Documents",
    "Encoded",
    "Modality",
    "MultimodalRows",
    "Rows",
    "Tokenizer",
    "Tokens",
    "load_chat_template",
    "load_tokenizer",
    "write_arrayrecord",
]
